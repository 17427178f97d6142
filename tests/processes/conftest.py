"""A folder for the main job of each test."""

from pathlib import Path

import pytest

from tests.processes.job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)
