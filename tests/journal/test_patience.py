"""How long a write that failed for certain is tried again: a store that is away for a while ends no run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from agent_runtime.errors import ReadOnlyStore, StoreRefused, StoreUnavailable
from agent_runtime.journal.commits import DEFINITE_TRIES, LONGEST_PAUSE_SECONDS
from agent_runtime.journal.journal import Journal
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.store import Append
from agent_runtime.testing.manual_clock import ManualClock
from tests.journal.test_commits import UNKNOWN, Ledger, count, opened

AWAY = StoreUnavailable("the server is starting up")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


async def at_work(ledger: Ledger, clock: ManualClock) -> Journal:
    """A run that is open, with a record to write."""
    journal = opened(ledger, clock, "run")
    await journal.barrier()
    journal.note(RecordKind.CLAIMED)
    return journal


def away_for(clock: ManualClock, seconds: float, said: object = AWAY) -> Callable[[Sequence[Append]], object]:
    """What a commit comes to while the store is away for so long from now."""
    until = clock.monotonic() + seconds
    return lambda appends: said if clock.monotonic() < until else None


@pytest.mark.parametrize("seconds", [0.1, 2.0, 10.0, 18.0])
async def test_a_store_that_is_away_for_less_than_the_trust_in_the_lease_ends_no_run(
    ledger: Ledger, clock: ManualClock, seconds: float
) -> None:
    journal = await at_work(ledger, clock)
    assert seconds < journal.trust_seconds
    ledger.plan = [away_for(clock, seconds)] * 100
    began = clock.monotonic()
    await journal.barrier()
    assert seconds <= clock.monotonic() - began <= seconds + LONGEST_PAUSE_SECONDS + 0.001
    assert await count(ledger, "run") == 2


async def test_it_is_asked_again_later_each_time_and_never_at_longer_distances_than_a_second(
    ledger: Ledger, clock: ManualClock
) -> None:
    journal = await at_work(ledger, clock)
    asked: list[float] = []

    def refuse(appends: Sequence[Append]) -> object:
        asked.append(clock.monotonic())
        return AWAY if len(asked) < 12 else None

    ledger.plan = [refuse] * 12
    await journal.barrier()
    pauses = [round(after - before, 3) for before, after in pairwise(asked)]
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0, 1.0]


async def test_before_the_trust_in_the_lease_ends_the_run_stops_with_what_the_store_said(
    ledger: Ledger, clock: ManualClock
) -> None:
    journal = await at_work(ledger, clock)
    ledger.plan = [away_for(clock, 1_000)] * 100
    trusted_until = journal.trusted_until
    with pytest.raises(StoreUnavailable, match="starting up"):
        await journal.barrier()
    assert trusted_until - LONGEST_PAUSE_SECONDS <= clock.monotonic() < trusted_until


async def test_a_heart_that_goes_on_beating_does_not_make_a_write_that_can_never_land_wait_for_ever(
    ledger: Ledger, clock: ManualClock
) -> None:
    journal = await at_work(ledger, clock)

    def refuse(appends: Sequence[Append]) -> object:
        journal.heard(clock.monotonic(), 0)
        return AWAY

    ledger.plan = [refuse] * 1_000
    trusted_until = journal.trusted_until
    with pytest.raises(StoreUnavailable):
        await journal.barrier()
    assert clock.monotonic() < trusted_until


async def test_a_write_that_becomes_unknown_on_the_way_is_settled(ledger: Ledger, clock: ManualClock) -> None:
    journal = await at_work(ledger, clock)
    ledger.says(AWAY)
    ledger.lands_first(UNKNOWN)
    await journal.barrier()
    journal.note(RecordKind.STARTED, "0/model", 1)
    await journal.barrier()
    assert await count(ledger, "run") == 3


@pytest.mark.parametrize(
    "refused", [ReadOnlyStore("read only"), StoreRefused("no permission")], ids=lambda e: type(e).__name__
)
async def test_what_somebody_has_to_change_first_is_said_at_once(
    ledger: Ledger, clock: ManualClock, refused: StoreRefused
) -> None:
    journal = await at_work(ledger, clock)
    ledger.plan = [away_for(clock, 1_000, refused)] * 100
    began, sent = clock.monotonic(), len(ledger.batches)
    with pytest.raises(type(refused)):
        await journal.barrier()
    assert (clock.monotonic() - began, len(ledger.batches) - sent) == (0, 1)


async def test_a_run_that_was_never_written_says_soon_that_it_cannot_be_begun(ledger: Ledger, clock: ManualClock) -> None:
    journal = opened(ledger, clock, "run")
    ledger.plan = [away_for(clock, 1_000)] * 100
    with pytest.raises(StoreUnavailable):
        await journal.barrier()
    assert len(ledger.batches) == DEFINITE_TRIES
    assert clock.monotonic() < 1
