"""The examples that a page shows: those kept by the first seed of every model, init, dataset and method of a run."""

import json
from typing import Any

from fairseq_icl.replication.report.run import Run

MOST_BYTES = 2_500_000
"""Of all examples together: the page stays small enough to be sent around."""


def page_examples(run: Run) -> list[dict[str, Any]]:
    """Groups of examples for the page, as many as there is room for: what was not re-initialised comes first."""
    cells = run.planned[run.planned["finished"] & (run.planned["variant"] == "")]
    cells = cells.drop_duplicates(["model", "init", "dataset", "method"])
    cells = cells.sort_values("init", key=lambda init: init != "pretrained", kind="stable")
    groups, room = [], MOST_BYTES
    for cell in cells.to_dict("records"):
        kept = run.cell_folder(cell["model"], cell["key"]).examples()
        if kept is not None:
            group = {name: str(cell[name]) for name in ("model", "init", "dataset", "method", "seed", "key")} | kept
            size = len(json.dumps(group, ensure_ascii=False).encode())
            if size <= room:
                groups.append(group)
                room -= size
    return groups
