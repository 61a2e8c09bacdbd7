"""The fairseq task as `fairseq-train` makes it: datasets by name, and no demonstration left out in silence."""

import pytest
from fairseq.tasks import setup_task

from fairseq_icl import tasks  # noqa: F401 - registers the task
from fairseq_icl.errors import UserError
from fairseq_icl.files import DEMO_DATA
from fairseq_icl.models.files import find_files
from fairseq_icl.settings import Settings
from fairseq_icl.training.fine_tuning import fairseq_config
from fairseq_icl.training.methods import get_method, training_options


def test_a_yaml_beside_the_data_is_found_by_its_name_and_long_demonstrations_are_refused():
    settings = Settings(num_demonstrations=2, lr=0.1, limit=2)
    options = training_options(get_method("gd"), settings, find_files("demo"), str(DEMO_DATA), "demo_sentiment")
    task = setup_task(fairseq_config(options).task)
    assert task.prompts.spec.name == "demo_sentiment"
    task.load_dataset("train")
    longest = max(len(sequence.tokens) for sequence in task.prompts.finetuning)
    batches = task.get_batch_iterator(task.datasets["train"], max_sentences=1, max_positions=longest)
    assert len(batches.next_epoch_itr(shuffle=False)) == 2
    with pytest.raises(UserError, match=rf"train row \d+: {longest} tokens, but .* admits {longest - 1}"):
        task.get_batch_iterator(task.datasets["train"], max_sentences=1, max_positions=longest - 1)
