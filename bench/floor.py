"""The floor: the least that journals the same work in the same kind of store, with its bare driver and nothing around it.

Each call is written down before it is made and after, in one table. No owner, no guard, no seal, no check of arguments, no
events. Two forms:

* each: every one of the four records of a step in a commit of its own;
* group: the records of all runs that wait are committed together.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from bench.floor_sqlite import Ended, SQLiteTable
from bench.job import Figures
from bench.meter import meter_of
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
CONNECTIONS = 20
"""On how many connections of a server many runs commit each record by itself, as the peers' floor does."""


class Table(Protocol):
    """Where the calls of runs are written down."""

    async def begin(self, run: str, step: int, kind: int, body: str) -> None: ...

    async def end(self, run: str, step: int, kind: int, body: str) -> None: ...

    async def read(self, run: str) -> Ended:
        """What the table holds of a run."""

    async def runs(self) -> list[str]: ...

    async def fill_beats(self, owners: list[bytes]) -> None:
        """A row a run, in a table of its own."""

    async def beat(self, owners: list[bytes], now: int) -> int:
        """Write down that the owners were heard; how many rows that was."""

    async def close(self) -> None: ...


async def open_table(folder: str, url: str, *, grouped: bool, connections: int = 1) -> Table:
    """The table in the database at `url`; without one, in a SQLite file in the folder."""
    if not url:
        return SQLiteTable(file_in(folder), grouped=grouped)
    if url.startswith("redis://"):
        from bench.floor_redis import RedisTable

        return await RedisTable(url).open()
    from bench.floor_postgres import PostgresTable

    return await PostgresTable(url, grouped=grouped, connections=connections).open()


def file_in(folder: str) -> str:
    return os.path.join(folder, "floor.db")


class Floor:
    """Works runs on a table."""

    def __init__(self, table: Table, *, tally: Tally | None = None, begun: Callable[[], object] = lambda: None) -> None:
        self._table = table
        self._tally = tally
        self._begun = begun

    async def work(self, run: str, steps: int, ended: Ended) -> None:
        """A run to its end, from what is known of it."""
        messages: list[object] = []
        for step in range(steps):
            reply = await self._call(run, step, MODEL, {}, ended)
            messages.append(reply)
            result = await self._call(run, step, TOOL, reply["tool_call"]["args"], ended)
            messages.append({"role": "tool", "tool_call_id": reply["tool_call"]["id"], "content": result})

    async def _call(self, run: str, step: int, kind: int, args: dict[str, object], ended: Ended) -> Any:
        """The result of a call: the one written down, or that of a call made now."""
        known = ended.get((step, kind))
        if known is not None:
            return json.loads(known)
        if (step, kind) not in ended:
            await self._table.begin(run, step, kind, json.dumps(args))
        result = await (self._ask(run, step) if kind == MODEL else self._act(run, step))
        await self._table.end(run, step, kind, json.dumps(result))
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


def crowd(*, folder: str, runs: int, steps: int, in_flight: int, url: str = "") -> Figures:
    """Many short runs at once, grouped."""

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=True)
        floor = Floor(table)
        await floor.work("warm", WARM_STEPS, {})
        watch = Stopwatch()
        await closed_loop((f"r{at}" for at in range(runs)), in_flight, lambda run: floor.work(run, steps, {}))
        figures = watch.read()
        await table.close()
        return figures

    return asyncio.run(work())


def long(*, folder: str, steps: int, url: str = "") -> Figures:
    """One long run, each record in its own commit."""
    stamps = Stamps()

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=False)
        floor = Floor(table, begun=stamps.take)
        await floor.work("warm", WARM_STEPS, {})
        stamps.clear()
        watch = Stopwatch()
        await floor.work("long", steps, {})
        figures = watch.read()
        await table.close()
        return figures

    return {**asyncio.run(work()), **stamps.grown()}


def kept(*, folder: str, steps: int, url: str = "") -> Figures:
    """What one run leaves in the store, and in how many commits."""

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=False)
        floor = Floor(table)
        await floor.work("warm", WARM_STEPS, {})
        with meter_of(file_in(folder), url) as meter:
            await floor.work("long", steps, {})
            commits = meter.commits()
        await table.close()
        return {"commits": commits, "bytes": meter.bytes()}

    return {**asyncio.run(work()), "payload": sum(payload_of(step) for step in range(steps))}


def crash(*, folder: str, runs: int, steps: int, tally: str, url: str = "") -> Figures:
    """All runs at once until each is inside the same tool call; then this process is killed."""

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=False, connections=CONNECTIONS)
        floor = Floor(table, tally=Tally(tally, kill_at=runs))
        await closed_loop((f"r{at}" for at in range(runs)), runs, lambda run: floor.work(run, steps, {}))
        raise AssertionError("expected to be killed")

    return asyncio.run(work())


def recover(
    *, folder: str, steps: int, in_flight: int, tally: str, started_at: float, grouped: bool, url: str = ""
) -> Figures:
    """Every run of the store to its end; `since_start` counts from before this process was made."""

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=grouped, connections=1 if grouped else CONNECTIONS)
        floor = Floor(table, tally=Tally(tally))

        async def recover_one(run: str) -> None:
            await floor.work(run, steps, await table.read(run))

        await closed_loop(await table.runs(), in_flight, recover_one)
        figures = {"since_start": time.time() - started_at}
        await table.close()
        return figures

    return asyncio.run(work())


def load(*, folder: str, records: int, times: int, url: str = "") -> Figures:
    """Read a run of so many records, the bodies decoded."""

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=True)
        await Floor(table).work("long", records // 4, {})
        took = []
        for _ in range(times):
            watch = Stopwatch()
            ended = await table.read("long")
            assert all(json.loads(body) for body in ended.values() if body is not None)
            took.append(watch.read()["wall"])
        await table.close()
        return {"wall": middle(took)}

    return asyncio.run(work())


def beats(*, folder: str, runs: int, times: int, url: str = "") -> Figures:
    """One statement a round writes into a narrow row of each run that its owner was heard."""

    async def work() -> Figures:
        table = await open_table(folder, url, grouped=False)
        owners = [os.urandom(16) for _ in range(runs)]
        await table.fill_beats(owners)
        took = []
        for now in range(times):
            watch = Stopwatch()
            heard = await table.beat(owners, now)
            took.append(watch.read()["wall"])
            assert heard == runs
        await table.close()
        return {"wall": middle(took)}

    return asyncio.run(work())
