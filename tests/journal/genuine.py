"""A genuine run of many records under two epochs, and every way of changing a stored value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from agent_runtime.crash import CrashPoint
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, StoredCheckpoint, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.seal import checkpoint_digest, sealer_for
from agent_runtime.journal.store import Answer, Append, CheckpointStore
from tests.bench import RING, Bench, Delegate, Place, Script, Worker

RUN = "order-7"
NAME = "orders"
SEALED = ("run_id", "format", "key_id", "tenant", "kind", "name", "status", "step", "epoch", "owner", "number", "head",
          "attempts", "seal")  # fmt: skip
"""The columns of a row that are sealed; the others are hints."""


def script() -> Script:
    """A model that asks for two calls at once, for a tool that is not there, and for one more call."""
    return Script(
        [("charge_i", {"amount": 1}), ("lookup", {"name": "a"})],
        [("no_such_tool", {})],
        [("charge_i", {"amount": 2})],
        "all is done",
    )


async def work_until_killed(place: Place, bench: Bench, run_id: str = RUN, *, tenant: str = "") -> None:
    """A run that two workers died on: unfinished, and free to be picked up."""
    first = Worker(place).killed_at(CrashPoint.AFTER_INTENT, 2)
    await first.run_and_die(script(), bench.registry, run_id, name=NAME, tenant=tenant)
    second = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 3)
    await second.recover_and_die(script(), bench.registry, run_id, tenant=tenant)


async def genuine_run(place: Place, run_id: str = RUN, *, tenant: str = "") -> StoredRun:
    """Such a run as it is stored, with a genuine checkpoint, which loops themselves do not keep."""
    await work_until_killed(place, Bench(), run_id, tenant=tenant)
    [run] = await place.open().load_many([RunId(run_id)])
    assert run is not None
    assert len(run.records) >= 12
    return with_checkpoint(run, b'{"cursor":3}')


def with_checkpoint(run: StoredRun, body: bytes) -> StoredRun:
    """The run after its owner has kept a state at its present step."""
    row = run.row
    sealer = sealer_for(RING, tenant=row.tenant, run_id=row.run_id)
    number, named = row.number + 1, checkpoint_digest(row.step, body)
    seal = sealer.record(number, row.epoch, RecordKind.CHECKPOINT, "", 0, row.head, named)
    record = StoredRecord(number, row.epoch, int(RecordKind.CHECKPOINT), "", 0, named, seal)
    row = row._replace(number=number, head=seal)
    checkpoint = StoredCheckpoint(row.step, body, sealer.checkpoint(row.step, body))
    return StoredRun(row._replace(seal=sealer.row(row)), checkpoint, (*run.records, record))


class Showing(Delegate):
    """A store that shows one run as somebody has changed it, and notes every attempt to write."""

    def __init__(self, inner: CheckpointStore, run: StoredRun) -> None:
        super().__init__(inner)
        self.run = run
        self.writes: list[str] = []

    def check(self, verb: str) -> None:
        if verb in ("commit", "save", "record_call", "renew", "renew_all", "delete", "post"):
            self.writes.append(verb)

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return [self.run for _ in run_ids]

    async def latest(self, run_id: RunId) -> StoredRun | None:
        return self.run._replace(records=())


class Watching(Delegate):
    """Keeps the run as it was stored after each of its commits."""

    def __init__(self, inner: CheckpointStore, run_id: str = RUN) -> None:
        super().__init__(inner)
        self.run_id = RunId(run_id)
        self.states: list[StoredRun] = []

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        [run] = await self.inner.load_many([self.run_id])
        assert run is not None
        self.states.append(run)
        return answers


Stored = TypeVar("Stored", StoredRow, StoredRecord, StoredCheckpoint)


def with_column(stored: Stored, column: str, value: object) -> Stored:
    """The same with another value in one column, of whatever type."""
    return type(stored)._make(value if name == column else old for name, old in zip(stored._fields, stored, strict=True))


def changes(value: object) -> Iterator[object]:
    """Every value that differs in one bit, and some that are shorter or longer."""
    match value:
        case bool():
            raise AssertionError("no column is a bool")
        case int():
            yield from (value ^ (1 << bit) for bit in range(63))
        case bytes():
            yield from (
                value[:at] + bytes([value[at] ^ (1 << bit)]) + value[at + 1 :] for at in range(len(value)) for bit in range(8)
            )
            yield from (value + b"\0", value[1:], value[:-1], b"") if value else (b"\0",)
        case str():
            yield from (
                value[:at] + chr(ord(value[at]) ^ (1 << bit)) + value[at + 1 :] for at in range(len(value)) for bit in range(7)
            )
            yield from (value + "\0", value[1:], "") if value else ("\0", "x")
        case _:
            raise AssertionError(f"no column is a {type(value).__name__}")


def of_another_type(value: object) -> Iterator[object]:
    """The same as nearly as another SQL type can say it, and nothing at all."""
    yield None
    match value:
        case int():
            yield from (str(value), str(value).encode(), value + 0.5)
        case bytes():
            yield from (value.decode("latin-1"), 1, 1.5)
        case str():
            yield from (value.encode(), 1, 1.5)
        case _:
            raise AssertionError(f"no column is a {type(value).__name__}")


@contextmanager
def calls_of(function: Callable[..., object]) -> Iterator[list[None]]:
    """Count how often a Python function is entered on this thread."""
    code = function.__code__
    entered: list[None] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            entered.append(None)

    sys.setprofile(look)
    try:
        yield entered
    finally:
        sys.setprofile(None)
