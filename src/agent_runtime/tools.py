"""Tools: what the model may call, how arguments are checked, and what a crash in the middle of a call leads to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_type_hints, overload

from agent_runtime import codec
from agent_runtime.errors import InvalidArguments, ToolDefinitionError, ToolError, UnknownTool
from agent_runtime.messages import ToolSpec

F = TypeVar("F", bound=Callable[..., Any])

ATTEMPTS = 3
"""How often a call whose repeat rule allows it is tried within one life of a worker, if the tool does not say."""


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
    answers: tuple[type[BaseException], ...]
    timeout_seconds: float | None
    attempts: int
    pause_seconds: float
    result: codec.Shape
    _check: Callable[[bytes], dict[str, Any]]

    @property
    def name(self) -> str:
        return self.spec.name

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
        answers: tuple[type[BaseException], ...] | type[BaseException] = (),
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
        answers: tuple[type[BaseException], ...] | type[BaseException] = (),
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
                    answers=(ToolError, *(answers if isinstance(answers, tuple) else (answers,))),
                    timeout_seconds=_positive("timeout", timeout),
                    attempts=_count("attempts", attempts),
                    pause_seconds=pause,
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


def _positive(option: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ToolDefinitionError(f"{option}= is a number of seconds above 0, found {value!r}")
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
    answers: tuple[type[BaseException], ...],
    timeout_seconds: float | None,
    attempts: int,
    pause_seconds: float,
) -> Tool:
    if not callable(function):
        raise ToolDefinitionError(f"a tool is a function, found {type(function).__name__}")
    if not _NAME.fullmatch(name):
        raise ToolDefinitionError(f"a tool's name is 1 to 64 letters, digits, _, - or ., found {name!r}; give it name='…'")
    hints = _hints(function, name)
    check, schema = _argument_check(function, name, hints)
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
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(vars(type(function)).get("__call__"))


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {name!r} has an annotation that cannot be read: {error}; import the type") from error


def _result_shape(name: str, hints: Mapping[str, Any]) -> codec.Shape:
    from pydantic.errors import PydanticUserError

    try:
        return codec.Shape(hints.get("return", object))
    except PydanticUserError as error:
        raise ToolDefinitionError(f"the result type of tool {name!r} cannot be recorded: {error}") from error


def _argument_check(
    function: Callable[..., Any], name: str, hints: Mapping[str, Any]
) -> tuple[Callable[[bytes], dict[str, Any]], dict[str, object]]:
    """A model of the arguments from the signature: what checks them, and the JSON schema of them."""
    from pydantic import ConfigDict, Field, ValidationError, create_model
    from pydantic.errors import PydanticUserError

    fields: dict[str, Any] = {}
    names: list[tuple[str, str]] = []
    for at, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"tool {name!r} has parameter {parameter}; a tool takes named parameters only")
        field = f"arg_{at}"  # its own name may be one that a model's field may not have
        required = parameter.default is parameter.empty
        default = Field(alias=parameter.name) if required else Field(default=parameter.default, alias=parameter.name)
        fields[field] = (hints.get(parameter.name, Any), default)
        names.append((field, parameter.name))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        schema = model.model_json_schema(by_alias=True)
    except PydanticUserError as error:
        raise ToolDefinitionError(f"the parameters of tool {name!r} cannot come from JSON: {error}") from error
    validate = model.__pydantic_validator__.validate_json

    def check(args: bytes) -> dict[str, Any]:
        try:
            values = validate(args).__dict__
        except ValidationError as error:
            raise InvalidArguments(_explain(name, error)) from error
        return {argument: values[field] for field, argument in names}

    return check, schema


def _explain(name: str, error: Any) -> str:
    faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}" for fault in error.errors())
    return f"the arguments do not fit tool {name!r}: {faults}"
