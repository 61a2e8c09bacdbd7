"""A server on loopback that speaks the Hugging Face hub's paths, as far as reading goes, and can misbehave."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".parquet", ".safetensors")
"""Files that the hub keeps by their sha256; others have git's hash."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """Files of a repository at one commit; `main` means it too."""

    files: dict[str, bytes]
    commit: str = COMMIT


@dataclass
class LoopbackHub:
    """What is served, what goes wrong, and what was asked for."""

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    """models/OWNER/NAME or datasets/OWNER/NAME -> repository."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Other paths -> content."""
    altered: dict[str, bytes] = field(default_factory=dict)
    """Path -> what is sent in place of the content that was announced."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """Path -> bytes after which the connection is closed, one number per request."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range) of every request."""

    def ranges(self, path: str) -> list[str]:
        """The ranges that were asked for of a path, in order."""
        return [wanted for method, asked, wanted in self.asked if asked == path and method == "GET"]


def git_hash(content: bytes) -> str:
    """git's name for a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def describe(path: str, content: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    described: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": git_hash(content)}
    if path.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return described


@contextmanager
def serve() -> Iterator[LoopbackHub]:
    """A running server; it ends with the block."""
    hub = LoopbackHub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range", "")))
            if path in hub.files:
                self.send(path, hub.files[path], {})
            elif match := re.fullmatch(r"/api/(models|datasets)/(.+?)(?:/revision/([^/]+))?", path):
                self.describe(f"{match[1]}/{match[2]}", match[3])
            elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.resolve(path, f"{match[1] or 'models/'}{match[2]}", match[3], match[4])
            else:
                self.fail("")

        def describe(self, name: str, revision: str | None) -> None:
            repo = hub.repos.get(name)
            if repo is None or revision not in (None, "main", repo.commit):
                return self.fail("RepoNotFound" if repo is None else "RevisionNotFound")
            files = [describe(path, content) for path, content in repo.files.items()]
            body = {"id": name.partition("/")[2], "sha": repo.commit, "siblings": files, "private": False, "tags": []}
            self.send("", json.dumps(body).encode(), {"Content-Type": "application/json"})
            return None

        def resolve(self, path: str, name: str, revision: str, file: str) -> None:
            repo = hub.repos.get(name)
            if repo is None or revision not in ("main", repo.commit) or file not in repo.files:
                return self.fail("EntryNotFound" if repo else "RepoNotFound")
            self.send(path, repo.files[file], {"X-Repo-Commit": repo.commit})
            return None

        def send(self, path: str, content: bytes, headers: dict[str, str]) -> None:
            tag = hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else git_hash(content)
            content = hub.altered.get(path, content)
            start, wanted = 0, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and self.headers.get("If-Range", f'"{tag}"') == f'"{tag}"':
                start = int(wanted[1])
            if start > 0 and start >= len(content):
                return self.fail("", 416)
            self.send_response(206 if start else 200)
            for header, value in {"ETag": f'"{tag}"', "Content-Length": str(len(content) - start), **headers}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                cut = hub.cuts[path].pop(0) if hub.cuts.get(path) else None
                self.wfile.write(content[start:] if cut is None else content[start : start + cut])
                self.close_connection = cut is not None
            return None

        def fail(self, code: str, status: int = 404) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
