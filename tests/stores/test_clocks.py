"""Clocks that disagree, and hosts in other zones: a live run stays its owner's, and stored times are UTC, on each store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from agent_runtime.clock import SystemClock
from agent_runtime.errors import CheckpointConflict
from tests.bench import Asked, Bench, Place, Script, Worker, error_of

CALL: list[Asked] = [("charge_i", {"amount": 1})]
NEAR = timedelta(minutes=5)


class Wrong(SystemClock):
    """The clock of a host that is so many hours off, with what it says of time that passed."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self._off = timedelta(hours=hours)

    def now(self) -> datetime:
        return super().now() + self._off


@pytest.fixture
def in_bangkok(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Bangkok")
    time.tzset()
    assert time.localtime().tm_gmtoff == 7 * 3600
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_bangkok")
@pytest.mark.parametrize("hours", [1, -1])
async def test_a_host_whose_clock_is_off_takes_no_living_run_and_stored_times_are_utc(every_place: Place, hours: int) -> None:
    bench, model, taken = Bench(), Script(CALL, "done"), list[object]()

    async def look(_: str, __: dict[str, object]) -> None:
        other = Worker(every_place)
        taken.append(await error_of(other.recover(model, bench.registry, clock=Wrong(hours))))

    bench.after = look
    result = await Worker(every_place).run(model, bench.registry)
    assert [type(error) for error in taken] == [CheckpointConflict]
    assert (result.status, bench.effects, model.asked) == ("done", 1, 2)
    store = every_place.open()
    now = await store.now()
    assert now.utcoffset() == timedelta(0)
    [row] = await store.list_runs()
    assert row.epoch == 1
    for moment in (now, *(datetime.fromtimestamp(at / 1000, UTC) for at in (row.created_at, row.updated_at))):
        assert abs(moment - datetime.now(UTC)) < NEAR


@pytest.mark.parametrize("hours", [1, -1])
async def test_an_owner_whose_clock_is_off_keeps_its_run(every_place: Place, hours: int) -> None:
    bench, model, taken = Bench(), Script(CALL, "done"), list[object]()

    async def look(_: str, __: dict[str, object]) -> None:
        taken.append(await error_of(Worker(every_place).recover(model, bench.registry)))

    bench.after = look
    result = await Worker(every_place).run(model, bench.registry, clock=Wrong(hours))
    assert [type(error) for error in taken] == [CheckpointConflict]
    assert (result.status, bench.effects) == ("done", 1)
