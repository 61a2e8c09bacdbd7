"""The demo's own simple evaluation runs the very prompts that the package builds."""

import pytest

from examples.demo_model import DEMO_DATASETS
from examples.demo_model.evaluate import tokenize_dataset
from examples.demo_model.tokenizer import Tokenizer
from fairseq_icl.files import DEMO_DATA, DEMO_MODEL
from fairseq_icl.prompts import Writing
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.settings import Settings

TOKENIZER = DEMO_MODEL.parent / "sentencepiece.bpe.model"


@pytest.mark.parametrize("name", DEMO_DATASETS)
def test_prompts_are_those_of_the_package_and_32_demonstrations_fit(name):
    tokenizer = Tokenizer(TOKENIZER)
    writing = Writing(lambda text: tokenizer.encode([text])[0], max_positions=1024)
    spec = load_spec(str(DEMO_DATA / f"{name}.yaml"))
    prompts = build_prompts(spec, DEMO_DATA, writing, Settings(num_demonstrations=32, seed=5))
    data = tokenize_dataset(name, DEMO_DATA, tokenizer)
    assert list(prompts.context) == data.context(32, seed=5)
    assert len(prompts.context_rows) == 32
    assert prompts.single_token
    assert [token for (token,) in prompts.queries[0].labels] == data.label_tokens
    assert {tuple(text) for text, _ in data.valid} == {query.inputs[0] for query in prompts.queries}
