"""The demo's own simple evaluation runs the very prompts that the package builds."""

import pytest

from fairseq_icl.demo import DEMO_DATASETS, demo_data, demo_tokenizer
from fairseq_icl.demo.evaluation import tokenize_dataset
from fairseq_icl.demo.tokenizer import Tokenizer
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.reading import Reading


@pytest.mark.parametrize("name", DEMO_DATASETS)
def test_prompts_are_those_of_the_package_and_32_demonstrations_fit(name):
    tokenizer = Tokenizer(demo_tokenizer())
    prompts = build_prompts(
        load_spec(str(demo_data() / f"{name}.yaml")),
        demo_data(),
        lambda text: tokenizer.encode([text])[0],
        num_demonstrations=32,
        seed=5,
        reading=Reading(),
        max_positions=1024,
    )
    data = tokenize_dataset(name, demo_data(), tokenizer)
    assert list(prompts.context) == data.context(32, seed=5)
    assert prompts.num_dropped == 0
    assert all(query.single_token for query in prompts.queries)
    assert [token for (token,) in prompts.queries[0].labels] == data.label_tokens
    assert {tuple(text) for text, _ in data.valid} == {query.inputs[0] for query in prompts.queries}
