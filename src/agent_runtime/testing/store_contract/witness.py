"""What the contract's cases do with a store, and how they look at what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredMessage, StoredRow, StoredRun
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.testing.store_contract.draft import NEXT_RING, TENANT, Draft

T = TypeVar("T")

OK, FENCED, MOVED = AnswerKind.OK, AnswerKind.FENCED, AnswerKind.MOVED
_SEALED = StoredRow._fields.index("seal") + 1


def sealed_part(row: StoredRow) -> tuple[object, ...]:
    """The columns of a row that its writer seals, and the seal."""
    return tuple(row)[:_SEALED]


async def answer_to(store: CheckpointStore, append: Append) -> AnswerKind:
    """The store's answer to one append."""
    [answer] = await store.commit([append])
    return answer.kind


def demand(kind: AnswerKind, found: Answer | AnswerKind) -> None:
    """What the store answered must be of that kind."""
    answered = found.kind if isinstance(found, Answer) else found
    assert answered is kind, f"the answer must be {kind.value}, found {answered.value}"


async def land(store: CheckpointStore, draft: Draft, append: Append) -> Draft:
    """Commit an append that must land; the draft after it."""
    answer = await answer_to(store, append)
    assert answer is OK, f"run {draft.run_id!r}: an append that nothing stands against must be ok, found {answer}"
    return draft.after(append)


async def opened(store: CheckpointStore, run_id: str = "run-1", *, name: str = "orders") -> Draft:
    """A run with one record, stored."""
    draft = Draft.of(run_id, name=name)
    return await land(store, draft, draft.open())


async def ended(store: CheckpointStore, run_id: str = "run-1", *, name: str = "orders") -> Draft:
    """A run that is done, stored."""
    draft = await opened(store, run_id, name=name)
    return await land(store, draft, draft.end())


async def read(store: CheckpointStore, run_id: RunId) -> StoredRun:
    """A run that must be there, with its records; every seal, number and link of it checked."""
    [run] = await store.load_many([run_id])
    return verified(run_id, run)


def verified(run_id: RunId, run: StoredRun | None) -> StoredRun:
    """What was read of a run that must be there, every seal, number and link of it checked."""
    assert run is not None, f"run {run_id!r} was stored, and is not there"
    try:
        open_run(NEXT_RING, run, tenant=TENANT)
    except CheckpointStoreCorrupt as error:
        raise AssertionError(f"what a store gives back must verify: {error}") from error
    return run


async def read_row(store: CheckpointStore, run_id: RunId) -> StoredRow:
    """The row of a run that must be there."""
    run = await store.latest(run_id)
    assert run is not None, f"run {run_id!r} was stored, and is not there"
    return run.row


async def read_as(store: CheckpointStore, draft: Draft) -> StoredRun:
    """The same, and its row must say what the draft says."""
    [run] = await store.load_many([draft.run_id])
    return demand_as(draft, run)


def demand_as(draft: Draft, found: StoredRun | None) -> StoredRun:
    """What was read must verify, and its row must say what the draft says."""
    run = verified(draft.run_id, found)
    assert sealed_part(run.row) == sealed_part(draft.row), f"the row must be as written, found {run.row}"
    return run


class Snapshot(NamedTuple):
    """Everything that can be read of a run, but for what time alone changes."""

    loaded: StoredRun | None
    latest: StoredRun | None
    records: int
    messages: tuple[StoredMessage, ...]


async def snapshot(store: CheckpointStore, run_id: RunId) -> Snapshot:
    """What is stored of a run now."""
    [loaded] = await store.load_many([run_id])
    latest = await store.latest(run_id)
    records, messages = await store.calls(run_id), await store.inbox(run_id)
    return Snapshot(_timeless(loaded), _timeless(latest), len(records), tuple(messages))


@asynccontextmanager
async def untouched(store: CheckpointStore, *run_ids: RunId) -> AsyncIterator[None]:
    """What happens inside must leave no trace on these runs."""
    before = [await snapshot(store, run_id) for run_id in run_ids]
    yield
    after = [await snapshot(store, run_id) for run_id in run_ids]
    assert after == before, f"what was refused left something behind:\n{after}\nwhere this was:\n{before}"


@asynccontextmanager
async def reopened(store: CheckpointStore) -> AsyncIterator[CheckpointStore]:
    """The same store through connections of its own, closed at the end."""
    other = store.reopen()
    try:
        yield other
    finally:
        if other is not store:
            await other.close()


async def in_thread(store: CheckpointStore, work: Callable[[CheckpointStore], Awaitable[T]]) -> T:
    """Do work on the reopened store from another thread, on an event loop of its own."""

    async def on_its_own_loop() -> T:
        async with reopened(store) as other:
            return await work(other)

    return await asyncio.to_thread(lambda: asyncio.run(on_its_own_loop()))


def _timeless(run: StoredRun | None) -> StoredRun | None:
    return None if run is None else run._replace(row=run.row._replace(idle_ms=0))
