from pathlib import Path

import pytest

from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.statistics import dataset_statistics, num_fitting
from fairseq_icl.reading import Reading
from tests.prompts.samples import SENTIMENT, encode_words, spec_of, write_sentiment

SPEC = spec_of(SENTIMENT)


def test_statistics_count_input_and_label_tokens(tmp_path: Path) -> None:
    found = dataset_statistics(SPEC, write_sentiment(tmp_path), encode_words, max_positions=36)
    assert (found.dataset, found.train_rows, found.valid_rows) == ("sample", 12, 6)
    assert found.average_tokens == 4
    assert found.longest_query == 5


def test_average_over_some_rows_only(tmp_path: Path) -> None:
    assert dataset_statistics(SPEC, write_sentiment(tmp_path), encode_words, num_rows=2).average_tokens == 4


@pytest.mark.parametrize("max_positions", [12, 36, 37, 50])
def test_fitting_number_agrees_with_the_prompt_builder(tmp_path: Path, max_positions: int) -> None:
    write_sentiment(tmp_path)
    prompts = build_prompts(
        SPEC, tmp_path, encode_words, num_demonstrations=12, seed=1, reading=Reading(), max_positions=max_positions
    )
    assert num_fitting(4, 5, max_positions) == len(prompts.context_rows)


def test_nothing_fits_beside_a_long_query() -> None:
    assert num_fitting(10, 2048, 2048) == 0
