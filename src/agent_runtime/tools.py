"""Tools: what the model may call, how arguments are checked, and what a crash in the middle of a call leads to."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

from agent_runtime import codec
from agent_runtime.errors import InvalidArguments, ToolDefinitionError, ToolError, UnknownTool, Unrecordable
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
    PROBE = "probe"
    """The remote can be asked whether it happened."""
    NONE = "none"
    """Nobody but a person can say."""


NeedsApproval: TypeAlias = Callable[[dict[str, Any]], bool]
"""From a call's checked arguments to whether a person must agree."""

Probe: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[object]]
"""From a call's idempotency key and its arguments to an `Outcome`: what the remote says became of it."""

Undo: TypeAlias = Callable[[dict[str, Any], Any], Any]
"""Takes back a call, given its arguments and its result; its key is `idempotency_key()`."""


class Approval(NamedTuple):
    """When a tool's calls need a verdict, how long a request stays open, and who may answer it."""

    needed: bool | NeedsApproval = True
    expires_seconds: float | None = None
    may_approve: Callable[..., bool] | None = None
    no_self: bool = False


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
    check_arguments: ArgumentCheck
    approval: Approval | None = None
    probe: Probe | None = None
    settles_seconds: float = 0.0
    """After so long no request of an attempt that is over can still take effect."""
    key_seconds: float | None = None
    """How long the remote remembers a key; past it the rule `idempotent` no longer counts."""
    undo: Undo | None = None
    name: str = field(init=False)
    may_repeat: bool = field(init=False)
    """Whether its rule lets a call in doubt run again."""
    recorded_name: bytes = field(init=False)
    """The name as records hold it."""
    recorded_settling: bytes = field(init=False)
    """How an intent ends that may take effect late."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.spec.name)
        object.__setattr__(self, "may_repeat", self.rule in (RepeatRule.IDEMPOTENT, RepeatRule.PURE))
        object.__setattr__(self, "recorded_name", codec.encode(self.spec.name))
        settling = b',"settles":%d' % (self.settles_seconds * 1000) if self.settles_seconds else b""
        object.__setattr__(self, "recorded_settling", settling)

    def check(self, args: bytes, plain: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The keyword arguments to call with, from recorded ones; `InvalidArguments` says what does not fit.

        `plain`: the same as plain data, where the caller has them.
        """
        return self.check_arguments(args, plain)

    def shown(self, args: bytes) -> bytes:
        """The arguments as they will be sent, as plain data: what a person agrees to.

        `InvalidArguments` where the tool does not take them, where their plain form does not say all that is sent, or where
        the check makes others of them each time.
        """
        checked = self.check(args)
        shown = _as_plain(checked)
        try:
            where = codec.difference(checked, self.check(shown))
        except InvalidArguments as error:
            raise InvalidArguments(f"what would be shown to a person is not what is sent: {error}") from error
        if where is not None or _as_plain(self.check(args)) != shown:
            raise InvalidArguments(
                f"tool {self.name!r} makes other arguments each time they are checked, or keeps some from being shown, so "
                "nobody can agree to them"
            )
        return shown

    def needs_approval(self, args: bytes) -> bool:
        """Whether a call with these recorded arguments, which the tool takes, needs a person's verdict.

        `ToolDefinitionError` where the function that the tool declares for it cannot say.
        """
        if self.approval is None or isinstance(self.approval.needed, bool):
            return self.approval is not None and self.approval.needed is True
        try:
            needed: object = self.approval.needed(self.check(args))  # its own, which it may change
        except Exception as error:
            raise ToolDefinitionError(
                f"needs_approval= of tool {self.name!r} raised {type(error).__name__}: {error}; nothing was called"
            ) from error
        if not isinstance(needed, bool):
            raise ToolDefinitionError(
                f"needs_approval= of tool {self.name!r} gives True or False, found {type(needed).__name__}; nothing was called"
            )
        return needed


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
        needs_approval: bool | NeedsApproval = False,
        approval_expires: float | None = None,
        may_approve: Callable[..., bool] | None = None,
        no_self_approval: bool = False,
        probe: Probe | None = None,
        settles_after: float = 0.0,
        key_retention: float | None = None,
        undo: Undo | None = None,
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
        needs_approval: bool | NeedsApproval = False,
        approval_expires: float | None = None,
        may_approve: Callable[..., bool] | None = None,
        no_self_approval: bool = False,
        probe: Probe | None = None,
        settles_after: float = 0.0,
        key_retention: float | None = None,
        undo: Undo | None = None,
    ) -> F | Callable[[F], F]:
        """Register a function, async or plain (it then runs in a thread), as a tool.

        `idempotent`: the remote knows `idempotency_key()`. `pure`: nothing outside changes. With neither, a call in
        doubt stops the run. `answers`: exceptions that are the tool's answer. `timeout`, in seconds: past it the call is
        in doubt. `attempts` and `pause` (seconds, doubled each time): how a call is tried again that is known not to
        have gone out, or that its rule lets run again.

        `needs_approval`: True, or a plain function of the checked arguments: a person must agree before the call goes out,
        to the arguments as they will be sent; where those cannot be shown the call is answered with an error. A call in
        doubt that was started before its tool needed approval is not run again by its rule. `approval_expires`: seconds
        after which nobody may agree any more; the call is then answered as expired. `may_approve(by, request)` says who may
        answer, and `no_self_approval` keeps the run's own principal from it; one that raises lets nobody.

        `probe(key, args)` asks the remote about a call in doubt and gives an `Outcome`. `settles_after`: seconds after
        which a request that was sent can no longer take effect there. `key_retention`: seconds for which the remote
        remembers a key; a call in doubt that is older is not run again by `idempotent`. `undo(args, result)` takes a call
        back, under a key of its own.
        """

        def register(function: F) -> F:
            rule = _rule(function, idempotent=idempotent, pure=pure, probes=probe is not None)
            approval = Approval(needs_approval, _expires(approval_expires), may_approve, no_self_approval)
            tool = _define(
                function,
                name=str(name or getattr(function, "__name__", "")),
                rule=rule,
                answers=_answers(answers),
                timeout_seconds=_positive("timeout", timeout),
                attempts=_count("attempts", attempts),
                pause_seconds=_pause("pause", pause),
            )
            self.add(
                replace(
                    tool,
                    approval=_approval(approval),
                    probe=_function("probe", probe, is_async=True),
                    settles_seconds=_pause("settles_after", settles_after),
                    key_seconds=_key_seconds(rule, key_retention),
                    undo=_function("undo", undo),
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


def _rule(function: Callable[..., Any], *, idempotent: bool, pure: bool, probes: bool) -> RepeatRule:
    if idempotent and pure:
        raise ToolDefinitionError(f"tool {function!r} is declared both idempotent and pure; pure alone says enough")
    if probes and (idempotent or pure):
        raise ToolDefinitionError(f"tool {function!r} may run again by its rule, so its probe is never asked; leave one out")
    if probes:
        return RepeatRule.PROBE
    return RepeatRule.IDEMPOTENT if idempotent else RepeatRule.PURE if pure else RepeatRule.NONE


def _approval(given: Approval) -> Approval | None:
    if not isinstance(given.needed, bool) and not _is_plain_function(given.needed):
        raise ToolDefinitionError(f"needs_approval= is True, or a plain function of the arguments, found {given.needed!r}")
    if given.needed is not False:
        if given.may_approve is not None and not _is_plain_function(given.may_approve):
            raise ToolDefinitionError(f"may_approve= is a plain function of who and what, found {given.may_approve!r}")
        return given
    if given != Approval(False):
        raise ToolDefinitionError("how a call is approved is declared on a tool without needs_approval=; add it")
    return None


def _is_plain_function(given: object) -> bool:
    return callable(given) and not is_async_callable(given)


C = TypeVar("C", bound=Callable[..., Any])


def _function(option: str, given: C | None, *, is_async: bool = False) -> C | None:
    if given is not None and not (is_async_callable(given) if is_async else callable(given)):
        raise ToolDefinitionError(f"{option}= is {'an async' if is_async else 'a'} function, found {given!r}")
    return given


LONGEST_OPEN_SECONDS = 3_155_760_000
"""A hundred years: no calendar holds what may be said beyond."""


def _expires(value: float | None) -> float | None:
    if value is not None and not (type(value) in (int, float) and 0 < value <= LONGEST_OPEN_SECONDS):
        raise ToolDefinitionError(f"approval_expires= is a number of seconds above 0, up to a hundred years, found {value!r}")
    return value


def _key_seconds(rule: RepeatRule, value: float | None) -> float | None:
    if value is not None and rule is not RepeatRule.IDEMPOTENT:
        raise ToolDefinitionError("key_retention= says how long the remote knows a key, and goes with idempotent=True")
    return _positive("key_retention", value)


def _as_plain(arguments: dict[str, Any]) -> bytes:
    """Checked arguments as plain data; `InvalidArguments` where some have no such form."""
    if codec.least_size(arguments) != codec.NOT_PLAIN:
        return codec.encode(arguments)
    from pydantic_core import PydanticSerializationError

    try:
        return codec.encode(_plain_of(_in_order(arguments)))
    except (PydanticSerializationError, Unrecordable, RecursionError) as error:
        raise InvalidArguments(f"the arguments cannot be shown to a person as they will be sent: {error}") from error


def _plain_of(value: object) -> object:
    from pydantic_core import to_jsonable_python

    with warnings.catch_warnings():  # of a list where a set is declared, which `_in_order` made
        warnings.simplefilter("ignore", UserWarning)
        return to_jsonable_python(value, by_alias=True, inf_nan_mode="constants")


def _in_order(value: Any) -> Any:
    """The value with its sets as lists in an order of their own: that of a set is another one in each process."""
    if isinstance(value, set | frozenset):
        return sorted((_in_order(item) for item in value), key=lambda item: codec.encode(_plain_of(item)))
    if isinstance(value, dict):
        return {key: _in_order(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_in_order(item) for item in value]
    if not is_dataclass(value) and not hasattr(type(value), "model_fields"):
        return value
    twin = copy(value)
    for name in getattr(type(value), "model_fields", None) or [each.name for each in fields(value)]:
        object.__setattr__(twin, name, _in_order(getattr(value, name)))
    return twin


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


def _pause(option: str, value: float) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ToolDefinitionError(f"{option}= is a number of seconds from 0, found {value!r}")
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
        check_arguments=check,
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
