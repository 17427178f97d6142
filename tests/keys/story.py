"""Runs with a secret in every place where a value can stand, on any store; and where to look for it afterwards."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from agent_runtime import Outcome, ToolError, codec
from agent_runtime.clock import Clock
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import AgentRuntimeError, CheckpointStoreCorrupt, RecoveryNeedsDecision
from agent_runtime.flow.nodes import Call
from agent_runtime.ids import RunId, Step
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.keys import KeyRing
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.runs import Runs
from agent_runtime.tools import ToolRegistry
from tests.bench import Place, Script, Worker, error_of
from tests.cases.test_hostile_values import ENVELOPES, HOSTILE, loud_events
from tests.flow import desk

MARKER = "sk-TEST-123"
LONG = MARKER * 100
"""Of a size that a flow keeps in a record of its own."""
WRONG = KeyRing({"old": b"somebody else's key of that id", "new": b"and another one of the other's"}, "new")


class At(Place):
    """One store that all workers share."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__("at", Path())
        self.is_tampered = True
        self._store = store

    def open(self, clock: Clock | None = None) -> CheckpointStore:
        return self._store


def registry() -> ToolRegistry:
    tools = ToolRegistry()

    @tools.tool(idempotent=True)
    async def echo(text: str) -> dict[str, str]:
        return {"echoed": text}

    @tools.tool(idempotent=True)
    async def say(text: str) -> str:
        return text

    @tools.tool
    async def refuse(text: str) -> str:
        raise ToolError(f"no {text}")

    @tools.tool(needs_approval=True)
    async def ask(text: str) -> str:
        return f"asked {text}"

    @tools.tool
    async def risk(text: str) -> str:
        return text

    return tools


def model() -> Script:
    return Script([("echo", {"text": MARKER}), ("refuse", {"text": MARKER})], [("ask", {"text": MARKER})], f"done {MARKER}")


async def tell(store: CheckpointStore, ring: KeyRing, **options: Any) -> dict[str, object]:
    """Work the runs, each through a death, and give what they came to."""
    place, runs = At(store), Runs(store, checkpoint_key=ring)
    key: dict[str, Any] = {"checkpoint_key": ring, **options}
    told: dict[str, object] = {}

    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 0).run_and_die(model(), registry(), "a", messages=MARKER, **key)
    assert (await Worker(place).recover(model(), registry(), "a", rerun_in_doubt=True, **key)).status == "paused"
    [request] = await runs.pending("a")
    await runs.edit(request, {"text": f"{MARKER} edited"}, by="ana", note=MARKER)
    told["a"] = [message.content for message in (await Worker(place).recover(model(), registry(), "a", **key)).messages]

    risky = Script([("risk", {"text": MARKER})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(risky, registry(), "b", **key)
    assert isinstance(await error_of(Worker(place).recover(risky, registry(), "b", **key)), RecoveryNeedsDecision)
    await runs.settle("b", "0", Outcome.done(MARKER), by="ana", why=MARKER)
    told["b"] = [message.content for message in (await Worker(place).recover(risky, registry(), "b", **key)).messages]

    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(risky, registry(), "c", **key)
    late: dict[str, object] = {"call": "0", "attempt": 1, "epoch": 1, "opened": "", "ending": {"result": MARKER}}
    await post_message(store, sealer_for(ring, tenant="", run_id="c"), MessageKind.LATE, late)
    await runs.cancel("c", by="ana", why=MARKER)
    told["c"] = (await runs.show("c")).timeline.cancelled

    kept = Call("say", args=lambda order: {"text": order.to}, into="note")
    flow, state = desk.chain(kept, kept), desk.Order(to=LONG, notes=[MARKER])
    await desk.run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL, 1), registry(), flow, state, "d", **key)
    told["d"] = (await desk.recover(Worker(place), registry(), flow, "d", **key)).state

    odd = Script(lambda _: Reply(MARKER, [ToolCall(MARKER, MARKER, {MARKER: MARKER})]), MARKER)
    told["e"] = [message.content for message in (await Worker(place).run(odd, registry(), "e", **key)).messages]
    return told


async def said_under_a_wrong_key(store: CheckpointStore) -> str:
    """All that the errors say of whoever looks at those runs under another key of the same id."""
    said = []
    for run_id in "abcde":
        error = await error_of(Runs(store, checkpoint_key=WRONG).show(run_id))
        assert isinstance(error, AgentRuntimeError), error
        said.append("".join(traceback.format_exception(error)))
    said += [f"{info}" for info in await Runs(store, checkpoint_key=WRONG).list()]
    return "\n".join(said)


async def stored_bodies(store: CheckpointStore, run_id: str) -> list[bytes]:
    """The bodies of a run as they are stored."""
    [run] = await store.load_many([RunId(run_id)])
    assert run is not None
    kept = [] if run.checkpoint is None else [run.checkpoint.body]
    messages = await store.inbox(run.row.run_id)
    return [*(record.body for record in run.records), *kept, *(message.body for message in messages)]


async def come_back(store: CheckpointStore, ring: KeyRing) -> None:
    """Data that looks like somebody's envelope, or is no text at all, is data after a restart, and builds no object."""
    place, tools, results = At(store), ToolRegistry(), [*ENVELOPES, {"half": "\ud800", "\udfff": ["\x00", "😀"]}]

    @tools.tool(idempotent=True)
    async def give(at: int, like: object = None) -> object:
        return results[at]

    script = Script(*[[("give", {"at": at, "like": value})] for at, value in enumerate(results)], "done")
    dying = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, len(results))
    await dying.run_and_die(script, tools, checkpoint_key=ring, commits="each")
    await store.load_many([RunId("run")])  # what a driver imports with its first use is no doing of the data
    with loud_events() as heard:
        report = await Runs(store, checkpoint_key=ring).show("run")
        result = await Worker(place).recover(script, tools, checkpoint_key=ring)
    assert heard == []
    given = [call.outcome["result"] for call in report.timeline.calls.values() if not call.is_decision]
    assert given == results
    asked = [dict(call.args)["like"] for message in result.messages for call in message.tool_calls]
    assert asked == codec.readable(results), "a request can hold no half of a character"


async def refuse_pickles(store: CheckpointStore, ring: KeyRing) -> None:
    """Bytes that somebody puts into the store are refused before they are read, and run nothing."""
    await Worker(At(store)).run(Script("done"), ToolRegistry(), "sealed", checkpoint_key=ring)
    [run] = await store.load_many([RunId("sealed")])
    assert run is not None
    first = run.records[0]
    for body in HOSTILE:
        forged = run._replace(records=(first._replace(body=body), *run.records[1:]))
        row = run.row._replace(run_id=RunId(f"forged {HOSTILE.index(body)}"), posted=0)
        answer = await store.save(row.run_id, Step(0), None, row=row._replace(step=0), records=forged.records)
        assert answer.kind is AnswerKind.OK, "a store keeps bytes"
        with loud_events() as heard:
            error = await error_of(Runs(store, checkpoint_key=ring).show(row.run_id))
        assert isinstance(error, CheckpointStoreCorrupt)
        assert heard == []
    assert [each.holds for each in await Runs(store, checkpoint_key=ring).verify()] == [False] * len(HOSTILE)
