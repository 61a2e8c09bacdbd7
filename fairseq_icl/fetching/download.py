"""One address -> one file: in pieces that survive a cut, with progress, complete and checked or not at all.

What has arrived is kept in FILE.part, and FILE.part.json says of which version of the address it is a part; the next
call goes on from there. The library of the hub keeps nothing of a download that was cut off.
"""

import hashlib
import http.client
import json
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of, remedy_for, sha256_of, sync

BLOCK = 1 << 20
ATTEMPTS = 5
"""So often a connection is made anew without a byte having come."""
PAUSE = 0.5
"""Seconds before the second attempt; doubled before each further one."""
TIMEOUT = 60.0
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
GIT = "git:"
"""Before a checksum that is git's name for the content: what the hub knows of small files."""


def download(
    url: str,
    path: Path,
    *,
    size: int | None = None,
    checksum: str | None = None,
    headers: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> None:
    """Bring `url` to `path`, going on where an earlier call was cut off.

    What arrives with another `checksum` (sha256, or `git:` and git's hash) is thrown away and reported. `headers` are
    sent to this address alone, not to where it may redirect.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url}: not an address; it must begin with https:// or http://")
    part, about = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        missing, free = (size or 0) - _size_of(part), shutil.disk_usage(path.parent).free
        if missing > free:  # which is better said at the start than after an hour
            raise UserError(
                f"{path.parent}: {missing / 1e9:,.2f} GB are to come, but {free / 1e9:,.2f} GB are free; free some "
                "space or choose another folder (--to)"
            )
        with tqdm(unit="B", unit_scale=True, desc=path.name, disable=quiet) as bar:
            _bring(url, part, about, dict(headers or {}), size, bar)
        if checksum is not None and (found := checksum_of(part, checksum)) != checksum:
            part.unlink()
            raise UserError(
                f"{url}: damaged or changed on the way (checksum {found[:16]}..., expected {checksum[:16]}...); "
                "nothing is kept of it, give the command again"
            )
        sync(part)
        part.replace(path)
        about.unlink(missing_ok=True)
    except OSError as error:
        said = f"{path}: cannot be written ({reason_of(error)}); {remedy_for(error)} folder (--to)"
        raise UserError(f"{said}; what has arrived is kept") from error


def checksum_of(path: Path, like: str = "") -> str:
    """sha256 of a file; or git's hash, with its mark, where `like` is one."""
    if not like.startswith(GIT):
        return sha256_of(path)
    head = f"blob {path.stat().st_size}\0".encode()
    with path.open("rb") as file:
        return GIT + hashlib.file_digest(file, lambda: hashlib.sha1(head, usedforsecurity=False)).hexdigest()


def network_reason(error: Exception) -> str:
    """What is wrong with the network, without the layers that the libraries wrap around it."""
    inner = getattr(error, "reason", None)
    return reason_of(inner if isinstance(inner, Exception) else error)


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _bring(url: str, part: Path, about: Path, headers: dict[str, str], size: int | None, bar: "tqdm[Any]") -> None:
    """Fill `part`: connect, and connect again where it stopped, until all is there."""
    attempt = 0
    while True:
        before = _size_of(part)
        try:
            if _continue(url, part, about, headers, size, bar):
                return
            problem = "the connection was closed too early"
        except urllib.error.HTTPError as error:
            problem = f"the server says {error.code} {error.reason}"
            if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                about.unlink(missing_ok=True)  # more is here than there: from the start
            elif error.code < 500 and error.code not in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS):
                raise UserError(f"{url}: cannot be fetched ({problem}); check the address") from error
        except NETWORK_ERRORS as error:
            problem = network_reason(error)
        attempt = 1 if _size_of(part) > before else attempt + 1
        if attempt >= ATTEMPTS:
            raise UserError(
                f"{url}: cannot be fetched ({problem}); what has arrived is kept, give the command again when the "
                "network is there"
            )
        time.sleep(PAUSE * 2 ** (attempt - 1))


def _continue(url: str, part: Path, about: Path, headers: dict[str, str], size: int | None, bar: "tqdm[Any]") -> bool:
    """One connection's worth of the file; whether all of it is there now."""
    have, version = _state(url, part, about)
    if have and have == size:
        return True
    request = urllib.request.Request(url)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    if have:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", version)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        goes_on = have > 0 and answer.status == 206
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = size if length is None else have + int(length)
        if size is not None and total != size:
            raise UserError(f"{url}: {total:,} bytes are offered where {size:,} were announced; try again later")
        bar.total, bar.n = total, have
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        about.write_text(json.dumps({"url": url, "version": version}), encoding="utf-8")
        with part.open("ab" if goes_on else "wb") as file:
            while block := answer.read1(BLOCK):  # what has come, so that a cut loses nothing
                file.write(block)
                bar.update(len(block))
    return total is None or part.stat().st_size == total


def _state(url: str, part: Path, about: Path) -> tuple[int, str]:
    """(bytes that can be used, version they are of); a part of something else, or of no known version, is no use."""
    try:
        said = json.loads(about.read_text(encoding="utf-8"))
        usable = said["url"] == url and said["version"] and not said["version"].startswith("W/")
        return (os.path.getsize(part), str(said["version"])) if usable else (0, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, ""
