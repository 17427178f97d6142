"""What a swept run is worked by: a tool loop or a flow, and what must be true of the journal of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from agent_runtime.approvals import Verdict
from agent_runtime.asking import Ask
from agent_runtime.executor import Executor
from agent_runtime.flow.runner import KIND as FLOW_KIND
from agent_runtime.flow.runner import FlowResult, FlowRunner
from agent_runtime.ids import seq_of
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.journal.replay import History
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.messages import Reply, encode_messages
from agent_runtime.model import ModelFunction
from agent_runtime.offload import Offload
from agent_runtime.settlements import read_asked
from agent_runtime.testing.crash_sweep.rules import Broken, Rule, check_decided, recorded_reply
from agent_runtime.testing.crash_sweep.scenario import FlowScenario, Scenario
from agent_runtime.testing.script_model import ScriptModel, without_marks
from agent_runtime.tool_loop import KIND as LOOP_KIND
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry

Result: TypeAlias = "LoopResult | FlowResult[Any]"

KEY = b"the key of all swept runs, no secret"


class Terms(NamedTuple):
    """What one worker works with."""

    run_id: str
    store: CheckpointStore
    commits: str
    offload: Offload
    take_over: bool = False
    verdicts: Sequence[Verdict] = ()
    approvals: Ask | None = None


class Program(Protocol):
    """How a scenario is worked."""

    kind: str

    def make_model(self) -> ScriptModel:
        """The model of one run, which outlives its workers; a flow has none and never asks it."""

    async def work(self, ask: ModelFunction, registry: ToolRegistry, terms: Terms, *, is_new: bool, rerun: bool) -> Result:
        """Start the run, or recover it."""

    def tool_of(self, records: Sequence[StoredRecord], started: StoredRecord) -> str:
        """The tool of a call that was started."""

    def check_history(self, history: History) -> list[Broken]:
        """What was asked against what was decided."""

    def check_call(self, records: Sequence[StoredRecord], call: str) -> list[Broken]:
        """What must be durable at the moment at which a call is made."""

    def state(self, result: Result) -> str:
        """What the run came to, as text in which nothing tells how often something was asked for."""

    def told(self, result: Result) -> tuple[object, ...]:
        """All of a result that recovering the ended run gives again."""


def program_of(scenario: Scenario | FlowScenario) -> Program:
    """What works a scenario."""
    return LoopProgram(scenario) if isinstance(scenario, Scenario) else FlowProgram(scenario)


class LoopProgram:
    """A tool loop: what is called was decided by a recorded reply."""

    kind = LOOP_KIND

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def make_model(self) -> ScriptModel:
        return ScriptModel(self._scenario.replies, vary_args=self._scenario.vary_args)

    async def work(self, ask: ModelFunction, registry: ToolRegistry, terms: Terms, *, is_new: bool, rerun: bool) -> Result:
        options: dict[str, Any] = {
            "checkpoints": terms.store, "checkpoint_key": KEY, "commits": terms.commits, "offload": terms.offload,
            "parallel": self._scenario.parallel, "approvals": terms.approvals,
        }  # fmt: skip
        if is_new:
            return await run_tool_loop(ask, registry, self._scenario.messages, run_id=terms.run_id, **options)
        return await recover_tool_loop(
            ask, registry, terms.run_id, rerun_in_doubt=rerun, take_over=terms.take_over, verdicts=terms.verdicts or None,
            **options,
        )  # fmt: skip

    def tool_of(self, records: Sequence[StoredRecord], started: StoredRecord) -> str:
        reply = recorded_reply(records, seq_of(started.call))
        assert reply is not None, "a call that was started was decided"
        return reply.tool_calls[int(started.call.partition(".")[2] or 0)].name

    def check_history(self, history: History) -> list[Broken]:
        return check_decided(history)

    def check_call(self, records: Sequence[StoredRecord], call: str) -> list[Broken]:
        if recorded_reply(records, seq_of(call)) is not None:
            return []
        return [Broken(Rule.REPLY_FIRST, f"call {call} was made, and the reply that decided it is not durable")]

    def state(self, result: Result) -> str:
        assert isinstance(result, LoopResult)
        plain = {"status": result.status, "output": result.output, "messages": encode_messages(result.messages)}
        return without_marks(json.dumps(plain, sort_keys=True))

    def told(self, result: Result) -> tuple[object, ...]:
        assert isinstance(result, LoopResult)
        return (result.status, result.output, list(result.messages), dict(result.usage), result.llm_calls, result.steps)


class FlowProgram:
    """A flow: what is called follows from a saved state."""

    kind = FLOW_KIND

    def __init__(self, scenario: FlowScenario) -> None:
        self._scenario = scenario

    def make_model(self) -> ScriptModel:
        return ScriptModel([Reply()])

    async def work(self, ask: ModelFunction, registry: ToolRegistry, terms: Terms, *, is_new: bool, rerun: bool) -> Result:
        runner = FlowRunner(
            Executor(registry), checkpoints=terms.store, checkpoint_key=KEY, commits=terms.commits, offload=terms.offload,
            parallel=self._scenario.parallel, approvals=terms.approvals,
        )  # fmt: skip
        flow, state = self._scenario.flow, self._scenario.state
        if is_new:
            return await runner.run(flow, state, run_id=terms.run_id)
        if terms.verdicts:
            return await runner.resume(flow, terms.run_id, terms.verdicts, rerun_in_doubt=rerun)
        return await runner.recover(flow, terms.run_id, rerun_in_doubt=rerun, take_over=terms.take_over)

    def tool_of(self, records: Sequence[StoredRecord], started: StoredRecord) -> str:
        return read_asked(started.body).tool

    def check_history(self, history: History) -> list[Broken]:
        """The same call is asked the same whoever asks, and its place says so: no call of a flow gets another place."""
        return [
            Broken(Rule.AS_DECIDED, f"call {call} stands at a place of its own, though nothing in the code has changed")
            for call in history.lives
            if "~" in call
        ]

    def check_call(self, records: Sequence[StoredRecord], call: str) -> list[Broken]:
        superstep = seq_of(call)
        saved = sum(record.kind == RecordKind.CHECKPOINT for record in records)
        if saved == superstep:
            return []
        return [Broken(Rule.SAVED_FIRST, f"call {call} was made, and {saved} supersteps are saved")]

    def state(self, result: Result) -> str:
        assert isinstance(result, FlowResult)
        return without_marks(json.dumps([result.status, result.state.model_dump(mode="json"), str(result.error)]))

    def told(self, result: Result) -> tuple[object, ...]:
        assert isinstance(result, FlowResult)
        return (result.status, result.state, result.error)
