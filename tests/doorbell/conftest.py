"""The stores at whose doorbell these tests wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent_runtime import doorbell as doorbells
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from tests.doorbell.waiting import Minimal


@pytest.fixture(params=["memory", "sqlite", "minimal"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    stores: dict[str, Callable[[], CheckpointStore]] = {
        "memory": MemoryCheckpointStore,
        "minimal": Minimal,
        "sqlite": lambda: SQLiteCheckpointStore(tmp_path / "runs.db"),
    }
    opened_store = stores[request.param]()
    yield opened_store
    await opened_store.close()


@pytest.fixture(autouse=True)
def _brief_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 0.05)
