"""A value of a declared type comes back equal and of its own type, or is refused: never hollow, never another one."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field, field_serializer
from typing_extensions import TypedDict

from agent_runtime import codec
from agent_runtime.errors import Unrecordable
from tests.test_codec import Colour, Level, Shade, Text, same


@dataclass
class Order:
    show: str
    seats: int
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = self.seats * 40


@dataclass
class Counted:
    name: str
    calls: int = field(init=False, default=0)

    @staticmethod
    def after(name: str, calls: int) -> Counted:
        counted = Counted(name)
        counted.calls = calls
        return counted


@dataclass(frozen=True, slots=True)
class Slotted:
    amount: float


@dataclass(slots=True)
class Holder:
    inner: Slotted
    tags: set[float]


class Seat(BaseModel):
    row: int
    price: Decimal


class Booking(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    seats: list[Seat]
    colour: Colour
    at: datetime
    code: UUID
    note: str | None = Field(default=None, alias="NOTE")


class Pair(NamedTuple):
    left: int
    right: Decimal


class Plan(TypedDict):
    day: date
    tags: list[str]


class OneWay(BaseModel):
    """Writes what it cannot read."""

    amount: int

    @field_serializer("amount")
    def as_text(self, amount: int) -> str:
        return f"{amount} €"


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Hidden(BaseModel):
    name: str
    secret: str = Field(exclude=True, default="")


class WithSum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def double(self) -> int:
        return self.a * 2


class Vault(BaseModel):
    key: SecretStr


class Lax(BaseModel):
    amount: float
    label: str
    ids: set[int]


MOMENT = datetime(2030, 5, 17, 12, 30, 15, 123456, tzinfo=UTC)
SEAT = Seat(row=3, price=Decimal("12.50"))
COMES_BACK: list[tuple[object, object]] = [
    (Order, Order("Hamlet", 2)),
    (list[Order], [Order("Hamlet", 2), Order("Lear", 0)]),
    (Slotted, Slotted(1.5)),
    (Holder, Holder(Slotted(0.5), {1.5, 2.0})),
    (Booking, Booking(seats=[SEAT], colour=Colour.RED, at=MOMENT, code=UUID(int=2**127))),
    (Optional[Booking], None),  # noqa: UP045  # the older form too
    (dict[str, Seat], {"a": SEAT}),
    (Pair, Pair(2**256, Decimal("0.10"))),
    (Plan, {"day": date(2030, 2, 28), "tags": ["a"]}),
    (Extra, Extra(name="a")),
    (Colour, Colour.RED),
    (Shade, Shade.DARK),
    (Level, Level.ONE),
    (Decimal, Decimal("0.1")),
    (Decimal, Decimal("1.000")),
    (Decimal, Decimal("-0")),
    (Decimal, Decimal("1E+40")),
    (datetime, MOMENT),
    (datetime, datetime(2030, 5, 17, 12, 30, tzinfo=timezone(timedelta(hours=7)))),
    (datetime, datetime(2030, 5, 17, 12, 30)),  # without a zone
    (date, date(1, 1, 1)),
    (time, time(23, 59, 59, 999999)),
    (timedelta, timedelta(days=-3, microseconds=7)),
    (UUID, UUID(int=5)),
    (Fraction, Fraction(1, 3)),
    (bytes, b"text"),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (tuple[()], ()),
    (set[str], {"a", "b"}),
    (frozenset[tuple[int, str]], frozenset({(1, "a"), (2, "b")})),
    (set[frozenset[int]], {frozenset({1, 2}), frozenset()}),
    (dict[int, bool], {1: True, 2: False}),
    (dict[int, str], {10: "a", 9: "b"}),
    (dict[tuple[int, int], int], {}),
    (dict[bool, int], {True: 1}),
    (dict[Colour, int], {Colour.RED: 1}),
    (dict[UUID, date], {UUID(int=1): date(2030, 1, 1)}),
    (int | Decimal, 5),
    (Literal["a", 1], 1),
    (Annotated[int, Field(ge=0)], 2**256),
    (list[int | None], [None, 1]),
    (deque[int], deque([1, 2])),
    (str, "ok \ud83d"),
    (list[Order], []),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value"), COMES_BACK, ids=[f"{at}-{row[0]}" for at, row in enumerate(COMES_BACK)])
def test_a_declared_type_comes_back_equal_and_of_its_own_type(annotation: object, value: object) -> None:
    shape = codec.Shape(annotation)
    data = shape.encode(value)
    again = shape.decode(data)
    assert type(again) is type(value)
    assert again == value
    assert repr(again) == repr(value) or isinstance(value, set | frozenset | datetime | Holder | BaseModel)
    assert shape.encode(again) == data or isinstance(value, set | frozenset | Holder)


HOLLOW: list[tuple[object, object]] = [
    (Counted, Counted.after("a", 7)),
    (OneWay, OneWay(amount=5)),
    (Hidden, Hidden(name="a", secret="s")),
    (WithSum, WithSum(a=2)),
    (Vault, Vault(key=SecretStr("sk-TEST-123"))),
    (Extra, Extra(name="a", at=MOMENT)),  # type: ignore[call-arg]  # that is what extra is
    (dict[int | str, str], {1: "a"}),
    (dict[int | str, str], {"x": "a", 2: "b"}),
    (dict[int | str, str], {1: "a", "1": "b"}),
    (dict[tuple[int, int], int], {(1, 2): 3}),
    (dict[Any, str], {1: "a"}),
    (dict[float, str], {1.0: "a", 2: "b"}),
    (dict[str, Any], {"a": Decimal("0.1")}),
    (list[Any], [(1, 2)]),
    (list[Any], [{1, 2}]),
    (tuple[Any, ...], (Colour.RED,)),
    (float | Decimal, Decimal("0.1")),
    (Order, {"show": "Hamlet", "seats": 2}),
    (Order, None),
    (Seat, Booking(seats=[], colour=Colour.RED, at=MOMENT, code=UUID(int=1))),
    (list[Seat], (SEAT,)),
    (Slotted, Slotted(1)),
    (Holder, Holder(Slotted(1), {1.5})),
    (Holder, Holder(Slotted(1.0), {1})),
    (set[float], {1}),
    (set[float], {True, 2.5}),
    (frozenset[int], frozenset({True})),
    (deque[float], deque([1])),
    (tuple[float, int], (1, 2)),
    (tuple[int, int], (True, 2)),
    (Lax, Lax.model_construct(amount=1, label="x", ids={1})),
    (Lax, Lax.model_construct(amount=1.5, label=Text("x"), ids={1})),
    (Lax, Lax.model_construct(amount=1.5, label="x", ids={True})),
    (Lax, Lax.model_construct(amount=float("nan"), label="x", ids=set())),
    (Decimal, Decimal("NaN")),
    (Decimal, Decimal("Infinity")),
    (datetime, MOMENT.astimezone(ZoneInfo("Europe/Berlin"))),
    (datetime, datetime(2030, 10, 27, 2, 30, fold=1)),  # one of two such hours
    (time, time(12, 0, tzinfo=ZoneInfo("Europe/Berlin"))),
    (list[datetime], [MOMENT.astimezone(ZoneInfo("Asia/Bangkok"))]),
    (Booking, Booking(seats=[], colour=Colour.RED, at=MOMENT.astimezone(ZoneInfo("Asia/Bangkok")), code=UUID(int=1))),
    (bytes, b"\xff\xfe"),
    (bytes, bytearray(b"x")),
    (list[str], ["\ud83d\ude00"]),
    (Seat, Seat.model_construct(row="three", price=Decimal(1))),
    (Union[int, str], Text("x")),  # noqa: UP007  # the older form too
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value"), HOLLOW, ids=[f"{at}-{row[0]}" for at, row in enumerate(HOLLOW)])
def test_what_would_come_back_as_something_else_is_refused_or_comes_back_the_same_after_all(
    annotation: object, value: object
) -> None:
    shape = codec.Shape(annotation)
    try:
        data = shape.encode(value)
    except Unrecordable:
        return
    again = shape.decode(data)
    assert codec_says_same(value, again), f"{value!r} came back as {again!r}"


def codec_says_same(left: Any, right: Any) -> bool:
    """A judgement of our own, stricter than equality: types, zones and every attribute, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, datetime | time):
        return bool(left == right) and left.fold == right.fold and type(left.tzinfo) is type(right.tzinfo)
    if isinstance(left, dict):
        return list(map(type, left)) == list(map(type, right)) and same_items(left.items(), right.items())
    if isinstance(left, list | tuple | deque):
        return same_items(left, right)
    if isinstance(left, set | frozenset):
        return same_items(sorted(left, key=repr), sorted(right, key=repr))
    names = [*getattr(left, "__dict__", {}), *(name for kind in type(left).__mro__ for name in getattr(kind, "__slots__", ()))]
    own = [name for name in names if not name.startswith("__") and hasattr(left, name)]
    if not own or isinstance(left, enum.Enum | Fraction | Decimal):
        return bool(left == right)
    return all(codec_says_same(getattr(left, name), getattr(right, name)) for name in own)


def same_items(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(codec_says_same(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (dict[str, Any], {"a": [{"h": Decimal(1)}]}, "$.a[0].h"),
        (list[Lax], [Lax.model_construct(amount=1.5, label="x", ids={1}), Lax.model_construct(amount=1, label="x", ids={1})],
         "$[1].amount"),
        (dict[str, set[float]], {"a": {1.5}, "b": {1}}, "$.b"),
        (list[datetime], [MOMENT, MOMENT.astimezone(ZoneInfo("Asia/Bangkok"))], "$[1]"),
        (Holder, Holder(Slotted(1), {1.5}), "$.inner.amount"),
    ],
    ids=["plain", "model", "set", "zone", "slots"],
)  # fmt: skip
def test_the_path_of_what_comes_back_as_something_else_is_named(annotation: object, value: object, path: str) -> None:
    with pytest.raises(Unrecordable) as refused:
        codec.Shape(annotation).encode(value)
    assert refused.value.path.startswith(path)


@given(st.dictionaries(st.integers() | st.text(max_size=3) | st.booleans(), st.text(max_size=3), max_size=5))
def test_a_dict_never_comes_back_smaller(value: dict[int | str, str]) -> None:
    shape = codec.Shape(dict[int | str, str])
    try:
        data = shape.encode(value)
    except Unrecordable:
        return
    assert same(shape.decode(data), value)


@given(st.datetimes(timezones=st.none() | st.timezones() | st.just(UTC)) | st.times(timezones=st.none() | st.timezones()))
def test_a_moment_never_loses_its_zone(value: datetime | time) -> None:
    shape = codec.Shape(type(value))
    try:
        data = shape.encode(value)
    except Unrecordable:
        return
    again = shape.decode(data)
    assert again == value
    assert again.utcoffset() == value.utcoffset()
    assert (again.tzinfo is None) is (value.tzinfo is None)
    assert value.tzinfo is None or value.tzinfo.utcoffset(None) is not None, "a zone with rules of its own lost them"


@given(
    st.decimals(allow_nan=False, allow_infinity=False) | st.fractions() | st.uuids() | st.timedeltas() | st.binary(max_size=9)
)
def test_values_of_the_standard_library_come_back_to_the_letter_or_are_refused(value: object) -> None:
    shape = codec.Shape(type(value))
    try:
        data = shape.encode(value)
    except Unrecordable:
        return
    assert repr(shape.decode(data)) == repr(value)


def test_plain_annotations_need_no_schema_and_others_do() -> None:
    plain: list[object] = [None, Any, object, int, dict[str, list[int | None]], list[dict[str, Any]], Literal["a"], str | None]
    for annotation in plain:
        assert codec.is_plain_type(annotation), annotation
    others: list[object] = [
        tuple[int],
        dict[int, str],
        Order,
        Seat,
        list[Order],
        Decimal,
        set[int],
        Literal[Colour.RED],
        bytes,
    ]
    for annotation in others:
        assert not codec.is_plain_type(annotation), annotation
