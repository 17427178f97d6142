"""What the supervisor does about a store that is away, a clock that stood still, and workers that cannot be started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt, ForeignStore, InvalidSetting, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.journal import guard_of
from agent_runtime.journal.store import AnswerKind, Append
from agent_runtime.lease import mark_of_child, own_mark
from agent_runtime.settings import read_settings
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.supervisor import Child, Program, Supervisor, Terms
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import owner_named
from agent_runtime.worker import Exit
from tests.bench import Asked, Bench, Delegate, Place, Script, Worker
from tests.processes.job import until as until_then

CALL: list[Asked] = [("charge_i", {"amount": 1})]
TERMS = Terms(12.0, 3.0, 3.0, 5, 2)
NOTHING = Program("tests", (sys.executable, "-c", "pass"))


class Failing(Delegate):
    """A store whose listing does what the test says, look by look; then it tells the supervisor to stop."""

    def __init__(self, inner: Any, *looks: Exception | Callable[[], None] | None) -> None:
        super().__init__(inner)
        self.looks = list(looks)
        self.stop: Callable[[], None] = lambda: None

    async def list_unfinished(self, **options: Any) -> Any:
        if options["after"] is None:
            if not self.looks:
                self.stop()
            else:
                look = self.looks.pop(0)
                if isinstance(look, Exception):
                    raise look
                if look is not None:
                    look()
        return await super().list_unfinished(**options)


async def supervise(store: Failing, clock: ManualClock, program: Program = NOTHING) -> None:
    supervisor = Supervisor(store, program, TERMS, environ={}, as_json=True, clock=clock)
    store.stop = supervisor.stop
    await supervisor.supervise()


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]


AWAY = StoreUnavailable("the server is away")


@pytest.mark.parametrize("first", [(), (None,)], ids=["from the start", "later"])
async def test_a_store_that_is_away_is_waited_for_and_told_of_once(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], first: tuple[None, ...]
) -> None:
    store = Failing(MemoryCheckpointStore(clock=clock), *first, *[AWAY] * 6, None, None, AWAY, None)
    await supervise(store, clock)
    lines = told(capsys)
    assert [line["event"] for line in lines] == ["store-away", "store-back"] * 2 + ["draining"]
    assert lines[0] == {"event": "store-away", "error": "StoreUnavailable", "why": "the server is away"}
    assert lines[1]["after"] == 1 + 2 + 3 + 3 + 3 + 3, "it looks less and less often, and with each poll at least"
    assert lines[3]["after"] == 1


@pytest.mark.parametrize(
    "error", [CheckpointStoreCorrupt("torn"), ForeignStore("another's"), RuntimeError("a bug"), KeyError()]
)
async def test_whatever_a_store_raises_once_it_has_been_seen_the_supervisor_goes_on(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    await supervise(Failing(MemoryCheckpointStore(clock=clock), None, error, error, None), clock)
    assert [line["event"] for line in told(capsys)] == ["store-away", "store-back", "draining"]


async def test_a_store_that_an_operator_must_mend_ends_it_at_the_start(clock: ManualClock) -> None:
    with pytest.raises(ForeignStore):
        await supervise(Failing(MemoryCheckpointStore(clock=clock), ForeignStore("another's")), clock)


class Told:
    """Chance that remembers when it was asked for a jitter: when a worker was about to be started."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.starts: list[float] = []

    def draw(self, size: int) -> bytes:
        if size == 2:
            self.starts.append(self.clock.monotonic())
        return bytes(size)


class Sleepy(ManualClock):
    """The host goes to sleep once, for an hour, while somebody rests."""

    def __init__(self) -> None:
        super().__init__(auto=True)
        self.naps = [3600.0]

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + (self.naps.pop() if self.naps else 0.0))


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("what", ["outage", "sleep"])
async def test_after_an_outage_or_a_sleep_of_the_host_living_owners_are_heard_before_their_leases_count(
    what: str, is_heard: bool
) -> None:
    clock = ManualClock(auto=True) if what == "outage" else Sleepy()
    inner, draft, told = MemoryCheckpointStore(clock=clock), Draft.of("run", name="tests", kind="loop"), Told(clock)
    await inner.commit([draft.open(b"input")])
    run = await inner.latest(RunId("run"))
    assert run is not None
    back: list[float] = []

    async def hear() -> None:
        await inner.renew(RunId("run"), guard=guard_of(run.row, even_if_alive=True))

    def lapse() -> None:
        if what == "outage":
            clock.advance(run.row.lease_ms / 1000 + 1)

    def is_back() -> None:
        back.append(clock.monotonic())
        if is_heard:
            hearing.append(asyncio.ensure_future(hear()))

    hearing: list[asyncio.Future[None]] = []
    looks = [None, *([AWAY] if what == "outage" else []), lapse, is_back, *[None] * 9]
    store = Failing(inner, *looks)
    supervisor = Supervisor(store, NOTHING, TERMS, environ={}, as_json=True, clock=clock, entropy=told)
    store.stop = supervisor.stop
    await supervisor.supervise()
    assert len(hearing) == is_heard
    if is_heard:
        assert told.starts == []
    else:
        assert len(told.starts) >= 1
        assert told.starts[0] >= back[0] + 2 * TERMS.heartbeat_seconds - 2


async def test_a_worker_that_cannot_be_started_is_told_of_and_tried_again_later_each_time(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    place, bench = MemoryCheckpointStore(clock=clock), Bench()
    await place.commit([Draft.of("run", name="tests", kind="loop").open(b"input")])
    clock.advance(3600)
    await supervise(Failing(place, *[None] * 12), clock, Program("tests", ("/no/such/program",)))
    lines = told(capsys)
    assert [line["seconds"] for line in lines if line["event"] == "pausing"][:4] == [0.5, 1.0, 2.0, 4.0]
    tries = [line for line in lines if line["event"] == "cannot-start"]
    assert 4 <= len(tries) <= 6
    assert "/no/such/program" in tries[0]["why"]
    assert bench.entered.total() == 0


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_worker_that_comes_late_for_its_run_makes_it_wait_no_longer_unless_nobody_has_taken_it(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], is_taken: bool
) -> None:
    inner, draft = MemoryCheckpointStore(clock=clock), Draft.of("run", name="tests", kind="loop")
    drafts = [draft]

    async def land(append: Append) -> None:
        assert [answer.kind for answer in await inner.commit([append])] == [AnswerKind.OK]
        drafts.append(drafts[-1].after(append))

    class Contested(Failing):
        """Whenever a worker has ended, another one has claimed the run meanwhile, and is gone by the next look; thrice."""

        reads = 0

        async def latest(self, run_id: RunId) -> Any:
            self.reads += 1
            if self.reads % 2 == 0 and is_taken:
                await land(drafts[-1].claim(owner_named(f"rival {self.reads}")))
            if self.reads == 6:
                self.stop()
            return await super().latest(run_id)

    await land(draft.open(b"input"))
    clock.advance(3600)
    store = Contested(inner, *[lambda: clock.advance(3600)] * 100_000)
    await supervise(store, clock, Program("tests", (sys.executable, "-c", f"raise SystemExit({Exit.NOT_MINE:d})")))
    lines = told(capsys)
    assert [line["code"] for line in lines if line["event"] == "worker-exited"] == [Exit.NOT_MINE] * 3
    assert any(line["event"] == "pausing" for line in lines) is not is_taken


async def test_a_store_that_never_answers_does_not_hold_up_a_stop(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(Delegate):
        async def list_unfinished(self, **options: Any) -> Any:
            asyncio.get_running_loop().call_soon(supervisor.stop)
            await asyncio.Event().wait()

    silent = Silent(MemoryCheckpointStore(clock=clock))
    supervisor = Supervisor(silent, NOTHING, TERMS, environ={}, as_json=True, clock=clock)
    await asyncio.wait_for(supervisor.supervise(), 10)
    assert [line["event"] for line in told(capsys)] == ["draining"]


async def test_a_row_that_can_be_listed_and_not_be_read_is_tried_less_and_less_often(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Torn(Failing):
        async def latest(self, run_id: RunId) -> Any:
            raise CheckpointStoreCorrupt("this row is torn")

    place = MemoryCheckpointStore(clock=clock)
    await place.commit([Draft.of("run", name="tests", kind="loop").open(b"input")])
    clock.advance(3600)
    await supervise(Torn(place, *[None] * 12), clock)
    lines = told(capsys)
    assert [line["seconds"] for line in lines if line["event"] == "pausing"][:3] == [0.5, 1.0, 2.0]
    assert lines[0] == {"event": "cannot-start", "run": "run", "why": "CheckpointStoreCorrupt: this row is torn"}


def test_a_worker_that_its_command_has_started_is_its_own() -> None:
    command = ("sh", "-c", "sleep 60; true")
    with subprocess.Popen(command, process_group=0) as shell, subprocess.Popen(("sleep", "60")) as stranger:
        try:
            child = Child(shell, mark_of_child(shell.pid), 1)
            [pid] = children_of(shell.pid)
            assert child.is_owner(mark_of_child(shell.pid))
            assert child.is_owner(mark_of_child(pid))
            assert not child.is_owner(mark_of_child(pid)._replace(host="elsewhere"))
            assert not child.is_owner(mark_of_child(stranger.pid))
            assert not child.is_owner(own_mark())
            assert not child.is_owner(own_mark()._replace(pid=2**22 - 1))
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            stranger.kill()


def children_of(pid: int) -> list[int]:
    """The processes that it has started, once there are any."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    until_then(lambda: listing.read_text().split(), "it has started one")
    return [int(each) for each in listing.read_text().split()]


@pytest.mark.parametrize("many", [0, -1])
def test_a_supervisor_without_workers_is_refused(many: int) -> None:
    with pytest.raises(InvalidSetting, match="--max-workers"):
        Terms.of(read_settings({}), many)


async def test_a_run_whose_worker_this_process_was_is_free_once_it_works_it_no_more(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, clock = Bench(), ManualClock(auto=True)
    dying = Worker(place).killed_at(CrashPoint.AFTER_INTENT)
    await dying.run_and_die(Script(CALL, "done"), bench.registry, name="tests")
    await supervise(Failing(place.open(), None, None), clock, Program("tests", ("/no/such/program",)))
    assert "cannot-start" in [line["event"] for line in told(capsys)]
