"""A write of which nobody learns whether it landed is settled: no second row, no conflict with oneself, one effect.

Each kind of record is struck by each kind of trouble, on each store, in both commit modes. What the run then holds is what
one without trouble holds, record by record.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from agent_runtime.errors import RecoveryNeedsDecision, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.journal.seal import KeyRing, open_run
from agent_runtime.journal.store import Answer, Append, CheckpointStore
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.faults import (
    Counts,
    Fault,
    FaultyStore,
    LandsLate,
    Life,
    LosesReply,
    LosesRequest,
    Moment,
    Refuses,
    RefusesFrom,
    SimulatedCrash,
    Stops,
    Where,
    Write,
    holds,
)
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.script_model import ScriptModel, without_marks
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import until

KEY = b"a key of tests, known to everybody"
RUN = "run-1"

KINDS = {
    "the opening and the claim": (RecordKind.OPENED, ""),
    "the intent of a decision": (RecordKind.STARTED, "0/model"),
    "a reply": (RecordKind.DONE, "0/model"),
    "the intent of a call": (RecordKind.STARTED, "0"),
    "the ending of a call": (RecordKind.DONE, "0"),
    "the intent of the next decision": (RecordKind.STARTED, "1/model"),
    "the end of the run": (RecordKind.ENDED, ""),
}
CLAIM = (RecordKind.CLAIMED, "")

TROUBLES: dict[str, Callable[[Callable[[Write], bool]], Fault]] = {
    "its request is lost": LosesRequest,
    "its request is lost, and reads fail for a while": lambda at: LosesRequest(at, reads=2),
    "its reply is lost": LosesReply,
    "its reply is lost, and reads fail for a while": lambda at: LosesReply(at, reads=2),
    "the store answers that it does not know": lambda at: LosesReply(at, answers=True),
    "it lands before it is sent again": LandsLate,
    "it lands behind itself": lambda at: LandsLate(at, behind=1),
    "it lands behind the next write": lambda at: LandsLate(at, behind=2),
    "the store is away twice": Refuses,
}

both_modes = pytest.mark.parametrize("commits", ["grouped", "each"])
every_kind = pytest.mark.parametrize("kind", KINDS)
every_trouble = pytest.mark.parametrize("trouble", TROUBLES)


@pytest.fixture(params=["memory", "sqlite"])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator["Stage"]:
    on = Stage(MemoryCheckpointStore() if request.param == "memory" else SQLiteCheckpointStore(tmp_path / "runs.db"))
    yield on
    await on.close()


class Stage:
    """A loop of one call, with its model, the remote that counts, and where its run is kept."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.commits = "grouped"
        self.life = Life()
        self.remote = Remote()
        self.model = ScriptModel([Reply(tool_calls=[ToolCall("a", "mail", {"to": "ana"})]), Reply("sent")])
        self.registry = ToolRegistry()

        self.idempotent = ToolRegistry()
        """The same tool, with the rule that the remote keeps."""
        self._opened: list[CheckpointStore] = [store]

        @self.registry.tool
        @self.idempotent.tool(idempotent=True)
        async def mail(to: str) -> str:
            receipt = await self.remote.act("mail", {"to": to}, idempotent=self.registry is self.idempotent)
            self.life.reach(Where.AFTER_ACT)
            return receipt.result

    def open(self, fault: Fault | None = None) -> FaultyStore:
        """Another worker's way to the store, with a fault in it."""
        opened = FaultyStore(self.store.reopen(), fault, life=self.life)
        self._opened.append(opened)
        return opened

    async def close(self) -> None:
        for store in self._opened:
            await store.close()

    def run(self, store: CheckpointStore, **terms: float) -> Awaitable[LoopResult]:
        return run_tool_loop(
            self.model, self.registry, "go", run_id=RUN, checkpoints=store, checkpoint_key=KEY, commits=self.commits,
            lease_seconds=terms.get("lease_seconds", 12.0), heartbeat_seconds=terms.get("heartbeat_seconds", 3.0),
        )  # fmt: skip

    def recover(self, store: CheckpointStore, *, rerun: bool = False) -> Awaitable[LoopResult]:
        return recover_tool_loop(
            self.model, self.registry, RUN, checkpoints=store, checkpoint_key=KEY, commits=self.commits, rerun_in_doubt=rerun
        )

    async def must_finish(self) -> None:
        """The run comes to its end: a call that was not started is made, one that ended is not, any other is in doubt."""
        left = await self.kinds()
        was_started, has_ended = (RecordKind.STARTED, "0") in left, (RecordKind.DONE, "0") in left
        before = self.remote.count()
        assert before == 1 or not has_ended
        assert before == 0 or was_started
        if not left:
            result = await self.run(self.store)
        elif was_started and not has_ended:
            with pytest.raises(RecoveryNeedsDecision) as needed:
                await self.recover(self.store)
            assert [doubt.call for doubt in needed.value.doubts] == ["0"]
            assert self.remote.count() == before
            result = await self.recover(self.store, rerun=True)
        else:
            result = await self.recover(self.store)
        assert (result.status, without_marks(result.output)) == ("done", "sent")
        assert self.remote.count() == before + (not has_ended)
        assert (await self.records())[: len(left)] == left

    async def kinds(self) -> list[tuple[RecordKind, str]]:
        """What the run's journal holds: nothing where there is no run."""
        return [(RecordKind(record.kind), record.call) for record in await self.store.calls(RunId(RUN))]

    async def records(self) -> list[tuple[RecordKind, str]]:
        """The same of a run that nobody holds any more, every seal of it verified."""
        [run] = await self.store.load_many([RunId(RUN)])
        assert run is not None
        open_run(KeyRing.of(KEY), run, tenant="")
        assert run.row.owner == NO_OWNER
        return await self.kinds()


UNDISTURBED = [
    (RecordKind.OPENED, ""),
    (RecordKind.CLAIMED, ""),
    (RecordKind.STARTED, "0/model"),
    (RecordKind.DONE, "0/model"),
    (RecordKind.STARTED, "0"),
    (RecordKind.DONE, "0"),
    (RecordKind.STARTED, "1/model"),
    (RecordKind.DONE, "1/model"),
    (RecordKind.ENDED, ""),
]


@both_modes
@every_kind
@every_trouble
async def test_a_run_ends_as_if_nothing_had_happened(stage: Stage, commits: str, kind: str, trouble: str) -> None:
    stage.commits = commits
    fault = TROUBLES[trouble](holds(*KINDS[kind]))
    result = await stage.run(stage.open(fault))
    assert (result.status, result.output, result.llm_calls) == ("done", "sent", 2)
    assert stage.remote.count() == 1
    assert await stage.records() == UNDISTURBED
    assert getattr(fault, "struck", None) is not None


@both_modes
@every_trouble
async def test_a_recovery_whose_claim_is_struck_ends_as_if_nothing_had_happened(
    stage: Stage, commits: str, trouble: str
) -> None:
    stage.commits, stage.registry = commits, stage.idempotent
    await die_after_the_act(stage)
    fault = TROUBLES[trouble](holds(*CLAIM))
    result = await stage.recover(stage.open(fault))
    assert (result.status, result.output, result.llm_calls) == ("done", "sent", 2)
    assert (stage.remote.count(), stage.remote.count_requests()) == (1, 2)
    claims = [record for record in await stage.records() if record[0] is RecordKind.CLAIMED]
    assert len(claims) == 2
    assert getattr(fault, "struck", None) is not None


@both_modes
@every_kind
@pytest.mark.parametrize("landed", [True, False])
async def test_a_run_that_is_cancelled_in_the_middle_of_a_commit_recovers(
    stage: Stage, commits: str, kind: str, landed: bool
) -> None:
    stage.commits = commits
    fault = Stops(holds(*KINDS[kind]), landed=landed)
    task = asyncio.ensure_future(stage.run(stage.open(fault)))
    await asyncio.wait_for(fault.reached.wait(), 20)
    task.cancel()
    fault.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stage.must_finish()


@both_modes
@every_kind
@pytest.mark.parametrize("landed", [True, False])
async def test_a_run_whose_loop_ends_in_the_middle_of_a_commit_recovers(
    stage: Stage, commits: str, kind: str, landed: bool
) -> None:
    stage.commits = commits

    async def begin() -> None:
        fault = Stops(holds(*KINDS[kind]), landed=landed)
        task = asyncio.ensure_future(stage.run(stage.open(fault)))
        await asyncio.wait_for(fault.reached.wait(), 20)
        assert not task.done()

    await asyncio.wait_for(asyncio.to_thread(asyncio.run, begin()), 20)  # its loop ends, and cancels what is left on it
    await stage.must_finish()


@both_modes
async def test_a_store_that_fails_for_good_at_an_ending_stops_the_run_there(stage: Stage, commits: str) -> None:
    stage.commits = commits
    fault = RefusesFrom(holds(RecordKind.DONE, "0"))
    with pytest.raises(StoreUnavailable):
        await stage.run(stage.open(fault), lease_seconds=0.6, heartbeat_seconds=0.3)
    stored = await stage.store.latest(RunId(RUN))
    assert stored is not None
    assert stored.row.status == RunStatus.RUNNING
    assert (stage.model.calls, stage.remote.count()) == (1, 1)

    fault.mend()
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await stage.recover(stage.open(fault))
    assert [(doubt.tool, doubt.call, doubt.key) for doubt in needed.value.doubts] == [("mail", "0", f"{RUN}:0")]
    assert (stage.model.calls, stage.remote.count()) == (1, 1)


class Gone(Fault):
    """From the chosen write on nothing passes, and nobody is told what became of it."""

    def __init__(self, at: Callable[[Write], bool]) -> None:
        self._at = at
        self._is_gone = False

    async def carry(self, write: Write) -> list[Answer]:
        self._is_gone = self._is_gone or self._at(write)
        self.read()
        return await write.land()

    def read(self) -> None:
        if self._is_gone:
            raise ConnectionError("connection lost")

    renew = read


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_whose_store_never_says_what_became_of_a_write_stops_before_its_lease_ends(
    stage: Stage, kind: str
) -> None:
    clock = ManualClock(auto=True)
    began = clock.monotonic()
    gone = stage.open(Gone(holds(*KINDS[kind])))
    with pytest.raises(StoreUnavailable):
        await run_tool_loop(
            stage.model, stage.registry, "go", run_id=RUN, checkpoints=gone, checkpoint_key=KEY, clock=clock, lease_seconds=30
        )
    assert 15 < clock.monotonic() - began <= 30
    clock.advance(30)  # lets the heartbeat see that there is nothing left to watch
    await stage.must_finish()


@both_modes
@every_kind
@pytest.mark.parametrize("landed", [True, False])
async def test_a_lone_append_that_goes_at_once_and_is_lost_is_settled(
    tmp_path: Path, commits: str, kind: str, landed: bool
) -> None:
    store = LosesOne(tmp_path / "runs.db", holds(*KINDS[kind]), landed=landed)
    stage = Stage(store)
    stage.commits = commits
    result = await stage.run(store)
    assert (result.status, result.output, result.llm_calls, stage.remote.count()) == ("done", "sent", 2, 1)
    assert await stage.records() == UNDISTURBED
    assert store.is_struck
    await stage.close()


class HeartFails(Fault):
    """Every other heartbeat meets a lost connection, of which the store makes no error of ours."""

    def __init__(self) -> None:
        self.beats = 0

    def renew(self) -> None:
        self.beats += 1
        if self.beats % 2:
            raise ConnectionError("connection lost")


async def test_a_heartbeat_outlives_a_store_that_raises(stage: Stage) -> None:
    fault = HeartFails()
    registry = ToolRegistry()

    @registry.tool
    async def mail(to: str) -> str:
        await until(lambda: fault.beats >= 6)
        return to

    result = await run_tool_loop(
        stage.model, registry, "go", run_id=RUN, checkpoints=stage.open(fault), checkpoint_key=KEY, heartbeat_seconds=0.02
    )
    assert result.status == "done"


class LosesOne(SQLiteCheckpointStore):
    """Loses one write, or the answer to it, on whichever way it takes."""

    def __init__(self, path: Path, at: Callable[[Write], bool], *, landed: bool) -> None:
        super().__init__(path)
        self._at = at
        self._landed = landed
        self.is_struck = False

    def commit_at_once(self, append: Append) -> Answer | None:
        if not self._strikes([append]):
            return super().commit_at_once(append)
        if self._landed and super().commit_at_once(append) is None:
            self.is_struck = False
            return None
        raise ConnectionError("connection lost")

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        if not self._strikes(appends):
            return await super().commit(appends)
        if self._landed:
            await super().commit(appends)
        raise ConnectionError("connection lost")

    def _strikes(self, appends: Sequence[Append]) -> bool:
        if self.is_struck or not self._at(Write(0, appends, self, Counts())):
            return False
        self.is_struck = True
        return True


async def die_after_the_act(stage: Stage) -> None:
    """A worker that mailed, and died before it wrote that down."""
    stage.life = Life(Moment(Where.AFTER_ACT, 1))
    with pytest.raises(SimulatedCrash):
        await stage.run(stage.open())
    stage.life = Life()
