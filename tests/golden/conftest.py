"""Fixtures over one golden folder: `golden`, and `golden_task` / `golden_case` for every task and permutation in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.folder import Golden


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    golden = Golden(metafunc.config.getoption("--golden-dir"))
    if not golden.cases:
        raise pytest.UsageError(f"--golden-dir {golden.root}: no data/*_train.jsonl with tokens/*_p*.json in it")
    if "golden_task" in metafunc.fixturenames:
        metafunc.parametrize("golden_task", golden.tasks)
    if "golden_case" in metafunc.fixturenames:
        metafunc.parametrize("golden_case", golden.cases, ids=[f"{task}-p{p}" for task, p in golden.cases])


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """The folder given by --golden-dir."""
    return Golden(request.config.getoption("--golden-dir"))


@pytest.fixture(scope="session")
def golden_spec(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """task -> path of a dataset YAML for it."""
    folder = tmp_path_factory.mktemp("golden_specs")
    return lambda task: golden.write_spec(task, folder)
