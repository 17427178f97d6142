"""Results that came after their worker had lost the run: left to it, taken over where they are truly its own, else ignored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from agent_runtime.abandoned import Lookout
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision, StoreUnavailable, ToolError
from agent_runtime.ids import RunId
from agent_runtime.inbox import LATE_SECONDS, MessageKind, write_message
from agent_runtime.journal.records import RunStatus, StoredMessage
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.settlements import Outcome, Rerun
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import RING, Asked, NoHeartbeat, Place, Script, Worker, error_of, results_in, until
from tests.doubts.desk import MAIL, Frozen, Outbox, post, post_settling, settled_in, status

LATE = "its result came after its worker had lost the run"


async def taken_over(place: Place, outbox: Outbox, model: Script, **options: Any) -> Frozen:
    """A worker that froze once it had sent, and whose run another one has claimed and blocked."""
    frozen = Frozen(place, outbox, model, at="after", **options)
    await frozen.inside()
    error = await error_of(Worker(place).recover(model, outbox.registry, take_over=True))
    assert isinstance(error, RecoveryNeedsDecision)
    return frozen


async def thaw(frozen: Frozen) -> None:
    """It goes on, learns that the run is another's, and stops."""
    frozen.thawed.set()
    with pytest.raises(CheckpointConflict, match="this worker has stopped"):
        await frozen.work


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_what_a_worker_got_that_had_lost_its_run_is_taken_over_by_whoever_picks_the_run_up(
    place: Place, commits: str
) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = await taken_over(place, outbox, model, commits=commits)
    before = await place.load("run")
    await thaw(frozen)
    run = await place.load("run")
    assert (run.records, run.row.head, run.row.status) == (before.records, before.row.head, RunStatus.BLOCKED)
    lookout = Lookout(place.open(), name="", kind="loop", poll_seconds=0.0, clock=SYSTEM_CLOCK)
    look = await lookout.look(lambda _: True, trust_leases=True)
    assert [seen.row.run_id for seen in look.due] == ["run"], "a supervisor would start a worker on it now"
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.entered, outbox.sent) == (["mail 1"], 1, ["run:0"])
    [settled] = settled_in(await place.load("run"))
    assert settled == {
        "how": "done", "by": "its worker", "why": LATE, "call": "0", "attempt": 1, "ending": {"result": "mail 1"},
    }  # fmt: skip


async def test_an_error_that_a_tool_answered_too_late_is_its_answer_all_the_same(place: Place) -> None:
    registry, model, go_on, inside = ToolRegistry(), Script([("pay", {})], "done"), asyncio.Event(), asyncio.Event()

    @registry.tool
    async def pay() -> str:
        inside.set()
        await go_on.wait()
        raise ToolError("no money")

    work = asyncio.ensure_future(Worker(place).run(model, registry, offload=NoHeartbeat()))
    await inside.wait()
    assert isinstance(await error_of(Worker(place).recover(model, registry, take_over=True)), RecoveryNeedsDecision)
    go_on.set()
    with pytest.raises(CheckpointConflict):
        await work
    result = await Worker(place).recover(model, registry)
    assert results_in(result.messages) == ["error: ToolError: no money"]


async def test_each_of_several_calls_that_ended_too_late_is_taken_over(place: Place) -> None:
    registry, go_on, entered = ToolRegistry(), asyncio.Event(), list[str]()

    @registry.tool
    async def pay(amount: int) -> int:
        entered.append(idempotency_key())
        if amount > 1:
            await go_on.wait()
        if amount == 3:
            raise ValueError("nobody knows")
        return amount

    calls: list[Asked] = [("pay", {"amount": amount}) for amount in (1, 2, 3, 4)]
    model = Script(calls, "done")
    work = asyncio.ensure_future(Worker(place).run(model, registry, offload=NoHeartbeat()))
    await until(lambda: len(entered) == 4)
    await place.becomes("run", lambda run: any(record.call == "0.0" and record.kind == 4 for record in run.records))
    error = await error_of(Worker(place).recover(model, registry, take_over=True))
    assert isinstance(error, RecoveryNeedsDecision)
    assert [doubt.call for doubt in error.doubts] == ["0.1", "0.2", "0.3"]
    go_on.set()
    with pytest.raises(CheckpointConflict):
        await work
    error = await error_of(Worker(place).recover(model, registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert [doubt.call for doubt in error.doubts] == ["0.2"], "that one raised, and nobody knows still"
    await post_settling(place, Outcome.done(3), call="0.2")
    result = await Worker(place).recover(model, registry)
    assert (results_in(result.messages), len(entered)) == (["1", "2", "3", "4"], 4)


async def test_a_worker_that_works_the_run_by_now_has_nothing_of_it_and_the_next_one_may_need_it(place: Place) -> None:
    """The result of a first attempt is not that of a second, which somebody has permitted meanwhile."""
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = await taken_over(place, outbox, model)
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await dying.recover_and_die(model, outbox.registry, rerun_in_doubt=True)
    await thaw(frozen)
    error = await error_of(Worker(place).recover(model, outbox.registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert (error.doubts[0].attempt, outbox.entered) == (2, 2)


async def test_a_late_result_comes_after_what_somebody_settled(place: Place) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = await taken_over(place, outbox, model)
    await post_settling(place, Outcome.done("found in the outbox"))
    result = await Worker(place).recover(model, outbox.registry)
    assert results_in(result.messages) == ["found in the outbox"]
    before = await place.load("run")
    await thaw(frozen)
    assert (await place.load("run")).records == before.records
    assert (await Worker(place).recover(model, outbox.registry)).messages == result.messages


async def test_the_workers_own_result_counts_more_than_what_somebody_said_before_it_was_taken_up(place: Place) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = await taken_over(place, outbox, model)
    await post_settling(place, Rerun())
    await thaw(frozen)
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.entered) == (["mail 1"], 1)


async def test_a_result_that_comes_after_the_run_was_cancelled_changes_nothing_and_is_told_to_the_operator(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = await taken_over(place, outbox, model)
    await post(place, MessageKind.CANCEL, {"by": "ana", "why": "not wanted"})
    assert (await Worker(place).recover(model, outbox.registry)).status == "cancelled"
    before = await place.load("run")
    with caplog.at_level(logging.WARNING, "agent_runtime"):
        await thaw(frozen)
    after = await place.load("run")
    assert (after.records, after.row.status) == (before.records, RunStatus.CANCELLED)
    assert "run 'run' has ended, and takes no late results; its call 0 happened" in caplog.text
    assert [message.kind for message in await place.open().inbox(RunId("run"))] == ["cancel"]


# What is not truly its own.

GENUINE = {"call": "0", "attempt": 1, "epoch": 1, "ending": {"result": "forged"}}
OTHERS: dict[str, dict[str, object]] = {
    "another call": {"call": "1"},
    "no call": {"call": None},
    "another attempt": {"attempt": 2},
    "no attempt": {"attempt": 0},
    "another epoch": {"epoch": 2},
    "another opening": {"opened": "00" * 32},
    "no opening": {"opened": None},
    "no ending": {"ending": None},
    "an ending of text": {"ending": "done"},
    "an ending that is empty": {"ending": {}},
    "an ending of another kind": {"ending": {"unknown": 1}},
    "two endings": {"ending": {"result": 1, "error": {"type": "a", "message": "b"}}},
    "an ending with more in it": {"ending": {"result": 1, "more": 2}},
    "an error of text": {"ending": {"error": "no"}},
    "an error without a message": {"ending": {"error": {"type": "a"}}},
    "an error with a number": {"ending": {"error": {"type": "a", "message": 5}}},
}


async def genuine(place: Place, **changes: object) -> dict[str, object]:
    run = await place.load("run")
    return {**GENUINE, "opened": run.records[0].seal.hex(), **changes}


async def blocked(place: Place) -> tuple[Outbox, Script]:
    """A run whose call is in doubt, and whose worker is gone."""
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, outbox.registry)
    assert isinstance(await error_of(Worker(place).recover(model, outbox.registry)), RecoveryNeedsDecision)
    return outbox, model


async def still_in_doubt(place: Place, outbox: Outbox, model: Script) -> None:
    for _ in range(2):
        assert isinstance(await error_of(Worker(place).recover(model, outbox.registry)), RecoveryNeedsDecision)
    assert (outbox.entered, settled_in(await place.load("run"))) == (1, [])
    assert await status(place) == (RunStatus.BLOCKED, None), "it does not wake the run again and again"


async def test_what_names_the_very_attempt_under_the_runs_key_is_taken_over(place: Place) -> None:
    """The forgeries below differ from this one in a single thing."""
    outbox, model = await blocked(place)
    await post(place, MessageKind.LATE, await genuine(place))
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["forged"]


@pytest.mark.parametrize("other", OTHERS)
async def test_what_is_of_anything_else_is_ignored(place: Place, other: str) -> None:
    outbox, model = await blocked(place)
    await post(place, MessageKind.LATE, await genuine(place, **OTHERS[other]))
    await still_in_doubt(place, outbox, model)


@pytest.mark.parametrize("ring", [KeyRing.of(b"a key that somebody else has"), RING], ids=["another key", "another run"])
async def test_what_was_not_sealed_for_this_run_is_ignored(place: Place, ring: KeyRing) -> None:
    outbox, model = await blocked(place)
    sealer = sealer_for(ring, tenant="", run_id="other" if ring is RING else "run")
    message = write_message(sealer, MessageKind.LATE, await genuine(place))
    assert (await place.open().post(RunId("run"), message)).kind is AnswerKind.OK
    await still_in_doubt(place, outbox, model)


async def test_a_message_that_was_changed_or_is_of_another_kind_is_ignored(place: Place) -> None:
    outbox, model = await blocked(place)
    message = write_message(sealer_for(RING, tenant="", run_id="run"), MessageKind.LATE, await genuine(place))
    for forged in (
        message._replace(body=message.body.replace(b"forged", b"forgep")),
        message._replace(kind=MessageKind.SETTLE.value),
        message._replace(kind="nothing that is known"),
        message._replace(seal=bytes(32)),
        message._replace(body=b"\xff\x00"),
    ):
        changed = forged._replace(digest=forged.seal[:16] + forged.body[:8].ljust(8) + forged.kind.encode()[:8].ljust(8))
        await place.open().post(RunId("run"), changed)
    await still_in_doubt(place, outbox, model)


# A store that is away.


class Away(Worker):
    """A worker that cannot reach its store for some posts, and for all writes, once it has acted."""

    def __init__(self, place: Place, *, posts: int, hangs: bool = False, clock: ManualClock | None = None) -> None:
        super().__init__(place, clock=clock)
        self.is_away, self.posts, self.hangs, self.posted = False, posts, hangs, 0

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        return [Answer(AnswerKind.UNKNOWN)] * len(appends) if self.is_away else await super().commit(appends)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        self.posted += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.posted <= self.posts:
            raise StoreUnavailable("away")
        return await super().post(run_id, message)


async def test_a_result_that_no_store_took_is_left_to_the_run_once_it_answers(place: Place) -> None:
    clock, outbox, model = ManualClock(auto=True), Outbox(probe=None), Script(MAIL, "done")
    worker = Away(place, posts=5, clock=clock)

    async def lose_the_store() -> None:
        worker.is_away = True

    outbox.after = lose_the_store
    with pytest.raises(StoreUnavailable):
        await worker.run(model, outbox.registry, clock=clock)
    await until(lambda: worker.posted == 6)
    store = place.open(clock)
    for _ in range(1000):
        if await store.inbox(RunId("run")):
            break
        await asyncio.sleep(0.001)
    outbox.after = Outbox().after
    result = await Worker(place, clock=clock).recover(model, outbox.registry, clock=clock)
    assert (results_in(result.messages), outbox.sent) == (["mail 1"], ["run:0"])


async def test_a_store_that_hangs_holds_a_worker_that_lost_its_run_for_a_moment_only(tmp_path: Path) -> None:
    place, outbox, model = Place("memory", tmp_path), Outbox(probe=None), Script(MAIL, "done")
    worker = Away(place, posts=0, hangs=True)

    async def lose_it() -> None:
        error = await error_of(Worker(place).recover(model, outbox.registry, take_over=True))
        assert isinstance(error, RecoveryNeedsDecision)

    outbox.after = lose_it
    began = monotonic()
    with pytest.raises(CheckpointConflict):
        await worker.run(model, outbox.registry, offload=NoHeartbeat())
    assert LATE_SECONDS - 0.1 <= monotonic() - began < LATE_SECONDS + 10
