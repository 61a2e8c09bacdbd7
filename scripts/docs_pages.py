"""A hook of mkdocs: the pages of the site that are made from the code; and what the reference shows of fields."""

import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent.parent))

from fairseq_icl.settings import SETTINGS, Setting

HEAD = """# Settings

Every setting has one name: a key of `fairseq-icl replicate` (`lr=0.1`), an argument of the Python functions (`lr=0.1`)
and, where it says so, a flag of `fairseq-train` and `fairseq-validate` (`--lr 0.1`): of our task, of fairseq itself, or
of a criterion. They stand here by what they affect first. This page is made from `fairseq_icl/settings.py`.
"""


class CommentsOfFields(griffe.Extension):
    """A field is described by the comment on its line, where it has no text of its own."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        comment = attr.source.partition("  # ")[2]
        if attr.docstring is None and comment and attr.parent is not None and attr.parent.is_class:
            attr.docstring = griffe.Docstring(comment, parent=attr)


def on_files(files: Files, config: Any) -> Files:
    """Add the page of all settings."""
    groups: dict[str, list[Setting]] = {}
    for setting in SETTINGS.values():
        groups.setdefault(setting.affects[0] if setting.affects else "nothing", []).append(setting)
    parts = [HEAD]
    for stage, members in groups.items():
        parts += [f"\n## {stage.capitalize()}\n", *map(entry, members)]
    files.append(File.generated(config, "settings.md", content="\n".join(parts)))
    return files


def entry(setting: Setting) -> str:
    """One setting: its name as a heading, what it is, and a list of facts."""
    default = "none" if setting.default is None else f"`{setting.default}`"
    facts = [f"default: {default}" + (f"; by the paper's text `{setting.paper}`" if setting.paper is not None else "")]
    if setting.choices:
        facts.append("choices: " + ", ".join(f"`{choice}`" for choice in setting.choices))
    if len(setting.affects) > 1:
        facts.append(f"affects: {', '.join(setting.affects)}")
    if setting.flag_of:
        flag = f"`--{setting.name.replace('_', '-')}`"
        facts.append(f"flag: {flag} of " + ", ".join(f"`{part}`" for part in setting.flag_of))
    return f"### `{setting.name}`\n\n{setting.help}\n\n" + "".join(f"- {fact}\n" for fact in facts)
