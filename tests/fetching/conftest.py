"""A loopback hub for each test."""

from collections.abc import Iterator

import pytest

from fairseq_icl.fetching import download
from tests.fetching.loopback_hub import LoopbackHub, serve


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with serve() as running:
        yield running
