"""The examples that a page shows: those kept by the first seed of every model, init, dataset and method of a run."""

import json
import os
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.store import Store

FILE = "examples.json"
MOST_BYTES = 2_500_000
"""Of all examples together: the page stays small enough to be sent around."""


def page_examples(run: Run) -> list[dict[str, Any]]:
    """Groups of examples for the page, as many as there is room for: what was not re-initialised comes first."""
    cells = run.planned[run.planned["finished"] & (run.planned["variant"] == "")]
    cells = cells.drop_duplicates(["model", "init", "dataset", "method"])
    cells = cells.sort_values("init", key=lambda init: init != "pretrained", kind="stable")
    groups, room = [], MOST_BYTES
    for cell in cells.to_dict("records"):
        path = run.cell_folder(cell["model"], cell["key"]) / FILE
        if os.path.lexists(path):
            group = {name: str(cell[name]) for name in ("model", "init", "dataset", "method", "seed", "key")}
            group |= read_kept(path)
            size = len(json.dumps(group, ensure_ascii=False).encode())
            if size <= room:
                groups.append(group)
                room -= size
    return groups


def read_kept(path: Path) -> dict[str, Any]:
    """The examples that a cell kept, checked: the page's script relies on their form."""
    remedy = f"remove the folder {path.parent} and give the replicate command again"
    try:
        said = Store.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    demonstrations, examples = said.get("demonstrations"), said.get("examples")
    if not _is_list(demonstrations, lambda one: _is_list(one, _is_text)) or not _is_list(examples, _is_example):
        raise UserError(f"{path}: damaged, or not a file of examples; {remedy}")
    return {"demonstrations": demonstrations, "examples": examples}


def _is_example(one: Any) -> bool:
    if not isinstance(one, dict) or not _is_text(one.get("query")) or not _is_list(one.get("options"), _is_text):
        return False
    shares = one.get("probabilities")
    sides = [one[side] for side in ("icl", "ft") if side in one]
    return (
        all(_is_number(one.get(name)) for name in ("row", "gold", "disagreement"))
        and isinstance(shares, dict)
        and all(_is_list(shares.get(name), _is_number) for name in ("zsl", "icl", "ft"))
        and all(len(shares[name]) == len(one["options"]) for name in ("zsl", "icl", "ft"))
        and all(_is_side(side) for side in sides)
    )


def _is_side(side: Any) -> bool:
    return (
        isinstance(side, dict)
        and _is_list(side.get("demonstrations"), lambda layer: _is_list(layer, _is_number))
        and _is_list(side.get("tokens"), lambda layer: _is_list(layer, lambda pair: _is_list(pair, _is_number)))
    )


def _is_list(value: Any, check: Any) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
