"""The papers' six datasets in small: the catalogue's YAML files with made-up rows on a loopback hub."""

import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fairseq_icl.prompts.catalogue import FOLDER, load_spec
from fairseq_icl.prompts.readers import SPLITS, read_split, record_rows
from tests.fetching.loopback_hub import LoopbackHub, Repo

SIX = ("sst2", "sst5", "mr", "subj", "agnews", "cb")
WORDS = ["a", "fine", "film", "with", "no", "plot", "at", "all", "but", "great", "care", "and", "bad", "jokes"]
ROWS = {"train": 12, "valid": 5}


def made_up_rows(name: str, split: str, count: int) -> list[dict[str, Any]]:
    """Rows of random words with the dataset's fields, an extra column, and labels in turn."""
    spec, draw = load_spec(name), random.Random(f"{name} {split}")
    rows = []
    for number in range(count):
        texts = {field: " ".join(draw.choices(WORDS, k=4)) for field in spec.fields}
        rows.append({**texts, "label": number % len(spec.label_words), "idx": number})
    return rows


def as_file(rows: list[dict[str, Any]], suffix: str) -> bytes:
    """Rows as a Parquet or JSONL file."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    return content.getvalue()


def publish(hub: LoopbackHub, folder: Path, names: tuple[str, ...] = SIX) -> dict[str, Path]:
    """Put made-up files where the catalogue says that the hub has them; name -> YAML file that knows these rows.

    Checksums are given for the datasets of which the catalogue has them, all rows or single ones likewise.
    """
    folder.mkdir()
    specs = {}
    for name in names:
        said = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        files = {
            path: as_file(made_up_rows(name, s, ROWS[s]), Path(path).suffix) for s, path in said["hub"]["files"].items()
        }
        hub.repos[f"datasets/{said['hub']['repo']}"] = Repo(files, said["hub"]["revision"])
        for split in said["hub"].get("sha256", ()):
            said["hub"]["sha256"][split] = hashlib.sha256(files[said["hub"]["files"][split]]).hexdigest()
        for split in SPLITS:
            known = _rows_of(name, split, said["rows"][split], folder / "scratch")
            said["rows"][split] = known
        specs[name] = folder / f"{name}.yaml"
        specs[name].write_text(yaml.safe_dump(said))
    return specs


def _rows_of(name: str, split: Any, known: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """What a YAML says of made-up rows, as much as `known` says of the papers'."""
    spec = load_spec(name)
    scratch.mkdir(exist_ok=True)
    (scratch / f"{name}_{split}.jsonl").write_bytes(as_file(made_up_rows(name, split, ROWS[split]), ".jsonl"))
    rows = read_split(scratch, spec, split)
    if "sha256" in known:
        return {"count": len(rows), "sha256": record_rows(spec, rows).sha256}
    return {"count": len(rows), "single": {number: record_rows(spec, [rows[number]]).sha256 for number in (3, 7)}}
