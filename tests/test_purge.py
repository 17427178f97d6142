"""Old runs that have ended go, one by one and only as they were read; what is in somebody's hands stays, and is told of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import RunContext, Runs
from agent_runtime.archive import archive_name, archives_in, verify_archive
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, InvalidSetting, RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import Answer, AnswerKind, Guard
from agent_runtime.retention import PAGE, Purged, parse_duration
from agent_runtime.settlements import Outcome
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import KEY, Asked, Bench, Counting, Delegate, Place, Script, Worker, error_of, until
from tests.test_recovery import rewrite

CALL: list[Asked] = [("charge_i", {"amount": 1})]
CHARGE: list[Asked] = [("charge", {"amount": 1})]
DAY = 86_400.0


class Shop:
    """A place with runs of all kinds in it, and a clock of its own."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.clock = ManualClock()
        self.bench = Bench()

    def worker(self) -> Worker:
        return Worker(self.place, clock=self.clock)

    def runs(self, **options: Any) -> Runs:
        return Runs(self.place.open(self.clock), **{"checkpoint_key": KEY, **options})

    async def work(self, *run_ids: str, **options: Any) -> None:
        for run_id in run_ids:
            await self.worker().run(Script(CALL, "done"), self.bench.registry, run_id, clock=self.clock, **options)

    async def doubtful(self, run_id: str) -> None:
        """A run that is blocked by a call in doubt."""
        dying = self.worker().killed_at(CrashPoint.AFTER_CALL)
        await dying.run_and_die(Script(CHARGE, "x"), self.bench.registry, run_id, clock=self.clock)
        await error_of(self.worker().recover(Script(CHARGE, "x"), self.bench.registry, run_id, clock=self.clock))

    async def ids(self) -> list[str]:
        return [row.run_id for row in await self.place.open(self.clock).list_runs(limit=10_000)]


@pytest.fixture
def shop(place: Place) -> Shop:
    return Shop(place)


def ids(purged: Sequence[Purged]) -> list[str]:
    return [each.run_id for each in purged]


async def test_runs_that_ended_before_a_time_go_and_younger_ones_stay(shop: Shop) -> None:
    await shop.work("old-1", "old-2")
    shop.clock.advance(10 * DAY)
    await shop.work("young")
    shop.clock.advance(20 * DAY)
    report = await shop.runs().purge(timedelta(days=25), by="ana")
    assert (ids(report.removed), report.left) == (["old-1", "old-2"], [])
    assert await shop.ids() == ["young"]
    assert ids((await shop.runs().purge(20 * DAY + 1, by="ana")).removed) == []
    assert ids((await shop.runs().purge(20 * DAY, by="ana")).removed) == ["young"], "an age of seconds counts to the second"


async def test_it_is_told_what_went_and_how_much_of_it_there_was(shop: Shop) -> None:
    await shop.work("a", "b")
    [stored] = await shop.place.open(shop.clock).load_many([RunId("a")])
    assert stored is not None
    shop.clock.advance(DAY)
    report = await shop.runs().purge(0, by="ana")
    size = sum(len(record.body) + len(record.seal) for record in stored.records)
    assert report.removed[0] == Purged("a", "done", report.removed[0].updated_at, len(stored.records), size)
    assert (report.records, report.size) == (2 * len(stored.records), sum(each.size for each in report.removed))
    assert report.removed[0].updated_at == shop.clock.now() - timedelta(days=1)


async def test_a_dry_run_tells_what_would_go_and_writes_nothing(shop: Shop) -> None:
    await shop.work("a", "b")
    counting = Counting(shop.place.open(shop.clock))
    report = await Runs(counting, checkpoint_key=KEY).purge(0, by="ana", dry_run=True)
    assert (report.dry_run, ids(report.removed)) == (True, ["a", "b"])
    assert set(counting.verbs) <= {"now", "list_runs", "load_many", "latest"}
    assert await shop.ids() == ["a", "b"]
    assert report.removed == (await shop.runs().purge(0, by="ana")).removed, "and then it does so"


async def test_only_the_statuses_and_the_name_that_are_asked_for_go(shop: Shop) -> None:
    await shop.work("done")
    await shop.work("named", name="nightly")
    await error_of(shop.worker().run(Script(CALL), shop.bench.registry, "failed", max_steps=1, clock=shop.clock))
    await shop.work("x/undo")
    assert ids((await shop.runs().purge(0, by="ana", status="failed")).removed) == ["failed"]
    assert ids((await shop.runs().purge(0, by="ana", name="nightly")).removed) == ["named"]
    assert ids((await shop.runs().purge(0, by="ana", status=["failed", "cancelled"])).removed) == []
    assert ids((await shop.runs().purge(0, by="ana", status=["done", "failed"])).removed) == ["done", "x/undo"]


async def test_what_is_in_somebodys_hands_stays(shop: Shop) -> None:
    leave = asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    await shop.doubtful("doubtful")
    await (
        shop.worker()
        .killed_at(CrashPoint.AFTER_CALL)
        .run_and_die(Script(CALL, "x"), shop.bench.registry, "run", clock=shop.clock)
    )
    await rewrite(shop.place, RunStatus.PAUSED)
    dying = shop.worker().killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(Script(CALL, "x"), shop.bench.registry, "dead", clock=shop.clock)
    entered, shop.bench.before = shop.bench.entered.total(), before
    alive = asyncio.ensure_future(shop.worker().run(Script(CALL, "x"), shop.bench.registry, "alive"))
    await until(lambda: shop.bench.entered.total() > entered)
    everything = ("done", "failed", "cancelled", "interrupted", "paused", "in-doubt", "quarantined")
    assert (await shop.runs().purge(0, by="ana")).removed == []
    report = await shop.runs().purge(0, by="ana", status=everything, force=True, dry_run=True)
    assert sorted(ids(report.removed)) == ["dead", "doubtful", "run"], "by force, what nobody works"
    assert report.left == [], "a run that is worked is not interrupted"
    assert ids((await shop.runs().purge(0, by="ana", status="in-doubt", force=True)).removed) == ["doubtful"]
    leave.set()
    await alive
    assert set(await shop.ids()) == {"alive", "dead", "run"}


async def test_a_cancelled_run_with_a_call_in_doubt_stays_unless_it_is_settled_or_forced(shop: Shop) -> None:
    for run_id in ("settled", "forced"):
        await shop.doubtful(run_id)
        await shop.runs().cancel(run_id, by="ana", why="enough")
    report = await shop.runs().purge(0, by="ana")
    assert (report.removed, ids(report.left)) == ([], ["forced", "settled"])
    assert all("has calls in doubt (0)" in each.left for each in report.left)
    await shop.runs().settle("settled", "0", Outcome.done("paid"), by="ana", why="saw it")
    assert ids((await shop.runs().purge(0, by="ana")).removed) == ["settled"]
    assert ids((await shop.runs().purge(0, by="ana", force=True)).removed) == ["forced"]


async def test_a_settlement_makes_a_run_young_again(shop: Shop) -> None:
    await shop.doubtful("run")
    await shop.runs().cancel("run", by="ana", why="enough")
    shop.clock.advance(30 * DAY)
    await shop.runs().settle("run", "0", Outcome.done("paid"), by="ana", why="saw it")
    assert (await shop.runs().purge(DAY, by="ana")).removed == []


async def test_a_run_that_is_being_taken_back_stays_until_that_has_ended(shop: Shop) -> None:
    registry = shop.bench.registry

    async def unpay(args: dict[str, Any], result: str) -> str:
        raise TimeoutError("nobody knows")

    @registry.tool(undo=unpay)
    async def pay(amount: int) -> str:
        return "paid"

    await error_of(shop.worker().run(Script([("pay", {"amount": 1})]), registry, "run", max_steps=1, clock=shop.clock))
    runs = shop.runs(registry=registry)
    with pytest.raises(RecoveryNeedsDecision):
        await runs.undo("run", by="ana", why="wrong")
    report = await runs.purge(0, by="ana")
    assert [each.left for each in report.left] == ["it is being taken back, and that has not ended"]
    await runs.settle("run/undo", "0/undo", Outcome.done("given back"), by="ana", why="saw it")
    assert (await runs.undo("run", by="ana", why="wrong")).holds
    assert ids((await runs.purge(0, by="ana")).removed) == ["run/undo", "run"]
    with pytest.raises(CheckpointConflict):
        await runs.undo("run", by="ana", why="again")


async def test_an_id_that_was_purged_is_not_used_again(shop: Shop) -> None:
    await shop.work("run")
    await shop.runs().purge(0, by="ana")
    error = await error_of(shop.worker().run(Script("x"), shop.bench.registry, "run"))
    assert isinstance(error, CheckpointConflict)
    assert "or did before it was deleted" in str(error)
    assert (await shop.runs().purge(0, by="ana")).removed == [], "a mark is no run that goes"


async def test_a_run_that_is_corrupt_stays_and_hides_no_other(shop: Shop) -> None:
    await shop.work("a", "b", "c")
    shop.place.is_tampered = True
    store = Forging(shop.place.open(shop.clock), "b")
    report = await Runs(store, checkpoint_key=KEY).purge(0, by="ana")
    assert (ids(report.removed), ids(report.left)) == (["a", "c"], ["b"])
    assert "the seal of record 1 does not hold" in report.left[0].left
    assert await shop.ids() == ["b"]
    assert (await Runs(store, checkpoint_key=KEY).purge(0, by="ana", force=True)).removed == []


class Forging(Delegate):
    """Shows the records of one run other than as they were written."""

    def __init__(self, inner: Any, run_id: str) -> None:
        super().__init__(inner)
        self.run_id = run_id

    async def load_many(self, run_ids: Sequence[RunId]) -> Any:
        found = await super().load_many(run_ids)
        return [self.forged(run) if run is not None and run.row.run_id == self.run_id else run for run in found]

    def forged(self, run: Any) -> Any:
        return run._replace(records=(run.records[0]._replace(body=b"{}"), *run.records[1:]))


class Moving(Delegate):
    """Does something just before a run is removed, and may keep the answer to itself."""

    def __init__(self, inner: Any, *, is_lost: bool = False) -> None:
        super().__init__(inner)
        self.is_lost = is_lost
        self.before: Any = None
        self.before_load: Any = None

    async def load_many(self, run_ids: Sequence[RunId]) -> Any:
        if self.before_load is not None:
            for run_id in run_ids:
                await self.before_load(run_id)
        return await super().load_many(run_ids)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        if self.before is not None:
            await self.before(run_id)
        answer = await super().delete(run_id, guard=guard)
        return Answer(AnswerKind.UNKNOWN) if self.is_lost else answer


async def test_a_run_that_moves_while_it_is_looked_at_stays(shop: Shop) -> None:
    await shop.doubtful("run")
    await shop.runs().cancel("run", by="ana", why="enough")
    store = Moving(shop.place.open(shop.clock))

    async def settle(run_id: RunId) -> None:
        await shop.runs().settle(run_id, "0", Outcome.done("paid"), by="ben", why="saw it")

    store.before = settle
    report = await Runs(store, checkpoint_key=KEY).purge(0, by="ana", force=True)
    assert [each.left for each in report.left] == ["it was written, or removed, by somebody else meanwhile"]
    assert await shop.ids() == ["run"]


async def test_a_run_that_moves_once_it_is_listed_is_young_again_and_stays(shop: Shop) -> None:
    await shop.doubtful("run")
    await shop.runs().cancel("run", by="ana", why="enough")
    shop.clock.advance(30 * DAY)
    store = Moving(shop.place.open(shop.clock))

    async def settle(run_id: RunId) -> None:
        await shop.runs().settle(run_id, "0", Outcome.done("paid"), by="ben", why="saw it")

    store.before_load = settle
    report = await Runs(store, checkpoint_key=KEY).purge(DAY, by="ana", force=True)
    assert (report.removed, report.left) == ([], [])
    assert await shop.ids() == ["run"]


async def test_a_removal_whose_answer_was_lost_is_looked_up(shop: Shop) -> None:
    await shop.work("run")
    report = await Runs(Moving(shop.place.open(shop.clock), is_lost=True), checkpoint_key=KEY).purge(0, by="ana")
    assert ids(report.removed) == ["run"]
    assert await shop.ids() == []


async def test_two_who_purge_at_once_remove_each_run_once(shop: Shop) -> None:
    await shop.work(*(f"run-{n}" for n in range(20)))
    reports = await asyncio.gather(*(shop.runs().purge(0, by=by) for by in ("ana", "ben")))
    assert sorted(ids([*reports[0].removed, *reports[1].removed])) == sorted(f"run-{n}" for n in range(20))
    assert await shop.ids() == []


async def test_a_purge_that_is_left_in_the_middle_is_gone_on_with_by_the_next(shop: Shop) -> None:
    await shop.work(*(f"run-{n}" for n in range(5)))
    async for purged in shop.runs().purge_each(0, by="ana"):
        if purged.run_id == "run-1":
            break
    assert await shop.ids() == ["run-2", "run-3", "run-4"]
    assert ids((await shop.runs().purge(0, by="ana", limit=2)).removed) == ["run-2", "run-3"]
    assert ids((await shop.runs().purge(0, by="ana", limit=2)).removed) == ["run-4"]


async def test_more_runs_than_a_page_go_in_one_purge(shop: Shop) -> None:
    many = PAGE + 1
    worker = shop.worker()
    for n in range(many):
        await worker.run(Script("done"), shop.bench.registry, f"run-{n:03}", clock=shop.clock)
    assert len((await shop.runs().purge(0, by="ana")).removed) == many
    assert await shop.ids() == []


async def test_an_identity_purges_its_own_runs_alone(shop: Shop) -> None:
    for user in ("ana", "eve"):
        await shop.work(f"of {user}", ctx=RunContext(user=user))
    report = await shop.runs(ctx=RunContext(user="ana")).purge(0, by="ana")
    assert (ids(report.removed), report.left) == (["of ana"], [])
    assert await shop.ids() == ["of eve"]


@pytest.mark.parametrize("run_id", ["-x", "a/b", "%", "'; DROP TABLE runs; --", "é" * 512, "*", "x:y"])
async def test_a_run_of_any_name_goes_and_no_other_with_it(shop: Shop, run_id: str) -> None:
    await shop.work(run_id)
    shop.clock.advance(DAY)
    await shop.work(run_id[:-1] + "z", "other")
    assert ids((await shop.runs().purge(DAY, by="ana")).removed) == [run_id]
    assert len(await shop.ids()) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"older_than": -1}, {"older_than": float("nan")}, {"older_than": float("inf")}, {"older_than": True},
        {"older_than": "30d"}, {"older_than": timedelta(days=-1)}, {"status": "running"}, {"status": "corrupt"},
        {"status": "blocked"}, {"status": ()}, {"status": "paused"}, {"status": ("done", "in-doubt")}, {"limit": 0},
        {"limit": True}, {"limit": 1.5}, {"by": ""}, {"by": " "}, {"archive_to": "no such folder"},
    ],
    ids=str,
)  # fmt: skip
async def test_what_cannot_be_meant_is_refused_before_anything_goes(shop: Shop, options: dict[str, Any]) -> None:
    await shop.work("run")
    given = {"older_than": 0, "by": "ana", **options}
    with pytest.raises(InvalidSetting):
        await shop.runs().purge(given.pop("older_than"), **given)
    assert await shop.ids() == ["run"]


def test_a_length_of_time_is_a_number_and_its_unit() -> None:
    assert [parse_duration(text) for text in ("30d", "12h", "90m", "45s", "2w", "0s")] == [
        30 * DAY, 43_200, 5400, 45, 14 * DAY, 0
    ]  # fmt: skip
    for text in (
        "",
        "30",
        "d",
        "-1d",
        "1.5d",
        "1e3d",
        "30 days",
        "30D",
        "1d2h",
        "٣d",
        "999999999999d",
        "nan",
        "1_0d",
        "30d\nx",
    ):
        with pytest.raises(InvalidSetting, match="found"):
            parse_duration(text)


# Archived first.


async def test_each_run_is_archived_before_it_goes(shop: Shop, tmp_path: Path) -> None:
    await shop.work("a/b", "c")
    await shop.doubtful("d")
    report = await shop.runs().purge(0, by="ana", archive_to=tmp_path, status=["done", "in-doubt"], force=True)
    assert ids(report.removed) == ["a/b", "c"]
    assert [each.left for each in report.left] == ["it has not ended, and only what has ended is archived"]
    found = {verify_archive(path, checkpoint_key=KEY).run_id: path for path in archives_in(tmp_path)}
    assert found == {each.run_id: each.archive for each in report.removed}


async def test_a_dry_run_archives_nothing(shop: Shop, tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    folder.mkdir()
    await shop.work("a")
    await shop.runs().purge(0, by="ana", archive_to=folder, dry_run=True)
    assert list(archives_in(folder)) == []


async def test_an_archive_that_an_earlier_purge_left_counts_and_another_file_keeps_the_run(shop: Shop, tmp_path: Path) -> None:
    await shop.work("a", "b", "c")
    await shop.runs().archive("a", tmp_path / archive_name("a"))
    (tmp_path / archive_name("b")).write_bytes(b"garbage")
    await shop.runs().archive("a", tmp_path / archive_name("c"))
    report = await shop.runs().purge(0, by="ana", archive_to=tmp_path)
    assert (ids(report.removed), ids(report.left)) == (["a"], ["b", "c"])
    assert "at line 1: " in report.left[0].left
    assert "is another run, or an earlier state of it" in report.left[1].left
    assert await shop.ids() == ["b", "c"]
