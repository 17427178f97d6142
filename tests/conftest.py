"""Fixtures that several folders of tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import Place

# Here, and not beside the contract's own tests: others use its parts as well, and may be imported first.
pytest.register_assert_rewrite("agent_runtime.testing.store_contract")

# A busy machine is slow, and slow is not wrong.
settings.register_profile("unhurried", deadline=None, max_examples=60)
settings.load_profile("unhurried")


@pytest.fixture(params=["memory", "sqlite"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place to keep runs, on each store; at the end every run in it must verify."""
    where = Place(request.param, tmp_path)
    yield where
    await where.close()


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """A clock that whoever sleeps moves; at the end it lets the threads go that still wait for it."""
    manual = ManualClock(auto=True)
    yield manual
    manual.advance(1000)
