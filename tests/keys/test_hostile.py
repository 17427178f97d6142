"""Stored bytes build no objects, whatever they look like: in memory, in a file, and under a key that encrypts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime.journal.keys import KeyRing
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from tests.bench import Place
from tests.keys.rings import ALL_HIDING, STILL_OLD
from tests.keys.story import come_back, refuse_pickles

both = pytest.mark.parametrize("ring", [STILL_OLD, ALL_HIDING], ids=["plain", "hidden"])


@both
async def test_hostile_data_is_data_on_each_store(place: Place, ring: KeyRing) -> None:
    place.is_tampered = True
    await come_back(place.open(), ring)


@both
async def test_what_nobody_sealed_is_refused_on_each_store(place: Place, ring: KeyRing) -> None:
    place.is_tampered = True
    await refuse_pickles(place.open(), ring)


async def test_sqlalchemy_does_the_same(tmp_path: Path) -> None:
    store = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    await come_back(store, STILL_OLD)
    await refuse_pickles(store, STILL_OLD)
    await store.close()
