"""Models: a repository of the hub, of which only the needed files are brought; or an archive that fairseq published."""

import gzip
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from fairseq_icl.errors import UserError
from fairseq_icl.fetching import split_name
from fairseq_icl.fetching.download import BLOCK, checksum_of, download
from fairseq_icl.fetching.hub import address, cached_folder, fetch_to_cache, open_repository
from fairseq_icl.files import reason_of, remedy_for, temporary_prefix
from fairseq_icl.models.hugging_face import CONFIG, WEIGHT_FILES
from fairseq_icl.models.hugging_face.tokenizer import TOKENIZER_FILES

CHECKPOINT = "model.pt"


def needed_files(name: str, files: Iterable[str]) -> list[str]:
    """Of a repository's files those that a model is read from: config, tokenizer, weights (safetensors before bin)."""
    there = set(files)
    if CONFIG not in there:
        raise UserError(f"{name}: no {CONFIG} in it; not a model in Hugging Face's form")
    tokenizer = next((names for names in TOKENIZER_FILES if there.issuperset(names)), None)
    if tokenizer is None:
        wanted = ", nor ".join(" with ".join(names) for names in TOKENIZER_FILES)
        raise UserError(f"{name}: no {wanted} in it; its tokenizer cannot be read here")
    for weights in WEIGHT_FILES:
        if weights in there:
            return [CONFIG, *tokenizer, weights]
        if (index := f"{weights}.index.json") in there:
            stem, suffix = weights.rsplit(".", 1)
            shards = sorted(file for file in there if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", file))
            return [CONFIG, *tokenizer, index, *shards]
    raise UserError(f"{name}: no {' or '.join(WEIGHT_FILES)} in it, nor their shards; its weights cannot be read here")


def fetch_hub_model(name: str, folder: Path, *, quiet: bool = False) -> str:
    """Bring a model of the hub into a folder; returns a line that says which commit it is."""
    repository_name, revision = split_name(name)
    repository = open_repository("model", repository_name, revision, _by_hand(name, str(folder)))
    for path in needed_files(repository_name, repository.files):
        repository.fetch(path, folder / path, quiet=quiet)
    return f"{folder}: {repository.name} of the hub at commit {repository.commit}"


def cached_hub_model(name: str, *, quiet: bool = False) -> Path:
    """The folder of a model of the hub in the hub's own cache: fetched, or without network a copy that is there."""
    repository_name, revision = split_name(name)
    by_hand = _by_hand(name, "a folder", " and give model=THE_FOLDER")
    try:
        repository = open_repository("model", repository_name, revision, by_hand)
    except UserError:
        folder = cached_folder(repository_name, revision, CONFIG)
        if folder is None:
            raise
        needed_files(str(folder), (path.name for path in folder.iterdir()))
        return folder
    paths = needed_files(repository_name, repository.files)
    return fetch_to_cache(repository, repository_name, revision, paths, by_hand, quiet=quiet)


def _by_hand(name: str, folder: str, use: str = "") -> str:
    """How to do without the hub's library."""
    repository, revision = split_name(name)
    page = address("model", repository, revision or "main", "").rstrip("/").replace("/resolve/", "/tree/")
    return f"download {CONFIG}, tokenizer.json and {WEIGHT_FILES[0]} from {page} into {folder}{use}"


def fetch_archive(model: Mapping[str, Any], folder: Path, *, quiet: bool = False) -> str:
    """Bring and unpack the archive of a model of config/model, and what belongs beside it; returns a line about it."""
    place = folder / CHECKPOINT
    line = f"{place}: there already"
    if not place.is_file():
        archive = folder / (Path(urlsplit(model["archive"]).path).name or "archive")
        if not archive.is_file():  # whole, and left by a call that could not unpack it
            download(model["archive"], archive, quiet=quiet)
        line = f"{place}: from {model['archive']} (sha256 {checksum_of(archive)}; none is published to compare with)"
        unpack_model(archive, folder)
        archive.unlink()
    for name, file in model["beside"].items():
        if not (folder / name).is_file() or checksum_of(folder / name) != file["sha256"]:
            download(file["url"], folder / name, checksum=file["sha256"], quiet=quiet)
    return line


def unpack_model(archive: Path, folder: Path) -> None:
    """Put the files of the model in a .tar.gz into `folder`: those beside its model.pt, without folders around it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = temporary_prefix(archive.name)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as unfinished:
            _unpack(archive, Path(unfinished))
            found = sorted(Path(unfinished).rglob(CHECKPOINT))
            if len(found) != 1:
                raise UserError(f"{archive}: {len(found)} files named {CHECKPOINT} in it; not an archive of one model")
            for file in filter(Path.is_file, sorted(found[0].parent.iterdir())):
                file.replace(folder / file.name)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: not a whole .tar.gz ({error}); remove it and fetch it again") from error
    except OSError as error:
        reason, remedy = reason_of(error), remedy_for(error)
        raise UserError(f"{folder}: cannot be written ({reason}); {remedy} folder (--to)") from error


def _unpack(archive: Path, folder: Path) -> None:
    """Refuse links, devices and paths that lead out, and then the whole archive."""
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
