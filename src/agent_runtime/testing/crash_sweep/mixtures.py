"""Three calls side by side, each left behind in any of the ways in which a worker can leave one, in every mixture.

The journal of such a run is written here, by nobody's death, so that a mixture that no single death leaves is there too.
The reference is the same run worked from its start without a fault: whatever was left behind, it must come to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import combinations_with_replacement, zip_longest
from typing import Any, NamedTuple

from pydantic import BaseModel

from agent_runtime import codec
from agent_runtime.approvals import Checked, digest_of, pending_body, read_pending, request_of, verdict_body
from agent_runtime.errors import CallFailed, ToolError
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.saved import given
from agent_runtime.ids import reply_call, tool_call
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import CallState
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.messages import Reply, ToolCall, encode_messages, encode_reply, read_messages
from agent_runtime.run import Run, start
from agent_runtime.settlements import Outcome
from agent_runtime.testing.crash_sweep.people import Answers
from agent_runtime.testing.crash_sweep.report import Row
from agent_runtime.testing.crash_sweep.scenario import AnyScenario, Client, FlowScenario, Scenario
from agent_runtime.testing.crash_sweep.sweep import MakeStore, sweep
from agent_runtime.testing.crash_sweep.world import OpenStore, World, open_faulty
from agent_runtime.tools import RepeatRule, ToolRegistry

TOOLS = {rule: rule.value for rule in RepeatRule}
"""One tool of each rule, named like it."""


class State(Enum):
    """How a call was left behind."""

    NEW = "not started"
    PENDING = "pending"
    DECIDED = "decided"
    STARTED = "started"
    LOST = "started, not arrived"
    DONE = "done"
    FAILED = "failed"


class Left(NamedTuple):
    """One of the calls. `asks`: it needs a person."""

    rule: RepeatRule
    state: State
    asks: bool

    def what(self, at: int) -> str:
        """Its argument as the call in that place, which says how the tool and the person take it."""
        words = ("ask other" if self.rule is RepeatRule.NONE else "ask yes") if self.asks else "free"
        return f"{words} please {at}" + (", fails" if self.state is State.FAILED else "")


KINDS = tuple(
    Left(rule, state, asks)
    for rule in RepeatRule
    for state, asks in (
        (State.NEW, False), (State.PENDING, True), (State.DECIDED, True), (State.STARTED, False), (State.LOST, True),
        (State.DONE, True), (State.FAILED, False),
    )
)  # fmt: skip
"""Every state with every rule; each state of a call that needs a person, and of one that does not, is among them."""


def mixtures(kinds: Sequence[Left] = KINDS, *, each: int = 1) -> Iterator[tuple[Left, ...]]:
    """All threes of these kinds, whatever their order in the reply, or one in so many of them."""
    for at, three in enumerate(combinations_with_replacement(kinds, 3)):
        if at % each == 0:
            turn = at % 3  # so that each comes first in some
            yield (*three[turn:], *three[:turn])


def tools(remote: Client) -> ToolRegistry:
    """One tool of each rule, which needs a person, and fails, where it is told to."""
    registry = ToolRegistry()

    def asks(args: Mapping[str, object]) -> bool:
        return str(args["what"]).startswith("ask")

    async def find(key: str, args: Mapping[str, object]) -> Outcome:
        return await remote.probe(key)

    def fail_if_told(what: str) -> None:
        if "fails" in what:
            raise ToolError("not today")

    @registry.tool(needs_approval=asks, idempotent=True)
    async def idempotent(what: str) -> str:
        fail_if_told(what)
        return await remote.act("idempotent", {"what": what}, idempotent=True)

    @registry.tool(needs_approval=asks, pure=True)
    async def pure(what: str) -> str:
        fail_if_told(what)
        return await remote.read("pure", {"what": what})

    @registry.tool(needs_approval=asks, probe=find)
    async def probe(what: str) -> str:
        fail_if_told(what)
        return await remote.act("probe", {"what": what})

    @registry.tool(needs_approval=asks)
    async def none(what: str) -> str:
        fail_if_told(what)
        return await remote.act("none", {"what": what})

    return registry


def loop_of(left: Sequence[Left]) -> Scenario:
    """A loop whose one reply asks for these calls."""
    calls = [ToolCall(f"call_{at}", TOOLS[each.rule], {"what": each.what(at)}) for at, each in enumerate(left)]
    name = ", ".join(f"{each.rule.value} {each.state.value}" for each in left)
    return Scenario(name, [Reply("three", calls), Reply("done")], tools, answers=_way(left))


class Notes(BaseModel):
    """What the three calls gave."""

    notes: list[str] = []


def flow_of(left: Sequence[Left]) -> FlowScenario:
    """A flow whose one node makes these calls side by side."""

    async def work(state: Notes, run: NodeRun) -> dict[str, object]:
        async def one(at: int, each: Left) -> str:
            try:
                return str(await run.call(TOOLS[each.rule], what=each.what(at)))
            except CallFailed as failed:
                return failed.message

        return {"notes": await asyncio.gather(*(one(at, each) for at, each in enumerate(left)))}

    name = ", ".join(f"{each.rule.value} {each.state.value}" for each in left)
    return FlowScenario(name, Flow("three", state=Notes).node("own", work).end("own"), Notes(), tools, answers=_way(left))


def _way(left: Sequence[Left]) -> Answers:
    """Each way on which an answer can come, in turn: by the kinds alone, so the same in every sweep."""
    return list(Answers)[sum(KINDS.index(each) for each in left if each in KINDS) % len(Answers)]


MIXTURES: dict[str, Callable[[Sequence[Left]], AnyScenario]] = {
    "three of each kind: loop": loop_of,
    "three of each kind: flow": flow_of,
}


async def sweep_mixtures(
    name: str,
    make_store: MakeStore,
    *,
    store_name: str = "store",
    commits: str,
    depth: int,
    each: int = 1,
    kinds: Sequence[Left] = KINDS,
    progress: Callable[[Row], None] | None = None,
    open_store: OpenStore = open_faulty,
    is_steady: bool = True,
) -> Row:
    """Recover every mixture, or one in `each`, with up to `depth` deaths: one row for them all, on one store."""
    store, whole = await make_store(), Row(name, commits, store_name)

    async def same_store() -> CheckpointStore:
        return store.reopen()

    try:
        for at, left in enumerate(mixtures(kinds, each=each)):
            report = await sweep(
                MIXTURES[name](left), same_store, store_name=store_name, commits=[commits], depth=depth, progress=progress,
                open_store=open_store, is_steady=is_steady, left_behind=partial(leave_behind, left=left), run_ids=f"mix-{at}",
            )  # fmt: skip
            _add(whole, report.rows[0])
    finally:
        await store.close()
    return whole


def _add(whole: Row, row: Row) -> None:
    whole.moments = {where: whole.moments.get(where, 0) + count for where, count in row.moments.items()}
    whole.cells = [sum(counts) for counts in zip_longest(whole.cells, row.cells, fillvalue=0)]
    whole.decisions += row.decisions
    whole.violations += row.violations
    whole.seconds += row.seconds


# Leaving a run behind.


async def leave_behind(world: World, left: Sequence[Left]) -> None:
    """Write the run as its first worker left it, which is gone."""
    scenario = world.scenario
    opened: Mapping[str, object] | bytes = {"messages": encode_messages(read_messages("go"))}
    name = ""
    if isinstance(scenario, FlowScenario):
        name = scenario.flow.name
        shape = scenario.flow.shape
        opened = given(shape, shape.freeze(scenario.state)[0], scenario.flow.recorded)
    run = start(world.backing, world.run_id, kind=world.program.kind, name=name, context=None, given=opened)
    try:
        await run.barrier_if_each()
        if isinstance(scenario, Scenario):
            run.journal.note(RecordKind.STARTED, reply_call(0), 1, codec.encode({"messages": 1}))
            run.journal.note(RecordKind.DONE, reply_call(0), 1, encode_reply(scenario.replies[0]))
            places: list[str] = [tool_call(0, at, len(left)) for at in range(len(left))]
        else:
            places = [f"0/own.{at}" for at in range(len(left))]
        for at, each in enumerate(left):
            await _leave(world, run, places[at], each, each.what(at))
        await run.barrier()
    finally:
        run.let_go()
    await world.find()


async def _leave(world: World, run: Run, place: str, left: Left, what: str) -> None:
    """Write the records of one call, and have at the remote what happened there."""
    if left.state is State.NEW:
        return
    asked: dict[str, Any] = {"tool": TOOLS[left.rule], "args": {"what": what}}
    ends: dict[str, object] = {}
    if left.asks:
        life = _pend(run, place, asked)
        if left.state is State.PENDING:
            return
        verdict = world.person.answer(request_of(run.run_id, life, run.key(place)))
        checked = Checked(verdict, b"" if verdict.args is None else codec.encode(dict(verdict.args)))
        run.journal.note(RecordKind.VERDICT, place, 0, verdict_body(checked, run.now_ms()))
        if left.state is State.DECIDED:
            return
        asked["args"] = dict(verdict.args or asked["args"])
        digest = read_pending(life.pending).digest
        if verdict.args is not None:
            digest = digest_of(run.run_id, place, TOOLS[left.rule], checked.sent)
        ends = {"verdict": digest}
    run.journal.note(RecordKind.STARTED, place, 1, codec.encode({**asked, "at": run.now_ms(), **ends}))
    if left.state is State.FAILED:
        run.journal.note(RecordKind.DONE, place, 1, codec.encode({"error": {"type": "ToolError", "message": "not today"}}))
    elif left.state is not State.LOST:
        result = await _act(world, run.key(place), left.rule, asked["args"])
        world.gave(place, 1, result)
        if left.state is State.DONE:
            run.journal.note(RecordKind.DONE, place, 1, codec.encode({"result": result}))


def _pend(run: Run, place: str, asked: Mapping[str, Any]) -> CallLife:
    sent = codec.encode(asked["args"])
    body = pending_body(
        codec.encode(asked)[:-1] + b',"at":', sent=sent, digest=digest_of(run.run_id, place, asked["tool"], sent),
        at_ms=run.now_ms(), step=run.journal.step, expires_ms=None, no_self=False,
    )  # fmt: skip
    run.journal.note(RecordKind.PENDING, place, 0, body)
    return CallLife(place, CallState.PENDING, pending=body)


async def _act(world: World, key: str, rule: RepeatRule, args: Mapping[str, object]) -> str:
    if rule is RepeatRule.PURE:
        return await world.remote.read(TOOLS[rule], args, key=key)
    receipt = await world.remote.act(TOOLS[rule], args, key=key, idempotent=rule is RepeatRule.IDEMPOTENT)
    return receipt.result
