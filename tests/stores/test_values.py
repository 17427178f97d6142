"""Any value goes through each store and comes back equal and of its type: as a result, as an argument, and in a flow's state.

One example holds many values of many types, so that a few round trips to each store are enough.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agent_runtime.codec import MAX_DEPTH, MAX_INT_BITS, Shape
from agent_runtime.crash import CrashPoint
from agent_runtime.endings import read_ending
from agent_runtime.errors import Unrecordable
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.state import StateShape
from agent_runtime.journal.records import RecordKind, StoredRun
from agent_runtime.tools import ToolRegistry
from tests.bench import Place, Worker
from tests.flow.desk import recover, run_and_die
from tests.stores.places import STORES, place_on
from tests.test_codec import PLAIN, Colour, Level, Shade, has_a_split_pair, same

EXAMPLES = 1
TEXT = (st.text(max_size=8) | st.text(st.sampled_from('\x00\ud83d\udfffé\u2028"\\'), max_size=5)).filter(
    lambda text: not has_a_split_pair(text)
)
HUGE = st.integers(-(2**MAX_INT_BITS) + 1, 2**MAX_INT_BITS - 1) | st.integers()
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.just(-0.0)
ZONES = st.sampled_from([UTC, timezone(timedelta(hours=7)), timezone(-timedelta(hours=9, minutes=30))])
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)


@dataclass(frozen=True)
class Spot:
    x: float
    tags: frozenset[str]


@dataclass
class Order:
    seats: int
    at: Spot | None = None
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = self.seats * 40


class Item(BaseModel):
    price: Decimal
    colour: Colour
    order: Order
    more: list[Item] = []


SPOTS = st.builds(Spot, FLOATS, st.frozensets(TEXT, max_size=3))
ORDERS = st.builds(Order, st.integers(0, 2**80), st.none() | SPOTS)
ITEMS = st.recursive(
    st.builds(Item, price=DECIMALS, colour=st.just(Colour.RED), order=ORDERS),
    lambda inner: st.builds(
        Item, price=DECIMALS, colour=st.just(Colour.RED), order=ORDERS, more=st.lists(inner, min_size=1, max_size=2)
    ),
    max_leaves=3,
)
DECLARED: list[tuple[object, st.SearchStrategy[object]]] = [
    (object, PLAIN.filter(lambda value: not has_a_split_pair(value))),
    (str, TEXT),
    (int, HUGE),
    (float, FLOATS),
    (Item, ITEMS),
    (Order, ORDERS),
    (list[Item | None], st.lists(st.none() | ITEMS, max_size=3)),
    (dict[int, bool], st.dictionaries(HUGE, st.booleans(), max_size=4)),
    (dict[UUID, date], st.dictionaries(st.uuids(), st.dates(), max_size=3)),
    (tuple[int, str, Decimal], st.tuples(st.integers(), TEXT, DECIMALS)),
    (tuple[float, ...], st.lists(FLOATS, max_size=4).map(tuple)),
    (frozenset[tuple[int, str]], st.frozensets(st.tuples(st.integers(), TEXT), max_size=3)),
    (set[str], st.sets(TEXT, max_size=4)),
    (deque[int], st.lists(st.integers(), max_size=3).map(deque)),
    (datetime, st.datetimes(timezones=st.none() | ZONES)),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (Decimal, DECIMALS),
    (Fraction, st.fractions()),
    (bytes, st.text(max_size=6).map(str.encode)),
    (Colour, st.just(Colour.RED)),
    (Shade | Level, st.sampled_from([Shade.DARK, Level.ONE])),
    (int | str | None, st.none() | st.integers() | st.text(max_size=3)),
    (list[dict[str, list[int]]], st.lists(st.dictionaries(TEXT, st.lists(HUGE, max_size=2), max_size=2), max_size=2)),
]


class Held(BaseModel):
    """A flow's state, of declared types that hold one another."""

    items: list[Item] = []
    moments: dict[str, datetime] = {}
    pairs: frozenset[tuple[int, str]] = frozenset()
    number: int = 0
    ratio: float = -0.0
    text: str = ""
    plain: Any = None


HELD = st.builds(
    Held,
    items=st.lists(ITEMS, max_size=3),
    moments=st.dictionaries(st.text(max_size=4), st.datetimes(timezones=ZONES), max_size=3),
    pairs=st.frozensets(st.tuples(st.integers(), TEXT), max_size=3),
    number=HUGE,
    ratio=FLOATS,
    text=TEXT,
    plain=DECLARED[0][1],
)


def nested(depth: int) -> object:
    value: object = -0.0
    for at in range(depth):
        value = [value] if at % 2 else {"": value}
    return value


EDGES: list[object] = [
    [nested(MAX_DEPTH), "ok \ud83d", 2**MAX_INT_BITS - 1, -0.0, Item(price=Decimal("-0"), colour=Colour.RED, order=Order(2)),
     Order(0), [], {}, {}, (0, "", Decimal("1E+40")), (), frozenset(), set(), deque(), datetime(1, 1, 1),
     time(23, 59, 59, 999999), timedelta.min, Decimal("0.10"), Fraction(1, 3), b"", Colour.RED, Level.ONE, None, [{}]],
    [{"\x00": [[], {}, "", 1, True, 1.0]}, "\x00", -(2**MAX_INT_BITS) + 1, 5e-324,
     Item(price=Decimal("1.000"), colour=Colour.RED, order=Order(1, Spot(-0.0, frozenset({"\x00"})))), Order(2**80), [None],
     {1: True, -1: False}, {UUID(int=0): date.max}, (2**300, "\udfff", Decimal(0)), (-0.0, 0.0),
     frozenset({(1, "\ud83d")}), {""}, deque([1]), datetime.max.replace(tzinfo=UTC), time(0), timedelta.max, Decimal("-0"),
     Fraction(0), b"\x00", Colour.RED, Shade.DARK, "", []],
]  # fmt: skip


SHAPE = StateShape(Held)


def is_freezable(state: Held) -> bool:
    """Whether a flow takes it at all, which no store has a say in."""
    try:
        SHAPE.freeze(state)
    except Unrecordable:
        return False
    return True


def is_sendable(value: object) -> bool:
    """Whether the text in it can be sent at all: an argument with half a character fits no tool, and the call says so."""
    return "\\ud" not in json.dumps(value, allow_nan=False)


def alike(left: object, right: object) -> bool:
    """Equal, and of the same types all the way down: also inside of models and dataclasses."""
    if type(left) is not type(right):
        return False
    match left:
        case BaseModel():
            assert isinstance(right, BaseModel)
            return alike(dict(left), dict(right))
        case dict():
            assert isinstance(right, dict)
            pairs = zip(left.items(), right.items(), strict=False)
            return len(left) == len(right) and all(alike(a, c) and alike(b, d) for (a, b), (c, d) in pairs)
        case list() | tuple() | deque():
            assert isinstance(right, list | tuple | deque)
            return len(left) == len(right) and all(map(alike, left, right))
        case datetime():
            assert isinstance(right, datetime)
            return left == right and left.utcoffset() == right.utcoffset()
        case Decimal():
            return repr(left) == repr(right)
    if is_dataclass(left) and not isinstance(left, type):
        return all(alike(getattr(left, each.name), getattr(right, each.name)) for each in fields(left))
    return same(left, right)


class Stage(NamedTuple):
    """A place on each store, and the loop on which they are used."""

    loop: asyncio.Runner
    places: dict[str, Place]


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    with asyncio.Runner() as loop:
        stack = AsyncExitStack()

        async def opened() -> dict[str, Place]:
            return {kind: await stack.enter_async_context(place_on(kind, _folder(tmp_path, kind), request)) for kind in STORES}

        yield Stage(loop, loop.run(opened()))
        loop.run(stack.aclose())


def _folder(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / kind.replace(" ", "-")
    folder.mkdir()
    return folder


class Giving:
    """A flow whose node calls a tool for each value, which takes a plain value and gives a declared one."""

    def __init__(self, values: list[object], plain: list[object]) -> None:
        pairs = [(annotation, value) for (annotation, _), value in zip(DECLARED, values, strict=True)]
        storable = map(is_storable, SHAPES, values)
        self.given = list(itertools.compress(pairs, storable))
        self.plain = plain
        self.taken: list[object] = []
        self.seen: list[object] = []
        self.states: list[object] = []
        self.registry = ToolRegistry()
        for at, (annotation, value) in enumerate(self.given):
            self._add(at, annotation, value)
        self.flow = Flow("values", state=Held).node("give", self._give).node("look", self._look)
        self.flow.edge("give", "look").end("look")

    def argument(self, at: int) -> object:
        return self.plain[at % len(self.plain)]

    def _add(self, at: int, annotation: object, value: object) -> None:
        async def give(given: Any) -> Any:
            self.taken.append(given)
            return value

        give.__annotations__ = {"given": object, "return": annotation}
        self.registry.tool(name=f"t{at}", idempotent=True)(give)

    async def _give(self, state: Held, run: NodeRun) -> dict[str, object]:
        self.states.append(state)
        calls = (run.call(f"t{at}", given=self.argument(at)) for at in range(len(self.given)))
        self.seen += await asyncio.gather(*calls)
        return {"number": state.number}

    async def _look(self, state: Held, run: NodeRun) -> dict[str, object]:
        self.states.append(state)
        await run.call("t0", given=self.argument(0))  # the worker dies in it
        return {"text": state.text}

    def assert_all_alike(self, kind: str, stored: StoredRun, state: Held) -> None:
        values = [value for _, value in self.given]
        assert alike(self.seen, values), f"{kind}: live"
        for at, value in enumerate(values):
            [body] = [each.body for each in stored.records if (each.call, each.kind) == (f"0/give.{at}", RecordKind.DONE)]
            assert alike(read_ending(body, self.registry.get(f"t{at}")).value, value), f"{kind}: as it is stored"
        taken = [self.argument(at) for at in range(len(values))] + [self.argument(0)]
        assert sorted(map(repr, self.taken)) == sorted(map(repr, taken)), kind
        assert len(self.states) == 3
        for found in self.states:
            assert alike(found, state), kind


SHAPES = [Shape(annotation) for annotation, _ in DECLARED]


def is_storable(shape: Shape, value: object) -> bool:
    """Whether the codec takes it at all, which no store has a say in."""
    try:
        shape.encode(value)
    except Unrecordable:
        return False
    return True


NAMES = itertools.count()


@given(
    st.tuples(*(strategy for _, strategy in DECLARED)).map(list),
    st.lists(DECLARED[0][1].filter(is_sendable), min_size=1, max_size=4),
    HELD.filter(is_freezable),
)
@example(EDGES[0], [nested(MAX_DEPTH - 4), "\x00"], Held(text="\ud83d", number=2**MAX_INT_BITS - 1, plain=[{}, [], -0.0]))
@example(EDGES[1], [{}, [], {"\x00": -0.0}], Held(plain="\x00", pairs=frozenset({(2**70, "\udfff")})))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
def test_values_come_back_from_every_store_equal_and_of_their_types_live_and_after_a_recovery(
    stage: Stage, values: list[object], plain: list[object], state: Held
) -> None:
    run_id = f"run-{next(NAMES)}"

    async def on_all() -> None:
        for kind, place in stage.places.items():
            giving = Giving(values, plain)
            assert len(giving.given) >= len(DECLARED) - 4, "the codec takes nearly all of them"
            await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_INTENT, 1), giving.registry, giving.flow, state, run_id)
            result = await recover(Worker(place), giving.registry, giving.flow, run_id)
            assert (result.status, result.rerun) == ("done", 1), kind
            giving.assert_all_alike(kind, await place.load(run_id), state)
            again = await recover(Worker(place), giving.registry, giving.flow, run_id)
            assert alike(result.state, state), kind
            assert alike(again.state, state), f"{kind}: as it is stored"

    stage.loop.run(on_all())
