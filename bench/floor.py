"""The floor: the least that journals the same work in the same kind of file, with `sqlite3` and nothing around it.

Each call is written down before it is made and after, in one table, WAL and `synchronous=FULL`. No owner, no guard, no
seal, no check of arguments, no events. Two forms:

* each: every one of the four records of a step in a commit of its own, inline on the event loop;
* group: one writer thread commits the records of all runs that wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bench.job import Figures
from bench.log import LogPin, file_bytes
from bench.workload import (
    Stamps,
    Stopwatch,
    Tally,
    call_args,
    call_id,
    closed_loop,
    middle,
    payload_of,
    reply_text,
    tool_result,
)

MODEL, TOOL = 0, 1
WARM_STEPS = 3

Statement: TypeAlias = tuple[str, tuple[object, ...]]
Ended: TypeAlias = "dict[tuple[int, int], str | None]"
"""What the table holds of a run: a call's result, or None where it was begun and has none."""

_CREATE = """
CREATE TABLE IF NOT EXISTS calls (
    run TEXT, step INTEGER, kind INTEGER, ended INTEGER, body TEXT, PRIMARY KEY (run, step, kind)
) WITHOUT ROWID
"""
_BEGIN_CALL = "INSERT INTO calls (run, step, kind, ended, body) VALUES (?, ?, ?, 0, ?)"
_END_CALL = "UPDATE calls SET ended = 1, body = ? WHERE run = ? AND step = ? AND kind = ?"
_READ = "SELECT step, kind, ended, body FROM calls WHERE run = ? ORDER BY step, kind"


def connect(path: str) -> sqlite3.Connection:
    """The floor's file, made where there is none."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(_CREATE)
    return db


class EachWriter:
    """Commits every statement by itself."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    async def write(self, statement: Statement) -> None:
        self._db.execute(*statement)

    def close(self) -> None:
        """Nothing is left to end."""


class GroupWriter:
    """Commits all statements that wait, on a thread of its own; each caller goes on once its own is durable."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._asleep = True
        self._ended = False
        self._waiting: list[tuple[Statement, asyncio.Future[None]]] = []
        self._thread = threading.Thread(target=self._run, name="floor-writer")
        self._thread.start()

    async def write(self, statement: Statement) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._waiting.append((statement, done))
            if self._asleep:
                self._asleep = False
                self._wake.set()
        await done

    def close(self) -> None:
        """End the thread, which has written everything."""
        with self._lock:
            self._ended = True
            self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._db.execute("BEGIN IMMEDIATE")
            for statement, _ in batch:
                self._db.execute(*statement)
            self._db.execute("COMMIT")
            self._loop.call_soon_threadsafe(self._tell, [done for _, done in batch])

    def _next_batch(self) -> list[tuple[Statement, asyncio.Future[None]]]:
        """All that waits; nothing only once this has been closed."""
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                if batch or self._ended:
                    return batch
                self._asleep = True
                self._wake.clear()
            self._wake.wait()

    @staticmethod
    def _tell(waiting: Sequence[asyncio.Future[None]]) -> None:
        for done in waiting:
            done.set_result(None)


class Floor:
    """Works runs on a file."""

    def __init__(
        self, path: str, *, grouped: bool, tally: Tally | None = None, begun: Callable[[], object] = lambda: None
    ) -> None:
        self.db = connect(path)
        self._writer = GroupWriter(self.db) if grouped else EachWriter(self.db)
        self._tally = tally
        self._begun = begun

    def close(self) -> None:
        self._writer.close()
        self.db.close()

    async def work(self, run: str, steps: int, ended: Ended) -> None:
        """A run to its end, from what is known of it."""
        messages: list[object] = []
        for step in range(steps):
            reply = await self._call(run, step, MODEL, {}, ended)
            messages.append(reply)
            result = await self._call(run, step, TOOL, reply["tool_call"]["args"], ended)
            messages.append({"role": "tool", "tool_call_id": reply["tool_call"]["id"], "content": result})

    def read(self, run: str) -> Ended:
        """What the file holds of a run."""
        return {(step, kind): body if ended else None for step, kind, ended, body in self.db.execute(_READ, (run,))}

    async def _call(self, run: str, step: int, kind: int, args: dict[str, object], ended: Ended) -> Any:
        """The result of a call: the one written down, or that of a call made now."""
        known = ended.get((step, kind))
        if known is not None:
            return json.loads(known)
        if (step, kind) not in ended:
            await self._writer.write((_BEGIN_CALL, (run, step, kind, json.dumps(args))))
        result = await (self._ask(run, step) if kind == MODEL else self._act(run, step))
        await self._writer.write((_END_CALL, (json.dumps(result), run, step, kind)))
        return result

    async def _ask(self, run: str, step: int) -> object:
        self._begun()
        if self._tally is not None:
            self._tally.count("model", run, step)
        call = {"id": call_id(step), "name": "lookup", "args": call_args(step)}
        return {"role": "assistant", "content": reply_text(step), "tool_call": call}

    async def _act(self, run: str, step: int) -> object:
        if self._tally is not None:
            await self._tally.enter_tool(step)
            self._tally.count("tool", run, step)
        return tool_result(step)


# The jobs.


def crowd(*, folder: str, runs: int, steps: int, in_flight: int) -> Figures:
    """Many short runs at once, grouped."""

    async def work() -> Figures:
        floor = Floor(os.path.join(folder, "floor.db"), grouped=True)
        await floor.work("warm", WARM_STEPS, {})
        watch = Stopwatch()
        await closed_loop((f"r{at}" for at in range(runs)), in_flight, lambda run: floor.work(run, steps, {}))
        figures = watch.read()
        floor.close()
        return figures

    return asyncio.run(work())


def long(*, folder: str, steps: int) -> Figures:
    """One long run, each record in its own commit."""
    stamps = Stamps()

    async def work() -> Figures:
        floor = Floor(os.path.join(folder, "floor.db"), grouped=False, begun=stamps.take)
        await floor.work("warm", WARM_STEPS, {})
        stamps.clear()
        watch = Stopwatch()
        await floor.work("long", steps, {})
        figures = watch.read()
        floor.close()
        return figures

    return {**asyncio.run(work()), **stamps.grown()}


def kept(*, folder: str, steps: int) -> Figures:
    """What one run leaves in the file, and in how many commits."""
    path = os.path.join(folder, "floor.db")

    async def work() -> int:
        floor = Floor(path, grouped=False)
        await floor.work("warm", WARM_STEPS, {})
        with LogPin(path) as pin:
            await floor.work("long", steps, {})
            commits = pin.commits()
        floor.close()
        return commits

    commits = asyncio.run(work())
    payload = sum(payload_of(step) for step in range(steps))
    return {"bytes": file_bytes(path), "commits": commits, "payload": payload}


def crash(*, folder: str, runs: int, steps: int, tally: str) -> Figures:
    """All runs at once until each is inside the same tool call; then this process is killed."""

    async def work() -> Figures:
        floor = Floor(os.path.join(folder, "floor.db"), grouped=False, tally=Tally(tally, kill_at=runs))
        await closed_loop((f"r{at}" for at in range(runs)), runs, lambda run: floor.work(run, steps, {}))
        raise AssertionError("expected to be killed")

    return asyncio.run(work())


def recover(*, folder: str, steps: int, in_flight: int, tally: str, started_at: float, grouped: bool) -> Figures:
    """Every run of the file to its end; `since_start` counts from before this process was made."""

    async def work() -> Figures:
        floor = Floor(os.path.join(folder, "floor.db"), grouped=grouped, tally=Tally(tally))
        runs = [run for (run,) in floor.db.execute("SELECT DISTINCT run FROM calls")]
        await closed_loop(runs, in_flight, lambda run: floor.work(run, steps, floor.read(run)))
        figures = {"since_start": time.time() - started_at}
        floor.close()
        return figures

    return asyncio.run(work())


def load(*, folder: str, records: int, times: int) -> Figures:
    """Read a run of so many records, the bodies decoded."""

    async def work() -> Figures:
        floor = Floor(os.path.join(folder, "floor.db"), grouped=True)
        await floor.work("long", records // 4, {})
        took = []
        for _ in range(times):
            watch = Stopwatch()
            ended = floor.read("long")
            assert all(json.loads(body) for body in ended.values() if body is not None)
            took.append(watch.read()["wall"])
        floor.close()
        return {"wall": middle(took)}

    return asyncio.run(work())
