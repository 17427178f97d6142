"""Runs are moved to the active key by somebody's word, and what is sealed under a revoked key is refused until then."""

from __future__ import annotations

import asyncio

import pytest

from agent_runtime import Outcome
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointStoreCorrupt,
    IdentityMismatch,
    InvalidKey,
    InvalidSetting,
    RevokedKey,
    StoreUnavailable,
    UnknownKey,
)
from agent_runtime.journal.keys import KeyRing
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.journal.seal import open_run, sealer_for
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.run import RunContext
from agent_runtime.runs import Runs
from tests.bench import KEY, Bench, Delegate, Place, Script, Worker, results_in, transcript
from tests.flow import desk
from tests.keys.rings import NEXT, OLD, OLD_KEY, REVOKING, STILL_OLD, keys_of, load, runs_of
from tests.standing import AT_REST, alive, bring_to, kinds, script

NEW_OVER = KeyRing({"key": KEY, "new": OLD_KEY}, "new")
"""The key of the bench's own runs, and the one after it."""
WITHDRAWN = KeyRing({"key": KEY, "new": OLD_KEY}, "new", revoked={"key"})


# Reseal.


@pytest.mark.parametrize("state", AT_REST)
async def test_a_run_that_nobody_works_is_moved_as_it_stands(place: Place, state: str) -> None:
    place.is_tampered = True
    bench = await bring_to(place, state)
    before = await runs_of(place, NEW_OVER).show("run")
    was = await load(place, NEW_OVER)
    [resealed] = await runs_of(place, NEW_OVER).reseal("run", by="ana")
    assert (resealed.was, resealed.now, resealed.moved, resealed.why) == ("key", "new", True, "")
    run, report = await load(place, NEW_OVER), await runs_of(place, NEW_OVER).show("run")
    assert keys_of(run) == ["key", "new"]
    assert (run.row.status, run.row.attempts, run.row.wake_at) == (was.row.status, was.row.attempts, was.row.wake_at)
    assert (report.info.status, report.info.why) == (before.info.status, before.info.why)
    assert run.row.owner == NO_OWNER
    rekeyed = next(moment for segment in report.timeline.segments for moment in segment.moments if moment.what == "rekeyed")
    assert rekeyed.details == {"by": "ana"}
    added = kinds(run, len(was.records))
    is_final = RunStatus(was.row.status).is_final
    assert added == (["rekeyed"] if is_final else ["rekeyed", "claimed", *(["quarantined"] if state == "quarantined" else [])])
    assert [each.moved for each in await runs_of(place, NEW_OVER).reseal("run", by="ana")] == [False]
    assert await load(place, NEW_OVER) == run, "to move it again changes nothing"
    if state == "doubtful":
        result = await Worker(place).recover(script(), bench.registry, checkpoint_key=NEW_OVER, rerun_in_doubt=True)
        assert (result.status, bench.effects) == ("done", 2)


async def test_a_run_that_has_ended_is_settled_under_the_key_that_it_is_under_by_then(place: Place) -> None:
    place.is_tampered = True
    await bring_to(place, "cancelled in doubt")
    await runs_of(place, NEW_OVER).reseal("run", by="ana")
    assert await runs_of(place, NEW_OVER).settle("run", "0", Outcome.done("paid"), by="ben", why="saw it")
    assert kinds(await load(place, NEW_OVER))[-2:] == ["rekeyed", "settled"]
    result = await Worker(place).recover(script(), Bench().registry, checkpoint_key=NEW_OVER)
    assert results_in(result.messages) == ["paid"]


async def test_what_a_flow_kept_is_read_after_it_was_moved(place: Place) -> None:
    place.is_tampered = True
    flow, bench = desk.chain(desk.CHARGE, desk.LOOK), Bench()
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL, 1)
    await desk.run_and_die(dying, bench.registry, flow, desk.Order(notes=["x" * 600]), checkpoint_key=OLD)
    await runs_of(place, NEXT).reseal(by="ana")
    result = await desk.recover(Worker(place), bench.registry, flow, checkpoint_key=NEXT)
    assert (result.state.note, result.state.notes) == ("what is known of ana", ["x" * 600])
    assert await runs_of(place, NEXT).verify() == []


async def test_a_run_whose_worker_lives_is_reported_and_left_alone(place: Place) -> None:
    place.is_tampered = True
    async with alive(place) as (task, _):
        before = await load(place, NEW_OVER)
        [resealed] = await runs_of(place, NEW_OVER).reseal("run", by="ana")
        assert (resealed.moved, resealed.was) == (False, "key")
        assert "may be alive" in resealed.why
        after = await load(place, NEW_OVER)
        assert after.records == before.records
    assert (await task).status == "done", "its worker never heard of it"


class Fails(Delegate):
    """Reads so many runs, and then none."""

    def __init__(self, inner: CheckpointStore, runs: int) -> None:
        super().__init__(inner)
        self.left = runs

    def check(self, verb: str) -> None:
        self.left -= verb == "load_many"
        if self.left < 0:
            raise StoreUnavailable("the disk is gone")


async def test_all_runs_are_moved_one_by_one_and_what_was_cut_short_goes_on(place: Place) -> None:
    place.is_tampered = True
    for number, state in enumerate(("done", "paused", "dead", "failed")):
        await bring_to(place, state, f"run {number}")
    with pytest.raises(StoreUnavailable):
        await Runs(Fails(place.open(), 2), checkpoint_key=NEW_OVER).reseal(by="ana")
    moved = await runs_of(place, NEW_OVER).reseal(by="ana")
    assert [each.run_id for each in moved] == ["run 2", "run 3"]
    assert {each.key_id async for each in runs_of(place, NEW_OVER).verify_each()} == {"new"}


async def test_a_run_that_is_not_as_it_was_written_is_reported_and_hinders_no_other(place: Place) -> None:
    place.is_tampered = True
    await Worker(place).run(Script("done"), Bench().registry, "a", checkpoint_key={"lost": b"nobody has this key any more"})
    await Worker(place).run(Script("done"), Bench().registry, "b", checkpoint_key=OLD)
    lost, moved = await runs_of(place, NEXT).reseal(by="ana")
    assert (lost.run_id, lost.moved, "'lost'" in lost.why) == ("a", False, True)
    assert (moved.run_id, moved.moved) == ("b", True)


async def test_who_reseals_all_runs_is_an_operator_and_says_who_it_is(place: Place) -> None:
    await bring_to(place, "done")
    with pytest.raises(InvalidSetting):
        await runs_of(place, NEW_OVER).reseal("run", by="")
    ana = runs_of(place, NEW_OVER, ctx=RunContext(user="ana"))
    for work in (ana.reseal(by="ana"), ana.reseal("run", by="ana")):
        with pytest.raises(IdentityMismatch):
            await work
    assert keys_of(await load(place, NEW_OVER)) == ["key"]


# Revoked keys.


def test_the_active_key_cannot_be_revoked_and_a_set_of_ids_is_no_text() -> None:
    with pytest.raises(InvalidKey, match="'old' is revoked"):
        KeyRing({"old": OLD_KEY}, "old", revoked={"old"})
    for wrong in ("old", b"old", 5, [1]):
        with pytest.raises(InvalidKey, match="revoked="):
            KeyRing({"old": OLD_KEY}, "old", revoked=wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidKey, match="encrypts="):
        KeyRing({"old": OLD_KEY}, "old", encrypts={"third"})
    assert repr(REVOKING) == "KeyRing(keys=['new', 'old'], active='new', revoked=['old'])"


@pytest.mark.parametrize("state", AT_REST)
async def test_a_run_under_a_revoked_key_is_refused_until_an_operator_says_that_it_is_genuine(
    place: Place, state: str
) -> None:
    place.is_tampered = True
    bench = await bring_to(place, state)
    before, runs = await load(place, NEW_OVER), runs_of(place, WITHDRAWN)
    entered = bench.entered.total()
    for work in (
        Worker(place).recover(script(), bench.registry, checkpoint_key=WITHDRAWN),
        runs.show("run"),
        runs.settle("run", "0", Outcome.done(1), by="ana", why="x"),
        runs.cancel("run", by="ana"),
        runs.release("run", by="ana"),
        runs.reseal("run", by="ana"),
    ):
        with pytest.raises(RevokedKey, match="'key', which is revoked") as refused:
            await work
        assert isinstance(refused.value, UnknownKey)
        assert isinstance(refused.value, CheckpointStoreCorrupt)
    [listed] = await runs.list()
    assert (listed.status, "revoked" in listed.why) == ("corrupt", True)
    [left] = await runs.reseal(by="ana")
    assert (left.moved, "revoked" in left.why) == (False, True)
    assert await load(place, NEW_OVER) == before, "nothing of it changed"
    assert bench.entered.total() == entered
    [moved] = await runs.reseal("run", by="ana", even_revoked=True)
    assert (moved.was, moved.now, moved.moved) == ("key", "new", True)
    assert (await runs.show("run")).info.status == (await runs_of(place, NEW_OVER).show("run")).info.status


async def test_a_run_that_went_on_to_another_key_before_is_worked_on(place: Place) -> None:
    place.is_tampered = True
    bench, model = Bench(), Script([("charge_i", {"amount": 1})], [("charge_i", {"amount": 2})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 0).run_and_die(model, bench.registry, checkpoint_key=OLD)
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 1).recover_and_die(model, bench.registry, checkpoint_key=NEXT)
    result = await Worker(place).recover(model, bench.registry, checkpoint_key=REVOKING)
    assert (result.status, bench.effects) == ("done", 2)


async def test_who_has_the_revoked_key_cannot_change_what_came_before_the_change(place: Place) -> None:
    """The records under the old key are written anew, with seals that hold; the first one under the new key tells."""
    place.is_tampered = True
    bench, model = Bench(), Script([("charge_i", {"amount": 1})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 0).run_and_die(model, bench.registry, checkpoint_key=OLD)
    result = await Worker(place).recover(model, bench.registry, checkpoint_key=NEXT)
    run = await load(place, REVOKING)
    old, new = (sealer_for(REVOKING, tenant="", run_id="run", key_id=key_id) for key_id in ("old", "new"))
    at = next(record.number for record in run.records if record.kind == RecordKind.REKEYED)
    for changed in range(1, at):
        noted = [(each.kind, each.call, each.attempt, each.body) for each in run.records[: at - 1]]
        kind, call, attempt, body = noted[changed - 1]
        noted[changed - 1] = (kind, call, attempt, body.replace(b"1", b"2") + b" ")
        forged = old.chain(noted, number=0, epoch=1, previous=bytes(32))
        with pytest.raises(CheckpointStoreCorrupt, match=f"seal of record {at} "):
            open_run(REVOKING, run._replace(records=(*forged, *run.records[at - 1 :])), tenant="")
    whole = old.chain([(each.kind, each.call, each.attempt, each.body) for each in run.records], number=0, epoch=2,
                      previous=bytes(32))  # fmt: skip
    row = run.row._replace(key_id="old", head=whole[-1].seal)
    with pytest.raises(RevokedKey):
        open_run(REVOKING, run._replace(row=row._replace(seal=old.row(row)), records=whole), tenant="")
    assert new.row(run.row) == run.row.seal
    assert transcript(await Worker(place).recover(model, bench.registry, checkpoint_key=REVOKING)) == transcript(result)


@pytest.mark.parametrize("ring", [STILL_OLD, REVOKING], ids=["trusted", "revoked"])
async def test_a_message_under_a_revoked_key_is_not_heard(place: Place, ring: KeyRing) -> None:
    place.is_tampered = True
    bench, model = Bench(needs_approval=True), Script([("charge", {"amount": 1})], "done")
    await Worker(place).run(model, bench.registry, checkpoint_key=NEXT)
    [request] = await runs_of(place, STILL_OLD).pending()
    await runs_of(place, STILL_OLD).approve(request, by="eve")
    result = await Worker(place).recover(model, bench.registry, checkpoint_key=ring)
    assert (result.status, bench.effects) == (("done", 1) if ring is STILL_OLD else ("paused", 0))


async def test_the_answers_of_a_store_to_a_run_that_is_moved_twice_at_once_are_settled(place: Place) -> None:
    place.is_tampered = True
    await bring_to(place, "done")
    both = await asyncio.gather(*(runs_of(place, NEW_OVER).reseal("run", by=by) for by in ("ana", "ben")))
    assert {each.now for [each] in both} == {"new"}
    run = await load(place, NEW_OVER)
    assert kinds(run).count("rekeyed") == 1
