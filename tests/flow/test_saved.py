"""What a flow stores: each state as it comes back, a large field once, and no more at step 1,000 than at step 10."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_serializer

from agent_runtime import codec
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt, FlowError, TooLarge, Unrecordable
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.flow.saved import LARGE_BYTES
from agent_runtime.flow.state import StateShape
from agent_runtime.journal.journal import guard_of
from agent_runtime.journal.records import RecordKind, StoredCheckpoint
from agent_runtime.journal.seal import checkpoint_digest, sealer_for
from agent_runtime.journal.store import Append
from agent_runtime.settings import MAX_VALUE_BYTES
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.faults import FaultyStore
from tests.bench import RING, Bench, Place, Worker, error_of
from tests.flow.desk import CHARGE, LOOK, Order, chain, recover, run, run_and_die


class Colour(Enum):
    RED = "red"


class Part(BaseModel):
    price: Decimal
    tags: set[str] = set()


class Rich(BaseModel):
    """A state of declared types."""

    when: datetime
    day: date | None = None
    waits: timedelta = timedelta(0)
    id: UUID | None = None
    colour: Colour = Colour.RED
    parts: list[Part] = []
    pair: tuple[int, str] = (0, "")
    named: dict[str, float] = {}
    odd_name: str = Field(default="", alias="oddName")
    text: str = ""


RICH = Rich(
    when=datetime(2030, 5, 1, 12, tzinfo=UTC), day=date(2030, 5, 1), waits=timedelta(seconds=1.5), id=UUID(int=7),
    parts=[Part(price=Decimal("1.10"), tags={"a", "b"})], pair=(1, "x"), named={"a": 0.1}, oddName="odd", text="ü \ud800",
)  # fmt: skip


async def test_a_state_of_declared_types_is_the_same_before_and_after_a_recovery(place: Place) -> None:
    seen: list[Rich] = []

    def look(state: Rich) -> dict[str, object]:
        seen.append(state)
        return {"named": {**state.named, f"{len(seen)}": 1.0}}

    flow = Flow("rich", state=Rich).node("a", look).node("b", Call("charge_i", args=lambda s: {"amount": 1})).node("c", look)
    flow.edge("a", "b").edge("b", "c").end("c")
    bench = Bench()
    await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL, 1), bench.registry, flow, RICH)
    result = await recover(Worker(place), bench.registry, flow)
    assert result.state == RICH.model_copy(update={"named": {"a": 0.1, "1": 1.0, "2": 1.0}})
    assert codec.difference(seen[1], RICH.model_copy(update={"named": {"a": 0.1, "1": 1.0}})) is None


@given(
    st.builds(
        Rich,
        when=st.datetimes(timezones=st.just(UTC)),
        day=st.none() | st.dates(),
        waits=st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=9)),
        pair=st.tuples(st.integers(), st.text()),
        named=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
        text=st.text(),
    )
)
def test_whatever_fits_the_model_comes_back_equal_or_is_refused(state: Rich) -> None:
    shape = StateShape(Rich)
    try:
        fields, again = shape.freeze(state)
    except Unrecordable:
        return
    assert again == state
    assert shape.thaw(fields) == state


def test_a_field_that_does_not_come_back_is_refused_when_it_is_saved() -> None:
    class OneWay(BaseModel):
        count: int = 1

        @field_serializer("count")
        def shown(self, count: int) -> str:
            return f"{count} pieces"

    with pytest.raises(Unrecordable):
        StateShape(OneWay).freeze(OneWay())


def test_a_copy_shares_nothing_that_can_be_changed() -> None:
    shape = StateShape(Order)
    state = Order(names=["a"])
    shape.copy(state).names.append("b")
    assert state.names == ["a"]


# How much is stored.


class Big(BaseModel):
    constant: str = ""
    grows: Annotated[list[str], lambda held, new: [*held, new]] = []
    rounds: int = 0
    later: str = ""


def turning(rounds: int) -> Flow[Big]:
    """A loop of so many supersteps, each with one call."""
    flow = Flow("turning", state=Big).node("count", lambda state: {"rounds": state.rounds + 1})
    flow.node("pay", Call("charge_i", args=lambda state: {"amount": state.rounds % 10}))
    flow.edge("pay", "count").edge("count", "pay", when=lambda state: state.rounds < rounds)
    return flow.end("count")


async def bytes_of(place: Place, run_id: str) -> int:
    stored = await place.load(run_id)
    assert stored.checkpoint is not None
    return len(stored.checkpoint.body) + sum(len(record.body) for record in stored.records)


async def test_fifty_supersteps_with_a_large_constant_store_it_once(place: Place) -> None:
    constant = "x" * 180_000
    store = FaultyStore(place.open())
    worker = Worker(place)
    worker.inner = store
    result = await run(worker, Bench().registry, turning(50), Big(constant=constant, rounds=0))
    assert result.state.constant == constant
    assert await bytes_of(place, "run") < 180_000 + 50 * 600
    assert store.counts.bytes < 180_000 + 110 * 1_000, "what was written over all supersteps, checkpoints included"


async def test_a_large_field_that_comes_later_is_stored_once_in_a_record_of_its_own_and_a_changing_one_in_none(
    place: Place,
) -> None:
    later = "y" * 50_000

    def set_once(state: Big) -> dict[str, object]:
        return {"later": later} if state.rounds == 2 else {}

    flow = Flow("f", state=Big).node("n", lambda state: {"rounds": state.rounds + 1, "grows": "z" * 600, **set_once(state)})
    flow.edge("n", "n", when=lambda state: state.rounds < 20).node("pay", Call("charge_i", args=lambda s: {"amount": 1}))
    flow.edge("n", "pay", when=lambda state: state.rounds == 20).end("pay")
    bench = Bench()
    await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL, 20), bench.registry, flow, Big())
    fields = [record for record in (await place.load("run")).records if record.kind == RecordKind.FIELD]
    assert [record.body for record in fields] == [codec.encode(later)]
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.state.later, len(result.state.grows), result.state.rounds) == (later, 20, 20)


async def test_a_small_field_is_stored_with_its_checkpoint(place: Place) -> None:
    await run(Worker(place), Bench().registry, chain(LOOK, LOOK), Order(to="a" * (LARGE_BYTES - 100)))
    assert not [record for record in (await place.load("run")).records if record.kind == RecordKind.FIELD]


@pytest.mark.parametrize("mode", ["grouped", "each"])
async def test_superstep_one_thousand_costs_no_more_than_superstep_ten(mode: str) -> None:
    async def cost(rounds: int) -> tuple[int, int, int, int]:
        store = FaultyStore(MemoryCheckpointStore())
        runner = FlowRunner(Executor(Bench().registry), checkpoints=store, commits=mode, checkpoint_key=b"k" * 16)
        await runner.run(turning(rounds), Big(constant="x" * 5_000), run_id=f"{rounds:04}")
        counts = store.counts
        return counts.writes, counts.rows, counts.reads, counts.bytes

    ten, twenty, most, more = [await cost(rounds) for rounds in (10, 20, 500, 510)]
    early = [after - before for before, after in zip(ten, twenty, strict=True)]
    late = [after - before for before, after in zip(most, more, strict=True)]
    assert late[:3] == early[:3]
    assert late[3] <= early[3] * 1.02, "the numbers of the supersteps are a little longer"


# What is stored, and is not as it was.


async def test_a_state_that_does_not_fit_the_model_any_more_is_refused_before_the_claim(place: Place) -> None:
    bench = Bench()
    await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL), bench.registry, chain(CHARGE, LOOK), Order(amount=-1))

    class Stricter(Order):
        amount: int = Field(default=40, gt=0)

    before = await place.load("run")
    stricter = Flow("orders", state=Stricter).node("n0", CHARGE).node("n1", LOOK).edge("n0", "n1").end("n1")
    error = await error_of(recover(Worker(place), bench.registry, stricter))
    assert isinstance(error, FlowError)
    assert "the stored state does not fit Stricter as it is now: amount" in str(error)
    assert (await place.load("run")).row.epoch == before.row.epoch


@pytest.mark.parametrize("body", [b"[]", b"{}", b"", b'{"superstep":0}', b"\xff"])
async def test_a_checkpoint_that_was_sealed_and_cannot_be_read_is_corrupt(body: bytes, place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL), bench.registry, flow)
    stored = await place.load("run")
    sealer, row = sealer_for(RING, tenant="", run_id="run"), stored.row
    digest, step = checkpoint_digest(row.step + 1, body), row.step + 1
    [record] = sealer.chain([(RecordKind.CHECKPOINT, "", 0, digest)], number=row.number, epoch=row.epoch, previous=row.head)
    wished = row._replace(number=record.number, head=record.seal, step=step)
    wished = wished._replace(seal=sealer.row(wished))
    checkpoint = StoredCheckpoint(step, body, sealer.checkpoint(step, body))
    await place.open().commit([Append(wished, guard_of(row), (record,), checkpoint)])
    assert isinstance(await error_of(recover(Worker(place), bench.registry, flow)), CheckpointStoreCorrupt)


def test_what_is_told_of_a_state_that_does_not_fit_never_holds_its_values() -> None:
    shape: StateShape[Any] = StateShape(Order)
    with pytest.raises(FlowError) as refused:
        shape.build({"amount": "a secret"}, by="it")
    assert "a secret" not in str(refused.value)


async def test_a_state_larger_than_a_checkpoint_may_be_is_refused_before_it_is_saved(place: Place) -> None:
    class Wide(BaseModel):
        one: str = ""
        two: str = ""

    half = "x" * (MAX_VALUE_BYTES // 2 + 1)
    flow = Flow("f", state=Wide).node("a", lambda state: {"one": half, "two": half}).end("a")
    error = await error_of(run(Worker(place), Bench().registry, flow, Wide()))
    assert isinstance(error, TooLarge)
    assert "what changed of the state of flow 'f'" in str(error)
    assert (await place.load("run")).checkpoint is None


@pytest.mark.parametrize("nth", range(1, 5))
async def test_a_large_field_that_was_stored_once_and_changes_comes_back_as_it_is_now(nth: int, place: Place) -> None:
    def change(state: Big) -> dict[str, object]:
        return {"rounds": state.rounds + 1, "later": f"{state.rounds // 2}" * 1_000, "constant": f"{state.rounds}" * 1_000}

    flow = Flow("f", state=Big).node("n", change).node("pay", Call("charge_i", args=lambda state: {"amount": 1}))
    flow.edge("n", "pay").edge("pay", "n", when=lambda state: state.rounds < 5).end("pay")
    bench = Bench()
    state = Big(constant="x" * 1_000, later="y" * 1_000)
    await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL, 2 * nth - 1), bench.registry, flow, state)
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.state.later, result.state.constant) == ("2" * 1_000, "4" * 1_000)
    stored = await recover(Worker(place), bench.registry, flow)
    assert stored.state == result.state
