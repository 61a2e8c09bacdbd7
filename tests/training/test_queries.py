"""Query vectors that are recorded in the pass of the loss itself: those of the model just before it learns."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary

import fairseq_icl as fi
from fairseq_icl.models import Model
from fairseq_icl.observing.probe import observe_training_queries
from fairseq_icl.settings import Settings
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingConfig, DemonstrationPromptingTask
from tests.training.small_models import SAMPLE, TOKENS, small_model


@pytest.mark.parametrize("step_per", ["demonstration", "token"])
@pytest.mark.parametrize("method", ["gd", "lcgd", "lcgd_sequential", "linearized", "short_circuit"])
def test_recorded_queries_are_those_of_a_pass_before_every_step(method: str, step_per: str):
    model = fi.load_model("demo", device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=3, limit=1)
    sequences = [torch.tensor([sequence.tokens]) for sequence in prompts.finetuning]
    expected = [observe_training_queries(model.lm, sequences[0])[:, 0]]

    def look(count: int, tuned: Model, base: Model) -> None:
        if count < len(sequences):
            expected.append(observe_training_queries(tuned.lm, sequences[count])[:, 0])

    with fi.fine_tuned(model, prompts, method, lr=0.3, after_demonstration=look, step_per=step_per) as tuned:
        recorded = tuned.training_queries
    assert recorded is not None
    assert list(recorded) == [sequence.row for sequence in prompts.finetuning]
    assert not torch.allclose(expected[1], observe_training_queries(model.lm, sequences[1])[:, 0], rtol=1e-3)
    for found, wanted, tokens in zip(recorded.values(), expected, sequences, strict=True):
        assert found.shape[1] == tokens.size(1)
        if step_per == "demonstration":  # else they are of the last step, in the middle of the demonstration
            torch.testing.assert_close(found, wanted)


def test_demonstrations_of_one_batch_have_tensors_of_their_own():
    model = small_model("fairseq")
    config = DemonstrationPromptingConfig(record_queries=True)
    task = DemonstrationPromptingTask(config, Dictionary(), Settings())
    with task._recording_queries(SAMPLE, model, CrossEntropyCriterion(task, sentence_avg=False)):
        model(**SAMPLE["net_input"])
    assert {row: queries.size(1) for row, queries in task.training_queries.items()} == {7: 6, 3: 4}
    for row, tokens in zip(SAMPLE["rows"], TOKENS, strict=True):
        found = task.training_queries[row]
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes
        torch.testing.assert_close(found, observe_training_queries(model, torch.tensor([tokens]))[:, 0].float())
