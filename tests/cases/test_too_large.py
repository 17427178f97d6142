"""What is larger than may be recorded is refused at its door: once, clearly, and for its own run alone."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime import (
    Call,
    Executor,
    Flow,
    FlowRunner,
    Outcome,
    RecoveryNeedsDecision,
    RunQuarantined,
    Runs,
    Unrecordable,
    VerdictRefused,
    codec,
)
from agent_runtime.errors import CallFailed, InvalidSetting, StoreRefused, TooLarge
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.messages import Reply
from agent_runtime.run import AROUND_BYTES, LEAST_VALUE_BYTES
from agent_runtime.stores import BlobStore, open_store
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Script, results_in
from tests.redis_servers import RedisServer, redis_origins
from tests.servers import Server, fresh_schema

LIMIT = 1_000_000
HUGE = "x" * 5_000_000


class Shop:
    """Tools whose results, or arguments, are too large."""

    def __init__(self) -> None:
        self.charged = self.fetched = 0
        self.registry = ToolRegistry()

        @self.registry.tool
        async def charge(amount: int) -> str:
            self.charged += 1
            return HUGE

        @self.registry.tool(idempotent=True, pause=0.001)
        async def fetch(page: int) -> list[str]:
            self.fetched += 1
            return [HUGE]

        @self.registry.tool
        async def note(text: str) -> str:
            return f"{len(text)} noted"

        @self.registry.tool(needs_approval=True)
        async def publish(text: str) -> str:
            return f"{len(text)} published"


@pytest.fixture(scope="module")
def redis() -> Any:
    with RedisServer(redis_origins()[0].program, appendonly="no") as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "blobs", "postgres", "sqlalchemy", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    match request.param:
        case "memory":
            yield MemoryCheckpointStore()
        case "sqlite":
            opened: CheckpointStore = SQLiteCheckpointStore(tmp_path / "runs.db")
            yield opened
            await opened.close()
        case "blobs":
            (tmp_path / "blobs").mkdir()
            yield BlobStore(MemoryCheckpointStore(), tmp_path / "blobs")
        case "redis":
            server: RedisServer = request.getfixturevalue("redis")
            opened = open_store(f"{server.url}?prefix=t{secrets.token_hex(8)}&may_lose_writes=no")
            yield opened
            await opened.close()
        case kind:
            postgres: Server = request.getfixturevalue("one_postgres")
            async with fresh_schema(postgres.url) as schema:
                native = PostgresCheckpointStore(postgres.url, schema=schema)
                url = postgres.url.replace("postgresql:", "postgresql+asyncpg:")
                opened = native if kind == "postgres" else SQLAlchemyCheckpointStore(url, schema=schema)
                yield opened
                await opened.close()


async def start(shop: Shop, store: CheckpointStore, tool: str, args: dict[str, object], **options: Any) -> Any:
    options = {"run_id": "run", "max_value_bytes": LIMIT, **options}
    return await run_tool_loop(
        Script([(tool, args)], "end"), shop.registry, "go", checkpoints=store, checkpoint_key=KEY, **options
    )


async def both(shop: Shop, store: CheckpointStore, most: int) -> tuple[Any, Any]:
    """What became of a run with a large result, and of another that is worked beside it."""
    large = asyncio.create_task(start(shop, store, "charge", {"amount": 1}, max_value_bytes=most))
    other = asyncio.create_task(start(shop, store, "note", {"text": "small"}, run_id="other", max_value_bytes=most))
    await asyncio.wait({large, other})
    return large.exception(), other.result()


async def recover(shop: Shop, store: CheckpointStore, **options: Any) -> Any:
    options = {"max_value_bytes": LIMIT, **options}
    return await recover_tool_loop(
        Script([("charge", {"amount": 1})], "end"), shop.registry, "run", checkpoints=store, checkpoint_key=KEY, **options
    )


async def test_a_result_too_large_is_refused_once_and_its_call_is_never_made_again_by_itself(store: CheckpointStore) -> None:
    shop = Shop()
    refused, other = await both(shop, store, LIMIT)
    assert isinstance(refused, TooLarge)
    assert isinstance(refused, Unrecordable)
    for told in ("'charge'", "5,000,002", "1,000,000"):
        assert told in str(refused)
    assert (refused.tool, refused.size, refused.limit) == ("charge", 5_000_002, LIMIT)
    assert results_in(other.messages) == ["5 noted"]
    kinds = [record.kind for record in await store.calls(RunId("run")) if record.call == "0"]
    assert kinds == [RecordKind.STARTED, RecordKind.UNRECORDABLE]
    for _ in range(2):
        with pytest.raises(RecoveryNeedsDecision, match="could not be stored"):
            await recover(shop, store)
    assert shop.charged == 1
    await Runs(store, checkpoint_key=KEY).settle("run", "0", Outcome.done("kept in box 7"), by="ana", why="seen")
    assert results_in((await recover(shop, store)).messages) == ["kept in box 7"]
    assert shop.charged == 1


async def test_a_result_too_large_of_a_tool_that_may_repeat_is_asked_for_once_more_and_no_more(store: CheckpointStore) -> None:
    shop = Shop()
    with pytest.raises(TooLarge, match="fetch"):
        await start(shop, store, "fetch", {"page": 1})
    with pytest.raises(RecoveryNeedsDecision):
        await recover(shop, store)
    assert shop.fetched == 2


async def test_what_the_store_itself_does_not_take_is_known_at_the_door() -> None:
    shop, store = Shop(), MemoryCheckpointStore()
    store.max_body_bytes = LIMIT + AROUND_BYTES
    with pytest.raises(TooLarge, match=r"5,000,002.*1,000,000"):
        await start(shop, store, "charge", {"amount": 1}, max_value_bytes=codec.MAX_BYTES)
    assert shop.charged == 1
    store.max_body_bytes = LEAST_VALUE_BYTES
    with pytest.raises(InvalidSetting, match="takes bodies of"):
        await start(shop, store, "note", {"text": ""}, run_id="another")


async def test_a_server_that_takes_less_than_others_is_asked_how_much() -> None:
    shop = Shop()
    with RedisServer(redis_origins()[0].program, appendonly="no", proto_max_bulk_len="1mb") as server:
        store = open_store(f"{server.url}?may_lose_writes=no")
        with pytest.raises(TooLarge, match="'charge'"):
            await start(shop, store, "charge", {"amount": 1}, max_value_bytes=codec.MAX_BYTES)
        assert shop.charged == 1
        with pytest.raises(StoreRefused, match="proto-max-bulk-len"):
            await store.commit([Draft.of("direct").open(b"x" * 2_000_000)])
        assert await store.latest(Draft.of("direct").run_id) is None
        await store.close()


class Narrow(SQLiteCheckpointStore):
    """A file that takes less than SQLite usually does, and does not say so."""

    max_body_bytes = None

    def _connect(self, *, wait_seconds: float = 0) -> sqlite3.Connection:
        db = super()._connect(wait_seconds=wait_seconds)
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMIT)
        return db


async def test_what_only_the_database_finds_too_large_is_a_refusal_of_that_run_alone(tmp_path: Path) -> None:
    shop, store = Shop(), Narrow(tmp_path / "runs.db")
    refused, other = await both(shop, store, codec.MAX_BYTES)
    assert isinstance(refused, StoreRefused)
    assert other.status == "done"
    await store.close()


# Every other door.


async def test_an_input_too_large_is_refused_before_anything_is_written(store: CheckpointStore) -> None:
    with pytest.raises(TooLarge, match=r"the input of run 'run' takes 5,000,\d+ bytes"):
        await run_tool_loop(
            Script("end"), ToolRegistry(), HUGE, run_id="run", checkpoints=store, checkpoint_key=KEY, max_value_bytes=LIMIT
        )
    assert await store.list_runs() == []


async def test_a_reply_too_large_fails_clearly_and_its_run_can_be_recovered_a_bounded_number_of_times() -> None:
    store = MemoryCheckpointStore()

    class Wordy:
        asked = 0

        async def reply(self, messages: object, tools: object) -> Reply:
            self.asked += 1
            return Reply(HUGE)

    model = Wordy()
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY, "max_value_bytes": LIMIT, "max_attempts": 2}
    with pytest.raises(TooLarge, match="the reply of the model takes 5,000,"):
        await run_tool_loop(model, ToolRegistry(), "go", run_id="run", **options)
    for _ in range(2):
        with pytest.raises(TooLarge):
            await recover_tool_loop(model, ToolRegistry(), "run", **options)
    with pytest.raises(RunQuarantined):
        await recover_tool_loop(model, ToolRegistry(), "run", **options)
    assert model.asked == 3
    await Runs(store, checkpoint_key=KEY).release("run", by="ana")
    assert (await recover_tool_loop(Script("short"), ToolRegistry(), "run", **options)).output == "short"


async def test_arguments_for_which_there_is_no_room_are_answered_to_the_model_and_never_sent() -> None:
    text = "x" * 600_000  # as they are and as they will be sent, a request holds them twice
    result = await start(Shop(), MemoryCheckpointStore(), "publish", {"text": text})
    [told] = results_in(result.messages)
    assert told.startswith("error: InvalidArguments: its arguments take 1,200,")
    assert "1,000,000 are allowed" in told


async def test_arguments_of_a_node_for_which_there_is_no_room_fail_its_call_and_are_never_sent() -> None:
    shop = Shop()

    class State(BaseModel):
        told: str = ""

    async def large(state: State, run: Any) -> dict[str, object]:
        try:
            await run.call("note", text=HUGE)
        except CallFailed as failed:
            return {"told": f"{failed.error_type}: {failed.message}"}
        return {}

    flow = Flow("f", state=State).node("a", large).end("a")
    runner = FlowRunner(Executor(shop.registry), checkpoint_key=KEY, max_value_bytes=LIMIT)
    assert (await runner.run(flow, State())).state.told.startswith("InvalidArguments: its arguments take 5,000,011 bytes")


async def test_a_state_too_large_is_refused_and_its_run_goes_on_once_there_is_room(store: CheckpointStore) -> None:
    shop = Shop()

    class State(BaseModel):
        noted: str = ""
        text: str = ""

    flow = Flow("f", state=State).node("pay", Call("note", args=lambda state: {"text": "once"}, into="noted"))
    flow.node("grow", lambda state: {"text": HUGE}).edge("pay", "grow").end("grow")

    def runner(most: int) -> FlowRunner:
        return FlowRunner(Executor(shop.registry), checkpoints=store, checkpoint_key=KEY, max_value_bytes=most)

    for go in (runner(LIMIT).run(flow, State(), run_id="run"), runner(LIMIT).recover(flow, "run")):
        with pytest.raises(TooLarge, match="field 'text' of the state of flow 'f' takes 5,000,002 bytes"):
            await go
    result = await runner(codec.MAX_BYTES).recover(flow, "run")
    assert (result.status, len(result.state.text)) == ("done", len(HUGE))
    with pytest.raises(TooLarge, match="the input of run 'wide'"):
        await runner(LIMIT).run(flow, State(text=HUGE), run_id="wide")


async def test_what_people_say_is_refused_where_there_is_no_room_and_the_run_waits_on() -> None:
    shop, store = Shop(), MemoryCheckpointStore()
    runs = Runs(store, checkpoint_key=KEY, max_value_bytes=LIMIT)
    paused = await start(shop, store, "publish", {"text": "short"}, run_id="paused")
    [request] = paused.pending
    edit = request.edit({"text": HUGE}, by="ana")
    for refused in (runs.edit(request, {"text": HUGE}, by="ana"), recover_with(shop, store, [edit])):
        with pytest.raises(VerdictRefused, match=r"the edit takes .* bytes as it is recorded, and 1,000,000 are allowed"):
            await refused
    with pytest.raises(TooLarge):
        await start(shop, store, "charge", {"amount": 1})
    with pytest.raises(TooLarge, match="what is said of call '0' of run 'run'"):
        await runs.settle("run", "0", Outcome.done(HUGE), by="ana", why="seen")
    with pytest.raises(TooLarge, match="the word that ends run 'run'"):
        await runs.cancel("run", by="ana", why=HUGE)
    assert sorted((info.run_id, info.status) for info in await runs.list()) == [("paused", "paused"), ("run", "in-doubt")]
    assert await store.inbox(request.run_id) == []


async def recover_with(shop: Shop, store: CheckpointStore, verdicts: list[Any]) -> Any:
    return await run_tool_loop(
        Script([("publish", {"text": "short"})], "end"), shop.registry, run_id="paused", verdicts=verdicts, checkpoints=store,
        checkpoint_key=KEY, max_value_bytes=LIMIT,
    )  # fmt: skip


@pytest.mark.parametrize("most", [0, -1, LEAST_VALUE_BYTES - 1, codec.MAX_BYTES + 1, 1e6, True, None, "1000000"])
async def test_a_limit_that_none_can_be_is_refused(most: Any) -> None:
    with pytest.raises(InvalidSetting, match="max_value_bytes="):
        await start(Shop(), MemoryCheckpointStore(), "note", {"text": ""}, max_value_bytes=most)
    with pytest.raises(InvalidSetting, match="max_value_bytes="):
        Runs(MemoryCheckpointStore(), checkpoint_key=KEY, max_value_bytes=most)


VALUES = {"text": "x" * 20_000_000, "deep": {"a": ["é" * 4_000_000] * 5}, "escaped": ["\n" * 20_000_000]}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_far_too_large_is_refused_without_another_copy_of_it(name: str) -> None:
    value = VALUES[name]
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as refused:
            codec.encode(value, LIMIT)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10_000_000
    assert refused.value.size == len(codec.encode(value))
