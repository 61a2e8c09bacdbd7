"""Names from foreign files in a report: data in every format, never markup, formulas, commands or paths."""

import csv
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fairseq_icl.replication.artefacts import CellFolder
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.report import write_report
from fairseq_icl.replication.report.html import anchor
from fairseq_icl.replication.report.run import Run, load_run
from fairseq_icl.replication.report.text import file_name, marked, spreadsheet_safe
from tests.replication.test_report import table_of

SCRIPT = "<script>alert(1)</script>"
HOSTILE = [
    "=cmd()",
    "+1",
    "-1",
    "@x",
    "a$x^_{$b",
    "]{}\\input{secret}%",
    "x | y\n# title",
    f"\"'>{SCRIPT}",
    "[a](b)`c`",
]
MODEL = 'm$o_{"}'


def hostile_run(folder: Path) -> Run:
    store = ResultsFolder(folder)
    entries = []
    for number, name in enumerate(HOSTILE):
        for variant in ("", name):
            key = f"k{number}{'v' if variant else ''}"
            place = {"model": MODEL, "init": "pretrained", "dataset": name, "method": "gd", "variant": variant}
            entries.append({**place, "seed": 1, "permutation": 0, "key": key})
            settings = {"lr": 0.1 + number, "num_demonstrations": 8, "switch_labels": "none", "switch_fraction": 1.0}
            configuration = {"cell": {"method": SCRIPT, "settings": settings}}

            def write(cell: CellFolder, name: str = name, configuration: dict = configuration) -> None:
                cell.write(configuration, table_of(name, 1, "gd", "pretrained"), configuration, seconds=1.0)

            store.finish(key, write)
    store.add_plan({"experiment": f"# {SCRIPT}", "tables": ["deutch2024_table2"], "cells": entries})
    return load_run(folder)


class Tags(HTMLParser):
    """Scripts and event handlers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.handlers, self.ids = 0, [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.ids += [value for name, value in attrs if name == "id"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    run = hostile_run(folder / "run")
    keys = {"k0": f'k"><img src=x onerror=alert(1)>{SCRIPT}'}
    planned = run.planned.assign(key=run.planned["key"].replace(keys))
    values = run.values.assign(key=run.values["key"].replace(keys))
    configurations = {keys.get(key, key): value for key, value in run.configurations.items()}
    shutil.copytree(run.cell_folder(MODEL, "k0").path, run.cell_folder(MODEL, keys["k0"]).path)
    to = folder / "report"
    (to / "figures").mkdir(parents=True)
    (folder / "precious").write_text("mine")
    for name in ("partition", "layers_sim_aou"):
        (to / "figures" / f"{file_name(f'{name}_{MODEL}')}.png").symlink_to(folder / "precious")
    write_report(Run(run.folder, planned, configurations, values, run.experiments, run.tables), to)
    return to


def test_no_script_of_a_name_is_part_of_the_page(written: Path):
    page = Tags()
    page.feed((written / "report.html").read_text())
    assert page.scripts == 2  # the page's own, and its data, which does not run
    assert page.handlers == []
    assert len(page.ids) == len(set(page.ids))


def test_no_cell_of_a_spreadsheet_is_a_formula(written: Path):
    for name in ("report.csv", "summary.csv"):
        with (written / name).open(newline="") as file:
            for row in csv.reader(file):
                for cell in row:
                    assert not cell.startswith(("=", "+", "@", "\t", "\r")), cell
                    assert not cell.startswith("-") or re.fullmatch(r"-[\d.e+-]+", cell), cell
    assert spreadsheet_safe("=1") == "'=1"


def test_latex_holds_no_command_of_a_name(written: Path):
    source = (written / "report.tex").read_text()
    assert "\\input" not in source.replace("\\textbackslash{}input", "")
    for name in re.findall(r"\\(?:label|includegraphics(?:\[[^\]]*\])?)\{([^}]*)\}", source):
        assert re.fullmatch(r"[A-Za-z0-9_.:=/-]+", name), name


def test_markdown_has_the_lines_that_were_written_and_no_html(written: Path):
    text = (written / "report.md").read_text()
    assert not re.search(r"(?<!\\)<", text)
    heads = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(heads) == 1
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
    for target in re.findall(r"\]\((figures/[^)]*)\)", text):
        assert (written / target).is_file()
    assert marked("a|b\n# c") == "a\\|b # c"


def test_planted_links_are_replaced_and_not_followed(written: Path):
    assert (written.parent / "precious").read_text() == "mine"
    figures = list((written / "figures").iterdir())
    assert figures
    assert not any(path.is_symlink() for path in figures)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)


def test_names_that_become_alike_stay_two():
    assert file_name("plain_125m") == "plain_125m"
    assert file_name("a$b") != file_name("a%b")
    assert re.fullmatch(r"cell-a-b-[0-9a-f]{6}", anchor("cell", 'a"b'))
