"""Large bodies in a folder beside a store, which keeps a stub of each: by content, written before what names it, sealed as
they are.

Rules of this file:

* A body above the threshold is durable in the folder before the inner store is asked to write what names it. So a crash
  leaves blobs that nothing names, and never a name without its blob; `sweep` finds the former.
* What is read back is compared with the stub's hash and size; the kernel checks the seal over the original bytes. A blob that
  is missing or changed is its own run's trouble: the others of the same read come back.
* A list reads no blob. A state that was replaced takes its blob along; everything else goes with its run.
* The disk is never waited for on the event loop, and at most `AT_ONCE` threads at a time work for one verb.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple, TypeVar, cast

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import CheckpointStoreCorrupt, InvalidSetting
from agent_runtime.ids import RunId, Step
from agent_runtime.journal.commits import goes_at_once
from agent_runtime.journal.records import (
    LostBody,
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
)
from agent_runtime.journal.store import (
    Answer,
    AnswerKind,
    Append,
    AtOnce,
    CheckpointStore,
    Ear,
    Guard,
    Roomy,
    Searching,
    Sifting,
)
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.stores.blob_folder import Blob, BlobFolder, Lying, is_named
from agent_runtime.stores.blob_stub import MARK, Stub, pack_held, stub_of, unpack
from agent_runtime.stores.blob_url import ABOVE
from agent_runtime.stores.layouts import Layout, Migratable

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

AT_ONCE = 8
DAY_SECONDS = 86_400.0
LEAST_AGE_SECONDS = 3_600.0
"""A write that is on its way is younger than this, whatever holds it up: its lease is over long before."""
MOST_STATES = 50_000
READ_TRIES = 5
"""How often a run is read again whose blobs went while it was read: somebody had moved it on."""


class Swept(NamedTuple):
    """What a sweep removed, or would remove."""

    files: int = 0
    bytes: int = 0
    unknown: int = 0
    """How many folders were left alone, since nothing says whose they are, or their run cannot be read."""


class _Place(NamedTuple):
    """A body as the inner store keeps it, and the name that its blob has if it is a stub."""

    run_id: RunId
    stored: bytes
    step: int | None = None
    """Of a state: it is a blob of its own, since it goes when the next one comes."""


class BlobStore:
    """`inner`, with each body of more than `above` bytes in `folder` instead: one folder for one store."""

    max_body_bytes = None

    def __init__(
        self,
        inner: CheckpointStore,
        folder: str | os.PathLike[str],
        *,
        above: int = ABOVE,
        clock: Clock = SYSTEM_CLOCK,
        entropy: Entropy = SYSTEM_ENTROPY,
        offload: Offload = SYSTEM_OFFLOAD,
    ) -> None:
        """Every process that works the runs names the same folder, on a disk that all of them share."""
        most = getattr(inner, "max_body_bytes", None)
        if type(above) is not int or above < 0 or (most is not None and above >= most):
            upto = "" if most is None else f" and less than the {most} that {inner!r} takes"
            raise InvalidSetting(f"above= is a whole number of bytes from 0{upto}, found {above!r}")
        self._inner = inner
        self._above = above
        self._clock = clock
        self._entropy = entropy
        self._offload = offload
        self._folder = BlobFolder(os.fspath(folder), entropy)
        self._folder.open()
        self._goes_at_once = goes_at_once(inner)
        self._states: dict[RunId, str] = {}

    def __repr__(self) -> str:
        return f"BlobStore({self._inner!r}, {self._folder.root!r})"

    @property
    def lanes(self) -> int:
        return int(getattr(self._inner, "lanes", 1))

    @property
    def may_lose_writes(self) -> bool:
        return bool(getattr(self._inner, "may_lose_writes", False))

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        packed = await self._pack_all(appends)
        answers = await self._inner.commit(packed)
        moved = [append for append, answer in zip(packed, answers, strict=True) if _has_moved(append, answer)]
        if moved:
            replaced = [each for each in map(self._note_state, moved) if each is not None]
            await self._side_by_side(self._drop, replaced)
        return answers

    def commit_at_once(self, append: Append) -> Answer | None:
        replaces = append.checkpoint is not None and append.row.run_id in self._states
        if replaces or not self._goes_at_once or self._is_large(append):
            return None
        inner: AtOnce = self._inner  # type: ignore[assignment]  # asked for, when it was given
        return inner.commit_at_once(append)

    async def save(
        self,
        run_id: RunId,
        step: Step,
        checkpoint: StoredCheckpoint | None,
        *,
        row: StoredRow,
        guard: Guard | None = None,
        records: Sequence[StoredRecord] = (),
    ) -> Answer:
        [append] = await self._pack_all([Append(row, guard, tuple(records), checkpoint)])
        return await self._inner.save(run_id, step, append.checkpoint, row=row, guard=guard, records=append.records)

    async def record_call(self, run_id: RunId, record: StoredRecord, *, row: StoredRow, guard: Guard) -> Answer:
        [append] = await self._pack_all([Append(row, guard, (record,))])
        return await self._inner.record_call(run_id, append.records[0], row=row, guard=guard)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        body = message.body
        if len(body) > self._above:
            stub = await self._offload.start(partial(self._put, run_id, body)).outcome
            return await self._inner.post(run_id, message._replace(body=stub))
        return await self._inner.post(run_id, message._replace(body=pack_held(body)))

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        return await self._inner.renew(run_id, guard=guard, seen=seen, wake_at=wake_at)

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        return await self._inner.renew_all(guards)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        answer = await self._inner.delete(run_id, guard=guard)
        if answer.kind is AnswerKind.OK:
            self._states.pop(run_id, None)
            await self._offload.start(partial(self._folder.remove, run_id)).outcome
        return answer

    # Reading.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        async def read() -> list[StoredRun | None]:
            return [await self._inner.latest(run_id)]

        [run] = await self._resolved(read, self._open_runs)
        return run

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return await self._resolved(lambda: self._inner.load_many(run_ids), self._open_runs)

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        async def open_records(records: Sequence[StoredRecord]) -> list[StoredRecord]:
            bodies = await self._open_bodies([_Place(run_id, record.body) for record in records])
            return [record._replace(body=body) for record, body in zip(records, bodies, strict=True)]

        return await self._resolved(lambda: self._inner.calls(run_id, since=since), open_records)

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        async def open_messages(messages: Sequence[StoredMessage]) -> list[StoredMessage]:
            bodies = await self._open_bodies([_Place(run_id, message.body) for message in messages])
            return [message._replace(body=body) for message, body in zip(messages, bodies, strict=True)]

        return await self._resolved(lambda: self._inner.inbox(run_id), open_messages)

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        return await self._inner.list_unfinished(name=name, limit=limit, after=after)

    async def list_awake(
        self, *, at: int, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        """What the store beside the folder sifts; all that is unfinished where it does not."""
        if isinstance(self._inner, Sifting):
            return await self._inner.list_awake(at=at, name=name, limit=limit, after=after)
        return await self.list_unfinished(name=name, limit=limit, after=after)

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        return await self._inner.list_runs(status=status, limit=limit, after=after)

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        return await self._inner.list_recent(status=status, before=before, limit=limit)

    async def strays(self) -> list[StoredRecord]:
        """What the store beside the folder finds, where it looks."""
        return await self._inner.strays() if isinstance(self._inner, Searching) else []

    async def vacuum(self) -> int:
        """The room that the store beside the folder gives back."""
        return await self._inner.vacuum() if isinstance(self._inner, Roomy) else 0

    async def read_layout(self) -> Layout:
        """The layout of the store beside the folder."""
        return await cast(Migratable, self._inner).read_layout()

    async def migrate(self) -> Layout:
        """Bring the store beside the folder to the newest layout."""
        return await cast(Migratable, self._inner).migrate()

    async def now(self) -> datetime:
        return await self._inner.now()

    async def listen(self, ring: Callable[[], None]) -> Ear:
        return await self._inner.listen(ring)

    def reopen(self) -> BlobStore:
        return BlobStore(
            self._inner.reopen(), self._folder.root, above=self._above, clock=self._clock, entropy=self._entropy,
            offload=self._offload,
        )  # fmt: skip

    async def close(self) -> None:
        await self._inner.close()

    # Sweeping.

    async def sweep(self, *, older_than_seconds: float = DAY_SECONDS, dry_run: bool = False) -> Swept:
        """Remove blobs that no stored run names, and nobody has wanted for so long: what crashes left over.

        With `dry_run` nothing is removed, and the answer is the same. A folder of which nothing says whose it is stays.
        """
        if not older_than_seconds >= LEAST_AGE_SECONDS:
            raise InvalidSetting(
                f"older_than_seconds= is {LEAST_AGE_SECONDS:g} or more, found {older_than_seconds!r}: what is younger may be "
                "of a write that is on its way"
            )
        before = self._clock.now_ms() / 1000 - older_than_seconds
        swept = Swept()
        folders = await self._offload.start(lambda: list(self._folder.folders())).outcome
        for folder in folders:
            lying = await self._offload.start(partial(self._folder.look, folder, before)).outcome
            swept = await self._sweep_run(lying, swept, before, dry_run=dry_run)
        return swept

    async def _sweep_run(self, lying: Lying, swept: Swept, before: float, *, dry_run: bool) -> Swept:
        if lying.run_id is None:
            return swept._replace(unknown=swept.unknown + bool(lying.files))
        if not lying.files and not lying.is_empty:
            return swept
        try:
            found = await self._named(lying.run_id)
        except CheckpointStoreCorrupt:
            return swept._replace(unknown=swept.unknown + 1)
        named = found or frozenset()
        if not dry_run:
            await self._offload.start(partial(self._folder.sweep, lying, named, before, is_gone=found is None)).outcome
        left_over = [size for name, size in lying.files if not is_named(name, named)]
        return swept._replace(files=swept.files + len(left_over), bytes=swept.bytes + sum(left_over))

    async def _named(self, run_id: RunId) -> frozenset[str] | None:
        """The names of all blobs that a run's records, state and messages have; None where there is no such run."""
        [run] = await self._inner.load_many([run_id])
        if run is None or run.row.status == RunStatus.DELETED:
            return None
        places = [*_places(run), *(_Place(run_id, message.body) for message in await self._inner.inbox(run_id))]
        return frozenset(name for place in places if (name := _name(place)) is not None)

    # How bodies go out and come back.

    def _is_large(self, append: Append) -> bool:
        """Whether anything in an append is not kept as it is."""
        above, state = self._above, append.checkpoint
        if state is not None and (len(state.body) > above or state.body.startswith(MARK)):
            return True
        return any(len(record.body) > above or record.body.startswith(MARK) for record in append.records)

    async def _pack_all(self, appends: Sequence[Append]) -> list[Append]:
        """The appends as the inner store is to keep them; all their blobs are durable then."""
        packed = list(appends)
        large = [place for place, append in enumerate(appends) if self._is_large(append)]
        done = await self._side_by_side(self._pack, [appends[place] for place in large])
        for place, append in zip(large, done, strict=True):
            packed[place] = append
        return packed

    def _pack(self, append: Append) -> Append:
        run_id, blobs = append.row.run_id, list[Blob]()

        def keep(body: bytes, step: int | None = None) -> bytes:
            if len(body) <= self._above:
                return pack_held(body)
            stub = stub_of(body)
            blobs.append(Blob(_named_at(stub, step), body))
            return stub.pack()

        records = tuple([record._replace(body=keep(record.body)) for record in append.records])
        state = append.checkpoint
        if state is not None:
            state = state._replace(body=keep(state.body, state.step))
        if blobs:
            self._folder.write(run_id, blobs)
        return append._replace(records=records, checkpoint=state)

    def _put(self, run_id: RunId, body: bytes) -> bytes:
        stub = stub_of(body)
        self._folder.write(run_id, [Blob(stub.name, body)])
        return stub.pack()

    def _note_state(self, append: Append) -> tuple[RunId, str] | None:
        """Remember a run's state of now; the blob of the one before it, which nothing names any more."""
        assert append.checkpoint is not None, "a state was written"
        run_id = append.row.run_id
        before = self._states.pop(run_id, None)
        now = _name(_Place(run_id, append.checkpoint.body, append.checkpoint.step))
        self._remember(run_id, now)
        return (run_id, before) if before is not None and before != now else None

    def _remember(self, run_id: RunId, name: str | None) -> None:
        if len(self._states) >= MOST_STATES:
            self._states.clear()  # what is left over then is found by a sweep
        if name is not None:
            self._states[run_id] = name

    def _drop(self, replaced: tuple[RunId, str]) -> None:
        self._folder.drop(replaced[0], [replaced[1]])

    async def _resolved(
        self, read: Callable[[], Awaitable[Sequence[T]]], open_all: Callable[[Sequence[T]], Awaitable[list[T]]]
    ) -> list[T]:
        """What was read, with its blobs. Where one is missing, it is read again: somebody may have moved the run on."""
        found = await read()
        for _ in range(READ_TRIES):
            opened = await open_all(found)
            if not any(map(_is_lost, opened)):
                return opened
            before, found = found, await read()
            if [_what_is_named(each) for each in before] == [_what_is_named(each) for each in found]:
                return opened
        return await open_all(found)

    async def _open_runs(self, runs: Sequence[StoredRun | None]) -> list[StoredRun | None]:
        there = [run for run in runs if run is not None]
        for run in there:
            if run.checkpoint is not None:
                self._remember(run.row.run_id, _name(_Place(run.row.run_id, run.checkpoint.body, run.checkpoint.step)))
        places = [place for run in there for place in _places(run)]
        bodies = iter(await self._open_bodies(places))
        return [None if run is None else _with_bodies(run, bodies) for run in runs]

    async def _open_bodies(self, places: Sequence[_Place]) -> list[bytes]:
        """The bodies that are kept so; a `LostBody` for each that cannot be given back."""
        bodies = [place.stored for place in places]
        outside = [at for at, body in enumerate(bodies) if body.startswith(MARK)]
        if outside:
            for at, body in zip(outside, await self._side_by_side(self._open, [places[at] for at in outside]), strict=True):
                bodies[at] = body
        return bodies

    def _open(self, place: _Place) -> bytes:
        try:
            found = unpack(place.stored)
        except ValueError as error:
            return LostBody.of(place.stored, f"one of its bodies was changed: {error}")
        return self._folder.read(place.run_id, _named_at(found, place.step), found) if isinstance(found, Stub) else found

    async def _side_by_side(self, work: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """What the work makes of each item, on a few threads."""
        if not items:
            return []
        shares = [items[first::AT_ONCE] for first in range(min(AT_ONCE, len(items)))]
        jobs = [self._offload.start(partial(_each, work, share)).outcome for share in shares]
        done = await asyncio.gather(*jobs, return_exceptions=True)  # all have ended before anything is raised
        results: list[B | None] = [None] * len(items)
        for first, share in enumerate(done):
            if isinstance(share, BaseException):
                raise share
            results[first::AT_ONCE] = share
        return results  # type: ignore[return-value]  # every place is filled


def _each(work: Callable[[A], B], items: Sequence[A]) -> list[B]:
    return [work(item) for item in items]


def _has_moved(append: Append, answer: Answer) -> bool:
    return append.checkpoint is not None and answer.kind is AnswerKind.OK


def _places(run: StoredRun) -> list[_Place]:
    """Where the bodies of a run are, its state's first."""
    run_id, state = run.row.run_id, run.checkpoint
    records = [_Place(run_id, record.body) for record in run.records]
    return records if state is None else [_Place(run_id, state.body, state.step), *records]


def _with_bodies(run: StoredRun, bodies: Iterator[bytes]) -> StoredRun:
    """The run with its bodies, taken in the order of `_places`."""
    state = None if run.checkpoint is None else run.checkpoint._replace(body=next(bodies))
    return run._replace(checkpoint=state, records=tuple([record._replace(body=next(bodies)) for record in run.records]))


def _name(place: _Place) -> str | None:
    """The name of the blob that a stored body stands for, if it does."""
    try:
        found = unpack(place.stored)
    except ValueError:
        return None
    return _named_at(found, place.step) if isinstance(found, Stub) else None


def _named_at(stub: Stub, step: int | None) -> str:
    return stub.name if step is None else f"{stub.name}.{step}"


def _is_lost(item: object) -> bool:
    match item:
        case StoredRun(_, state, records):
            return (state is not None and isinstance(state.body, LostBody)) or any(map(_is_lost, records))
        case StoredRecord() | StoredMessage():
            return isinstance(item.body, LostBody)
        case _:
            return False


def _what_is_named(item: object) -> object:
    """What of a stored thing says which blobs it has: hints change all the time."""
    return (item.row.epoch, item.row.head, item.row.status, item.checkpoint) if isinstance(item, StoredRun) else item
