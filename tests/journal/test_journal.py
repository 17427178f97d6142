"""One run's journal: what a barrier promises, what stops it, and when records are written."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from agent_runtime.errors import CheckpointStoreCorrupt, Fenced, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Commits, Journal, claim_row, guard_of, new_row
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus, StoredRow
from agent_runtime.journal.seal import open_run, sealer_for
from agent_runtime.journal.store import Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import RING, Asked, Bench, Counting, Place, Script, Worker

OWNER, OTHER = b"an owner, 128 b.", b"another, 128 b.."
LEASE_MS = 3_000


@pytest.fixture
def store() -> Counting:
    return Counting(MemoryCheckpointStore())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def first_row() -> StoredRow:
    sealer = sealer_for(RING, tenant="", run_id="run")
    return new_row(sealer, run_id=RunId("run"), kind="loop", name="n", owner=OWNER, lease_ms=LEASE_MS)


def journal_on(store: Counting, clock: ManualClock, row: StoredRow, guard: Guard | None) -> Journal:
    sealer = sealer_for(RING, tenant="", run_id="run")
    return Journal(group_commit(store, clock), sealer, clock=clock, row=row, guard=guard, mode=Commits.GROUPED)


def opened(store: Counting, clock: ManualClock) -> Journal:
    journal = journal_on(store, clock, first_row(), None)
    journal.note(RecordKind.OPENED, body=b"input")
    journal.note(RecordKind.CLAIMED, body=b"who")
    return journal


async def stored_row(store: Counting) -> StoredRow:
    [run] = await store.inner.load_many([RunId("run")])
    assert run is not None
    open_run(RING, run, tenant="")
    return run.row


async def claimed(store: Counting, clock: ManualClock, *, owner: bytes = OTHER, even_if_alive: bool = True) -> Journal:
    """The journal of another owner, who claims what is stored now."""
    row = await stored_row(store)
    guard = guard_of(row, even_if_alive=even_if_alive)
    journal = journal_on(store, clock, claim_row(row, owner=owner, lease_ms=LEASE_MS), guard)
    journal.note(RecordKind.CLAIMED, body=b"who else")
    return journal


# What a barrier promises.


async def test_noting_is_not_writing_and_a_barrier_is(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    await asyncio.sleep(0)
    assert store.appends == []
    await journal.barrier()
    assert [record.number for record in store.appends[0].records] == [1, 2]
    assert journal.guard == Guard(1, OWNER, 2, store.appends[0].records[1].seal)


async def test_a_barrier_with_nothing_before_it_writes_nothing(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    await journal.barrier()
    await journal.barrier()
    assert store.verbs["commit"] == 1


async def test_all_who_stand_at_a_barrier_in_one_turn_share_its_write(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    await journal.barrier()

    async def one(call: str) -> None:
        journal.note(RecordKind.STARTED, call, 1)
        await journal.barrier()

    await asyncio.gather(*(one(f"0.{at}") for at in range(8)))
    assert [len(append.records) for append in store.appends] == [2, 8]


async def test_what_is_noted_after_a_barrier_was_begun_waits_for_the_next_but_the_waiter_does_not(
    store: Counting, clock: ManualClock
) -> None:
    journal = opened(store, clock)
    waiting = asyncio.ensure_future(journal.barrier())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    journal.note(RecordKind.STARTED, "0", 1)
    await waiting
    assert journal.number == 3
    await journal.barrier()
    assert (await stored_row(store)).number == 3


async def test_the_chain_verifies_after_every_write(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    await journal.barrier()
    kept = 0
    for at in range(20):
        journal.note(RecordKind.STARTED, str(at), 1, b"x" * at)
        if at % 3 == 0:
            journal.move_to_next_step()
            journal.keep_state(b"%d" % at)
            kept += 1
        await journal.barrier()
        assert (await stored_row(store)).number == at + 3 + kept


async def test_a_step_is_taken_once_for_each_commit_however_often_it_is_asked_for(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    await journal.barrier()
    for expected in (1, 2):
        journal.note(RecordKind.STARTED, f"{expected}/model", 1)
        journal.move_to_next_step()
        journal.move_to_next_step()
        await journal.barrier()
        assert (await stored_row(store)).step == expected


@pytest.mark.parametrize("kind", [RecordKind.DONE, RecordKind.SETTLED, RecordKind.VERDICT])
async def test_progress_sets_the_count_of_claims_back(store: Counting, clock: ManualClock, kind: RecordKind) -> None:
    await opened(store, clock).barrier()
    journal = await claimed(store, clock)
    await journal.barrier()
    assert (await stored_row(store)).attempts == 1
    journal.note(RecordKind.STARTED, "0", 1)
    await journal.barrier()
    assert (await stored_row(store)).attempts == 1
    journal.note(kind, "0", 1)
    await journal.barrier()
    assert (await stored_row(store)).attempts == 0


async def test_a_run_given_back_has_no_owner_and_takes_no_more_notes(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    journal.give_back()
    await journal.barrier()
    assert (await stored_row(store)).owner == NO_OWNER
    with pytest.raises(AssertionError):
        journal.note(RecordKind.DONE, "0", 1)


async def test_a_status_moves_as_the_table_allows(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    journal.set_status(RunStatus.BLOCKED, wake_at=77)
    await journal.barrier()
    row = await stored_row(store)
    assert (row.status, row.wake_at) == (RunStatus.BLOCKED, 77)
    with pytest.raises(AssertionError):
        journal.set_status(RunStatus.DONE)


# What stops it.


async def test_a_claimed_run_fences_the_owner_before(store: Counting, clock: ManualClock) -> None:
    first = opened(store, clock)
    await first.barrier()
    await (await claimed(store, clock)).barrier()
    first.note(RecordKind.STARTED, "0", 1)
    with pytest.raises(Fenced):
        await first.barrier()
    with pytest.raises(Fenced):
        first.note(RecordKind.DONE, "0", 1)
    with pytest.raises(Fenced):
        await first.barrier()
    assert (await stored_row(store)).number == 3


async def test_a_claim_that_loses_a_race_is_fenced_and_no_alarm(store: Counting, clock: ManualClock) -> None:
    await opened(store, clock).barrier()
    one, two = await claimed(store, clock), await claimed(store, clock, owner=b"a third, 128 b..")
    await one.barrier()
    with pytest.raises(Fenced):
        await two.barrier()
    assert (await stored_row(store)).epoch == 2


async def test_a_claim_of_a_run_that_its_owner_wrote_on_meanwhile_is_no_alarm(store: Counting, clock: ManualClock) -> None:
    first = opened(store, clock)
    await first.barrier()
    late = await claimed(store, clock)
    first.note(RecordKind.STARTED, "0", 1)
    await first.barrier()
    with pytest.raises(Fenced, match="claimed by another owner first"):
        await late.barrier()


async def test_a_claim_of_a_run_whose_owner_was_heard_since_is_fenced_unless_it_takes_over(
    store: Counting, clock: ManualClock
) -> None:
    first = opened(store, clock)
    await first.barrier()
    patient, bold = await claimed(store, clock, even_if_alive=False), await claimed(store, clock)
    assert first.guard is not None
    await store.renew(RunId("run"), guard=first.guard)
    with pytest.raises(Fenced):
        await patient.barrier()
    await bold.barrier()


async def test_a_run_that_moved_under_its_owner_is_an_alarm(store: Counting, clock: ManualClock) -> None:
    first = opened(store, clock)
    await first.barrier()
    copy = journal_on(store, clock, (await stored_row(store))._replace(step=1), first.guard)
    copy.note(RecordKind.STARTED, "0", 1, b"of a copied process")
    await copy.barrier()
    first.note(RecordKind.STARTED, "0", 1, b"mine")
    with pytest.raises(CheckpointStoreCorrupt, match="moved under its owner"):
        await first.barrier()


async def test_the_first_failure_is_the_one_that_everybody_gets(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    waiting = asyncio.ensure_future(journal.barrier())
    await asyncio.sleep(0)
    journal.fail(StoreUnavailable("first"))
    journal.fail(Fenced("second"))
    with pytest.raises(StoreUnavailable, match="first"):
        await waiting
    with pytest.raises(StoreUnavailable, match="first"):
        await journal.barrier()
    with pytest.raises(StoreUnavailable, match="first"):
        journal.note(RecordKind.DONE, "0", 1)


async def test_a_failure_told_from_a_thread_stops_it_and_one_told_too_late_is_nothing(
    store: Counting, clock: ManualClock
) -> None:
    journal = opened(store, clock)
    await journal.barrier()
    thread = threading.Thread(target=journal.fail_from_thread, args=(Fenced("taken over"),))
    thread.start()
    thread.join()
    await asyncio.sleep(0)
    with pytest.raises(Fenced):
        journal.note(RecordKind.DONE, "0", 1)


async def test_trust_follows_every_sign_of_life_and_never_goes_back(store: Counting, clock: ManualClock) -> None:
    journal = opened(store, clock)
    await journal.barrier()
    assert journal.trusted_until == pytest.approx(clock.monotonic() + 2.0)
    clock.advance(1.5)
    journal.note(RecordKind.STARTED, "0", 1)
    await journal.barrier()
    assert journal.trusted_until == pytest.approx(3.5)
    journal.heard(0.0, 4)
    assert journal.trusted_until == pytest.approx(3.5)
    journal.heard(2.0, 3)
    assert journal.trusted_until == pytest.approx(4.0)
    assert journal.posted == 4


FORKED = """
import asyncio, os, sys
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import Fenced
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Commits, Journal, new_row
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.stores.memory import MemoryCheckpointStore

async def main():
    sealer = sealer_for(KeyRing.of(bytes(16)), tenant="", run_id="run")
    row = new_row(sealer, run_id=RunId("run"), kind="loop", name="", owner=bytes(range(16)), lease_ms=1000)
    store = MemoryCheckpointStore()
    commits = group_commit(store, SYSTEM_CLOCK)
    journal = Journal(commits, sealer, clock=SYSTEM_CLOCK, row=row, guard=None, mode=Commits.GROUPED)
    journal.note(RecordKind.OPENED)
    await journal.barrier()
    child = os.fork()
    if child == 0:
        try:
            journal.note(RecordKind.CLAIMED)
            await journal.barrier()
        except Fenced:
            os._exit(42)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    journal.note(RecordKind.CLAIMED)
    await journal.barrier()
    sys.exit(os.waitstatus_to_exitcode(status))

asyncio.run(main())
"""


FORKED_LATER = FORKED.replace(
    "    child = os.fork()",
    "    journal.note(RecordKind.CLAIMED)\n    waiting = journal.stand(is_alone=False)\n    child = os.fork()",
).replace("            await journal.barrier()\n        except", "            await waiting\n        except")


@pytest.mark.parametrize("program", [FORKED, FORKED_LATER], ids=["before its barrier", "at its barrier"])
def test_a_copy_of_the_process_made_by_fork_is_no_owner_and_the_process_itself_still_is(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (42, "")


# When records are written.


async def commits_of_a_run(place: Place, commits: str, *steps: list[Asked]) -> list[list[int]]:
    """The kinds of the records in each commit of a run."""
    counting = Counting(place.open())
    worker = Worker(place)
    worker.inner = counting
    await worker.run(Script(*steps, "done"), Bench().registry, commits=commits)
    return [[record.kind for record in append.records] for append in counting.appends]


async def test_each_mode_writes_every_record_by_itself(place: Place) -> None:
    call: list[Asked] = [("charge_i", {"amount": 1})]
    commits = await commits_of_a_run(place, "each", call, call)
    asked = [[RecordKind.STARTED], [RecordKind.DONE]]
    assert [kinds for kinds in commits if kinds[0] not in (RecordKind.OPENED, RecordKind.ENDED)] == asked * 5
    assert commits[-1] == [RecordKind.ENDED]


async def test_grouped_mode_writes_twice_a_step_whatever_the_number_of_calls_that_end_together(place: Place) -> None:
    call: list[Asked] = [("charge_i", {"amount": 1})]
    commits = await commits_of_a_run(place, "grouped", *[call] * 4)
    reply_and_intent, result_and_next = [RecordKind.DONE, RecordKind.STARTED], [RecordKind.DONE, RecordKind.STARTED]
    assert commits[1:-1] == [reply_and_intent, result_and_next] * 4
    assert commits[0] == [RecordKind.OPENED, RecordKind.CLAIMED, RecordKind.STARTED]
    assert commits[-1] == [RecordKind.DONE, RecordKind.ENDED]
