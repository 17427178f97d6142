"""Group commit: who shares a write, who is hurt by a failure, and how a write whose fate is unknown is settled."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest

from agent_runtime.clock import Clock
from agent_runtime.errors import AgentRuntimeError, Fenced, ReadOnlyStore, StoreRefused, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import DEFINITE_TRIES, MAX_BATCH, WORTH_SHARING, GroupCommit, Landing, group_commit, judge
from agent_runtime.journal.journal import Commits, Journal, new_row
from agent_runtime.journal.records import NO_OWNER, RecordKind, StoredRow, StoredRun
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import RING, Delegate, Killed, until

OK, UNKNOWN = Answer(AnswerKind.OK), Answer(AnswerKind.UNKNOWN)
OWNER = b"an owner, 128 b."
LEASE_MS = 30_000


class Ledger(Delegate):
    """A store whose commits do as a test says, first come first served; afterwards they are what they are."""

    def __init__(self) -> None:
        super().__init__(MemoryCheckpointStore())
        self.batches: list[list[str]] = []
        self.plan: list[Callable[[Sequence[Append]], object]] = []
        self.looks = 0
        self.away = 0
        """How many looks at a row fail from now on."""
        self.gate: asyncio.Event | None = None

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self.batches.append([append.row.run_id for append in appends])
        if self.gate is not None:
            await self.gate.wait()
        if self.plan:
            told = self.plan.pop(0)(appends)
            if isinstance(told, BaseException):
                raise told
            if told is not None:
                assert isinstance(told, list)
                return told
        return await self.inner.commit(appends)

    async def latest(self, run_id: RunId) -> StoredRun | None:
        self.looks += 1
        if self.away:
            self.away -= 1
            raise ConnectionError("away")
        return await self.inner.latest(run_id)

    def lands_first(self, then: object) -> None:
        """The next commit lands, and its answer is lost like that."""
        self.plan.append(lambda appends: self._land(appends, then))

    def says(self, what: object) -> None:
        """The next commit does not land, and this is what comes of it."""
        self.plan.append(lambda appends: [what] * len(appends) if isinstance(what, Answer) else what)

    def _land(self, appends: Sequence[Append], then: object) -> object:
        inner = self.inner
        assert isinstance(inner, MemoryCheckpointStore)
        with inner._lock:  # a commit of the double's own, at the very moment that the answer is lost
            for append in appends:
                inner._append_one(append)
        return [then] * len(appends) if isinstance(then, Answer) else then


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(auto=True)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def opened(store: CheckpointStore, clock: Clock, run_id: str, commits: GroupCommit | None = None) -> Journal:
    """The journal of a new run, with its first record noted."""
    sealer = sealer_for(RING, tenant="", run_id=run_id)
    row = new_row(sealer, run_id=RunId(run_id), kind="loop", name="", owner=OWNER, lease_ms=LEASE_MS)
    group = commits or group_commit(store, clock)
    journal = Journal(group, sealer, clock=clock, row=row, guard=None, mode=Commits.GROUPED)
    journal.note(RecordKind.OPENED)
    return journal


async def count(store: CheckpointStore, run_id: str) -> int:
    return len(await store.calls(RunId(run_id)))


# What a row says about an append whose answer was lost.

WISHED = StoredRow(RunId("run"), 1, "key", "", "loop", "", 1, 4, 2, OWNER, 7, b"h7" * 16, 0, b"")
BEFORE = WISHED._replace(number=5, head=b"h5" * 16, step=3)
GUARD = Guard(2, OWNER, 5, b"h5" * 16)


@pytest.mark.parametrize(
    ("stored", "guard", "landing"),
    [
        (WISHED, GUARD, Landing.LANDED),
        (WISHED, None, Landing.LANDED),
        (BEFORE, GUARD, Landing.ABSENT),
        (None, None, Landing.ABSENT),
        (None, GUARD, Landing.ANOTHERS),
        (BEFORE, None, Landing.ANOTHERS),
        (BEFORE._replace(epoch=3, owner=b"x" * 16), GUARD, Landing.ANOTHERS),
        (WISHED._replace(epoch=3), GUARD, Landing.ANOTHERS),
        (WISHED._replace(epoch=3, number=8, head=b"h8" * 16, owner=b"x" * 16), GUARD, Landing.ANOTHERS),
        (BEFORE._replace(owner=NO_OWNER), GUARD, Landing.ANOTHERS),
        (BEFORE._replace(head=b"hx" * 16), GUARD, Landing.FORKED),
        (BEFORE._replace(number=6), GUARD, Landing.FORKED),
        (WISHED._replace(head=b"hx" * 16), GUARD, Landing.FORKED),
        (WISHED._replace(number=8, head=b"h8" * 16), GUARD, Landing.FORKED),
        (BEFORE._replace(heartbeat_at=10), GUARD._replace(heartbeat_at=10), Landing.ABSENT),
        (BEFORE._replace(heartbeat_at=11), GUARD._replace(heartbeat_at=10), Landing.ANOTHERS),
    ],
)
def test_a_row_says_what_became_of_an_append(stored: StoredRow | None, guard: Guard | None, landing: Landing) -> None:
    assert judge(stored, Append(WISHED, guard, ())) is landing


# Who shares a write.


async def test_runs_that_write_in_one_turn_of_the_loop_share_one_commit(ledger: Ledger, clock: ManualClock) -> None:
    journals = [opened(ledger, clock, f"run-{at}") for at in range(5)]
    await asyncio.gather(*(journal.barrier() for journal in journals))
    assert ledger.batches == [[f"run-{at}" for at in range(5)]]
    assert [await count(ledger, f"run-{at}") for at in range(5)] == [1] * 5


async def test_what_comes_while_a_commit_is_in_flight_goes_together_with_the_next(ledger: Ledger, clock: ManualClock) -> None:
    ledger.gate = asyncio.Event()
    first, second, third = (opened(ledger, clock, name) for name in ("a", "b", "c"))
    waiting = [asyncio.ensure_future(first.barrier())]
    await until(lambda: len(ledger.batches) == 1)
    waiting += [asyncio.ensure_future(second.barrier()), asyncio.ensure_future(third.barrier())]
    first.note(RecordKind.CLAIMED)
    waiting.append(asyncio.ensure_future(first.barrier()))
    await asyncio.sleep(0)
    assert ledger.batches == [["a"]]
    ledger.gate.set()
    await asyncio.gather(*waiting)
    assert [sorted(batch) for batch in ledger.batches] == [["a"], ["a", "b", "c"]]
    assert await count(ledger, "a") == 2


async def test_a_batch_has_a_greatest_size(ledger: Ledger, clock: ManualClock) -> None:
    journals = [opened(ledger, clock, f"run-{at}") for at in range(MAX_BATCH + 3)]
    await asyncio.gather(*(journal.barrier() for journal in journals))
    sizes = [len(batch) for batch in ledger.batches]
    assert max(sizes) <= MAX_BATCH
    assert (sum(sizes), len(sizes)) == (MAX_BATCH + 3, 2)


class Lanes(Ledger):
    """A store that takes two batches at a time, and notes which it held together."""

    lanes = 2

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[list[str]] = []
        self.together: list[list[list[str]]] = []
        self.gate = asyncio.Event()

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        batch: list[str] = [append.row.run_id for append in appends]
        self.inside.append(batch)
        self.together.append(list(self.inside))
        try:
            return await super().commit(appends)
        finally:
            self.inside.remove(batch)


@pytest.mark.parametrize(("runs", "shares"), [(3, [3]), (2 * WORTH_SHARING, [WORTH_SHARING, WORTH_SHARING])])
async def test_a_store_with_lanes_gets_what_is_worth_sharing_in_as_many_batches(
    clock: ManualClock, runs: int, shares: list[int]
) -> None:
    store = Lanes()
    journals = [opened(store, clock, f"r{i:03}") for i in range(runs)]
    barriers = [asyncio.ensure_future(journal.barrier()) for journal in journals]
    await until(lambda: len(store.inside) == len(shares))
    assert [len(batch) for batch in store.inside] == shares
    assert store.gate is not None
    store.gate.set()
    await asyncio.gather(*barriers)
    assert sorted(run for batch in store.batches for run in batch) == sorted(journal.run_id for journal in journals)


async def test_while_one_lane_is_busy_the_other_carries_what_comes_and_no_run_is_in_both(clock: ManualClock) -> None:
    store = Lanes()
    first, second, third = (opened(store, clock, run_id) for run_id in ("a", "b", "c"))
    barriers = [asyncio.ensure_future(first.barrier())]
    await until(lambda: store.inside == [["a"]])
    first.note(RecordKind.CLAIMED)
    barriers += [asyncio.ensure_future(journal.barrier()) for journal in (first, second)]
    await until(lambda: store.inside == [["a"], ["b"]])
    barriers.append(asyncio.ensure_future(third.barrier()))
    assert store.gate is not None
    store.gate.set()
    await asyncio.gather(*barriers)
    assert all(len({run for batch in held for run in batch}) == sum(map(len, held)) for held in store.together)
    assert max(map(len, store.together)) == 2
    assert [await count(store, run_id) for run_id in ("a", "b", "c")] == [2, 1, 1]


async def test_one_group_commit_serves_all_runs_of_a_store_on_a_loop(ledger: Ledger, clock: ManualClock) -> None:
    assert group_commit(ledger, clock) is group_commit(ledger, clock)
    assert group_commit(ledger, clock) is not group_commit(Ledger(), clock)


async def test_a_store_that_nobody_works_with_any_more_is_let_go_of(clock: ManualClock) -> None:
    store = Ledger()
    await opened(store, clock, "run").barrier()
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


# Who is hurt by a failure.


async def test_a_batch_that_failed_for_certain_is_sent_again_run_by_run(ledger: Ledger, clock: ManualClock) -> None:
    ledger.says(StoreUnavailable("not now"))
    journals = [opened(ledger, clock, name) for name in ("a", "b", "c")]
    await asyncio.gather(*(journal.barrier() for journal in journals))
    assert ledger.batches == [["a", "b", "c"], ["a"], ["b"], ["c"]]


@pytest.mark.parametrize(("kind", "tries"), [(StoreUnavailable, DEFINITE_TRIES), (StoreRefused, 1)])
async def test_one_bad_run_hurts_no_other(
    ledger: Ledger, clock: ManualClock, kind: type[AgentRuntimeError], tries: int
) -> None:
    def refuse_b(appends: Sequence[Append]) -> object:
        return kind("b cannot be written") if any(append.row.run_id == "b" for append in appends) else None

    ledger.plan = [refuse_b] * 20
    journals = [opened(ledger, clock, name) for name in ("a", "b", "c")]
    endings = await asyncio.gather(*(journal.barrier() for journal in journals), return_exceptions=True)
    assert [type(ending) for ending in endings] == [type(None), kind, type(None)]
    assert ledger.batches.count(["b"]) == tries
    with pytest.raises(kind):
        await journals[1].barrier()
    assert [await count(ledger, name) for name in ("a", "b", "c")] == [1, 0, 1]


async def test_a_store_that_may_not_be_written_is_not_asked_again(ledger: Ledger, clock: ManualClock) -> None:
    ledger.says(ReadOnlyStore("read only"))
    with pytest.raises(ReadOnlyStore):
        await opened(ledger, clock, "run").barrier()
    assert len(ledger.batches) == 1


async def test_a_lone_run_tries_a_bounded_number_of_times_and_waits_longer_each_time(
    ledger: Ledger, clock: ManualClock
) -> None:
    for _ in range(DEFINITE_TRIES - 1):
        ledger.says(StoreUnavailable("not now"))
    began = clock.monotonic()
    await opened(ledger, clock, "run").barrier()
    assert len(ledger.batches) == DEFINITE_TRIES
    assert clock.monotonic() - began == pytest.approx(0.02 + 0.04 + 0.08)
    assert await count(ledger, "run") == 1


async def test_a_signal_out_of_the_store_reaches_every_run_of_the_batch(ledger: Ledger, clock: ManualClock) -> None:
    ledger.says(Killed("the process ends"))
    journals = [opened(ledger, clock, name) for name in ("a", "b")]
    endings = await asyncio.gather(*(journal.barrier() for journal in journals), return_exceptions=True)
    assert [type(ending) for ending in endings] == [Killed, Killed]


async def test_a_signal_in_the_middle_of_a_batch_sent_singly_reaches_its_run_and_hurts_no_other(
    ledger: Ledger, clock: ManualClock
) -> None:
    ledger.says(StoreUnavailable("not now"))
    ledger.says(Killed("the process ends"))
    journals = [opened(ledger, clock, name) for name in ("a", "b")]
    async with asyncio.timeout(5):
        endings = await asyncio.gather(*(journal.barrier() for journal in journals), return_exceptions=True)
    assert [type(ending) for ending in endings] == [Killed, type(None)]


async def test_a_run_whose_write_is_being_settled_does_not_hold_up_the_rest_of_its_batch(ledger: Ledger) -> None:
    clock = ManualClock()
    ledger.says(StoreUnavailable("not now"))
    ledger.says(UNKNOWN)
    ledger.says(None)
    ledger.away = 1
    slow, quick = (opened(ledger, clock, name) for name in ("slow", "quick"))
    waiting = asyncio.ensure_future(slow.barrier())
    await asyncio.ensure_future(quick.barrier())
    await until(lambda: clock.sleepers == 1)
    assert not waiting.done()
    clock.advance(1)
    await waiting
    assert [await count(ledger, name) for name in ("slow", "quick")] == [1, 1]


@pytest.mark.parametrize("answers", [[], [OK], [OK, OK, OK], [Answer(AnswerKind.OK, None), OK], None])  # type: ignore[arg-type]  # a store's mistake
async def test_a_store_that_breaks_the_form_of_its_answers_leaves_no_run_waiting(
    ledger: Ledger, clock: ManualClock, answers: list[Answer] | None
) -> None:
    ledger.lands_first(UNKNOWN)
    first = ledger.plan.pop()

    def broken(appends: Sequence[Append]) -> object:
        first(appends)
        return answers if answers is not None else "no list"

    ledger.plan.append(lambda appends: list(broken(appends)))  # type: ignore[call-overload]  # a store's mistake
    journals = [opened(ledger, clock, name) for name in ("a", "b")]
    async with asyncio.timeout(5):
        await asyncio.gather(*(journal.barrier() for journal in journals))
    assert [await count(ledger, name) for name in ("a", "b")] == [1, 1]


# A write whose fate is unknown.


@pytest.mark.parametrize("lost", [UNKNOWN, ConnectionError("lost"), TimeoutError(), RuntimeError("a store's own")])
@pytest.mark.parametrize("landed", [True, False])
async def test_an_unknown_write_is_settled_by_a_read_and_lands_once(
    ledger: Ledger, clock: ManualClock, lost: object, landed: bool
) -> None:
    (ledger.lands_first if landed else ledger.says)(lost)
    journal = opened(ledger, clock, "run")
    await journal.barrier()
    journal.note(RecordKind.CLAIMED)
    await journal.barrier()
    assert ledger.looks == 1
    assert len(ledger.batches) == (2 if landed else 3)
    assert await count(ledger, "run") == 2


async def test_the_identical_append_is_sent_again_whatever_was_noted_since(ledger: Ledger, clock: ManualClock) -> None:
    sent: list[Append] = []
    journal = opened(ledger, clock, "run")

    def lose(appends: Sequence[Append]) -> object:
        journal.note(RecordKind.CLAIMED)
        return keep(appends) or [UNKNOWN]

    def keep(appends: Sequence[Append]) -> object:
        sent.extend(appends)
        return None

    ledger.plan = [lose, keep]
    await journal.barrier()
    assert sent[0] == sent[1]
    await journal.barrier()
    assert await count(ledger, "run") == 2


async def test_a_first_send_that_lands_after_the_second_is_no_alarm(ledger: Ledger, clock: ManualClock) -> None:
    journal = opened(ledger, clock, "run")
    await journal.barrier()
    ledger.says(UNKNOWN)
    ledger.lands_first(Answer(AnswerKind.MOVED))
    journal.note(RecordKind.CLAIMED)
    await journal.barrier()
    assert await count(ledger, "run") == 2


async def test_a_row_that_became_anothers_fences_even_if_my_records_are_there(ledger: Ledger, clock: ManualClock) -> None:
    journal = opened(ledger, clock, "run")
    await journal.barrier()

    def taken_over(appends: Sequence[Append]) -> object:
        ledger._land(appends, None)
        inner = ledger.inner
        assert isinstance(inner, MemoryCheckpointStore)
        run = inner._runs[RunId("run")]
        run.row = run.row._replace(epoch=2, owner=b"x" * 16)
        return [UNKNOWN]

    ledger.plan.append(taken_over)
    journal.note(RecordKind.CLAIMED)
    with pytest.raises(Fenced):
        await journal.barrier()
    assert await count(ledger, "run") == 2


async def test_while_one_write_is_settled_other_runs_go_on(ledger: Ledger) -> None:
    clock = ManualClock()
    ledger.says(UNKNOWN)
    ledger.says(ConnectionError("still away"))
    slow = opened(ledger, clock, "slow")
    waiting = asyncio.ensure_future(slow.barrier())
    await until(lambda: clock.sleepers == 1)
    await opened(ledger, clock, "quick").barrier()
    assert not waiting.done()
    clock.advance(1)
    await waiting
    assert [await count(ledger, name) for name in ("slow", "quick")] == [1, 1]


async def test_a_waiter_that_is_cancelled_stops_no_write(ledger: Ledger, clock: ManualClock) -> None:
    ledger.gate = asyncio.Event()
    journal = opened(ledger, clock, "run")
    waiting = asyncio.ensure_future(journal.barrier())
    await until(lambda: len(ledger.batches) == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    journal.note(RecordKind.CLAIMED)
    ledger.gate.set()
    await journal.barrier()
    assert await count(ledger, "run") == 2


async def test_a_waiter_cancelled_while_its_write_is_settled_leaves_it_settled(ledger: Ledger) -> None:
    clock = ManualClock()
    ledger.lands_first(UNKNOWN)
    ledger.away = 1
    journal = opened(ledger, clock, "run")
    waiting = asyncio.ensure_future(journal.barrier())
    await until(lambda: clock.sleepers == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    clock.advance(1)
    journal.note(RecordKind.CLAIMED)
    await journal.barrier()
    assert await count(ledger, "run") == 2
    assert journal.guard is not None
    assert journal.guard.number == 2


async def test_past_its_trust_a_run_is_told_that_the_store_is_away_and_nothing_is_sent_again(
    ledger: Ledger, clock: ManualClock
) -> None:
    ledger.away = 1_000
    ledger.says(UNKNOWN)
    journal = opened(ledger, clock, "run")
    began = clock.monotonic()
    with pytest.raises(StoreUnavailable, match="whether a write landed"):
        await journal.barrier()
    assert journal.trust_seconds - 1.1 <= clock.monotonic() - began <= journal.trust_seconds + 1.1
    assert len(ledger.batches) == 1
    assert 5 < ledger.looks < 50
    with pytest.raises(StoreUnavailable):
        journal.note(RecordKind.CLAIMED)
