"""Tools: what the model may call, how arguments are checked, and what a crash in the middle of a call leads to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, overload

from agent_runtime import codec
from agent_runtime.errors import ToolDefinitionError, ToolError, UnknownTool
from agent_runtime.messages import ToolSpec
from agent_runtime.signatures import ArgumentCheck, read_arguments, read_hints

F = TypeVar("F", bound=Callable[..., Any])

ATTEMPTS = 3
"""How often a call whose repeat rule allows it is tried, if the tool does not say; once more with each later recovery."""


class RepeatRule(Enum):
    """What a call in doubt leads to."""

    IDEMPOTENT = "idempotent"
    """The remote knows the key: run again under it."""
    PURE = "pure"
    """Nothing outside changes: run again."""
    NONE = "none"
    """Nobody but a person can say."""

    @property
    def may_repeat(self) -> bool:
        return self is not RepeatRule.NONE


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A registered tool. Made by `ToolRegistry.tool`."""

    spec: ToolSpec
    function: Callable[..., Any]
    is_async: bool
    rule: RepeatRule
    answers: tuple[type[Exception], ...]
    timeout_seconds: float | None
    attempts: int
    pause_seconds: float
    result: codec.Shape
    _check: ArgumentCheck
    name: str = field(init=False)
    recorded_name: bytes = field(init=False)
    """The name as records hold it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.spec.name)
        object.__setattr__(self, "recorded_name", codec.encode(self.spec.name))

    def check(self, args: bytes) -> dict[str, Any]:
        """The keyword arguments to call with, from recorded ones; `InvalidArguments` says what does not fit."""
        return self._check(args)


class ToolRegistry:
    """The tools of an agent, by name."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._specs: tuple[ToolSpec, ...] = ()

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        idempotent: bool = False,
        pure: bool = False,
        answers: tuple[type[Exception], ...] | type[Exception] = (),
        timeout: float | None = None,
        attempts: int = ATTEMPTS,
        pause: float = 0.1,
    ) -> Callable[[F], F]: ...
    def tool(
        self,
        function: F | None = None,
        /,
        *,
        name: str | None = None,
        idempotent: bool = False,
        pure: bool = False,
        answers: tuple[type[Exception], ...] | type[Exception] = (),
        timeout: float | None = None,
        attempts: int = ATTEMPTS,
        pause: float = 0.1,
    ) -> F | Callable[[F], F]:
        """Register a function, async or plain (it then runs in a thread), as a tool.

        `idempotent`: the remote knows `idempotency_key()`. `pure`: nothing outside changes. With neither, a call in
        doubt stops the run. `answers`: exceptions that are the tool's answer. `timeout`, in seconds: past it the call is
        in doubt. `attempts` and `pause` (seconds, doubled each time): how a call is tried again that is known not to
        have gone out, or that its rule lets run again.
        """

        def register(function: F) -> F:
            rule = _rule(function, idempotent=idempotent, pure=pure)
            self.add(
                _define(
                    function,
                    name=str(name or getattr(function, "__name__", "")),
                    rule=rule,
                    answers=_answers(answers),
                    timeout_seconds=_positive("timeout", timeout),
                    attempts=_count("attempts", attempts),
                    pause_seconds=_pause(pause),
                )
            )
            return function

        return register if function is None else register(function)

    def add(self, tool: Tool) -> None:
        """Register a tool that is made already."""
        if tool.name in self._tools:
            raise ToolDefinitionError(f"a tool named {tool.name!r} is registered already; give one of them name='…'")
        self._tools[tool.name] = tool
        self._specs = tuple(each.spec for each in self._tools.values())

    def get(self, name: str) -> Tool:
        """The tool of that name, or `UnknownTool`."""
        try:
            return self._tools[name]
        except KeyError:
            raise UnknownTool(f"no tool is named {name!r}; there are {sorted(self._tools) or 'none'}") from None

    def find(self, name: str) -> Tool | None:
        """The tool of that name, or None."""
        return self._tools.get(name)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What a model is told of the tools, in the order they were registered."""
        return self._specs

    def __len__(self) -> int:
        return len(self._tools)


CALL_KEY: ContextVar[str] = ContextVar("agent_runtime_call_key")
"""The idempotency key of the call that is being made. Set by the executor."""


def idempotency_key() -> str:
    """The key of the call being made: the same on every worker and after every recovery. `LookupError` outside a call."""
    key = CALL_KEY.get(None)
    if key is None:
        raise LookupError("idempotency_key() has a value only inside a tool or model call that the runtime makes")
    return key


def _rule(function: Callable[..., Any], *, idempotent: bool, pure: bool) -> RepeatRule:
    if idempotent and pure:
        raise ToolDefinitionError(f"tool {function!r} is declared both idempotent and pure; pure alone says enough")
    return RepeatRule.IDEMPOTENT if idempotent else RepeatRule.PURE if pure else RepeatRule.NONE


def _answers(declared: object) -> tuple[type[Exception], ...]:
    types = declared if isinstance(declared, tuple) else (declared,)
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ToolDefinitionError(f"answers= holds exception types that a tool may answer with, found {kind!r}")
    return (ToolError, *types)


def _positive(option: str, value: float | None) -> float | None:
    if value is not None and not (type(value) in (int, float) and value > 0):
        raise ToolDefinitionError(f"{option}= is a number of seconds above 0, found {value!r}")
    return value


def _pause(value: float) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ToolDefinitionError(f"pause= is a number of seconds from 0, found {value!r}")
    return value


def _count(option: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ToolDefinitionError(f"{option}= is a whole number from 1, found {value!r}")
    return value


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _define(
    function: Any,
    *,
    name: str,
    rule: RepeatRule,
    answers: tuple[type[Exception], ...],
    timeout_seconds: float | None,
    attempts: int,
    pause_seconds: float,
) -> Tool:
    if not callable(function):
        raise ToolDefinitionError(f"a tool is a function, found {type(function).__name__}")
    if not _NAME.fullmatch(name):
        raise ToolDefinitionError(f"a tool's name is 1 to 64 letters, digits, _, - or ., found {name!r}; give it name='…'")
    hints = read_hints(function, name)
    check, schema = read_arguments(function, name, hints)
    return Tool(
        spec=ToolSpec(name, inspect.getdoc(function) or "", schema),
        function=function,
        is_async=is_async_callable(function),
        rule=rule,
        answers=answers,
        timeout_seconds=timeout_seconds,
        attempts=attempts,
        pause_seconds=pause_seconds,
        result=_result_shape(name, hints),
        _check=check,
    )


def is_async_callable(function: object) -> bool:
    """Whether calling it gives something to await: an async function, or an object with an async `__call__`."""
    return callable(function) and (
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    )


def _result_shape(name: str, hints: Mapping[str, Any]) -> codec.Shape:
    declared = hints.get("return", object)
    if codec.is_plain_type(declared):
        return codec.Shape(declared)
    from pydantic.errors import PydanticUserError

    try:
        return codec.Shape(declared)
    except PydanticUserError as error:
        raise ToolDefinitionError(f"the result type of tool {name!r} cannot be recorded: {error}") from error
