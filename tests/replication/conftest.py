"""The small world of the command tests, once for all tests of runs."""

import pytest

from tests.world import World, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("replication") / "w")
