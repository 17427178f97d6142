"""Tools: what a signature becomes, which arguments pass, and what a function may not be."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agent_runtime.errors import InvalidArguments, ToolDefinitionError, UnknownTool
from agent_runtime.messages import ToolSpec
from agent_runtime.tools import RepeatRule, Tool, ToolRegistry, idempotency_key
from tests.bench import Place, Script, Worker, results_in


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Guest(BaseModel):
    name: str
    age: int = 18


@dataclass
class Range:
    low: int
    high: int


def tool_of(function: Callable[..., Any], **options: Any) -> Tool:
    registry = ToolRegistry()
    registry.tool(**options)(function)
    [spec] = registry.specs
    return registry.get(spec.name)


def checked(tool: Tool, **args: object) -> dict[str, Any]:
    return tool.check(json.dumps(args).encode())


# What the model sees.


def test_the_signature_and_the_docstring_are_what_the_model_sees() -> None:
    def book(show: str, seats: int = 2, *, size: Size = Size.SMALL, note: str | None = None) -> str:
        """Book seats.

        As many as there are.
        """
        return ""

    spec = tool_of(book).spec
    assert (spec.name, spec.description) == ("book", "Book seats.\n\nAs many as there are.")
    properties = spec.parameters["properties"]
    assert isinstance(properties, dict)
    assert list(properties) == ["show", "seats", "size", "note"]
    assert spec.parameters["required"] == ["show"]
    assert spec.parameters["additionalProperties"] is False
    assert properties["seats"]["default"] == 2
    assert "small" in json.dumps(spec.parameters)


def test_a_bare_decorator_works_gives_the_function_back_and_keeps_the_order() -> None:
    registry = ToolRegistry()

    @registry.tool
    def one() -> None: ...

    @registry.tool()
    async def two() -> None: ...

    @registry.tool(name="three.b-c_d")
    def other() -> None: ...

    assert [spec.name for spec in registry.specs] == ["one", "two", "three.b-c_d"]
    assert len(registry) == 3
    assert one.__name__ == "one"
    assert (registry.get("one").is_async, registry.get("two").is_async) == (False, True)


@pytest.mark.parametrize(
    "annotation",
    [
        int, str, bool, float, None, Any, object, list, dict, list[int], dict[str, Any], int | None, int | str,
        Optional[str],  # noqa: UP045  # the older form, which people still write
        Union[int, str],  # noqa: UP007  # the older form
        Literal["a", 1], list[dict[str, int | None]], Size, Guest, list[Guest], Range, Decimal, tuple[int, str],
        set[str], dict[int, str], Annotated[int, Field(ge=1, description="how many")],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("default", ["none", "given"])
def test_every_schema_is_json_and_names_the_argument(annotation: Any, default: str) -> None:
    def act(value: Any, other: Any = None) -> None: ...

    act.__annotations__ = {"value": annotation, "other": annotation}
    tool = tool_of(act)
    text = json.dumps(tool.spec.parameters, allow_nan=False)
    assert '"value"' in text
    assert tool.spec.parameters["type"] == "object"


@pytest.mark.parametrize("default", [float("inf"), float("nan"), -float("inf"), 1e308])
def test_a_default_that_json_cannot_hold_is_left_out_of_the_schema_and_still_used(default: float) -> None:
    def act(limit: float = 1.0, other: Size = Size.SMALL) -> None: ...

    def plain(limit: float = 1.0) -> None: ...

    for function in (act, plain):
        function.__defaults__ = (default, Size.SMALL)[: len(function.__defaults__ or ())]
        tool = tool_of(function)
        json.dumps(tool.spec.parameters, allow_nan=False)
        assert repr(checked(tool)["limit"]) == repr(default)


# What passes.


def greedy(amount: int, name: str = "x", tags: list[str] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ({"amount": 1, "more": 2}, "more"),
        ({"amount": 1, "Amount": 2}, "Amount"),
        ({}, "amount"),
        ({"name": "x"}, "amount"),
        ({"amount": "five"}, "amount"),
        ({"amount": 1.5}, "amount"),
        ({"amount": None}, "amount"),
        ({"amount": [1]}, "amount"),
        ({"amount": {}}, "amount"),
        ({"amount": 1, "name": 5}, "name"),
        ({"amount": 1, "name": None}, "name"),
        ({"amount": 1, "tags": "x"}, "tags"),
        ({"amount": 1, "tags": [1]}, "tags.0"),
        ({"amount": 1, "tags": {"a": 1}}, "tags"),
        ({"amount": 1, "self": 1}, "self"),
        ({"amount": 1, "args": {}}, "args"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(args: dict[str, object], fault: str) -> None:
    def declared(amount: int, name: str = "x", tags: list[str] | None = None, size: Size = Size.SMALL) -> None: ...

    for function in (greedy, declared):
        with pytest.raises(InvalidArguments, match=fault) as refused:
            checked(tool_of(function), **args)
        assert function.__name__ in str(refused.value)


@pytest.mark.parametrize("data", [b"[]", b"5", b"null", b'"x"', b"", b"{", b'{"amount": 1', b"\xff"])
def test_arguments_that_are_no_object_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArguments):
        tool_of(greedy).check(data)


def test_defaults_are_filled_in_and_are_nobodys_to_change() -> None:
    def act(tags: list[str] = ["a"], guest: Guest = Guest(name="x")) -> None: ...  # noqa: B006, B008  # what people write

    tool = tool_of(act)
    first = checked(tool)
    assert first == {"tags": ["a"], "guest": Guest(name="x")}
    first["tags"].append("b")
    first["guest"].name = "y"
    assert checked(tool)["tags"] == ["a"]
    assert checked(tool)["guest"].name in ("x", "y")  # as Python itself has it: one default for all calls


def test_values_become_what_the_signature_says() -> None:
    def act(size: Size, guest: Guest, guests: list[Guest], within: Range, price: Decimal, by_id: dict[int, str]) -> None: ...

    values = checked(
        tool_of(act), size="large", guest={"name": "a"}, guests=[{"name": "b", "age": 3}], within={"low": 1, "high": 2},
        price="0.10", by_id={"7": "x"},
    )  # fmt: skip
    assert values == {
        "size": Size.LARGE, "guest": Guest(name="a"), "guests": [Guest(name="b", age=3)], "within": Range(1, 2),
        "price": Decimal("0.10"), "by_id": {7: "x"},
    }  # fmt: skip
    with pytest.raises(InvalidArguments, match="size"):
        checked(tool_of(act), size="huge")


def test_constraints_are_checked_and_shown() -> None:
    def act(
        amount: Annotated[int, Field(ge=1, le=9, description="how many")], code: Annotated[str, Field(pattern="^a+$")] = "a"
    ) -> None: ...

    tool = tool_of(act)
    assert checked(tool, amount=9) == {"amount": 9, "code": "a"}
    wrongs: list[dict[str, object]] = [{"amount": 0}, {"amount": 10}, {"amount": 1, "code": "b"}]
    for wrong in wrongs:
        with pytest.raises(InvalidArguments):
            checked(tool, **wrong)
    assert "how many" in json.dumps(tool.spec.parameters)


NAMES = [
    "self", "cls", "model_", "model_config", "model_fields", "copy", "json", "dict", "schema", "validate", "construct",
    "alias", "args", "kwargs", "func", "function", "name", "_private", "__dunder__", "arg_0", "arg_1", "type", "properties",
    "ünicode", "root", "context", "run", "key", "fields",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("annotation", ["str", "Size"])
async def test_an_argument_may_have_any_name(place: Place, name: str, annotation: str) -> None:
    for is_async in (False, True):
        space: dict[str, Any] = {"Size": Size}
        text = (
            f"{'async ' if is_async else ''}def act({name}: {annotation}, other: str = 'x') -> str: return str({name}) + other"
        )
        exec(text, space)  # a function with any name
        registry = ToolRegistry()
        registry.tool(space["act"])
        assert f'"{name}"' in json.dumps(registry.specs[0].parameters, ensure_ascii=False)
        model = Script([("act", {name: "small"})], "done")
        result = await Worker(place).run(model, registry, f"run-{is_async}")
        expected = "small" if annotation == "str" else "Size.SMALL"
        assert results_in(result.messages) == [f"{expected}x"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)
    | st.sampled_from(["1", "1.0", "true", "a", "", " 5 ", "1e3", "off"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@pytest.mark.parametrize(
    "annotation",
    [
        int, float, bool, str, None, Any, list, dict, list[int], list[Any], dict[str, float], int | None, int | str,
        float | bool | None, Literal["a", 1, True], list[dict[str, int | None]], dict[str, list[str]],
        Union[str, int, None],  # noqa: UP007  # the older form
    ],
    ids=str,
)  # fmt: skip
def test_a_plain_signature_is_checked_as_a_declared_one_would_be(annotation: Any) -> None:
    def plain(value: Any) -> None: ...

    def declared(value: Any, other: Size = Size.SMALL) -> None: ...

    plain.__annotations__, declared.__annotations__ = {"value": annotation}, {"value": annotation, "other": Size}
    tools = [tool_of(plain), tool_of(declared)]

    @given(JSON_VALUES)
    def agree(value: object) -> None:
        one, two = (outcome(tool, value) for tool in tools)
        assert one == two

    agree()


def outcome(tool: Tool, value: object) -> str:
    try:
        return repr(checked(tool, value=value)["value"])
    except InvalidArguments:
        return "refused"


# What may be a tool, and how it is called.


class Desk:
    def __init__(self) -> None:
        self.name = "desk"

    def book(self, seats: int) -> str:
        """Book."""
        return f"{self.name} {seats}"

    async def cancel(self, seats: int) -> str:
        return f"{self.name} -{seats}"

    @staticmethod
    def static(seats: int) -> str:
        return f"static {seats}"

    @classmethod
    def of_class(cls, seats: int) -> str:
        return f"{cls.__name__} {seats}"


class Callable_:
    def __call__(self, seats: int) -> str:
        return f"called {seats}"


class AsyncCallable:
    async def __call__(self, seats: int) -> str:
        return f"awaited {seats}"


class Inherited(AsyncCallable):
    pass


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def added(seats: int, extra: int) -> str:
    return f"{seats}+{extra}"


async def added_async(seats: int, extra: int) -> str:
    return f"{seats}+{extra}"


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (Desk().book, "desk 3"),
        (Desk().cancel, "desk -3"),
        (Desk.static, "static 3"),
        (Desk.of_class, "Desk 3"),
        (Callable_(), "called 3"),
        (AsyncCallable(), "awaited 3"),
        (Inherited(), "awaited 3"),
        (decorated(Desk().book), "desk 3"),
        (functools.partial(added, extra=1), "3+1"),
        (functools.partial(added_async, extra=1), "3+1"),
        (lambda seats: f"lambda {seats}", "lambda 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_anything_that_can_be_called_by_name_is_a_tool(place: Place, function: Callable[..., Any], result: str) -> None:
    registry = ToolRegistry()
    registry.tool(name="book")(function)
    found = await Worker(place).run(Script([("book", {"seats": 3})], "done"), registry)
    assert results_in(found.messages) == [result]


def with_star(*seats: int) -> None: ...
def with_stars(**seats: int) -> None: ...
def positional(seats: int, /) -> None: ...
def unknown_type(seats: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # that is what is tested
def no_json(handle: threading.Thread) -> None: ...
def no_json_result() -> threading.Thread: ...  # type: ignore[empty-body]  # never called
def fine() -> None: ...


@pytest.mark.parametrize(
    "function", [with_star, with_stars, positional, unknown_type, no_json, no_json_result, 5, "name", None, object()]
)
def test_what_cannot_be_called_from_json_is_refused_when_it_is_registered(function: Any) -> None:
    registry = ToolRegistry()
    with pytest.raises(ToolDefinitionError):
        registry.tool(name="act")(function)
    assert len(registry) == 0


@pytest.mark.parametrize("name", ["", " ", "a b", "1a", "-a", "a" * 65, "ä", "a\n", "a/b", "a:b"])
def test_a_name_that_models_do_not_take_is_refused(name: str) -> None:
    if name:
        with pytest.raises(ToolDefinitionError, match="name"):
            ToolRegistry().tool(name=name)(fine)
    with pytest.raises(ToolDefinitionError, match="name"):
        ToolRegistry().tool(functools.partial(fine))  # which has none


def test_two_tools_of_one_name_are_refused() -> None:
    registry = ToolRegistry()
    registry.tool(fine)
    with pytest.raises(ToolDefinitionError, match="'fine'"):
        registry.tool(fine)
    registry.tool(name="other")(fine)
    assert len(registry) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0}, {"timeout": -1}, {"timeout": float("nan")}, {"timeout": "5"}, {"timeout": True},
        {"attempts": 0}, {"attempts": -1}, {"attempts": 1.5}, {"attempts": True}, {"attempts": "3"},
        {"pause": -1}, {"pause": float("nan")}, {"pause": float("inf")}, {"pause": "1"},
        {"answers": 5}, {"answers": "ValueError"}, {"answers": (ValueError, "x")}, {"answers": BaseException},
        {"answers": [ValueError]}, {"answers": ValueError("x")}, {"answers": (KeyboardInterrupt,)},
        {"idempotent": True, "pure": True},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused_when_the_tool_is_registered(options: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError):
        ToolRegistry().tool(**options)(fine)


def test_what_a_tool_declares_is_what_it_has() -> None:
    tool = tool_of(fine, idempotent=True, timeout=1.5, attempts=7, pause=0, answers=(KeyError, OSError))
    assert (tool.rule, tool.timeout_seconds, tool.attempts, tool.pause_seconds) == (RepeatRule.IDEMPOTENT, 1.5, 7, 0)
    assert set(tool.answers) >= {KeyError, OSError}
    assert tool_of(fine, pure=True).rule is RepeatRule.PURE
    plain = tool_of(fine)
    assert (plain.rule, plain.timeout_seconds) == (RepeatRule.NONE, None)
    assert [each.may_repeat for each in (tool, tool_of(fine, pure=True), plain)] == [True, True, False]


def test_an_unknown_tool_is_named_with_those_there_are() -> None:
    registry = ToolRegistry()
    registry.tool(fine)
    with pytest.raises(UnknownTool, match=r"'gone'.*fine"):
        registry.get("gone")
    assert registry.find("gone") is None
    assert isinstance(registry.specs[0], ToolSpec)


def test_a_default_written_as_a_field_is_a_default_or_is_refused() -> None:
    def act(amount: int = Field(3, ge=1)) -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            tool = tool_of(act)
        except ToolDefinitionError:
            return
    assert checked(tool) == {"amount": 3}
    with pytest.raises(InvalidArguments):
        checked(tool, amount=0)


# The key.


def test_outside_a_call_there_is_no_key() -> None:
    with pytest.raises(LookupError, match="only inside"):
        idempotency_key()


async def test_a_tool_in_a_thread_a_task_and_a_model_see_the_key_of_their_own_call(place: Place) -> None:
    seen: dict[str, str] = {}
    registry = ToolRegistry()

    @registry.tool
    def in_thread() -> str:
        seen["thread"] = idempotency_key()
        assert threading.current_thread() is not threading.main_thread()
        return ""

    @registry.tool
    async def in_task() -> str:
        async def inner() -> None:
            seen["task"] = idempotency_key()

        await asyncio.create_task(inner())
        await asyncio.to_thread(lambda: seen.setdefault("to_thread", idempotency_key()))
        return ""

    async def model(messages: Any, tools: Any) -> Any:
        seen[f"model {len(messages)}"] = idempotency_key()
        return await script.reply(messages, tools)

    script = Script([("in_thread", {}), ("in_task", {})], "done")
    await Worker(place).run(model, registry)
    assert seen == {
        "thread": "run:0.0", "task": "run:0.1", "to_thread": "run:0.1", "model 1": "run:0/model", "model 4": "run:1/model",
    }  # fmt: skip
    with pytest.raises(LookupError):
        idempotency_key()
