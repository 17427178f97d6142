"""What is written comes back equal and of the same types, or is refused with the path of what cannot go."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agent_runtime import codec
from agent_runtime.errors import TooLarge, Unrecordable

MIXED = st.text(st.sampled_from('a"\\/\n\x00\x7f\u2028é\U0001f600\ud83d\ude00'), max_size=8)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**12_999), 2**12_999),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    MIXED,
)
PLAIN = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | MIXED, inner, max_size=4)
)


def same(left: object, right: object) -> bool:
    """Equal, of the same types all the way down, in the same order, with the same zeros."""
    if type(left) is not type(right):
        return False
    match left:
        case dict():
            assert isinstance(right, dict)
            pairs = zip(left.items(), right.items(), strict=False)
            return len(left) == len(right) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
        case list() | tuple():
            assert isinstance(right, list | tuple)
            return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
        case float():
            return repr(left) == repr(right)
        case _:
            return left == right


def has_a_split_pair(value: object) -> bool:
    """Whether some text holds the two halves of one character, which JSON cannot tell from the character."""
    match value:
        case str():
            return any("\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in pairwise(value))
        case dict():
            return any(has_a_split_pair(each) for pair in value.items() for each in pair)
        case list():
            return any(map(has_a_split_pair, value))
        case _:
            return False


# Plain data.


@given(PLAIN)
@example(-0.0)
@example([1, True, 1.0, "1", 0, False, 0.0, -0.0, None, ""])
@example({"": {"": [[], {}]}})
@example("ok \ud83d")
@example({"\ud83d": "\ude00"})
@example(1e308 * 1.5)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    if has_a_split_pair(value):
        with pytest.raises(Unrecordable):
            codec.encode(value)
        return
    data = codec.encode(value)
    assert same(codec.decode(data), value)
    assert codec.encode(codec.decode(data)) == data
    assert json.loads(data) == value


@pytest.mark.parametrize(
    "text", ["\ud83d\ude00", "a\udbff\udfffb", "\ud83d\ude00\ud83d", ["\ud83d\ude00"], {"\ud83d\ude00": 1}]
)
def test_the_two_halves_of_a_character_are_refused_since_they_would_come_back_as_the_character(text: object) -> None:
    with pytest.raises(Unrecordable):
        codec.encode(text)


# The time at the end of a record.

ENDING = st.sampled_from(["result", "error"])
TIMES = st.integers(0, 2**63 - 1)
LOOKS_TIMED = st.builds(lambda value, at: {"a": value, "at": at}, PLAIN, st.integers() | st.just("5") | PLAIN)
RESULTS = PLAIN | LOOKS_TIMED | st.lists(LOOKS_TIMED, max_size=2) | st.just(',"at":5}') | st.just('","at":5')


def as_an_ending(name: str, value: object) -> bytes:
    assume(not has_a_split_pair(value))
    return codec.encode({name: value})


@given(ENDING, RESULTS, TIMES)
@example("result", 0, 0)
@example("result", {"at": 5}, 2**63 - 1)
@example("result", {"a": 1, "at": 5}, 1)
def test_the_time_that_was_added_to_a_body_is_taken_away_again_and_nothing_else(name: str, value: object, at_ms: int) -> None:
    body = as_an_ending(name, value)
    timed = codec.timed(body, at_ms)
    assert codec.decode(timed) == {**codec.decode(body), "at": at_ms}
    assert codec.untimed(timed) == body


@given(ENDING, RESULTS)
@example("result", {"at": 5})
@example("result", {"a": 1, "at": 5})
@example("result", [{"a": 1, "at": 5}])
@example("result", ',"at":5')
@example("error", {"type": "E", "message": '","at":5'})
def test_a_body_to_which_no_time_was_added_keeps_what_looks_like_one(name: str, value: object) -> None:
    body = as_an_ending(name, value)
    assert codec.untimed(body) == body


class Colour(enum.Enum):
    RED = "red"


class Shade(enum.StrEnum):
    DARK = "dark"


class Level(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


class Number(int):
    pass


class Table(dict[str, int]):
    pass


Point = namedtuple("Point", "x y")  # the kind without types is what is tested

NOT_PLAIN: list[object] = [
    float("nan"), float("inf"), -float("inf"), (1, 2), (), {1, 2}, frozenset(), b"bytes", bytearray(b"x"), memoryview(b"x"),
    Decimal("0.1"), Fraction(1, 3), range(3), 1j, Colour.RED, Shade.DARK, Level.ONE, Text("x"), Number(1), Table(a=1),
    OrderedDict(a=1), defaultdict(int), deque([1]), Point(1, 2), date(2030, 1, 1), datetime(2030, 1, 1, tzinfo=UTC),
    timedelta(1), UUID(int=5), object(), object, len, ..., NotImplemented, ValueError("x"), 2**13_001, -(2**13_001),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda value: value, "$"),
        (lambda value: [0, value], "$[1]"),
        (lambda value: {"a": [{"h": value}]}, "$.a[0].h"),
    ],
    ids=["alone", "in a list", "deep"],
)
def test_what_is_not_plain_is_refused_with_its_path_and_what_it_is(
    value: object, wrap: Callable[[object], object], path: str
) -> None:
    with pytest.raises(Unrecordable) as refused:
        codec.encode(wrap(value))
    assert refused.value.path == path
    assert f" at {path}: found " in str(refused.value)


@pytest.mark.parametrize("key", [1, 1.5, True, None, (1, 2), b"x", Text("x"), Shade.DARK, Colour.RED])
def test_a_key_that_is_no_text_is_refused_with_the_path_of_its_dict(key: object) -> None:
    with pytest.raises(Unrecordable) as refused:
        codec.encode({"done": [{"1": "b", key: "a"}]})
    assert refused.value.path == "$.done[0]"
    assert repr(key) in str(refused.value)


def test_depth_is_bounded_and_what_holds_itself_is_too_deep() -> None:
    value: object = "bottom"
    for _ in range(codec.MAX_DEPTH):
        value = [value]
    assert same(codec.decode(codec.encode(value)), value)
    with pytest.raises(Unrecordable, match="deep"):
        codec.encode({"a": value})
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(Unrecordable, match="deep"):
        codec.encode(itself)


def test_size_is_bounded_before_anything_is_written_or_read() -> None:
    most = 1_000_000
    fits = "x" * (most - 2)
    assert len(codec.encode(fits, most)) == most
    for larger in (fits + "x", [fits], {"": fits}, "é" * (most // 2), "\n" * (most // 2)):
        with pytest.raises(TooLarge, match=f"{most:,}") as refused:
            codec.encode(larger, most)
        assert refused.value.size == len(codec.encode(larger)) > most
    with pytest.raises(ValueError, match="more than one record holds"):
        codec.decode(bytes(codec.MAX_BYTES + 1))


@pytest.mark.parametrize("data", [b"", b" 1", b"1 ", b"{", b'{"a":1', b"1,2", b"nul", b"\xff", b'"\xff"', b"'a'", b"[1,]"])
def test_bytes_that_are_not_one_value_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # several, all of them this one
        codec.decode(data)


def test_the_largest_integer_goes_and_comes_and_the_next_is_refused() -> None:
    largest = 2**codec.MAX_INT_BITS - 1
    assert codec.decode(codec.encode([largest, -largest])) == [largest, -largest]
    with pytest.raises(Unrecordable):
        codec.encode(largest + 1)
