"""The place of these tests: one on each store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.bench import Place
from tests.stores.places import OTHERS, STORES, place_on


@pytest.fixture(params=OTHERS)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """On each store that the tests of the cases themselves do not have."""
    async with place_on(request.param, tmp_path, request) as where:
        yield where


@pytest.fixture(params=STORES)
async def every_place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    async with place_on(request.param, tmp_path, request) as where:
        yield where
