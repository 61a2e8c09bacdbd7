"""The summary that `icl_similarity` prints: every mean with its bootstrap interval, in the order of the papers."""

import pandas as pd

ORDER = ("accuracy", "rec2ftp", "rpa", "sim_aou", "sim_am", "alpha", "sim_", "recall", "kendall")


def summary(overall: pd.DataFrame) -> str:
    """`overall` has the means over examples and layers, and the counts, of one run (`results.means`)."""
    measured = overall[overall["low"].notna()]
    counts = dict(overall[overall["low"].isna()][["metric", "value"]].itertuples(index=False))
    width = max(map(len, measured["metric"]), default=0)
    lines = [f"{'metric':<{width}}     value   95 % interval over examples"]
    for row in sorted(measured.itertuples(), key=lambda row: _place(row.metric)):
        lines.append(f"{row.metric:<{width}}  {row.value:8.4f}   [{row.low:.4f}, {row.high:.4f}]")
    for start, meaning in (
        ("undefined_", "values left out because they are not defined here"),
        ("zero_updates_", "cosines set to 0 because an update is zero"),
    ):
        told = [f"{name.removeprefix(start)} {int(n)}" for name, n in counts.items() if name.startswith(start) and n]
        if told:
            lines.append(f"{meaning}: {', '.join(told)}")
    lines.append(f"{int(counts['examples'])} examples")
    return "\n".join(lines)


def _place(name: str) -> int:
    return next((place for place, start in enumerate(ORDER) if name.startswith(start)), len(ORDER))
