"""The doubles that tests of ours and of users stand on do what they say: the faulty store, the remote, the scripted model."""

from collections.abc import Awaitable, Callable

import pytest

from agent_runtime.errors import InvalidSetting, KeyConflict, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore, Guard
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.stores.memory import MemoryCheckpointStore
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
    Slow,
    Where,
)
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.script_model import ScriptModel, check_request, without_marks
from agent_runtime.testing.store_contract import Draft, run_contract
from agent_runtime.tool_loop import run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key

NOBODY = Guard(1, bytes(16), 0, bytes(32))
VERBS: dict[str, Callable[[FaultyStore], Awaitable[object]]] = {
    "commit": lambda store: store.commit([Draft.of("run-1").open()]),
    "renew": lambda store: store.renew(RunId("run-1"), guard=NOBODY),
    "delete": lambda store: store.delete(RunId("run-1"), guard=NOBODY),
    "latest": lambda store: store.latest(RunId("run-1")),
    "calls": lambda store: store.calls(RunId("run-1")),
    "load_many": lambda store: store.load_many([RunId("run-1")]),
    "list_unfinished": lambda store: store.list_unfinished(),
    "list_runs": lambda store: store.list_runs(),
    "inbox": lambda store: store.inbox(RunId("run-1")),
    "now": lambda store: store.now(),
}


async def _is_stored(store: CheckpointStore) -> bool:
    return await store.latest(RunId("run-1")) is not None


class TestALife:
    def test_counts_every_moment_and_gives_them_all(self) -> None:
        life = Life()
        for where in (Where.BEFORE_WRITE, Where.AFTER_WRITE, Where.BEFORE_WRITE, Where.AFTER_ACT):
            life.reach(where)
        assert [str(moment) for moment in life.moments()] == [
            "before write 1", "before write 2", "after write 1", "after act 1",
        ]  # fmt: skip

    def test_ends_at_its_moment_and_not_before(self) -> None:
        life = Life(Moment(Where.AFTER_ACT, 2))
        life.reach(Where.AFTER_ACT)
        life.reach(Where.AFTER_ANSWER)
        assert life.ends_next(Where.AFTER_ACT)
        with pytest.raises(SimulatedCrash, match="after act 2"):
            life.reach(Where.AFTER_ACT)
        assert life.is_over
        with pytest.raises(SimulatedCrash):
            life.check()


class TestAFaultyStore:
    async def test_without_a_fault_keeps_the_whole_contract_of_stores(self) -> None:
        async def make_store() -> CheckpointStore:
            return FaultyStore(MemoryCheckpointStore())

        report = await run_contract(make_store)
        assert report.holds, str(report)

    @pytest.mark.parametrize("verb", VERBS)
    async def test_does_nothing_more_once_its_worker_is_dead(self, verb: str) -> None:
        store = FaultyStore(MemoryCheckpointStore(), life=Life(Moment(Where.AFTER_WRITE, 1)))
        with pytest.raises(SimulatedCrash):
            await store.commit([Draft.of("run-1").open()])
        with pytest.raises(SimulatedCrash):
            await VERBS[verb](store)
        with pytest.raises(SimulatedCrash):
            await VERBS[verb](store.reopen())

    async def test_lets_a_heartbeat_of_a_dead_worker_fail_as_if_the_store_were_away(self) -> None:
        life = Life(Moment(Where.AFTER_ACT, 1))
        store = FaultyStore(MemoryCheckpointStore(), life=life)
        with pytest.raises(SimulatedCrash):
            life.reach(Where.AFTER_ACT)
        with pytest.raises(StoreUnavailable):
            await store.renew_all([(RunId("run-1"), NOBODY)])

    @pytest.mark.parametrize(("where", "is_stored"), [(Where.BEFORE_WRITE, False), (Where.AFTER_WRITE, True)])
    async def test_dies_before_or_after_a_write_is_durable(self, where: Where, is_stored: bool) -> None:
        inner = MemoryCheckpointStore()
        store = FaultyStore(inner, life=Life(Moment(where, 1)))
        with pytest.raises(SimulatedCrash):
            await store.commit([Draft.of("run-1").open()])
        assert await _is_stored(inner) is is_stored

    @pytest.mark.parametrize(("fault", "is_stored"), [(LosesReply(1), True), (LosesRequest(1), False), (LandsLate(1), False)])
    async def test_loses_a_write_or_only_the_answer_to_it(self, fault: Fault, is_stored: bool) -> None:
        inner = MemoryCheckpointStore()
        with pytest.raises(ConnectionError):
            await FaultyStore(inner, fault).commit([Draft.of("run-1").open()])
        assert await _is_stored(inner) is is_stored

    async def test_lets_a_late_write_land_behind_the_one_that_was_sent_again(self) -> None:
        fault = LandsLate(1, behind=1)
        store = FaultyStore(MemoryCheckpointStore(), fault)
        append = Draft.of("run-1").open()
        with pytest.raises(ConnectionError):
            await store.commit([append])
        first = await store.commit([append])
        assert fault.late_answers == first

    async def test_refuses_as_often_as_it_is_told_and_then_works(self) -> None:
        store = FaultyStore(MemoryCheckpointStore(), Refuses(1, times=2))
        append = Draft.of("run-1").open()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.commit([append])
        assert not await _is_stored(store)
        await store.commit([append])
        assert await _is_stored(store)

    async def test_refuses_for_good_until_it_is_mended_and_still_reads(self) -> None:
        fault = RefusesFrom(1)
        store = FaultyStore(MemoryCheckpointStore(), fault)
        with pytest.raises(StoreUnavailable):
            await store.commit([Draft.of("run-1").open()])
        with pytest.raises(StoreUnavailable):
            await store.renew(RunId("run-1"), guard=NOBODY)
        assert not await _is_stored(store)
        fault.mend()
        await store.commit([Draft.of("run-1").open()])
        assert await _is_stored(store)

    async def test_is_as_slow_as_it_is_told_by_the_clock(self) -> None:
        clock = ManualClock(auto=True)
        await FaultyStore(MemoryCheckpointStore(), Slow(2.5, clock=clock)).commit([Draft.of("run-1").open()])
        assert clock.monotonic() == 2.5

    async def test_counts_what_passes_also_where_it_is_reopened(self) -> None:
        store = FaultyStore(MemoryCheckpointStore())
        append = Draft.of("run-1").open()
        await store.commit([append])
        await store.reopen().load_many([RunId("run-1")])
        await store.latest(RunId("run-2"))
        written = sum(len(record.body) + len(record.seal) + len(record.call) for record in append.records)
        rows = 1 + len(append.records)
        assert store.counts == Counts(
            writes=1, appends=1, rows=rows, bytes=32 + written, reads=2, rows_read=rows
        )  # fmt: skip


class TestARemote:
    async def test_knows_a_key_and_gives_the_first_result_again(self) -> None:
        remote = Remote()
        first = await remote.act("pay", {"cents": 1}, key="k", idempotent=True)
        again = await remote.act("pay", {"cents": 1}, key="k", idempotent=True)
        assert (first.already_done, again.already_done, again.result == first.result) == (False, True, True)
        assert (remote.count(key="k"), remote.count_requests(tool="pay")) == (1, 2)

    async def test_acts_again_where_the_caller_does_not_ask_it_to_know_the_key(self) -> None:
        remote = Remote()
        results = {(await remote.act("pay", {"cents": 1}, key="k")).result for _ in range(2)}
        assert remote.count(tool="pay") == 2
        assert len(results) == 2
        assert len({without_marks(result) for result in results}) == 1

    async def test_refuses_a_known_key_with_other_arguments(self) -> None:
        remote = Remote()
        await remote.act("pay", {"cents": 1}, key="k", idempotent=True)
        with pytest.raises(KeyConflict):
            await remote.act("pay", {"cents": 2}, key="k", idempotent=True)
        assert remote.count() == 1

    async def test_acts_and_drops_the_answer(self) -> None:
        remote = Remote()
        remote.drop_answers(1)
        with pytest.raises(ConnectionResetError):
            await remote.act("pay", {}, key="k", idempotent=True)
        assert (await remote.act("pay", {}, key="k", idempotent=True)).already_done

    async def test_acts_at_once_and_answers_late(self) -> None:
        clock = ManualClock(auto=True)
        remote = Remote(clock=clock)
        remote.answer_late(7)
        await remote.act("pay", {}, key="k")
        await remote.act("pay", {}, key="k")
        assert clock.monotonic() == 7

    async def test_acts_again_once_it_has_forgotten_its_keys(self) -> None:
        remote = Remote()
        await remote.act("pay", {}, key="k", idempotent=True)
        remote.forget_keys()
        assert not (await remote.act("pay", {}, key="k", idempotent=True)).already_done
        assert remote.count(key="k") == 2

    async def test_reads_without_an_effect(self) -> None:
        remote = Remote()
        await remote.read("look", {}, key="k")
        assert (remote.count(), remote.count_requests()) == (0, 1)


LOOK = ToolSpec("look", "", {})
CALL = ToolCall("a", "look", {"at": "sea"})


class TestAScriptedModel:
    async def test_that_calls_one_tool_is_done_once_it_has_the_result(self) -> None:
        model = ScriptModel.calling("look", at="sea")
        registry = ToolRegistry()

        @registry.tool
        async def look(at: str) -> str:
            return f"{at}, {idempotency_key()}"

        result = await run_tool_loop(model, registry, "go", run_id="r", checkpoints=MemoryCheckpointStore())
        assert (result.output, model.calls, result.messages[-2].content) == ("done", 2, "sea, r:0")
        assert model.asks == {"r:0/model": 1, "r:1/model": 1}

    async def test_answers_another_thing_each_time_it_is_asked_for_one_decision(self) -> None:
        model = ScriptModel([Reply("first", [CALL]), Reply("last")], vary_args=True)
        asked = [await model.reply([Message("user", "go")], [LOOK]) for _ in range(3)]
        assert [reply.text for reply in asked] == ["first", "first#2", "first#3"]
        assert [reply.tool_calls[0].args["at"] for reply in asked] == ["sea", "sea#2", "sea#3"]
        assert {without_marks(reply.text) for reply in asked} == {"first"}

    async def test_keeps_the_arguments_if_it_is_not_told_to_vary_them(self) -> None:
        model = ScriptModel.calling("look", at="sea")
        asked = [await model.reply([Message("user", "go")], [LOOK]) for _ in range(2)]
        assert asked[0].tool_calls == asked[1].tool_calls

    async def test_refuses_a_conversation_that_its_script_does_not_lead_to(self) -> None:
        model = ScriptModel([Reply("", [CALL, ToolCall("b", "look", {})]), Reply("last")])
        given = [Message("user", "go"), Message("assistant", "", (CALL,)), Message("tool", "blue", (), "a", "look")]
        with pytest.raises(AssertionError, match="1 results"):
            await model.reply(given, [LOOK])

    async def test_refuses_to_call_a_tool_that_it_was_not_told_of(self) -> None:
        with pytest.raises(AssertionError, match="look"):
            await ScriptModel.calling("look").reply([Message("user", "go")], [])

    @pytest.mark.parametrize("replies", [[], [Reply("no call"), Reply("last")]])
    def test_needs_a_script_that_a_loop_can_follow(self, replies: list[Reply]) -> None:
        with pytest.raises(InvalidSetting):
            ScriptModel(replies)


ASKED = Message("assistant", "", (CALL, ToolCall("b", "look", {})))
A, B = Message("tool", "1", (), "a", "look"), Message("tool", "2", (), "b", "look")


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([ASKED, A], id="a call without its result"),
        pytest.param([ASKED, A, A, B], id="a call with two results"),
        pytest.param([ASKED, B, A], id="results out of order"),
        pytest.param([ASKED, A, Message("user", "and?"), B], id="a message before the last result"),
        pytest.param([A], id="a result without a call"),
        pytest.param([Message("assistant", "", (CALL, CALL)), A, A], id="two calls with one id"),
    ],
)
def test_a_request_that_no_provider_takes_is_refused(messages: list[Message]) -> None:
    check_request([Message("user", "go"), ASKED, A, B])
    with pytest.raises(AssertionError):
        check_request([Message("user", "go"), *messages])
