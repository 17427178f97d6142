"""What runs are worked on, made from the options that every program takes at its door."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.crash import UNARMED, CrashPlan
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import InvalidSetting
from agent_runtime.events import Sink
from agent_runtime.ids import check_label
from agent_runtime.journal.journal import Commits
from agent_runtime.journal.seal import CheckpointKey, KeyRing
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.redaction import Redact, redacting
from agent_runtime.run import HEARTBEAT_SECONDS, LEASE_SECONDS, MAX_ATTEMPTS, Backing, check_terms
from agent_runtime.settings import MAX_VALUE_BYTES

_log = logging.getLogger("agent_runtime")


def make_backing(
    checkpoints: CheckpointStore | None,
    checkpoint_key: CheckpointKey | None,
    *,
    tenant: str = "",
    namespace: str = "",
    commits: str = Commits.GROUPED.value,
    sinks: Sequence[Sink] = (),
    crash: CrashPlan = UNARMED,
    lease_seconds: float = LEASE_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    max_attempts: int = MAX_ATTEMPTS,
    stuck_after: float | None = None,
    accept_lost_writes: bool = False,
    max_value_bytes: int = MAX_VALUE_BYTES,
    redact: Redact | None = None,
    clock: Clock = SYSTEM_CLOCK,
    entropy: Entropy = SYSTEM_ENTROPY,
    offload: Offload = SYSTEM_OFFLOAD,
) -> Backing:
    """What runs are worked on, from the options that every entry takes."""
    store, ring = _store_and_ring(checkpoints, checkpoint_key)
    heard = sinks if redact is None else [redacting(sink, redact) for sink in sinks]
    backing = Backing(
        store, ring, check_label("tenant", tenant), check_label("namespace", namespace), _mode(commits), lease_seconds,
        heartbeat_seconds, heard, crash, clock, entropy, offload, max_attempts, stuck_after, accept_lost_writes,
        max_value_bytes, redact,
    )  # fmt: skip
    check_terms(backing)
    return backing


def _mode(commits: str) -> Commits:
    mode = _MODES.get(commits)
    if mode is None:
        raise InvalidSetting(f"commits= is 'grouped' or 'each', found {commits!r}")
    return mode


_MODES = {mode.value: mode for mode in Commits}


_UNSHARED_KEY = KeyRing.of(SYSTEM_ENTROPY.draw(32))
"""Seals what is kept in memory, which no other process can read."""


@cache
def _warn_once() -> None:
    _log.warning("this run is not durable: without checkpoints= it is kept in memory and dies with the process")


def _store_and_ring(checkpoints: CheckpointStore | None, key: CheckpointKey | None) -> tuple[CheckpointStore, KeyRing]:
    if checkpoints is not None and key is not None:
        return checkpoints, KeyRing.of(key)

    from agent_runtime.stores.memory import MemoryCheckpointStore

    if checkpoints is None:
        _warn_once()
        return MemoryCheckpointStore(), _UNSHARED_KEY
    if key is None and isinstance(checkpoints, MemoryCheckpointStore):
        return checkpoints, _UNSHARED_KEY
    return checkpoints, KeyRing.of(key)
