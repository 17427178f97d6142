"""A worker whose disk fails it: a program that strace strikes, and that says what became of its runs.

    python -m tests.sqlite.beaten FILE RUNS [ROOM]

It works RUNS runs through the loop in each commit mode, twice as many at once, and as many that a first worker died of in the
middle, and every verb of the store by hand. What it prints is a line of JSON, a `Report`.

ROOM is what it does about a full disk once some writes have failed: it removes that file; `limit` stands for a limit on the
size of files, which it sets for itself at first.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sqlite3
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agent_runtime.errors import CheckpointStoreCorrupt, StoreRefused, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.stores import sqlite
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.script_model import ScriptModel
from agent_runtime.testing.store_contract.draft import BOB, Draft
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key

T = TypeVar("T")

KEY = b"a key of tests, known to everybody"
STOPS = (StoreUnavailable, StoreRefused, CheckpointStoreCorrupt)
"""What a store may say for certain of a disk that fails; any other error ends this program."""
PAGES_OF_LOG = 24
"""After how many pages the log is folded into the file: soon, so that this is struck too."""
TRIES = 60
FULL_AFTER, ROOM_AFTER = 70_000, 5
"""How large a file may grow where there is a limit, and after how many writes of unknown fate there is room again."""


@dataclass
class Report:
    """What became of everything."""

    done: list[str] = field(default_factory=list)
    stopped: dict[str, str] = field(default_factory=dict)
    """The runs of which a worker was stopped by its store, and by which error."""
    effects: dict[str, int] = field(default_factory=dict)
    """What the remote did, by key."""
    unknown: dict[str, int] = field(default_factory=dict)
    """How often the store did not know of a record of this kind, or of a verb, what became of it."""
    unreadable: int = 0
    """How often something could not be read."""
    wrong: list[str] = field(default_factory=list)


class Watched(SQLiteCheckpointStore):
    """The store, of which is noted what it says."""

    def __init__(self, path: Path, room: str | None = None) -> None:
        super().__init__(path)
        self.report = Report()
        self.acked: dict[tuple[str, int], bytes] = {}
        """The seal of each record that the store acknowledged, by run and number."""
        self.begun: set[str] = set()
        """The keys of the calls whose intent it acknowledged."""
        self._unknown: Counter[str] = Counter()
        self._room = room

    def _connect(self, *, wait_seconds: float = 0) -> sqlite3.Connection:
        db = super()._connect(wait_seconds=wait_seconds)
        db.execute(f"PRAGMA wal_autocheckpoint = {PAGES_OF_LOG}")
        return db

    def commit_at_once(self, append: Append) -> Answer | None:
        before = self._writer
        answer = super().commit_at_once(append)
        if answer is not None:
            self._note([append], [answer], before)
        return answer

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        before = self._writer
        answers = await super().commit(appends)
        self._note(appends, answers, before)
        return answers

    def _note(self, appends: Sequence[Append], answers: Sequence[Answer], before: sqlite3.Connection | None) -> None:
        for append, answer in zip(appends, answers, strict=True):
            run = append.row.run_id
            for record in append.records:
                if answer.kind is AnswerKind.UNKNOWN:
                    self.not_known(RecordKind(record.kind).name.lower())
                elif answer.kind is AnswerKind.OK:
                    self.acked[run, record.number] = record.seal
                    if record.kind == RecordKind.STARTED:
                        self.begun.add(f"{run}:{record.call}")
        is_unknown = any(answer.kind is AnswerKind.UNKNOWN for answer in answers)
        if is_unknown and before is not None and self._writer is before:
            self.report.wrong.append("the connection of an unknown write is used on")

    def not_read(self) -> None:
        self.report.unreadable += 1

    def not_known(self, what: str) -> None:
        self._unknown[what] += 1
        self.report.unknown = dict(self._unknown)
        if self._unknown.total() == ROOM_AFTER:
            self._make_room()

    def _make_room(self) -> None:
        match self._room:
            case None:
                pass
            case "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
            case ballast:
                os.unlink(ballast)


class Work:
    """Runs of one call each, whose remote counts."""

    def __init__(self, store: Watched) -> None:
        self.store = store
        self.remote = Remote()
        self.registry = ToolRegistry()
        self.life = Life()
        self._asked: Counter[str] = Counter()

        @self.registry.tool(idempotent=True)
        async def mail(to: str) -> str:
            key = idempotency_key()
            if key not in self.store.begun:
                self.store.report.wrong.append(f"{key} was made before its intent was acknowledged")
            receipt = await self.remote.act("mail", {"to": to}, idempotent=True)
            self.life.reach(Where.AFTER_ACT)
            return receipt.result

    async def run(self, name: str, **terms: Any) -> None:
        """From beginning to end."""
        await self._end(name, lambda: run_tool_loop(_script(), self.registry, "go", run_id=name, **self._terms(terms)))

    async def die_and_recover(self, name: str) -> None:
        """Die once the remote has acted; another worker ends the run."""
        self.life = Life(Moment(Where.AFTER_ACT, 1))
        dying = FaultyStore(self.store, None, life=self.life)
        with suppress(SimulatedCrash):
            await run_tool_loop(_script(), self.registry, "go", run_id=name, **self._terms({"checkpoints": dying}))
        self.life = Life()
        await self._end(name, lambda: recover_tool_loop(_script(), self.registry, name, **self._terms({})))

    def _terms(self, terms: dict[str, Any]) -> dict[str, Any]:
        return {"checkpoints": self.store, "checkpoint_key": KEY, "lease_seconds": 30.0, **terms}

    async def _end(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Until the run is done: a worker that its store stops is followed by another."""
        for _ in range(TRIES):
            try:
                await work()
            except STOPS as error:
                self.store.report.stopped.setdefault(name, f"{type(error).__name__}: {error}")
                work = self._again(name)
            else:
                self.store.report.done.append(name)
                return

    def _again(self, name: str) -> Callable[[], Awaitable[object]]:
        async def again() -> object:
            if await self.store.latest(RunId(name)) is None:
                return await run_tool_loop(_script(), self.registry, "go", run_id=name, **self._terms({}))
            return await recover_tool_loop(_script(), self.registry, name, **self._terms({}))

        return again


def _script() -> ScriptModel:
    return ScriptModel([Reply(tool_calls=[ToolCall("a", "mail", {"to": "ana"})]), Reply("sent")])


class Verbs:
    """Each verb of the store by hand. What did not land for certain is looked for, and sent again until it is there."""

    def __init__(self, store: Watched) -> None:
        self._store = store

    async def work(self, at: int) -> None:
        drafts = [Draft.of(f"hand-{at}-{n}") for n in range(3)]
        drafts = await self._append(drafts, [draft.open(checkpoint=b"c" * 5000) for draft in drafts])
        drafts = await self._append(drafts, [draft.step_on(b"r" * 100, checkpoint=b"d" * 5000) for draft in drafts])
        first, second, third = drafts
        await self._send("a heartbeat", lambda: self._store.renew(first.run_id, guard=first.guard))
        guards = [(draft.run_id, draft.guard) for draft in drafts]
        await self._send("heartbeats", lambda: self._first(self._store.renew_all(guards)))
        message = first.message()
        await self._send("a message", lambda: self._store.post(first.run_id, message))
        if [found.digest for found in await self.read(lambda: self._store.inbox(first.run_id))] != [message.digest]:
            self._store.report.wrong.append(f"the message to {first.run_id} is not there once")
        [first] = await self._append([first], [first.claim(BOB)])
        [second] = await self._append([second], [second.end()])
        await self._delete(third)

    async def _append(self, drafts: Sequence[Draft], appends: Sequence[Append]) -> list[Draft]:
        for _ in range(TRIES):
            with suppress(*STOPS):
                answers = await self._store.commit(appends)
                if all(answer.kind is AnswerKind.OK for answer in answers):
                    return [draft.after(append) for draft, append in zip(drafts, appends, strict=True)]
                if any(answer.kind not in (AnswerKind.OK, AnswerKind.UNKNOWN) for answer in answers):
                    self._store.report.wrong.append(f"{[append.row.run_id for append in appends]}: {answers}")
            await self._must_be_whole(drafts, appends)
        raise AssertionError("the disk never mends")

    async def _must_be_whole(self, drafts: Sequence[Draft], appends: Sequence[Append]) -> None:
        """All of a batch is there, or nothing of it."""
        runs = await self.read(lambda: self._store.load_many([append.row.run_id for append in appends]))
        found = [0 if run is None else len(run.records) for run in runs]
        if found not in ([draft.row.number for draft in drafts], [append.row.number for append in appends]):
            self._store.report.wrong.append(f"half of a batch is there: {found}")

    async def _delete(self, draft: Draft) -> None:
        """A delete whose answer was lost and that landed is fenced when it is sent again."""
        unknown = self._store.report.unknown.get("a delete", 0)
        answer = await self._send("a delete", lambda: self._store.delete(draft.run_id, guard=draft.guard), AnswerKind.FENCED)
        was_unknown = self._store.report.unknown.get("a delete", 0) > unknown
        left = await self.read(lambda: self._store.calls(draft.run_id))
        if left or (answer.kind is AnswerKind.FENCED and not was_unknown):
            self._store.report.wrong.append(f"{draft.run_id} was not deleted once: {answer}")

    async def _send(self, what: str, verb: Callable[[], Awaitable[Answer]], and_also: AnswerKind = AnswerKind.OK) -> Answer:
        for _ in range(TRIES):
            with suppress(*STOPS):
                answer = await verb()
                if answer.kind in (AnswerKind.OK, and_also):
                    return answer
                if answer.kind is not AnswerKind.UNKNOWN:
                    self._store.report.wrong.append(f"{what}: {answer}")
                self._store.not_known(what)
        raise AssertionError("the disk never mends")

    async def _first(self, answers: Awaitable[list[Answer]]) -> Answer:
        return (await answers)[0]

    async def read(self, verb: Callable[[], Awaitable[T]]) -> T:
        for _ in range(TRIES):
            try:
                return await verb()
            except STOPS:
                self._store.not_read()
        raise AssertionError("the disk never mends")


async def check(store: Watched, work: Work, verbs: Verbs) -> Report:
    """What was acknowledged is there, as a fresh connection sees it, and every call was made once."""
    report, fresh = store.report, store.reopen()
    for run in sorted({run for run, _ in store.acked}):
        found = {record.number: record.seal for record in await verbs.read(partial(fresh.calls, RunId(run)))}
        lost = [number for (of, number), seal in store.acked.items() if of == run and found.get(number) != seal]
        latest = await verbs.read(partial(fresh.latest, RunId(run)))
        if lost and (latest is None or latest.row.status != RunStatus.DELETED):
            report.wrong.append(f"{run}: records {lost} were acknowledged and are gone")
    await fresh.close()
    report.effects = dict(Counter(effect.key for effect in work.remote.effects))
    return report


async def main(file: Path, runs: int, room: str | None) -> Report:
    store = Watched(file, room)
    sqlite.QUICK_COMMIT_SECONDS = 3600  # which call is struck is not to depend on how busy the machine is
    work, verbs = Work(store), Verbs(store)
    if room == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AFTER, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for at in range(runs):
        await work.run(f"grouped-{at}")
        await work.run(f"each-{at}", commits="each")
        await work.die_and_recover(f"died-{at}")
        await verbs.work(at)
    await asyncio.gather(*(work.run(f"beside-{at}") for at in range(2 * runs)))
    report = await check(store, work, verbs)
    await store.close()
    return report


if __name__ == "__main__":
    _, path, runs, *rest = sys.argv
    print(json.dumps(asdict(asyncio.run(main(Path(path), int(runs), rest[0] if rest else None)))))
