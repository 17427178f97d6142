"""Remotes for a test: a state file that is not there yet, and both servers over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime.mock import Mocks, start_mocks


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "mocks.db"


@pytest.fixture
def mocks(state: Path) -> Iterator[Mocks]:
    with start_mocks(state) as mocks:
        yield mocks
