"""The page of statements: everything holds, everything breaks without its premise, everything is escaped."""

from dataclasses import replace
from pathlib import Path

import pytest

from examples.layer_causal_drawing import draw_layer_causal
from fairseq_icl.commands.theory import render_html, render_markdown
from fairseq_icl.theory import descent  # noqa: F401 - adds to the exact statements
from fairseq_icl.theory.statements import EXACT, EXACT_STATEMENTS, Record, run_exact
from fairseq_icl.theory.trained import run_trained


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return run_exact()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_statements_hold_and_break(seed: int) -> None:
    found = run_exact(seed)
    assert len(found) == len(EXACT_STATEMENTS) == 13
    for record in found:
        assert record.value < EXACT, record
        assert record.broken > 1e-3, record
        assert record.holds


def test_trained_statements_are_records_too() -> None:
    one, two = run_trained()
    assert one.value < 0.05 < one.broken
    assert two.value < 0.2 * two.broken
    assert one.holds
    assert two.holds


def test_markdown_has_one_row_per_statement(records: list[Record]) -> None:
    lines = render_markdown(records).splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 + len(records)  # with the header and the line below it
    assert {row.replace("\\|", "").count("|") for row in rows} == {9}


def test_foreign_text_is_escaped(records: list[Record]) -> None:
    bad = replace(records[0], statement="<script>alert('a|b')</script>\nnext & *bold*", source='"><img src=x>')
    page, text = render_html([bad]), render_markdown([bad])
    assert "<script>" not in page + text
    assert "<img src=x" not in page + text
    assert "&lt;script&gt;" in page
    assert "a\\|b" in text
    assert "\\*bold\\*" in text


def test_html_is_self_contained(records: list[Record]) -> None:
    page = render_html(records)
    assert "data:image/png;base64," in page
    assert "://" not in page  # no address: nothing is loaded from elsewhere
    assert page.count("<tr>") == 1 + len(records)


def test_a_failed_statement_is_shown_as_failed(records: list[Record]) -> None:
    failed = replace(records[0], value=0.5)
    assert not failed.holds
    assert 'class="no">NO<' in render_html([failed])
    assert not replace(records[0], broken=1e-12).holds  # a premise that does not matter is a failure too


def test_numbers(records: list[Record]) -> None:
    shown = [render_markdown([replace(records[0], value=x)]) for x in (2.345e-16, 0.04321, 12.5, 54321.0)]
    for text, number in zip(shown, ("2.3e-16", "0.0432", "12.5000", "5.4e+04"), strict=True):
        assert f"| {number} |" in text


def test_a_question_cannot_fail_and_what_is_known_by_layer_is_drawn(records: list[Record]) -> None:
    asked = replace(records[0], value=2.0, broken=1.0, kind="question")
    assert asked.holds
    assert "| question | - |" in render_markdown([asked], "model x_y")
    assert "model x\\_y" in render_markdown([asked], "model x_y")
    drawn = render_html([replace(asked, per_layer={"a": [1.0, 200.0], "b": [0.1, float("nan")]})], subject="<model>")
    assert drawn.count("data:image/png;base64,") == 2  # and layer-causal descent
    assert "&lt;model&gt;" in drawn


def test_the_drawing_that_is_shipped_can_be_drawn_again(tmp_path: Path) -> None:
    draw_layer_causal(tmp_path / "drawing.png")
    assert (tmp_path / "drawing.png").read_bytes().startswith(b"\x89PNG")
