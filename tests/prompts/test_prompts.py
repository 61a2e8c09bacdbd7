"""How a model wants its text written: the authors' rule for line breaks, or the text as it is."""

import pytest

from fairseq_icl.prompts import Writing


def encode(line: str) -> list[int]:
    return [ord(character) for character in line]


def tokens(text: str) -> list[int]:
    return list(Writing(encode).tokens(text))


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\u0085", "\u2028", "\n\n\n", "\x0b", "\x1c"])
def test_line_break_becomes_one_eos(line_break: str) -> None:
    assert tokens(f"a{line_break}b") == [97, 2, 98]


def test_last_eos_is_dropped_and_outer_breaks_leave_nothing() -> None:
    assert tokens("a\n") == tokens("\na") == tokens("a") == [97]


def test_a_line_of_spaces_is_not_empty() -> None:
    assert tokens("a\n \nb") == [97, 2, 32, 2, 98]


def test_empty_text_has_no_tokens() -> None:
    assert tokens("") == tokens("\n\n") == []


def test_line_break_may_be_several_tokens_or_none() -> None:
    assert Writing(encode, line_break=(7, 8)).tokens("a\n\nb") == (97, 7, 8, 98)
    assert Writing(encode, line_break=()).tokens("a\nb") == (97, 98)


def test_a_tokenizer_that_takes_line_breaks_gets_the_text_as_it_is() -> None:
    assert Writing(encode, line_break=None).tokens("a\n\nb\n") == (97, 10, 10, 98, 10)
