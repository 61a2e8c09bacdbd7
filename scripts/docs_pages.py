"""A hook of mkdocs: the pages of the site that are made from the code."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent.parent))

from fairseq_icl.settings import SETTINGS, Setting

HEAD = """# Settings

Every setting has one name: a key of `fairseq-icl replicate` (`lr=0.1`), an argument of the Python functions (`lr=0.1`)
and, where the last column names somebody, a flag of `fairseq-train` and `fairseq-validate` (`--lr 0.1`): of our task,
of fairseq itself, or of a criterion. This page is made from `fairseq_icl/settings.py`.

| name | default | choices | what it is | affects | flag of |
|---|---|---|---|---|---|
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the page of all settings."""
    page = HEAD + "\n".join(map(row, SETTINGS.values())) + "\n"
    files.append(File.generated(config, "settings.md", content=page))
    return files


def row(setting: Setting) -> str:
    """One setting as a line of the table."""
    default = "" if setting.default is None else f"`{setting.default}`"
    default += f" (paper: `{setting.paper}`)" if setting.is_reading else ""
    choices = ", ".join(f"`{choice}`" for choice in setting.choices)
    text = setting.help.replace("|", r"\|")
    return f"| `{setting.name}` | {default} | {choices} | {text} | {', '.join(setting.affects)} | {flags(setting)} |"


def flags(setting: Setting) -> str:
    """Where the setting is a flag."""
    return ", ".join(f"`{part}`" for part in setting.flag_of)
