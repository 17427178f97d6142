"""Takes back what a failed or cancelled run did: its finished calls, in reverse, each by the `undo=` of its tool.

An undo is a run of its own, `RUN/undo`: journaled, keyed and doubt-safe like any. Its calls have the places and keys of
those that they take back, with `/undo` behind them. Asking for it again goes on with it, or gives back its result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.clock import milliseconds
from agent_runtime.doubts import Decider, RerunInDoubt, make_doubt
from agent_runtime.endings import read_ending
from agent_runtime.errors import CheckpointConflict, CheckpointNotFound, Doubt, RecoveryNeedsDecision
from agent_runtime.executor import CallInDoubt, Executor, Siblings, stop_in_doubt
from agent_runtime.ids import MAX_RUN_ID, CallId, RunId, build_key, check_run_id, digest_id, is_reply
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import CallState
from agent_runtime.recovery import Found, find, read_verified, reopen
from agent_runtime.run import Backing, Run, RunContext, prefix_of, start
from agent_runtime.settlements import read_asked, require_text
from agent_runtime.tools import Tool, ToolRegistry, is_async_callable
from agent_runtime.waiting import until_decided
from agent_runtime.working import work

KIND = "undo"
SUFFIX = "/undo"


class Undone(NamedTuple):
    """One call that was taken back, or whose undo answered with an error."""

    call: str
    tool: str
    error: str = ""


class UndoResult(NamedTuple):
    """What taking back a run came to, in the order in which it was done."""

    run_id: RunId
    """Of the undo: what it did can be shown, and settled, under this id."""
    calls: Sequence[Undone]
    status: str = "done"

    @property
    def holds(self) -> bool:
        """Whether every call was taken back."""
        return not any(undone.error for undone in self.calls)


def undo_id(run_id: RunId) -> RunId:
    """The id of the run that takes back another."""
    whole = f"{run_id}{SUFFIX}"
    return check_run_id(whole if len(whole) <= MAX_RUN_ID else digest_id(whole))


async def undo_run(
    backing: Backing,
    run_id: RunId,
    registry: ToolRegistry,
    *,
    by: str,
    why: str,
    rerun_in_doubt: RerunInDoubt = False,
) -> UndoResult:
    """Take back the finished calls of a run that failed or was cancelled, the last one first.

    Raises `CheckpointConflict` where the run is not one that has come to nothing, `RecoveryNeedsDecision` while a call of
    it, or an undo, is in doubt, `UnknownTool` where a tool of it is not registered: whether it can be taken back is unknown.
    """
    said = {"by": require_text("by", by), "why": require_text("why", why)}
    found = await read_verified(backing, run_id)
    plan = _plan(found, registry, milliseconds(await backing.store.now()))
    undo = _Undo(backing, run_id, undo_id(run_id), _undo_tools(registry), found.context, rerun_in_doubt)
    try:
        await find(backing, undo.undo_id, kind=KIND, context=found.context)
    except CheckpointNotFound:
        given = {"run": run_id, **said, "calls": plan}
        return await until_decided(partial(undo.start, found, given), undo.go_on, backing, undo.undo_id, 0)
    return await until_decided(undo.go_on, undo.go_on, backing, undo.undo_id, 0)


class _Undo:
    """One worker's way through an undo."""

    def __init__(
        self,
        backing: Backing,
        run_id: RunId,
        undo_id: RunId,
        registry: ToolRegistry,
        context: RunContext,
        rerun: RerunInDoubt,
    ) -> None:
        self.undo_id = undo_id
        self._backing = backing
        self._run_id = run_id
        self._executor = Executor(registry)
        self._context = context
        self._rerun = rerun

    async def start(self, found: Found, given: Mapping[str, object]) -> UndoResult:
        backing = self._backing._replace(namespace=found.opened["namespace"])
        run = start(
            backing, self.undo_id, kind=KIND, name=found.stored.row.name, context=self._context, given=given,
            keys_of=self._run_id,
        )  # fmt: skip
        return await work(run, self._take_back(run))

    async def go_on(self) -> UndoResult:
        """Go on with an undo that is stored, or give back what it came to."""
        decide = Decider(self._backing, self.undo_id, self._executor.registry, rerun=self._rerun)
        found = await reopen(self._backing, self.undo_id, kind=KIND, context=self._context, decide=decide)
        if isinstance(found, Run):
            return await work(found, self._take_back(found))
        lives = found.history.lives
        ended = [(call, _ending(lives[f"{call['call']}{SUFFIX}"])) for call in found.opened["input"]["calls"]]
        return UndoResult(self.undo_id, [Undone(call["call"], call["tool"], error) for call, error in ended])

    async def _take_back(self, run: Run) -> UndoResult:
        await run.barrier_if_each()
        undone = []
        for each in run.input["calls"]:
            place = CallId(f"{each['call']}{SUFFIX}")
            args = {name: each[name] for name in ("args", "result", "settled") if name in each}
            try:
                ending = await self._executor.call(run, place, each["tool"], args, Siblings(1))
            except CallInDoubt as doubt:
                await stop_in_doubt(run, [doubt])
            error = "" if ending.error_type is None else f"{ending.error_type}: {ending.error}"
            undone.append(Undone(each["call"], each["tool"], error))
        await run.end(RunStatus.DONE, codec.encode({"status": "done"}))
        return UndoResult(run.run_id, undone)


def _plan(found: Found, registry: ToolRegistry, now_ms: int) -> list[dict[str, object]]:
    """The calls to take back, the last one that ended first."""
    run_id = found.stored.row.run_id
    if found.status not in (RunStatus.FAILED, RunStatus.CANCELLED):
        status = found.status.name.lower()
        raise CheckpointConflict(
            f"run {run_id!r} is {status}; only a failed or a cancelled run is taken back. Cancel it first, if it is to end"
        )
    if doubts := [life for life in found.history.in_doubt() if not is_reply(life.call)]:
        raise RecoveryNeedsDecision(run_id, [_doubt(found, life, now_ms) for life in doubts])
    ended = {
        record.call: record.number
        for record in found.stored.records
        if record.call and record.kind in (RecordKind.DONE, RecordKind.SETTLED)
    }
    lives = [life for life in found.history.lives.values() if _did_something(life, registry)]
    return [_planned(life) for life in sorted(lives, key=lambda life: -ended[life.call])]


def _doubt(found: Found, life: CallLife, now_ms: int) -> Doubt:
    run_id, asked = found.stored.row.run_id, read_asked(life.asked)
    key = build_key(prefix_of(run_id, found.opened), life.call)
    why = "nobody knows whether there is anything to take back; settle it first"
    return make_doubt(run_id, life.call, key, asked.tool, life.attempts, why, asked.args, now_ms - asked.at_ms)


def _did_something(life: CallLife, registry: ToolRegistry) -> bool:
    """Whether the call went out, came back with a result, and can be taken back."""
    if is_reply(life.call) or life.state is not CallState.DONE or not life.asked:
        return False
    return registry.get(read_asked(life.asked).tool).undo is not None and read_ending(life.ended, None).error_type is None


def _planned(life: CallLife) -> dict[str, object]:
    asked = read_asked(life.asked)
    plain = {"call": life.call, "tool": asked.tool, "args": asked.args, "result": read_ending(life.ended, None).value}
    return {**plain, "settled": True} if life.is_settled else plain


def _ending(life: CallLife) -> str:
    ending = read_ending(life.ended, None)
    return "" if ending.error_type is None else f"{ending.error_type}: {ending.error}"


def _undo_tools(registry: ToolRegistry) -> ToolRegistry:
    """The tools whose call is the undo of another: by the same rule, under the same name."""
    tools = ToolRegistry()
    for spec in registry.specs:
        tool = registry.get(spec.name)
        if tool.undo is not None:
            tools.add(_undo_tool(tool, tool.undo))
    return tools


def _undo_tool(tool: Tool, undo: Any) -> Tool:
    def check(recorded: bytes, _plain: Mapping[str, object] | None = None) -> dict[str, Any]:
        given = codec.decode(recorded)
        data = codec.encode_checked(given["result"])
        is_plain = "settled" in given and not tool.result.fits(data)  # a person said so: given as they said it
        result = given["result"] if is_plain else tool.result.decode(data)
        return {"args": tool.check(codec.encode_checked(given["args"])), "result": result}

    return replace(
        tool, function=undo, is_async=is_async_callable(undo), result=codec.Shape(object), check_arguments=check,
        approval=None, probe=None, undo=None,
    )  # fmt: skip
