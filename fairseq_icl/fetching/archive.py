"""An archive -> the folder of a model: regular files only, and none outside of the folder."""

import gzip
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of, remedy_for, temporary_prefix

CHECKPOINT = "model.pt"
BLOCK = 1 << 20


def unpack_model(archive: Path, folder: Path) -> None:
    """Put the files of the model in a .tar.gz into `folder`: those beside its model.pt, without folders around it.

    Links, devices and paths that lead out are refused, and then nothing of the archive is kept.
    """
    unfinished = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=temporary_prefix(archive.name), dir=folder))
        _unpack(archive, unfinished)
        found = sorted(unfinished.rglob(CHECKPOINT))
        if len(found) != 1:
            raise UserError(f"{archive}: {len(found)} files named {CHECKPOINT} in it; not an archive of one model")
        for file in sorted(found[0].parent.iterdir()):
            if file.is_file():
                file.replace(folder / file.name)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: not a whole .tar.gz ({error}); remove it and fetch it again") from error
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({reason_of(error)}); {remedy_for(error)} folder (--to)"
        ) from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or "\0" in member.name:
                raise UserError(f"{archive}: {member.name!r} in it leads out of the folder; do not use this archive")
            if member.isdir():
                continue
            if not member.isreg():
                raise UserError(f"{archive}: {member.name!r} in it is a link or a device; do not use this archive")
            source, place = tar.extractfile(member), folder / path
            assert source is not None  # of a regular file there is a content
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as file:
                shutil.copyfileobj(source, file, BLOCK)
