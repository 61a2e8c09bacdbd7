import pytest

from fairseq_icl.prompts.tokens import encode_text, is_prefix


def encode(line: str) -> list[int]:
    return [ord(character) for character in line]


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\u0085", "\u2028", "\n\n\n", "\x0b", "\x1c"])
def test_line_break_becomes_one_eos(line_break: str) -> None:
    assert encode_text(f"a{line_break}b", encode) == [97, 2, 98]


def test_last_eos_is_dropped_and_outer_breaks_leave_nothing() -> None:
    assert encode_text("a\n", encode) == encode_text("\na", encode) == encode_text("a", encode) == [97]


def test_a_line_of_spaces_is_not_empty() -> None:
    assert encode_text("a\n \nb", encode) == [97, 2, 32, 2, 98]


def test_empty_text_has_no_tokens() -> None:
    assert encode_text("", encode) == encode_text("\n\n", encode) == []


def test_prefix() -> None:
    assert is_prefix([1, 2], [1, 2, 3])
    assert is_prefix([1], (1,))
    assert not is_prefix([1, 2], [1])
