"""The command that executes the papers' statements."""

from pathlib import Path

from tests.commands import assert_one_clear_line, run, succeeded


def test_every_statement_holds_on_the_demo_model(tmp_path: Path):
    small = ["--no-training", "--demonstrations", "6", "--queries", "4", "--to", tmp_path / "pages"]
    result = succeeded(run("fairseq-icl", "theory", *small))
    assert "statements hold" in result.stdout
    assert " NO " not in result.stdout
    page = (tmp_path / "pages" / "theory.html").read_text()
    assert "data:image/png;base64" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "On this model" in (tmp_path / "pages" / "theory.md").read_text()


def test_mistakes_are_one_line(tmp_path: Path):
    assert_one_clear_line(run("fairseq-icl", "theory", "--no-training", "--model", tmp_path / "no.pt"), "no.pt")
    assert_one_clear_line(run("fairseq-icl", "theory", "--no-training", "--demonstrations", "0"), "--demonstrations 0")
