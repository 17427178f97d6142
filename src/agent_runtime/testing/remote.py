"""A remote that counts what really happened at it: the only witness of effects that a test should believe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent_runtime import codec
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import KeyConflict
from agent_runtime.tools import idempotency_key


class Effect(NamedTuple):
    """One thing that was done, or asked for. `args` is JSON, its names in order."""

    tool: str
    key: str
    args: str


class Receipt(NamedTuple):
    """The remote's answer; `already_done`: the key was known, and this is what the first request gave."""

    result: str
    already_done: bool


class Remote:
    """Does what it is told and counts it. It outlives workers; what it remembers of keys is for its own users to choose.

    A result is the tool and its arguments as text, with `#2`, `#3` … where one key really acted again: so a result shows
    which effect it came from (`script_model.without_marks` takes the marks away).
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.effects: list[Effect] = []
        """What was done, in order: E."""
        self.requests: list[Effect] = []
        """What was asked for, those that were answered from memory and pure ones too."""
        self._known: dict[str, tuple[Effect, str]] = {}
        self._results: dict[str, str] = {}
        self._clock = clock
        self._drops = 0
        self._late: list[float] = []

    async def act(self, tool: str, args: Mapping[str, object], *, key: str | None = None, idempotent: bool = False) -> Receipt:
        """Do it. The key is that of the call being made, if none is given.

        `idempotent`: a key that is known is not acted upon again and gets the first result; with other arguments it is a
        `KeyConflict`.
        """
        asked = self._ask(tool, args, key)
        known = self._known.get(asked.key) if idempotent else None
        if known is not None and known[0] != asked:
            raise KeyConflict(f"key {asked.key!r} was used for {known[0]}, found {asked}")
        receipt = Receipt(known[1], True) if known is not None else Receipt(self._do(asked), False)
        await self._travel()
        return receipt

    async def read(self, tool: str, args: Mapping[str, object], *, key: str | None = None) -> str:
        """An answer that changes nothing here: asked for, and no effect."""
        asked = self._ask(tool, args, key)
        await self._travel()
        return _result(asked, 1)

    def count(self, *, key: str | None = None, tool: str | None = None) -> int:
        """How many effects there were, of one key or one tool where named."""
        return _count(self.effects, key, tool)

    def count_requests(self, *, key: str | None = None, tool: str | None = None) -> int:
        """The same of requests."""
        return _count(self.requests, key, tool)

    def result(self, key: str) -> str | None:
        """What the last effect under the key gave; None where there is none: what a probe asks."""
        return self._results.get(key)

    def drop_answers(self, times: int = 1) -> None:
        """Act upon the next requests and then let their connection break: the caller gets `ConnectionResetError`."""
        self._drops += times

    def answer_late(self, seconds: float, *, times: int = 1) -> None:
        """Act upon the next requests at once, and answer so much later."""
        self._late += [seconds] * times

    def forget_keys(self) -> None:
        """Know no key any more, as a remote does that keeps them for a while only."""
        self._known.clear()

    def _ask(self, tool: str, args: Mapping[str, object], key: str | None) -> Effect:
        plain = codec.encode(dict(sorted(args.items()))).decode()
        asked = Effect(tool, idempotency_key() if key is None else key, plain)
        self.requests.append(asked)
        return asked

    def _do(self, asked: Effect) -> str:
        self.effects.append(asked)
        result = _result(asked, self.count(key=asked.key))
        self._known[asked.key] = (asked, result)
        self._results[asked.key] = result
        return result

    async def _travel(self) -> None:
        """The way back of an answer."""
        if self._late:
            await self._clock.sleep(self._late.pop(0))
        if self._drops:
            self._drops -= 1
            raise ConnectionResetError("the remote acted, and its answer was lost")


def _result(effect: Effect, times: int) -> str:
    return f"{effect.tool} {effect.args}" + (f"#{times}" if times > 1 else "")


def _count(seen: list[Effect], key: str | None, tool: str | None) -> int:
    return sum((key is None or each.key == key) and (tool is None or each.tool == tool) for each in seen)
