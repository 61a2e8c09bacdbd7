"""Datasets of the catalogue from the hub: DATA/NAME/train.* and DATA/NAME/valid.*, as the readers take them.

A file is put into its place only when it is whole and what it should be: by the checksum that the dataset's YAML has,
else by the hub's own, and by the rows that the papers used, where they are known.
"""

import json
import os
from pathlib import Path

from filelock import FileLock

from fairseq_icl.errors import UserError
from fairseq_icl.fetching.download import checksum_of
from fairseq_icl.fetching.hub import address, open_repository
from fairseq_icl.files import reason_of, remedy_for, write_atomically
from fairseq_icl.prompts.catalogue import DatasetSpec, Hub
from fairseq_icl.prompts.readers import SPLITS, Split, compare_rows, find_split, read_split

Places = dict[Split, tuple[str, Path]]
UNFINISHED = ".fetching"
"""Folder inside DATA for what is not in its place yet, and for what is remembered of what is."""


def data_cache() -> Path:
    """The folder that `data=hub` means: FAIRSEQ_ICL_CACHE/data, else fairseq-icl/data in the user's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairseq-icl"
    return Path(os.environ.get("FAIRSEQ_ICL_CACHE") or usual) / "data"


def places(spec: DatasetSpec, folder: Path) -> Places:
    """(address, place) of each of a dataset's two files."""
    hub, found = _hub(spec), {}
    for split in SPLITS:
        url = address("dataset", hub.repo, hub.revision, hub.files[split])
        found[split] = (url, folder / spec.name / f"{split}{Path(hub.files[split]).suffix}")
    return found


def _hub(spec: DatasetSpec) -> Hub:
    if spec.hub is None:
        raise UserError(f"{spec.name}: its YAML does not say where the hub has it (the key hub); put its files by hand")
    return spec.hub


def fetch_dataset(spec: DatasetSpec, folder: Path, *, any_rows: bool = False, quiet: bool = False) -> list[str]:
    """Bring what is missing of a dataset, with `any_rows` also other rows than the papers'; a line about each split."""
    wanted = places(spec, folder)
    unfinished = folder / UNFINISHED / spec.name
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(unfinished.with_name(f"{spec.name}.lock")):
            missing = {split: place for split, place in wanted.items() if not _is_settled(spec, folder, split, *place)}
            if missing:
                _fetch(spec, folder, missing, any_rows=any_rows, quiet=quiet)
    except OSError as error:
        reason, remedy = reason_of(error), remedy_for(error)
        raise UserError(f"{folder}: cannot be written ({reason}); {remedy} folder (--to)") from error
    lines = []
    for split in SPLITS:
        rows, state = read_split(folder, spec, split), "fetched" if split in missing else "there"
        compared = compare_rows(folder, spec, split, rows)
        likeness = "no published rows to compare with" if compared is None else compared.text
        lines.append(f"{find_split(folder, spec, split)[0]}: {state}, {len(rows):,} rows, {likeness}")
    return lines


def _is_settled(spec: DatasetSpec, folder: Path, split: Split, url: str, place: Path) -> bool:
    """Whether the file is there and known to be the right one, without asking the hub."""
    try:
        there = find_split(folder, spec, split)[0]
    except UserError:
        return False
    if there != place:
        raise UserError(f"{there}: is there already and would be read instead; move it away, or choose another --to")
    if checksum_of(place) in (_hub(spec).sha256.get(split), _remembered(folder, spec).get(url)):
        return True
    compared = compare_rows(folder, spec, split, read_split(folder, spec, split))
    return compared is not None and compared.likeness == "same"


def _remembered(folder: Path, spec: DatasetSpec) -> dict[str, str]:
    """Address -> sha256 of what was fetched from it: such a file needs no second look by the hub."""
    try:
        said = json.loads((folder / UNFINISHED / f"{spec.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _fetch(spec: DatasetSpec, folder: Path, wanted: Places, *, any_rows: bool, quiet: bool) -> None:
    hub, (url, place) = _hub(spec), next(iter(wanted.values()))
    by_hand = f"download {url} and put it at {place}; fairseq-icl fetch data {spec.name} --by-hand lists all files"
    repository = open_repository("dataset", hub.repo, hub.revision, by_hand)
    unfinished = folder / UNFINISHED / spec.name
    for split, (url, place) in wanted.items():
        path = hub.files[split]
        if not repository.has(path, place):
            if place.exists():
                raise UserError(f"{place}: is there already, and is another file than {url}; move it away")
            staged = unfinished / place.name
            repository.fetch(path, staged, pinned=hub.sha256.get(split), quiet=quiet)
            compared = compare_rows(unfinished, spec, split, read_split(unfinished, spec, split))
            if compared is not None and compared.likeness == "other" and not any_rows:
                staged.unlink()
                said = f"{url}: {compared.text}, so it is not put into {place.parent}"
                raise UserError(f"{said}; to use it all the same: --any-rows")
            place.parent.mkdir(exist_ok=True)
            staged.replace(place)
        remembered = _remembered(folder, spec) | {url: checksum_of(place)}
        write_atomically(folder / UNFINISHED / f"{spec.name}.json", json.dumps(remembered))
