"""One base model in memory for all workers of a machine (`workers=N`, without a GPU).

    RUN/.sharing-HOST.PID-x/NAME.pt    a model as it stands before fine-tuning: weights drawn, rounded, perturbed

The first worker that needs a model loads or draws it as a single process would, and writes it while the others wait.
Then all of them, the first too, map the file: its pages are in memory once, whoever looks at them. The mapping is
private, so that nothing a worker does to its weights reaches the file or another worker. It is a copy even where the
checkpoint could be mapped itself: files of users may change under us.

The parent makes the folder, removes models that no unfinished cell needs, and the folder in the end. What a parent
leaves that was killed, the next run sweeps away (store.py).
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from fairseq_icl.errors import UserError
from fairseq_icl.files import give_back_memory, is_abandoned, reason_of, remove, temporary_prefix, write_atomically
from fairseq_icl.models import Model, facts_of, load_from
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.replication.cells import Cell, file_hash
from fairseq_icl.replication.locks import Locks, StoreError

SHARING = "sharing"
"""What names of the folders begin with, after a dot."""
SHARING_VARIABLE = "FAIRSEQ_ICL_SHARING"
"""Set for workers: the folder of the models that they share."""
ROOM = 2**28
"""Bytes of the disk that are left to the results."""
SUFFIX = ".pt"


def can_share() -> bool:
    """Whether workers of this machine share their models: a GPU has a copy of its own for each."""
    return not torch.cuda.is_available()


@contextmanager
def shared_models(results: Path) -> Iterator[Path | None]:
    """In the parent: a folder for the models that its workers share, gone in the end; None where they cannot."""
    folder = None
    if can_share():
        with suppress(OSError):  # whoever cannot write here hears of it when results are stored
            folder = Path(tempfile.mkdtemp(prefix=temporary_prefix(SHARING), dir=results))
    try:
        yield folder
    finally:
        if folder is not None:
            remove(folder)


def keep_only(folder: Path, names: Collection[str]) -> None:
    """In the parent: remove the models that are none of these (`model_name`); the folder is seen to be in use."""
    with suppress(OSError):  # a worker removed it because the disk is full
        os.utime(folder)
        for path in folder.glob(f"[!.]*{SUFFIX}"):
            if path.name.split("-")[0] not in names:
                path.unlink(missing_ok=True)


def model_name(cell: Cell) -> str:
    """What tells the cell's model from the others of its run."""
    return _print_of(asdict(cell.model_key()))


def is_sharing() -> bool:
    """In a worker: whether it shares its models."""
    return SHARING_VARIABLE in os.environ


def base_model(files: ModelFiles, cell: Cell, say: Callable[[str], None]) -> Model:
    """The cell's model before fine-tuning: mapped where workers share it, else loaded by this process for itself."""
    folder = Path(os.environ.get(SHARING_VARIABLE, ""))
    if not is_sharing() or not folder.is_dir():
        return load_from(files, cell.settings)
    content = [files.sha256, file_hash(files.dictionary) if files.dictionary else ""]
    path = folder / f"{model_name(cell)}-{_print_of(content)}{SUFFIX}"
    try:
        with Locks(folder).hold(path.stem, wait=True, say=say):
            own = None if path.exists() else _load_and_write(files, cell, path, say)
        if own is None:
            give_back_memory()  # of the model that was loaded to be written
            return Model(_mapped(path), files, *facts_of(cell.settings))
    except (StoreError, OSError):  # the folder was removed because the disk is full, which was told
        return load_from(files, cell.settings)
    return own


def _load_and_write(files: ModelFiles, cell: Cell, path: Path, say: Callable[[str], None]) -> Model | None:
    """Make the file at `path`. If that cannot be, sharing ends for all workers, and this one has a model of its own."""
    for other in path.parent.glob(".*"):  # of a worker that was killed while it wrote
        if is_abandoned(other):
            remove(other)
    model = load_from(files, cell.settings)
    try:
        _check_space(path.parent, model.lm)
        write_atomically(path, lambda unfinished: torch.save(model.lm, unfinished))
    except (UserError, OSError) as error:
        if path.parent.exists():  # else another worker has told already
            remove(path.parent)
            reason = str(error) if isinstance(error, UserError) else f"{path.parent}: {reason_of(error)}"
            say(f"{reason}; until then each worker loads a model of its own and needs the memory for it")
        return model
    return None


def _check_space(folder: Path, lm: PretrainedLM) -> None:
    """UserError if the model would fill the disk: results that others are just storing would be lost."""
    needed, free = sum(parameter.nbytes for parameter in lm.parameters()) + ROOM, shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: too little space for workers to share their model (needed: {needed / 2**30:.1f} GiB, free: "
            f"{free / 2**30:.1f}); free some, or choose another out=DIR"
        )


def _mapped(path: Path) -> PretrainedLM:
    """The module in the file; its tensors are views of the private mapping, and what was tied is.

    The file holds a pickled module, which could run code: only our own is read, out of a folder that only we can enter.
    """
    if path.stat().st_uid != os.geteuid():
        raise OSError(f"{path}: not a file of ours")
    lm: PretrainedLM = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return lm


def _print_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
