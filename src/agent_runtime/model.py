"""The model: the port (messages in, reply out), and what may stand for it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from agent_runtime.errors import InvalidSetting
from agent_runtime.messages import Message, Reply, ToolSpec


@runtime_checkable
class Model(Protocol):
    """Anything that answers a conversation. It may be asked again for a reply that was lost, never for one recorded.

    Where it has a text attribute `model`, that is the model's name in events and traces.
    """

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        """The answer to these messages, which may call these tools. Retries of its own are to be off."""


ModelFunction: TypeAlias = Callable[[Sequence[Message], Sequence[ToolSpec]], Awaitable[Reply]]


def name_of(function: ModelFunction) -> str:
    """The name of the model behind a function to ask, where it says one."""
    name = getattr(getattr(function, "__self__", function), "model", None)
    return name if isinstance(name, str) else ""


def as_model(given: Model | ModelFunction | str) -> ModelFunction:
    """The function to ask, for any form a model is given in."""
    if isinstance(given, str):
        raise InvalidSetting(
            f"no provider for model {given!r} is installed in this version; pass an object with an async "
            "`reply(messages, tools)`, or such a function"
        )
    reply = None if isinstance(given, type) else getattr(given, "reply", None)
    if reply is not None and inspect.iscoroutinefunction(reply):
        function: ModelFunction = reply
        return function
    if inspect.iscoroutinefunction(given) or (callable(given) and inspect.iscoroutinefunction(type(given).__call__)):
        return given
    raise InvalidSetting(
        f"a model has `async def reply(messages, tools) -> Reply`, or is such a function, found {type(given).__name__}"
    )
