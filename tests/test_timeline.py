"""What happened to a run, as every face reads it."""

from __future__ import annotations

from pydantic import BaseModel

from agent_runtime import Call as FlowCall
from agent_runtime import Executor, Flow, FlowRunner, Outcome, Runs, ToolRegistry
from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, write_message
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.states import CallState
from agent_runtime.timeline import read_timeline
from tests.bench import KEY, RING, Asked, Bench, Killed, Place, Script, Worker, error_of, expect_death

CHARGE: list[Asked] = [("charge", {"amount": 5})]


class Order(BaseModel):
    note: str = ""


async def test_a_run_is_told_claim_by_claim_with_its_decisions_calls_attempts_doubts_and_end(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, bench.registry)
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry)), RecoveryNeedsDecision)
    runs = Runs(place.open(), checkpoint_key=KEY)
    blocked = (await runs.show("run")).timeline
    assert [(segment.epoch, segment.why, segment.left) for segment in blocked.segments] == [
        (1, "start", ""),
        (2, "recovery", "gave it back: in doubt"),
    ]
    [doubt] = blocked.doubts
    assert (doubt.call, doubt.tool, doubt.args, doubt.attempts, doubt.outcome) == ("0", "charge", {"amount": 5}, 1, {})
    assert blocked.ended is None

    await Worker(place).recover(model, bench.registry, rerun_in_doubt=True)
    report = await runs.show("run")
    told = report.timeline
    assert [segment.left for segment in told.segments][-1] == "ended it: done"
    assert told.ended == {"status": "done"}
    assert [call.call for call in told.decisions] == ["0/model", "1/model"]
    assert told.doubts == []
    call = told.calls["0"]
    assert (call.state, call.attempts, call.outcome) == (CallState.DONE, 2, {"result": "effect 2"})
    moments = [moment for segment in told.segments for moment in segment.moments]
    assert [moment.number for moment in moments] == list(range(1, len((await place.load("run")).records) + 1))
    assert [moment.what for moment in moments][:4] == ["opened", "claimed", "started", "done"]
    assert [moment.details["how"] for moment in moments if moment.what == "settled"] == ["rerun"]


def record(kind: int, body: bytes, number: int = 1, call: str = "") -> StoredRecord:
    return StoredRecord(number, 1, kind, call, 0, body, b"")


def test_what_cannot_be_read_is_shown_as_such_and_hides_nothing_else() -> None:
    told = read_timeline(
        [
            record(RecordKind.CLAIMED, b"{", 1),
            record(RecordKind.SETTLED, b'{"how":"never heard of"}', 2, "0"),
            record(RecordKind.DONE, b"[1]", 3, "0"),
            record(99, b"", 4, "0"),
            record(RecordKind.RELEASED, b'"word"', 5),
        ]
    )
    [segment] = told.segments
    assert [(moment.what, moment.details) for moment in segment.moments] == [
        ("claimed", {"unreadable": "1 bytes"}),
        ("settled", {"how": "never heard of"}),
        ("done", {"value": [1]}),
        ("kind 99", {}),
        ("released", {"value": "word"}),
    ]


def test_a_lost_decision_is_not_in_doubt() -> None:
    told = read_timeline([record(RecordKind.STARTED, b'{"messages":1}', 1, "0/model")])
    assert told.calls["0/model"].state is CallState.STARTED
    assert told.doubts == []


async def test_it_is_told_who_settled_a_call_in_doubt_a_person_its_probe_or_its_own_worker_that_was_late(place: Place) -> None:
    async def probe(key: str, args: dict[str, object]) -> Outcome:
        return Outcome.done(f"{key} is there")

    registry = ToolRegistry()

    @registry.tool(probe=probe)
    async def charge(amount: int) -> str:
        raise RuntimeError("after which nobody knows")

    await Worker(place).run(Script(CHARGE, "done"), registry, "asked")
    runs = Runs(place.open(), checkpoint_key=KEY)
    asked = (await runs.show("asked")).timeline.calls["0"]
    assert (asked.state, asked.outcome) == (CallState.DONE, {"result": "asked:0 is there"})
    assert asked.settled == {"how": "done", "by": "its probe", "why": "the remote says that it happened"}

    bench = Bench()
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CHARGE, "done"), bench.registry, "late")
    run = await place.load("late")
    left = {"call": "0", "attempt": 1, "epoch": 1, "opened": run.records[0].seal.hex(), "ending": {"result": "late"}}
    message = write_message(sealer_for(RING, tenant="", run_id="late"), MessageKind.LATE, left)
    await place.open().post(RunId("late"), message)
    await Worker(place).recover(Script(CHARGE, "done"), bench.registry, "late")
    late = (await runs.show("late")).timeline.calls["0"]
    assert (late.state, late.outcome, late.settled["by"]) == (CallState.DONE, {"result": "late"}, "its worker")

    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CHARGE, "done"), bench.registry, "person")
    assert await runs.settle("person", "0", Outcome.not_done(), by="ana", why="asked the bank")
    told = (await runs.show("person")).timeline
    assert told.calls["0"].settled == {"how": "not_done", "by": "ana", "why": "asked the bank"}
    assert (told.calls["0"].state, told.doubts) == (CallState.REOPENED, [])
    assert (told.segments[-1].why, told.segments[-1].left) == (
        "settlement",
        "settled call 0 as not done, by ana (asked the bank)",
    )


async def test_a_request_its_verdict_and_what_went_out_are_told_of_one_call(place: Place) -> None:
    bench, runs = Bench(needs_approval=True), Runs(place.open(), checkpoint_key=KEY)
    await Worker(place).run(Script(CHARGE, "done"), bench.registry)
    [waiting] = (await runs.show("run")).timeline.pending
    assert (waiting.call, waiting.tool, waiting.args) == ("0", "charge", {"amount": 5})
    assert (waiting.state, waiting.attempts, waiting.verdict) == (CallState.PENDING, 0, {})
    await runs.edit(("run", "0"), {"amount": 3}, by="ana", note="less")
    await Worker(place).recover(Script(CHARGE, "done"), bench.registry)
    told = (await runs.show("run")).timeline
    call = told.calls["0"]
    assert told.pending == []
    assert call.verdict == {"decision": "edit", "by": "ana", "note": "less", "args": {"amount": 3}}
    assert (call.state, call.attempts, call.args, call.outcome) == (CallState.DONE, 1, {"amount": 3}, {"result": "effect 1"})


async def test_a_call_that_was_being_asked_about_when_its_worker_died_waits_and_is_in_no_doubt(place: Place) -> None:
    bench, runs = Bench(needs_approval=True), Runs(place.open(), checkpoint_key=KEY)

    def ask(request: ApprovalRequest) -> Verdict:
        raise Killed("killed while it asks")

    await expect_death(Worker(place).run(Script(CHARGE, "done"), bench.registry, approvals=ask))
    told = (await runs.show("run")).timeline
    assert ([call.call for call in told.pending], told.doubts) == (["0"], [])
    await runs.cancel("run", by="ana", why="enough")
    told = (await runs.show("run")).timeline
    assert (told.pending, told.cancelled) == ([], {"by": "ana", "why": "enough"})
    assert told.segments[-1].left == "ended it: cancelled by ana (enough)"


async def test_each_attempt_is_told_with_its_times_and_what_a_recovery_saved(place: Place) -> None:
    bench, runs = Bench(), Runs(place.open(), checkpoint_key=KEY)
    model = Script(CHARGE, CHARGE, "done")
    before = SYSTEM_CLOCK.now_ms()
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 1).run_and_die(model, bench.registry)
    await error_of(Worker(place).recover(model, bench.registry))
    await Worker(place).recover(model, bench.registry, rerun_in_doubt=True)
    told = (await runs.show("run")).timeline
    assert told.opened["input"]["messages"][0]["role"] == "user"
    assert told.was_recovered
    assert [segment.is_recovery for segment in told.segments] == [False, True, True]
    first, second = told.calls["0"], told.calls["1"]
    assert [(each.attempt, each.epoch, each.ended) for each in second.tries] == [(1, 1, ""), (2, 3, "done")]
    assert second.tries[0].ended_ms is None
    assert (first.replays, second.replays) == ([2, 3], [])
    times = [moment for each in (first, second) for one in each.tries for moment in (one.started_ms, one.ended_ms)]
    known = [each for each in times if each is not None]
    assert before <= known[0]
    assert known == sorted(known)
    assert len(known) == 5
    assert [segment.began_ms is not None and segment.last_ms is not None for segment in told.segments] == [True] * 3
    assert (told.model_requests, told.saved.decisions, told.saved.calls) == (3, 4, 2)


async def test_a_flow_is_told_with_its_graph_and_how_far_it_has_come(place: Place) -> None:
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def pay(amount: int) -> str:
        return "paid"

    flow = (
        Flow("order", state=Order)
        .node("look", lambda order: {"note": "seen"})
        .node("pay", FlowCall("pay", args=lambda order: {"amount": 5}, into="note"))
        .edge("look", "pay")
        .end("pay")
    )
    store = place.open()
    await FlowRunner(Executor(registry), checkpoints=store, checkpoint_key=KEY).run(flow, Order(), run_id="order")
    told = (await Runs(store, checkpoint_key=KEY).show("order")).timeline
    assert list(told.graph["nodes"]) == ["look", "pay"]
    assert told.visits == {"look": 1, "pay": 1}
    assert told.opened["input"]["state"] == {"note": ""}
