"""Fixtures that several folders of tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.bench import Place


@pytest.fixture(params=["memory", "sqlite"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place to keep runs, on each store; at the end every run in it must verify."""
    where = Place(request.param, tmp_path)
    yield where
    await where.close()
