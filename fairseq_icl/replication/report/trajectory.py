"""The steps of layer-causal fine-tuning on Subj beside the authors' log of the same steps (experiment=trajectory)."""

from typing import Any

from fairseq_icl.replication.report.published import AUTHORS_MODEL, authors_trajectory
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.tables import Entry, Table

EXPERIMENT = "trajectory"
COLUMNS = {"loss_bits": "loss (bits a token, layers added)", "sample_size": "tokens", "gradient_norm": "gradient norm"}
LOGGED = {"num_demonstrations": 32, "lr": 0.003, "seed": 4, "permutation": 0, "init": "pretrained", "clip_norm": 0.0}
"""The settings of the logged run, besides the authors' reading."""
LAYERS = 24


def trajectory_tables(run: Run) -> list[Table]:
    """A table of steps for every layer-causal cell of the experiment; the log beside it where it can be compared."""
    if EXPERIMENT not in run.experiments:
        return []
    cells = run.planned[(run.planned["method"] == "lcgd") & run.planned["key"].isin(run.steps)].drop_duplicates("key")
    return [_table(run, cell) for cell in cells.to_dict("records")]


def _table(run: Run, cell: dict[str, Any]) -> Table:
    steps, log = run.steps[cell["key"]], authors_trajectory()
    problem = _why_not(run, cell)
    rows = []
    for number, step in enumerate(steps.to_dict("records")):
        logged = log.iloc[number] if not problem else {}
        entries = [
            Entry(float(step[name]), published=None if problem else float(logged[name]), keys=(cell["key"],))
            for name in COLUMNS
        ]
        rows.append((f"step {number + 1}", tuple(entries)))
    title = f"The steps of lcgd on {cell['dataset']}, {cell['model']}, seed {cell['seed']}"
    note = f"Cannot be compared with the authors' log: {problem}." if problem else "The log is of an fp16 run."
    said = "" if problem else "the authors' log of one run (Subj, seed 4, permutation 0, learning rate 0.003, fp16)"
    name = f"trajectory_{cell['model']}_{cell['dataset']}_{cell['seed']}"
    return Table(name, title, tuple(COLUMNS.values()), tuple(rows), 3, said, "authors' log", (note,))


def _why_not(run: Run, cell: dict[str, Any]) -> str:
    """Why the cell is not the logged run; empty if it is."""
    settings = run.configurations[cell["key"]]["cell"]["settings"]
    layers = run.gradients[cell["key"]].shape[1]
    if cell["model"] != AUTHORS_MODEL or layers != LAYERS:
        return f"it is of the {AUTHORS_MODEL} model with {LAYERS} layers, and this is {cell['model']} with {layers}"
    if cell["dataset"] != "subj":
        return f"it is of subj, and this is {cell['dataset']}"
    different = [name for name, value in LOGGED.items() if settings.get(name, value) != value]
    if different or cell["variant"]:
        return f"it was run with another {', '.join(different) or 'variant'}"
    steps = len(run.steps[cell["key"]])
    return (
        "" if steps == len(authors_trajectory()) else f"it has {len(authors_trajectory())} steps, and this has {steps}"
    )
