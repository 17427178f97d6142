"""The runtime with one bug planted in it, swept in a process of its own: `python -m tests.crash.plants NAME`.

Each plant takes away one guard. What the sweep then says about it is what `test_planted_bugs.py` asks for.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime import asking, codec, doubts, lease, recovery, timeline
from agent_runtime.approvals import ApprovalRequest, Decision, Verdict
from agent_runtime.asking import Gate, Passed
from agent_runtime.doubts import Case, Decisions
from agent_runtime.endings import Ending
from agent_runtime.executor import Executor, Siblings
from agent_runtime.flow.calls import Calls
from agent_runtime.flow.saved import Keeper
from agent_runtime.ids import CallId
from agent_runtime.inbox import Message, MessageKind
from agent_runtime.journal.journal import Journal
from agent_runtime.journal.records import RecordKind, StoredRow
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import CallState, Settlement
from agent_runtime.loop import Loop
from agent_runtime.messages import ToolCall
from agent_runtime.recovery import Found
from agent_runtime.run import Run
from agent_runtime.settlements import Drain, Outcome, Said
from agent_runtime.testing.crash_sweep import Rule
from agent_runtime.testing.crash_sweep.__main__ import main
from agent_runtime.timeline import Call
from agent_runtime.tools import Tool

_LEFT: list[object] = []
"""Work that a plant no longer waits for: kept, so that it is done at all."""


@dataclass(frozen=True)
class Plant:
    """A bug, the rules that must be found broken, and a scenario that it shows in."""

    put: Callable[[], None]
    rules: frozenset[Rule]
    scenario: str = "three side by side"


def _replace(owner: object, name: str, broken: Callable[[Any], object]) -> None:
    """Put what `broken` makes of it in the place of an attribute, which must be there."""
    setattr(owner, name, broken(getattr(owner, name)))


def _is_not_awaited(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def broken(*args: Any, **options: Any) -> None:
        _LEFT.append(asyncio.ensure_future(original(*args, **options)))

    return broken


def _does_nothing(original: object) -> Callable[..., Awaitable[None]]:
    async def broken(self: object, **options: object) -> None:
        return None

    return broken


def _drops(kind: RecordKind, *, of_model: bool) -> Callable[[Any], object]:
    def break_note(original: Callable[..., None]) -> Callable[..., None]:
        def broken(self: Journal, noted: RecordKind, call: str = "", attempt: int = 0, body: bytes = b"") -> None:
            if noted is not kind or call.endswith("/model") is not of_model:
                original(self, noted, call, attempt, body)

        return broken

    return break_note


def barrier_does_not_wait() -> None:
    def break_stand(original: Callable[..., object]) -> Callable[..., None]:
        def broken(self: Journal, *, is_alone: bool) -> None:
            _LEFT.append(original(self, is_alone=is_alone))

        return broken

    _replace(Journal, "stand", break_stand)


def acts_before_the_barrier() -> None:
    _replace(Run, "ready_to_act", _does_nothing)


def result_before_the_end_is_durable() -> None:
    _replace(Run, "end", _is_not_awaited)


def spend_is_not_recorded() -> None:
    _replace(Journal, "note", _drops(RecordKind.STARTED, of_model=True))


def reply_is_not_recorded() -> None:
    _replace(Journal, "note", _drops(RecordKind.DONE, of_model=True))


def permission_is_not_recorded() -> None:
    _replace(Journal, "note", _drops(RecordKind.SETTLED, of_model=False))


def journal_is_not_replayed() -> None:
    def broken(self: Run, call: str) -> CallLife | None:
        return None

    _replace(Run, "life", lambda original: broken)


def recorded_result_is_changed() -> None:
    def break_life(original: Callable[[Run, str], CallLife | None]) -> object:
        def broken(self: Run, call: str) -> CallLife | None:
            life = original(self, call)
            if life is not None and life.state is CallState.DONE and not call.endswith("/model"):
                life.ended = b'{"result":"another"}'
            return life

        return broken

    _replace(Run, "life", break_life)


def every_tool_may_repeat() -> None:
    _replace(Tool, "may_repeat", lambda original: property(lambda self: True, lambda self, found: None))


def doubts_are_ignored() -> None:
    async def broken(run: Run, found: Found, decisions: Decisions) -> None:
        await run.barrier()

    _replace(recovery, "_land", lambda original: broken)


def key_is_another_after_a_crash() -> None:
    def break_key(original: Callable[[Run, str], str]) -> object:
        return lambda self, call: original(self, call) + "+" * (self.is_recovering and not call.endswith("/model"))

    _replace(Run, "key", break_key)


def claim_keeps_the_epoch() -> None:
    def break_row(original: Callable[..., StoredRow]) -> object:
        return lambda row, **options: original(row, **options)._replace(epoch=row.epoch)

    _replace(recovery, "claim_row", break_row)


def arguments_are_changed() -> None:
    def break_call(original: Callable[..., Awaitable[Ending]]) -> object:
        async def broken(
            self: Executor, run: Run, call: CallId, name: str, args: Mapping[str, object], siblings: Siblings
        ) -> Ending:
            return await original(self, run, call, name, {**args, "what": "another"}, siblings)

        return broken

    _replace(Executor, "call", break_call)


def results_are_out_of_order() -> None:
    def break_answer(original: Callable[..., None]) -> object:
        def broken(self: object, seq: int, calls: Sequence[ToolCall], endings: Sequence[Ending]) -> None:
            original(self, seq, calls[::-1], endings)

        return broken

    _replace(Loop, "_answer", break_answer)


def the_dead_are_thought_alive() -> None:
    _replace(lease, "is_dead", lambda original: lambda *args, **options: False)


def a_superstep_is_not_saved() -> None:
    _replace(Keeper, "keep", _does_nothing_with)


def _does_nothing_with(original: object) -> Callable[..., Awaitable[None]]:
    async def broken(*given: object) -> None:
        return None

    return broken


def a_recorded_call_is_taken_for_another() -> None:
    _replace(Calls, "_is_same", lambda original: lambda *given: False)


# People, probes and late results.


def verdict_is_not_recorded() -> None:
    _replace(Journal, "note", _drops(RecordKind.VERDICT, of_model=False))


def verdict_is_for_any_arguments() -> None:
    def break_check(original: Callable[..., bool]) -> object:
        def broken(verdict: Verdict, request: ApprovalRequest, life: CallLife, **options: Any) -> bool:
            return original(verdict._replace(digest=request.digest), request, life, **options)

        return broken

    _replace(doubts, "check_verdict", break_check)


def edit_is_ignored() -> None:
    def break_spend(original: Callable[[Gate, CallLife, Verdict, bytes], Passed]) -> object:
        def broken(self: Gate, life: CallLife, verdict: Verdict, recorded: bytes) -> Passed:
            return original(self, life, verdict._replace(decision=Decision.APPROVE, args=None), self._recorded)

        return broken

    _replace(Gate, "_spend", break_spend)


def denial_is_ignored() -> None:
    def break_read(original: Callable[[bytes], Verdict]) -> object:
        def broken(body: bytes) -> Verdict:
            verdict = original(body)
            return verdict if verdict.args is not None else verdict._replace(decision=Decision.APPROVE)

        return broken

    _replace(asking, "read_verdict", break_read)


def open_request_is_ignored_on_recovery() -> None:
    def break_wait(original: Callable[[Gate, CallLife], Awaitable[object]]) -> object:
        async def broken(self: Gate, life: CallLife) -> object:
            if not self._run.is_recovering:
                return await original(self, life)
            return Passed(self._recorded, self._tool.check(self._recorded), b"", life.attempts)

        return broken

    _replace(Gate, "_wait", break_wait)


def attempt_names_no_verdict() -> None:
    def break_spend(original: Callable[[Gate, CallLife, Verdict, bytes], Passed]) -> object:
        return lambda self, life, verdict, recorded: original(self, life, verdict, recorded)._replace(granted=b"")

    _replace(Gate, "_spend", break_spend)


def open_request_is_not_named() -> None:
    _replace(Found, "pending", lambda original: property(lambda self: original.fget(self)[1:]))


def message_is_not_read() -> None:
    async def broken(*args: object, **options: object) -> Sequence[Message]:
        return ()

    _replace(recovery, "read_inbox", lambda original: broken)


def probe_is_not_believed() -> None:
    async def broken(*given: object) -> Outcome:
        return Outcome.not_done()

    _replace(doubts, "ask_probe", lambda original: broken)


def frozen_worker_is_thought_gone() -> None:
    _replace(doubts, "drain_of", lambda original: lambda *given: Drain())


def drain_is_not_waited_for() -> None:
    def break_drain(original: Callable[..., Drain]) -> object:
        return lambda *given: Drain() if original(*given).until_ms is not None else original(*given)

    _replace(doubts, "drain_of", break_drain)


def late_result_is_taken_for_any_attempt() -> None:
    def broken(case: Case, life: CallLife) -> Said | None:
        for message in case.messages:
            if message.kind is MessageKind.LATE and message.body["call"] == life.call:
                ending = codec.encode(message.body["ending"])
                return Said(life.call, life.attempts, Settlement.DONE, "its worker", "late", ending)
        return None

    _replace(doubts, "find_late", lambda original: broken)


def attempts_of_the_dead_are_not_told() -> None:
    def break_end(original: Callable[..., None]) -> Callable[..., None]:
        def broken(call: Call, *rest: object) -> None:
            original(call, *rest)
            del call.tries[:-1]

        return broken

    _replace(timeline, "_end_try", break_end)


PLANTS = {
    plant.put.__name__: plant
    for plant in (
        Plant(barrier_does_not_wait, frozenset({Rule.CLAIM_FIRST, Rule.INTENT_FIRST, Rule.SPEND})),
        Plant(acts_before_the_barrier, frozenset({Rule.INTENT_FIRST, Rule.REPLY_FIRST, Rule.RESULT_FIRST, Rule.SPEND})),
        Plant(result_before_the_end_is_durable, frozenset({Rule.END_FIRST})),
        Plant(spend_is_not_recorded, frozenset({Rule.SPEND})),
        Plant(reply_is_not_recorded, frozenset({Rule.REPLY_FIRST})),
        Plant(permission_is_not_recorded, frozenset({Rule.AS_PERMITTED})),
        Plant(journal_is_not_replayed, frozenset({Rule.ENDED_ONCE, Rule.DECIDED_ONCE})),
        Plant(recorded_result_is_changed, frozenset({Rule.SAME_STATE})),
        Plant(every_tool_may_repeat, frozenset({Rule.NAMED_DOUBTS, Rule.AS_PERMITTED})),
        Plant(doubts_are_ignored, frozenset({Rule.NAMED_DOUBTS})),  # the executor refuses such a call all the same
        Plant(key_is_another_after_a_crash, frozenset({Rule.ONE_EFFECT})),
        Plant(claim_keeps_the_epoch, frozenset({Rule.EPOCHS})),
        Plant(arguments_are_changed, frozenset({Rule.AS_DECIDED})),
        Plant(results_are_out_of_order, frozenset({Rule.VALID_REQUEST})),
        Plant(the_dead_are_thought_alive, frozenset({Rule.REACHES_END})),
        Plant(a_superstep_is_not_saved, frozenset({Rule.SAVED_FIRST}), "flow: one after another"),
        Plant(a_recorded_call_is_taken_for_another, frozenset({Rule.NAMED_DOUBTS}), "flow: one after another"),
        Plant(verdict_is_not_recorded, frozenset({Rule.VERDICT_FIRST}), "people: yes, other, no"),
        Plant(verdict_is_for_any_arguments, frozenset({Rule.VERDICT_FIRST}), "people: by message"),
        Plant(edit_is_ignored, frozenset({Rule.VERDICT_FIRST, Rule.AS_DECIDED}), "people: yes, other, no"),
        Plant(denial_is_ignored, frozenset({Rule.DENIED}), "people: yes, other, no"),
        Plant(open_request_is_ignored_on_recovery, frozenset({Rule.VERDICT_FIRST}), "flow: ask three, by message"),
        Plant(attempt_names_no_verdict, frozenset({Rule.SPENT_ONCE}), "people: by message"),
        Plant(open_request_is_not_named, frozenset({Rule.NAMED_REQUESTS}), "people: by message"),
        Plant(message_is_not_read, frozenset({Rule.NAMED_REQUESTS}), "people: by message"),
        Plant(probe_is_not_believed, frozenset({Rule.PROBED_FIRST}), "probes"),
        Plant(frozen_worker_is_thought_gone, frozenset({Rule.DRAINED}), "taken over"),
        Plant(attempts_of_the_dead_are_not_told, frozenset({Rule.TOLD})),
        Plant(drain_is_not_waited_for, frozenset({Rule.DRAINED}), "probes"),
        Plant(late_result_is_taken_for_any_attempt, frozenset({Rule.OWN_RESULT}), "late results"),
    )
}


if __name__ == "__main__":
    chosen = PLANTS[sys.argv[1]]
    chosen.put()
    quick = ["--json", "--store", "memory", "--commits", "grouped", "--depth", "1", "--jobs", "1"]
    sys.exit(main([*quick, "--scenario", chosen.scenario]))
