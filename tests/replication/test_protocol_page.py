"""docs/protocol.md tells the truth about the readings."""

import re
from pathlib import Path

from fairseq_icl.settings import READING

PAGE = Path(__file__).parent.parent.parent / "docs" / "protocol.md"


def rows() -> dict[str, tuple[str, str, list[str]]]:
    """flag -> (authors' value, paper's value, other values) as the page's table gives them."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"`\w+`", cells[0]):
            flag, authors, paper = (cell.strip("`") for cell in cells[:3])
            found[flag] = (authors, paper, re.findall(r"`(\w+)`", cells[3]))
    return found


def test_the_table_has_every_difference_with_its_values():
    expected = {}
    for name, known in READING.items():
        others = [value for value in known.choices if value not in (known.default, known.paper)]
        expected[name] = (known.default, known.paper, others)
    assert rows() == expected


def test_every_difference_is_explained():
    text = PAGE.read_text(encoding="utf-8")
    for name in READING:
        assert f"- **{name}.**" in text
