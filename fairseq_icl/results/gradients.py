"""The gradient record as a table in a file; training/gradients.py makes it and says what its columns mean."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fairseq_icl.errors import UserError

COLUMNS = ("step", "demonstration", "layer", "parameter", "norm", "loss_sum", "sample_size")
METADATA_KEY = b"fairseq_icl_gradients"


def read_gradient_record(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(table, description of the model) of a file that --record-gradients or a replication wrote."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it with --record-gradients")
    try:
        table = pq.read_table(path)
        described = (table.schema.metadata or {}).get(METADATA_KEY)
        if described is None or tuple(table.column_names) != COLUMNS:
            raise UserError(f"{path}: not a gradient record; make it with --record-gradients")
        return table.to_pandas(ignore_metadata=True), dict(json.loads(described))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a Parquet file, or damaged; make it with --record-gradients") from error


def heatmap_matrix(record: pd.DataFrame) -> np.ndarray:
    """(steps, layers): l2 norm of each layer's whole gradient at each step, the papers' heatmap."""
    squares = record.assign(square=record["norm"] ** 2).groupby(["step", "layer"])["square"].sum()
    return np.sqrt(squares.unstack("layer").sort_index().to_numpy())
