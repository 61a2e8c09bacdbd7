"""`fairseq-icl datasets`: the catalogue, rendered examples, and the data statistics."""

from pathlib import Path

import pytest

from fairseq_icl.commands.datasets import dataset_statistics, main, num_fitting
from fairseq_icl.errors import UserError
from fairseq_icl.prompts import Writing
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import dataset_names
from fairseq_icl.settings import Settings
from tests.prompts.samples import SENTIMENT, encode_words, spec_of, write_jsonl, write_sentiment

SPEC = spec_of(SENTIMENT)
ROWS = [{"sentence": "fine", "label": 1}, {"sentence": "not fine", "label": 0}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("train", "valid"):
        write_jsonl(tmp_path / "sst2" / f"{split}.jsonl", ROWS)
    (tmp_path / "dict.txt").write_text("Sentence: 1\nfine 1\nLabel: 1\nPositive 1\nNegative 1\n")
    return tmp_path


def test_list_names_every_dataset(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == dataset_names()


def test_template_is_shown_without_data(capsys: pytest.CaptureFixture) -> None:
    assert main(["sst2", "winogrande"]) == 0
    out = capsys.readouterr().out
    assert "'Sentence: <sentence> Label:'" in out
    assert "deutch2024: k 32, seeds [2, 3, 4]" in out
    assert "'<sentence_before><option 1>' + ' <sentence_after>'" in out


def test_rendered_example_is_shown_with_data(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["sst2", "--data", str(data)]) == 0
    out = capsys.readouterr().out
    assert "train: 2 rows (Negative: 1, Positive: 1)" in out
    assert "'Sentence: fine Label:'\n  option 0   ' Negative'\n  option 1 * ' Positive'" in out


def test_statistics_table_of_what_is_in_the_folder(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["--data", str(data), "--dict", str(data / "dict.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "dataset"
    assert lines[1].split() == ["sst2", "2", "2", "4.5", "6", "371"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["sst3"], "did you mean"),
        (["sst2", "--data", "nowhere"], "nowhere: no such folder"),
        (["--bpe", "gpt2"], "need --data"),
        (["--data", ".", "--dict", "nowhere"], "nowhere: no such file; put the dict.txt .* there, or name it .--dict."),
        (
            ["--data", ".", "--dict", "x", "--bpe", "gpt2"],
            "^--gpt2-encoder-json: no such file; the tokenizer gpt2 needs",
        ),
        (["--data", ".", "--dict", "x", "--rows", "0"], "--rows 0"),
    ],
)
def test_wrong_use_is_one_clear_line(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(flags)


def test_folder_without_any_dataset_is_reported(tmp_path: Path, data: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no data of any dataset of the catalogue"):
        main(["--data", str(tmp_path / "empty"), "--dict", str(data / "dict.txt")])


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
    writing = Writing(encode_words, max_positions)
    prompts = build_prompts(SPEC, tmp_path, writing, Settings(num_demonstrations=12, seed=1))
    assert num_fitting(4, 5, max_positions) == len(prompts.context_rows)


def test_nothing_fits_beside_a_long_query() -> None:
    assert num_fitting(10, 2048, 2048) == 0
