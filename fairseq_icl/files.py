"""Files: written completely or not at all, hashed, YAML as plain data; where the shipped demo lies; freed memory."""

import ctypes
import errno
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from fairseq_icl.errors import UserError

PACKAGE = Path(__file__).parent
DEMO_MODEL = PACKAGE / "demo" / "model" / "model.pt"
"""The shipped checkpoint; `dict.txt` and `sentencepiece.bpe.model` lie beside it."""
DEMO_DATA = PACKAGE / "demo" / "data"  # the shipped datasets: NAME.yaml, NAME/train.jsonl and NAME/valid.jsonl of each

HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40]
"""This machine's name as it stands in names of temporary files."""
TEMPORARY = re.compile(r"\.(?P<name>.+)-(?P<host>[A-Za-z0-9_]*)\.(?P<pid>[0-9]+)-[a-z0-9_]+")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: str | Path, content: str | bytes | memoryview | Callable[[Path], object]) -> None:
    """Write a file completely or not at all; `content` may be a function that writes the file whose path it gets."""
    try:
        with in_one_step(Path(path)) as unfinished:
            if callable(content):
                content(unfinished)
            else:
                unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        raise UserError(f"{path}: cannot be written ({reason_of(error)}); {remedy_for(error)} place") from error


@contextmanager
def in_one_step(path: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """A new file or folder beside `path` to be filled; then it is synced and renamed to `path`.

    Of two processes that finish the same folder the second loses without harm.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        name = tempfile.mkdtemp(prefix=temporary_prefix(path.name), dir=path.parent)
    else:
        handle, name = tempfile.mkstemp(prefix=temporary_prefix(path.name), dir=path.parent)
        os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        unfinished.chmod(0o755 if is_folder else 0o644)  # so far only its owner can read it
        for part in (*unfinished.glob("*"), unfinished):
            sync(part)
        try:
            os.rename(unfinished, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not path.is_dir():
                raise
        sync(path.parent)
    finally:
        remove(unfinished)


def reason_of(error: Exception) -> str:
    """What the system says, in one line."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return reason.splitlines()[0]


def remedy_for(error: Exception) -> str:
    """What to do about a file that cannot be written; "place" or "out=DIR" is to follow."""
    number = getattr(error, "errno", None)
    return "free some space or choose another" if number is None or number in FULL else "choose another"


def temporary_prefix(name: str) -> str:
    """Beginning of the name of a temporary file for `name`: it says which process of which host writes it."""
    return f".{name[:40]}-{HOST}.{os.getpid()}-"


def is_abandoned(path: Path) -> bool:
    """Whether nobody writes a temporary file any more: its process (of this host) is gone, or it is a day old."""
    match = TEMPORARY.fullmatch(path.name)
    if match and match["host"] == HOST:
        try:
            os.kill(int(match["pid"]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's
            pass
    try:
        return time.time() - path.lstat().st_mtime > 24 * 3600
    except OSError:  # another process removed it
        return False


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make sure that a file or folder has reached the disk before something that relies on it does."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # a system that syncs no folders
            raise
    finally:
        os.close(handle)


def with_part(page: str, start: str, end: str, part: str) -> str:
    """The text of a page with `part` in place of what stands from `start` to `end`; added where there is none yet."""
    before, _, rest = page.partition(start)
    return f"{before}{start}\n{part}\n{end}{rest.partition(end)[2]}"


def sha256_of(path: str | Path) -> str:
    """Hash of a file: what a fine-tuned checkpoint and a result remember of what they came from."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MAX_TEXT_BYTES = 1 << 20


class _PlainLoader(yaml.SafeLoader):
    """YAML as data: no aliases (a few of them can stand for billions of values), no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*name) are not allowed; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} stands twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_small(path: str | Path) -> str:
    """The text of a file that people write; a device or a pipe, which might never end, and large files are refused."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: not a file but a folder, a device or a pipe; give the path of a text file")
    if found.st_size > MAX_TEXT_BYTES:
        raise UserError(f"{path}: larger than {MAX_TEXT_BYTES >> 20} MiB; that is no file of settings")
    return Path(path).read_text(encoding="utf-8")


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file of the user's; UserError names file, line and problem."""
    path = Path(path)
    try:
        return yaml.load(read_small(path), _PlainLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the path of a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise UserError(f"{path}{line}: not valid YAML ({problem}); quote texts that hold : or #") from error


def give_back_memory() -> None:
    """Return to the system what was freed: glibc keeps it, and goes on growing its heap where values stay between."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
