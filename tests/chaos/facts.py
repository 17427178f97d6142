"""Reads at the end what the store holds, every seal checked."""

from __future__ import annotations

from collections.abc import Sequence

from agent_runtime.errors import CheckpointStoreCorrupt, NewerFormat
from agent_runtime.journal.seal import KeyRing, parse_key
from agent_runtime.runs import RunReport, Runs
from agent_runtime.stores import open_store


async def read_reports(url: str, key: str, stored: Sequence[str]) -> tuple[dict[str, RunReport], dict[str, str]]:
    """What happened to each run; and of those that do not verify, why. The remotes count the rest."""
    store = open_store(url)
    runs = Runs(store, checkpoint_key=KeyRing.of(parse_key(key)))
    reports: dict[str, RunReport] = {}
    corrupt: dict[str, str] = {}
    try:
        for run in stored:
            try:
                reports[run] = await runs.show(run)
            except (CheckpointStoreCorrupt, NewerFormat) as error:
                corrupt[run] = str(error)
    finally:
        await store.close()
    return reports, corrupt
