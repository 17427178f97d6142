"""Our side of every measure: the loop through its front door, on a SQLite file or in a Postgres database."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from agent_runtime import Message, Reply, ToolCall, ToolRegistry, ToolSpec, idempotency_key, recover_tool_loop, run_tool_loop
from agent_runtime.journal.store import AnswerKind
from agent_runtime.model import ModelFunction
from bench.job import Figures
from bench.meter import meter_of
from bench.places import file_in, store_in
from bench.workload import (
    FIRST_MESSAGE,
    LAST_TEXT,
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

KEY = bytes(range(32))
WARM_STEPS = 3
READ_RUNS = 1000
DONE_IN_FLIGHT = 16


class Ours:
    """Works runs on a store."""

    def __init__(
        self,
        folder: str,
        steps: int,
        *,
        url: str = "",
        tally: Tally | None = None,
        begun: Callable[[], object] = lambda: None,
        inside_tool: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.store = store_in(folder, url)
        self._steps = steps
        self._tally = tally
        self._begun = begun
        self._inside_tool = inside_tool
        self._tools = ToolRegistry()
        self._tools.tool(name="lookup", idempotent=True)(self._lookup)

    async def work(self, run: str) -> None:
        """A new run to its end."""
        await self._work(run, self._model(self._steps))

    async def warm(self) -> None:
        """A short run, so that files are open and code is warm."""
        await self._work("warm", self._model(WARM_STEPS))

    async def recover(self, run: str) -> None:
        """A run that was left, to its end."""
        await recover_tool_loop(
            self._model(self._steps), self._tools, run, checkpoints=self.store, checkpoint_key=KEY, max_steps=self._steps + 1
        )

    async def _work(self, run: str, model: ModelFunction) -> None:
        await run_tool_loop(
            model,
            self._tools,
            FIRST_MESSAGE,
            run_id=run,
            checkpoints=self.store,
            checkpoint_key=KEY,
            max_steps=self._steps + 9,
        )

    def _model(self, steps: int) -> ModelFunction:
        begun, tally = self._begun, self._tally

        async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
            begun()
            step = len(messages) // 2
            if tally is not None:
                tally.count("model", _run_of_call(), step)
            if step >= steps:
                return Reply(LAST_TEXT)
            return Reply(reply_text(step), [ToolCall(call_id(step), "lookup", call_args(step))])

        return model

    async def _lookup(self, q: str, i: int) -> str:
        """What is known of a query."""
        if self._inside_tool is not None:
            await self._inside_tool(i)
        if self._tally is not None:
            self._tally.count("tool", _run_of_call(), i)
        return tool_result(i)


def _run_of_call() -> str:
    return idempotency_key().split(":")[0]


# The jobs.


def crowd(*, folder: str, runs: int, steps: int, in_flight: int, url: str = "", driver: str = "") -> Figures:
    """Many short runs at once; with a driver, through SQLAlchemy."""

    async def work() -> Figures:
        ours = Ours(folder, steps, url=url.replace(":", f"+{driver}:", 1) if driver else url)
        await ours.warm()
        watch = Stopwatch()
        await closed_loop((f"r{at}" for at in range(runs)), in_flight, ours.work)
        figures = watch.read()
        await ours.store.close()
        return figures

    return asyncio.run(work())


def long(*, folder: str, steps: int, url: str = "") -> Figures:
    """One long run."""
    stamps = Stamps()

    async def work() -> Figures:
        ours = Ours(folder, steps, url=url, begun=stamps.take)
        await ours.warm()
        stamps.clear()
        watch = Stopwatch()
        await ours.work("long")
        figures = watch.read()
        await ours.store.close()
        return figures

    return {**asyncio.run(work()), **stamps.grown()}


def kept(*, folder: str, steps: int, url: str = "") -> Figures:
    """What one run leaves in the store, and in how many commits."""

    async def work() -> Figures:
        ours = Ours(folder, steps, url=url)
        await ours.warm()
        with meter_of(file_in(folder), url) as meter:
            await ours.work("long")
            commits = meter.commits()
        await ours.store.close()
        return {"commits": commits, "bytes": meter.bytes()}

    return {**asyncio.run(work()), "payload": sum(payload_of(step) for step in range(steps))}


def crash(*, folder: str, runs: int, steps: int, tally: str, url: str = "") -> Figures:
    """All runs at once until each is inside the same tool call; then this process is killed."""

    async def work() -> Figures:
        counted = Tally(tally, kill_at=runs)
        ours = Ours(folder, steps, url=url, tally=counted, inside_tool=counted.enter_tool)
        await closed_loop((f"r{at}" for at in range(runs)), runs, ours.work)
        raise AssertionError("expected to be killed")

    return asyncio.run(work())


def recover(*, folder: str, steps: int, in_flight: int, tally: str, started_at: float, url: str = "") -> Figures:
    """Every unfinished run of the store to its end; `since_start` counts from before this process was made."""

    async def work() -> Figures:
        ours = Ours(folder, steps, url=url, tally=Tally(tally))
        runs = [row.run_id for row in await ours.store.list_unfinished(limit=READ_RUNS)]
        await closed_loop(runs, in_flight, ours.recover)
        figures = {"since_start": time.time() - started_at}
        await ours.store.close()
        return figures

    return asyncio.run(work())


def load(*, folder: str, records: int, times: int, url: str = "") -> Figures:
    """Find a run of so many records: read, every seal checked, its history replayed."""
    from agent_runtime.ids import RunId
    from agent_runtime.journal.seal import KeyRing
    from agent_runtime.recovery import find
    from agent_runtime.run import Backing

    async def work() -> Figures:
        ours = Ours(folder, records // 4, url=url)
        await ours.work("long")
        backing = Backing(ours.store, KeyRing.of(KEY))
        took, number = [], 0
        for _ in range(times):
            watch = Stopwatch()
            found = await find(backing, RunId("long"), kind="loop", context=None)
            took.append(watch.read()["wall"])
            number = found.stored.row.number
        assert number >= records
        await ours.store.close()
        return {"wall": middle(took)}

    return asyncio.run(work())


def beats(*, folder: str, runs: int, times: int, url: str = "") -> Figures:
    """A heartbeat of so many runs, which nobody else writes."""
    from agent_runtime.testing.store_contract import Draft

    async def work() -> Figures:
        store = store_in(folder, url)
        drafts = [Draft.of(f"r{at}") for at in range(runs)]
        openings = [draft.open() for draft in drafts]
        for start in range(0, runs, READ_RUNS):
            await store.commit(openings[start : start + READ_RUNS])
        guards = [(draft.run_id, draft.after(opening).guard) for draft, opening in zip(drafts, openings, strict=True)]
        took = []
        for _ in range(times):
            watch = Stopwatch()
            answers = await store.renew_all(guards)
            took.append(watch.read()["wall"])
            assert all(answer.kind is AnswerKind.OK for answer in answers)
        await store.close()
        return {"wall": middle(took)}

    return asyncio.run(work())


def idle(*, folder: str, runs: int) -> Figures:
    """The resident memory that an open run takes while its tool works, above the memory of its messages."""

    async def work() -> Figures:
        crowd = Crowd()
        ours = Ours(folder, 1, inside_tool=crowd.enter)
        crowd.opened.set()  # whole runs first, a few at a time, so that caches are full and code is warm
        await closed_loop((f"done{at}" for at in range(runs)), DONE_IN_FLIGHT, ours.work)
        crowd.opened.clear()
        before = resident_bytes()
        crowd.wait_for(runs)
        tasks = [asyncio.create_task(ours.work(f"open{at}")) for at in range(runs)]
        await crowd.complete.wait()
        gc.collect()
        taken = resident_bytes() - before
        crowd.opened.set()
        await asyncio.gather(*tasks)
        await ours.store.close()
        return {"bytes": taken / runs - message_bytes()}

    return asyncio.run(work())


class Crowd:
    """Holds runs inside their tool call until `opened`, and tells when all that are waited for are there."""

    def __init__(self) -> None:
        self.opened, self.complete = asyncio.Event(), asyncio.Event()
        self._missing = 0

    def wait_for(self, runs: int) -> None:
        self._missing = runs

    async def enter(self, step: int) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.complete.set()
        await self.opened.wait()


def resident_bytes() -> int:
    """What this process holds in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def message_bytes() -> int:
    """What the two messages of a run in its first tool call take."""
    args = call_args(0)
    call = ToolCall(call_id(0), "lookup", args)
    parts = (Message("user", FIRST_MESSAGE), Message("assistant", reply_text(0), (call,)), call, FIRST_MESSAGE, reply_text(0))
    return sum(map(sys.getsizeof, (*parts, call.id, args, *args, *args.values())))
