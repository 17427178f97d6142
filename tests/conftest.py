"""Fixtures that several folders of tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.bench import Place

# A busy machine is slow, and slow is not wrong.
settings.register_profile("unhurried", deadline=None, max_examples=60)
settings.load_profile("unhurried")


@pytest.fixture(params=["memory", "sqlite"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place to keep runs, on each store; at the end every run in it must verify."""
    where = Place(request.param, tmp_path)
    yield where
    await where.close()
