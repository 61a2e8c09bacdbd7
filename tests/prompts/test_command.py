from pathlib import Path

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.catalogue import dataset_names
from fairseq_icl.prompts.command import main
from tests.prompts.samples import write_jsonl

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
        (["--data", ".", "--dict", "nowhere"], "nowhere: no such file; give the dict.txt"),
        (["--data", ".", "--dict", "x", "--bpe", "gpt2"], "--bpe gpt2 needs --gpt2-encoder-json FILE"),
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
