"""A loopback hub for each test, asked for by everything that runs in the test's own process."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from fairseq_icl.fetching import download
from tests.fetching.loopback_hub import LoopbackHub, serve


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1")
        monkeypatch.setenv("FAIRSEQ_ICL_CACHE", str(tmp_path / "cache"))
        # The library reads its environment when it is imported, which may have been long ago.
        own = {"ENDPOINT": running.url, "HF_HUB_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": False}
        own["HUGGINGFACE_CO_URL_TEMPLATE"] = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        own |= {"AGENT_HARNESSES_PATH": str(tmp_path / "hf" / "agents.json"), "HF_TOKEN_PATH": str(tmp_path / "token")}
        for name, value in own.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value, raising=False)
        yield running
