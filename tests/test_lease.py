"""Who is alive, for how long a run is held, and the heartbeat that says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.errors import CheckpointConflict, Fenced, RecoveryNeedsDecision, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Commits, Journal, claim_row, guard_of, new_row
from agent_runtime.journal.records import NO_OWNER, RecordKind, StoredRow
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import Answer, Append, CheckpointStore, Guard
from agent_runtime.lease import (
    LIVE_OWNERS,
    MARK_WINDOW,
    Heartbeat,
    ProcessMark,
    claimed_body,
    find_mark,
    heartbeat,
    is_dead,
    own_mark,
    seconds_held,
)
from agent_runtime.offload import SYSTEM_OFFLOAD
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import RING, Bench, Delegate, NoHeartbeat, Place, Script, Worker, error_of, until

OWNER = b"an owner, 128 b."
ME = ProcessMark("host/1", "boot-1", "pid:[1]", 100, "5000")


# Who is dead for certain.


@pytest.mark.parametrize(
    ("change", "dead"),
    [
        ({"boot": "boot-0"}, True),
        ({"boot": "boot-0", "host": "host/2"}, False),
        ({"boot": ""}, False),
        ({"namespace": "pid:[2]"}, False),
        ({"namespace": ""}, False),
        ({"pid": 2**22 - 1}, True),
        ({"pid": 1, "born": "not when it was"}, True),
    ],
    ids=str,
)
def test_an_owner_is_dead_only_where_this_host_can_tell(change: dict[str, Any], dead: bool) -> None:
    me = own_mark()
    if not me.boot:
        pytest.fail("these tests need /proc")
    named = {"boot-0": "another-boot", "pid:[2]": "pid:[1]", "host/2": "elsewhere"}
    changes: dict[str, Any] = {name: named.get(str(value), value) for name, value in change.items()}
    assert is_dead(me._replace(**changes), OWNER) is dead


BLINDED = """
import os, resource
from agent_runtime.lease import is_dead, own_mark
from agent_runtime.lease import ProcessMark
me = own_mark()
with open(f"/proc/{os.getppid()}/stat") as file:
    born = file.read().rpartition(")")[2].split()[19]
parent = me._replace(pid=os.getppid(), born=born)
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
blind = is_dead(parent, b"owner")
for each in held:
    os.close(each)
print(blind, is_dead(parent, b"owner"), is_dead(parent._replace(born="1"), b"owner"))
"""


def test_an_owner_that_cannot_be_looked_at_is_not_dead() -> None:
    ended = subprocess.run([sys.executable, "-c", BLINDED], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.stdout.split(), ended.stderr) == (["False", "False", "True"], "")


def test_a_system_that_does_not_tell_its_boot_lets_the_lease_alone_judge() -> None:
    blind = ME._replace(boot="", namespace="", born="")
    assert not is_dead(ME, OWNER, me=blind)
    assert not is_dead(blind, OWNER, me=blind)
    assert not is_dead(ME._replace(boot="boot-0"), OWNER, me=blind)


def test_this_very_process_is_alive_for_the_owners_it_works_for_and_dead_for_others() -> None:
    me = own_mark()
    assert is_dead(me, OWNER)
    LIVE_OWNERS.add(OWNER)
    try:
        assert not is_dead(me, OWNER)
        assert is_dead(me, b"another owner, 1")
    finally:
        LIVE_OWNERS.discard(OWNER)


def mark_of_child(child: subprocess.Popen[bytes]) -> ProcessMark:
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    return own_mark()._replace(pid=child.pid, born=stat[stat.rindex(")") + 2 :].split()[19])


def test_a_child_is_alive_while_it_runs_and_dead_as_a_zombie_and_when_it_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        mark = mark_of_child(child)
        assert not is_dead(mark, OWNER)
        assert is_dead(mark._replace(born="1"), OWNER), "another process that has its number now"
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken note of it
        assert Path(f"/proc/{child.pid}").exists()
        assert is_dead(mark, OWNER), "a zombie acts no more"
    finally:
        child.kill()
        child.wait()
    assert is_dead(mark, OWNER)


async def claims(store: CheckpointStore, clock: ManualClock, *, records: int, claimed: bytes) -> StoredRow:
    """A run whose only claim is followed by so many records."""
    sealer = sealer_for(RING, tenant="", run_id="run")
    row = new_row(sealer, run_id=RunId("run"), kind="loop", name="", owner=OWNER, lease_ms=12_000)
    journal = Journal(group_commit(store, clock), sealer, clock=clock, row=row, guard=None, mode=Commits.GROUPED)
    journal.note(RecordKind.OPENED)
    journal.note(RecordKind.CLAIMED, body=claimed)
    for attempt in range(1, records + 1):
        journal.note(RecordKind.STARTED, "0", attempt)
    await journal.barrier()
    run = await store.latest(RunId("run"))
    assert run is not None
    return run.row


@pytest.mark.parametrize("records", [0, 1, MARK_WINDOW - 1, MARK_WINDOW, 3 * MARK_WINDOW])
async def test_whose_claim_it_is_is_found_however_much_was_written_since(place: Place, records: int) -> None:
    clock, store = ManualClock(), place.open()
    row = await claims(store, clock, records=records, claimed=claimed_body(os.getpid(), "start"))
    assert await find_mark(store, row) == own_mark()
    assert await find_mark(store, row._replace(epoch=2)) is None, "the claim of another epoch says nothing of this one's"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"host":1,"boot":"","namespace":"","pid":"x","born":""}'], ids=str)
async def test_a_claim_that_cannot_be_read_leaves_the_lease_to_tell(place: Place, body: bytes) -> None:
    store = place.open()
    row = await claims(store, ManualClock(), records=1, claimed=body)
    assert await find_mark(store, row) is None


def test_a_mark_goes_into_a_record_and_comes_back() -> None:
    assert ProcessMark.from_plain(ME.to_plain()) == ME
    assert own_mark() is own_mark()
    assert own_mark().pid == os.getpid()


def row_of(*, owner: bytes = OWNER, idle_ms: int = 0, lease_ms: int = 12_000) -> StoredRow:
    sealer = sealer_for(RING, tenant="", run_id="run")
    return new_row(sealer, run_id=RunId("run"), kind="loop", name="", owner=owner, lease_ms=lease_ms)._replace(idle_ms=idle_ms)


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        (row_of(), 12.0),
        (row_of(idle_ms=5_000), 7.0),
        (row_of(idle_ms=11_999), 0.001),
        (row_of(idle_ms=12_000), None),
        (row_of(idle_ms=10**12), None),
        (row_of(owner=NO_OWNER), None),
        (row_of(lease_ms=0), None),
        (row_of(idle_ms=-1), None),
        (row_of(lease_ms=-5, idle_ms=-10), None),
    ],
)
def test_a_run_is_held_until_its_lease_lapses(row: StoredRow, seconds: float | None) -> None:
    held = seconds_held(row, None)
    assert held == (None if seconds is None else pytest.approx(seconds))


def test_a_dead_owner_holds_nothing() -> None:
    assert seconds_held(row_of(), own_mark()) is None
    assert seconds_held(row_of(), own_mark()._replace(host="elsewhere", boot="another")) == pytest.approx(12.0)


# The heartbeat.


class Listening(Delegate):
    """Counts the renewals, and lets a test fail them."""

    def __init__(self, inner: CheckpointStore) -> None:
        super().__init__(inner)
        self.renewals: list[list[str]] = []
        self.fails: Exception | None = None
        self.threads: set[int] = set()

    def reopen(self) -> CheckpointStore:
        return self

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        self.renewals.append([run_id for run_id, _ in guards])
        self.threads.add(threading.get_ident())
        if self.fails is not None:
            raise self.fails
        return await super().renew_all(guards)


@pytest.fixture
def hands() -> ManualClock:
    """A clock that only the test moves."""
    return ManualClock()


async def opened(store: Listening, clock: ManualClock, run_id: str = "run", *, lease_ms: int = 12_000) -> Journal:
    sealer = sealer_for(RING, tenant="", run_id=run_id)
    row = new_row(sealer, run_id=RunId(run_id), kind="loop", name="", owner=OWNER, lease_ms=lease_ms)
    journal = Journal(group_commit(store, clock), sealer, clock=clock, row=row, guard=None, mode=Commits.GROUPED)
    journal.note(RecordKind.OPENED)
    journal.note(RecordKind.CLAIMED)
    await journal.barrier()
    return journal


async def beat(clock: ManualClock, seconds: float, holds: Callable[[], bool]) -> None:
    """Let time pass, and wait for the heartbeat's thread to have done what it does then."""
    await until(lambda: clock.sleepers >= 1)
    clock.advance(seconds)
    await until(holds)


async def test_a_silent_run_is_renewed_off_the_loop_and_trusted_for_longer(hands: ManualClock) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    journal, beating = await opened(store, hands), Heartbeat(store, hands, SYSTEM_OFFLOAD)
    beating.watch(journal, 3.0)
    for beats in (1, 2, 3):
        before = journal.trusted_until
        await beat(hands, 3.0, lambda: len(store.renewals) == beats and journal.trusted_until > before)  # noqa: B023  # waited for here
    run = await store.latest(RunId("run"))
    assert run is not None
    assert run.row.idle_ms == 0
    assert threading.get_ident() not in store.threads
    beating.unwatch(journal)
    hands.advance(10)


async def test_a_run_that_wrote_lately_needs_no_renewal(hands: ManualClock) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    quiet, busy = await opened(store, hands, "quiet"), await opened(store, hands, "busy")
    beating = Heartbeat(store, hands, SYSTEM_OFFLOAD)
    for journal in (quiet, busy):
        beating.watch(journal, 3.0)
    await until(lambda: hands.sleepers == 1)
    hands.advance(2.9)
    busy.note(RecordKind.STARTED, "0", 1)
    await busy.barrier()
    hands.advance(0.1)
    await until(lambda: len(store.renewals) == 1)
    assert store.renewals == [["quiet"]]
    for journal in (quiet, busy):
        beating.unwatch(journal)
    hands.advance(10)


async def test_a_run_that_was_taken_over_is_told_so_by_its_heartbeat(hands: ManualClock) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    journal, beating = await opened(store, hands), Heartbeat(store, hands, SYSTEM_OFFLOAD)
    beating.watch(journal, 3.0)
    run = await store.latest(RunId("run"))
    assert run is not None
    sealer = sealer_for(RING, tenant="", run_id="run")
    row = claim_row(run.row, owner=b"another, 128 b..", lease_ms=12_000)
    other = Journal(group_commit(store, hands), sealer, clock=hands, row=row, guard=guard_of(run.row), mode=Commits.GROUPED)
    other.note(RecordKind.CLAIMED)
    await other.barrier()
    await beat(hands, 3.0, lambda: journal.failure is not None)
    assert isinstance(journal.failure, Fenced)
    hands.advance(10)


@pytest.mark.parametrize("failure", [StoreUnavailable("away"), ConnectionError("away"), RuntimeError("?")])
async def test_a_store_that_is_away_stops_no_heartbeat_and_extends_no_trust(hands: ManualClock, failure: Exception) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    journal, beating = await opened(store, hands), Heartbeat(store, hands, SYSTEM_OFFLOAD)
    store.fails, before = failure, journal.trusted_until
    beating.watch(journal, 3.0)
    for beats in (1, 2):
        await beat(hands, 3.0, lambda: len(store.renewals) == beats)  # noqa: B023  # waited for here
    assert (journal.trusted_until, journal.failure) == (before, None)
    store.fails = None
    await beat(hands, 3.0, lambda: journal.trusted_until > before)
    beating.unwatch(journal)
    hands.advance(10)


async def test_the_thread_ends_when_nothing_is_watched_and_begins_again_with_the_next_run(hands: ManualClock) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    beating = Heartbeat(store, hands, SYSTEM_OFFLOAD)
    for run_id in ("one", "two"):
        journal = await opened(store, hands, run_id)
        beating.watch(journal, 3.0)
        await until(lambda: hands.sleepers == 1)
        beating.unwatch(journal)
        await beat(hands, 3.0, lambda: hands.sleepers == 0)
    assert store.renewals == []


async def test_a_shorter_beat_is_heard_at_once(hands: ManualClock) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    slow, quick = await opened(store, hands, "slow"), await opened(store, hands, "quick", lease_ms=1_000)
    beating = Heartbeat(store, hands, SYSTEM_OFFLOAD)
    beating.watch(slow, 300.0)
    await until(lambda: hands.sleepers == 1)
    hands.advance(0.2)
    beating.watch(quick, 0.2)
    await until(lambda: ["quick"] in store.renewals)
    assert not any("slow" in renewed for renewed in store.renewals)
    for journal in (slow, quick):
        beating.unwatch(journal)
    hands.advance(1000)


async def test_a_run_that_writes_nothing_for_too_long_is_left_to_its_lease_until_it_writes_again(hands: ManualClock) -> None:
    store = Listening(MemoryCheckpointStore(clock=hands))
    stuck, slow = await opened(store, hands, "stuck"), await opened(store, hands, "slow")
    beating = Heartbeat(store, hands, SYSTEM_OFFLOAD)
    beating.watch(stuck, 3.0, stuck_after=7.0)
    beating.watch(slow, 3.0)
    for beats in (1, 2):
        await beat(hands, 3.0, lambda: len(store.renewals) == beats)  # noqa: B023  # waited for here
    await beat(hands, 3.0, lambda: len(store.renewals) == 3)
    assert [sorted(renewed) for renewed in store.renewals] == [["slow", "stuck"], ["slow", "stuck"], ["slow"]]
    stuck.note(RecordKind.STARTED, "0", 1)
    await stuck.barrier()
    for beats in (4, 5):
        await beat(hands, 3.0, lambda: len(store.renewals) == beats)  # noqa: B023  # waited for here
    assert [sorted(renewed) for renewed in store.renewals[3:]] == [["slow", "stuck"], ["slow", "stuck"]]
    for journal in (stuck, slow):
        beating.unwatch(journal)
    hands.advance(10)


async def test_a_hung_loop_is_taken_over_once_its_lease_is_over_and_no_sooner(place: Place, hands: ManualClock) -> None:
    bench, model, thaw = Bench(), Script([("lookup", {"name": "x"})], "done"), asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        if bench.entered["lookup"] == 1:
            await thaw.wait()

    bench.before = before
    hung = Worker(place, clock=hands)
    work = asyncio.ensure_future(hung.run(model, bench.registry, clock=hands, stuck_after=5.0))
    await until(lambda: bench.entered["lookup"] == 1)
    for _ in range(5):
        assert isinstance(
            await error_of(Worker(place, clock=hands).recover(model, bench.registry, clock=hands)), CheckpointConflict
        )
        await beat(hands, 3.0, lambda: hands.sleepers >= 1)
        if hands.monotonic() <= 5.0:
            await place.becomes("run", lambda run: run.row.heartbeat_at == int(hands.monotonic() * 1e6))
    hands.advance(3.0)
    result = await Worker(place, clock=hands).recover(model, bench.registry, clock=hands, offload=NoHeartbeat())
    assert (result.status, bench.entered["lookup"]) == ("done", 2)
    thaw.set()
    with pytest.raises(CheckpointConflict, match="this worker has stopped"):
        await work


async def test_a_process_has_one_heartbeat_a_store(hands: ManualClock) -> None:
    one, two = Listening(MemoryCheckpointStore()), Listening(MemoryCheckpointStore())
    assert heartbeat(one, hands, SYSTEM_OFFLOAD) is heartbeat(one, hands, SYSTEM_OFFLOAD)
    assert heartbeat(one, hands, SYSTEM_OFFLOAD) is not heartbeat(two, hands, SYSTEM_OFFLOAD)


# The window of self-trust.


class Slow(Worker):
    """Each of its commits takes longer than its trust lasts; then a test may let something happen."""

    def __init__(self, place: Place, clock: ManualClock) -> None:
        super().__init__(place, clock=clock)
        self.hands = clock
        self.asked: list[str] = []
        self.then: Callable[[Append], Awaitable[None]] | None = None

    def check(self, verb: str) -> None:
        super().check(verb)
        self.asked.append(verb)

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        self.hands.advance(9)
        if self.then is not None:
            await self.then(appends[0])
        return answers


async def test_a_worker_past_its_trust_asks_the_store_before_each_act(place: Place, hands: ManualClock) -> None:
    bench, model, worker = Bench(), Script([("charge", {"amount": 1})], "done"), Slow(place, hands)
    result = await worker.run(model, bench.registry, clock=hands, offload=NoHeartbeat())
    assert (result.status, bench.effects) == ("done", 1)
    of_the_store = [verb for verb in worker.asked if verb in ("commit", "renew")]
    assert of_the_store == ["commit", "renew"] * 3 + ["commit"]


async def test_a_worker_past_its_trust_that_is_no_longer_the_owner_does_not_act(place: Place, hands: ManualClock) -> None:
    bench, model, worker = Bench(), Script([("charge", {"amount": 1})], "done"), Slow(place, hands)
    claims: list[Exception | None] = []

    async def claim(append: Append) -> None:
        if any((record.call, record.kind) == ("0", RecordKind.STARTED) for record in append.records):
            hands.advance(9)
            other = Worker(place, clock=hands)
            claims.append(await error_of(other.recover(model, bench.registry, clock=hands, offload=NoHeartbeat())))

    worker.then = claim
    with pytest.raises(CheckpointConflict, match="this worker has stopped"):
        await worker.run(model, bench.registry, clock=hands, offload=NoHeartbeat())
    assert [type(error) for error in claims] == [RecoveryNeedsDecision]
    assert bench.entered.total() == 0


async def test_owners_are_forgotten_when_their_runs_end_however_they_end(place: Place) -> None:
    before = set(LIVE_OWNERS)
    bench = Bench()
    await Worker(place).run(Script("done"), bench.registry, "done")
    task = asyncio.ensure_future(Worker(place).run(Script([("charge", {"amount": 1})], "done"), bench.registry, "cancelled"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    dying = Worker(place)
    bench.after = lambda *_: dying.die()  # type: ignore[assignment]  # it never returns
    await dying.run_and_die(Script([("charge", {"amount": 1})], "done"), bench.registry, "killed")
    assert before == LIVE_OWNERS
