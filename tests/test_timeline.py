"""What happened to a run, as every face reads it."""

from __future__ import annotations

from agent_runtime import Runs
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.journal.states import CallState
from agent_runtime.timeline import read_timeline
from tests.bench import KEY, Asked, Bench, Place, Script, Worker, error_of

CHARGE: list[Asked] = [("charge", {"amount": 5})]


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
