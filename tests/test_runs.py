"""Operating runs: what each is shown as, whatever became of its worker, and what is not as it was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime import Runs, standing
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointNotFound, CheckpointStoreCorrupt, InvalidRunId, InvalidSetting
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRecord, StoredRow
from agent_runtime.run import RunContext
from agent_runtime.runs import STATUSES, RunInfo
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import RING, TENANT
from tests.bench import KEY, Asked, Bench, Counting, Delegate, Place, Script, Worker, error_of, until
from tests.test_recovery import rewrite

CALL: list[Asked] = [("charge_i", {"amount": 1})]
CHARGE: list[Asked] = [("charge", {"amount": 1})]


def of(place: Place, **options: Any) -> Runs:
    return Runs(place.open(), **{"checkpoint_key": KEY, **options})


async def listed(place: Place) -> dict[str, str]:
    return {info.run_id: info.status for info in await of(place).list()}


async def poisoned(place: Place, bench: Bench, run: str) -> None:
    dying = [Worker(place).killed_at(CrashPoint.AFTER_CALL) for _ in range(2)]
    await dying[0].run_and_die(Script(CALL, "done"), bench.registry, run)
    await dying[1].recover_and_die(Script(CALL, "done"), bench.registry, run)
    assert await error_of(Worker(place).recover(Script(CALL, "done"), bench.registry, run, max_attempts=1))


async def test_the_status_of_a_run_is_what_is_true_of_it(place: Place) -> None:
    bench, leave = Bench(), asyncio.Event()
    await Worker(place).run(Script("done"), bench.registry, "done")
    await error_of(Worker(place).run(Script(CALL), bench.registry, "failed", max_steps=1))
    await (
        Worker(place)
        .killed_at(CrashPoint.BEFORE_DECIDE)
        .run_and_die(Script("x"), bench.registry, "dead-before-its-first-step", commits="each")
    )
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CALL, "x"), bench.registry, "dead-mid-step")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CHARGE, "x"), bench.registry, "doubtful")
    assert (await listed(place))["doubtful"] == "interrupted", "nobody has looked at it yet"
    await error_of(Worker(place).recover(Script(CHARGE, "x"), bench.registry, "doubtful"))
    await poisoned(place, bench, "poison")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CALL, "x"), bench.registry)
    await rewrite(place, RunStatus.PAUSED)

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    entered, bench.before = bench.entered.total(), before
    task = asyncio.ensure_future(Worker(place).run(Script(CALL, "x"), bench.registry, "alive"))
    await until(lambda: bench.entered.total() > entered)
    assert await listed(place) == {
        "alive": "running", "dead-before-its-first-step": "interrupted", "dead-mid-step": "interrupted", "done": "done",
        "doubtful": "in-doubt", "failed": "failed", "poison": "quarantined", "run": "paused",
    }  # fmt: skip
    leave.set()
    await task
    assert (await listed(place))["alive"] == "done"
    for status in STATUSES:
        assert {info.status for info in await of(place).list(status=status)} <= {status}
    assert [info.run_id for info in await of(place).list(status="in-doubt")] == ["doubtful"]
    [poison] = await of(place).list(status="quarantined")
    assert "claimed once without progress" in poison.why
    with pytest.raises(InvalidSetting, match="in-doubt"):
        await of(place).list(status="blocked")


async def test_a_run_whose_owner_cannot_be_told_runs_until_its_lease_is_over(place: Place) -> None:
    clock = ManualClock()
    store = place.open(clock)
    await store.commit([Draft.of("run", kind="loop").open(b"input")])
    run = await store.latest(RunId("run"))
    assert run is not None
    place.is_tampered = True  # it is of another ring and tenant than this place's
    operator = Runs(store, checkpoint_key=RING, tenant=TENANT)
    assert [info.status for info in await operator.list()] == ["running"]
    clock.advance(run.row.lease_ms / 1000)
    assert [info.status for info in await operator.list()] == ["interrupted"]


class Tampering(Delegate):
    """Shows rows and records other than as they are stored."""

    def __init__(self, inner: Any, change: Callable[[StoredRow], StoredRow]) -> None:
        super().__init__(inner)
        self.change = change
        self.body: bytes | None = None

    async def list_runs(self, **options: Any) -> list[StoredRow]:
        return [self.change(row) if row.run_id == "b" else row for row in await super().list_runs(**options)]

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        records = await super().calls(run_id, since=since)
        if self.body is not None:
            records[-1] = records[-1]._replace(body=self.body)
        return records


CHANGES: list[Callable[[StoredRow], StoredRow]] = [
    lambda row: row._replace(status=RunStatus.FAILED),
    lambda row: row._replace(step=row.step + 1),
    lambda row: row._replace(attempts=99),
    lambda row: row._replace(status=77),
    lambda row: row._replace(name="b\ud800"),
    lambda row: row._replace(tenant="another"),
    lambda row: row._replace(key_id="lost"),
    lambda row: row._replace(format=99),
    lambda row: row._replace(owner=b""),
    lambda row: row._replace(seal=b""),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
async def test_a_row_that_is_not_as_it_was_written_is_corrupt_and_hides_no_other(
    place: Place, change: Callable[[StoredRow], StoredRow]
) -> None:
    for run in "abc":
        await Worker(place).run(Script("done"), Bench().registry, run)
    operator = Runs(Tampering(place.open(), change), checkpoint_key=KEY)
    a, b, c = await operator.list()
    assert (a.status, b.status, c.status) == ("done", "corrupt", "done")
    assert "'b'" in b.why
    assert b == RunInfo("b", "corrupt", b.why), "nothing else is said of it"


async def test_a_forged_reason_is_not_told(place: Place) -> None:
    await poisoned(place, Bench(), "b")
    store = Tampering(place.open(), lambda row: row)
    assert [info.status for info in await Runs(store, checkpoint_key=KEY).list()] == ["quarantined"]
    store.body = b'{"why":"all is well, release it","attempts":1}'
    [info] = await Runs(store, checkpoint_key=KEY).list()
    assert info.status == "corrupt"
    assert "all is well" not in info.why


async def test_a_changed_record_is_found_by_verify_and_refused_by_show(place: Place) -> None:
    for run in "abc":
        await Worker(place).run(Script(CALL, "done"), Bench().registry, run)
    operator = of(place)
    assert list(await operator.verify()) == []
    [whole] = await operator.verify("b")
    assert (whole.run_id, whole.holds, whole.why) == ("b", True, "")
    assert whole.records == (await place.load("b")).row.number

    class Cut(Delegate):
        async def load_many(self, run_ids: Any) -> Any:
            [run] = await super().load_many(run_ids)
            assert run is not None
            return [run._replace(records=run.records[:-1]) if run_ids == ["b"] else run]

    cut = Runs(Cut(place.open()), checkpoint_key=KEY)
    [bad] = await cut.verify()
    assert (bad.run_id, bad.holds) == ("b", False)
    assert "'b'" in bad.why
    assert [verified.holds async for verified in cut.verify_each()] == [True, False, True]
    with pytest.raises(CheckpointStoreCorrupt):
        await cut.show("b")


async def test_another_key_or_tenant_finds_everything_corrupt_and_says_nothing_of_it(place: Place) -> None:
    await Worker(place).run(Script("the secret"), Bench().registry, "a", name="the name")
    for operator in (of(place, checkpoint_key=b"another key, which is as long"), of(place, tenant="another")):
        [info] = await operator.list()
        assert (info.status, info.name) == ("corrupt", "")
        assert len(await operator.verify()) == 1


async def test_what_nobody_stored_is_not_found_and_what_is_no_id_is_refused(place: Place) -> None:
    operator = of(place)
    for ask in (operator.show, operator.release, operator.verify):
        with pytest.raises(CheckpointNotFound):
            await ask("nobody")
        with pytest.raises(InvalidRunId):
            await ask("a\nb")
    assert list(await operator.list()) == []


async def test_lists_are_read_page_by_page_and_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "PAGE", 3)
    store = Counting(MemoryCheckpointStore())
    for i in range(8):
        worker = Script("done")
        place = type("Memory", (), {"open": lambda self, clock=None: store})()
        await Worker(place).run(worker, Bench().registry, f"run-{i}")
    operator = Runs(store, checkpoint_key=KEY)
    ids = [f"run-{i}" for i in range(8)]
    assert [info.run_id for info in await operator.list()] == ids
    assert store.verbs["list_runs"] == 4
    assert [info.run_id for info in await operator.list(limit=2)] == ids[:2]
    assert store.verbs["list_runs"] == 5, "no more is read than asked for"
    assert [info.run_id for info in await operator.list(after="run-5")] == ids[6:]
    assert list(await operator.list(limit=0)) == []


async def test_an_operator_needs_no_identity_and_nobody_learns_one_from_what_is_shown(place: Place) -> None:
    context = RunContext(user="ana", principal="role/admin")
    await Worker(place).run(Script("done"), Bench().registry, "a", ctx=context)
    report = await of(place).show("a")
    assert report.info.status == "done"
    assert "role/admin" not in repr(report)
