"""A model that answers from a script and counts what it is asked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from agent_runtime.errors import InvalidSetting
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec, check_history
from agent_runtime.tools import idempotency_key

_MARK = re.compile(r"#\d+")


class ScriptModel:
    """Gives the replies in turn, the one that is due by the tool results which the conversation holds.

    It keeps no place of its own: any worker may ask, in any order, and one model may serve many runs of one script. Asked
    again for a decision it gives *another* answer, with `#2`, `#3` and so on after the text (`vary_args=True`: after each
    text argument too), so that a decision made twice shows wherever it arrives; `without_marks` takes them away.
    """

    def __init__(self, replies: Sequence[Reply], *, vary_args: bool = False) -> None:
        if not replies or any(not reply.tool_calls for reply in replies[:-1]):
            raise InvalidSetting("each reply of a script asks for a call, but for the last: one without ends the loop")
        self.replies = tuple(replies)
        self.asks: Counter[str] = Counter()
        """How often each decision was asked for, by the key of the model call (or `decision n` outside a run)."""
        self._vary_args = vary_args
        self._due = {}
        results = 0
        for decision, reply in enumerate(self.replies):
            self._due[results] = decision
            results += len(reply.tool_calls)

    @classmethod
    def calling(cls, tool: str, /, **args: object) -> ScriptModel:
        """A model that asks for one call and is done once it has the result."""
        return cls([Reply(tool_calls=[ToolCall("call_0", tool, args)]), Reply("done")])

    @property
    def calls(self) -> int:
        """M: how many requests were made, over all runs."""
        return self.asks.total()

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        """The reply that is due; `AssertionError` where the conversation or the tools could not have come from the script."""
        check_request(messages)
        results = sum(message.role == "tool" for message in messages)
        assert results in self._due, f"the conversation holds {results} results; the script answers at {sorted(self._due)}"
        decision = self._due[results]
        reply = self.replies[decision]
        missing = {call.name for call in reply.tool_calls} - {spec.name for spec in tools}
        assert not missing, f"the script calls {sorted(missing)}, which the model was not told of"
        name = _asked_as(decision)
        self.asks[name] += 1
        return self._marked(reply, self.asks[name])

    def _marked(self, reply: Reply, ask: int) -> Reply:
        if ask == 1:
            return reply
        calls = [_marked_call(call, ask) if self._vary_args else call for call in reply.tool_calls]
        return Reply(f"{reply.text}#{ask}", calls, reply.usage)


def check_request(messages: Sequence[Message]) -> None:
    """Assert what every provider asks of a request: each call has exactly one result, right after it; ids are unique."""
    try:
        check_history(messages)
    except InvalidSetting as error:
        raise AssertionError(f"no provider would take this request: {error}") from error


def without_marks(text: str) -> str:
    """The text as it would be had nothing been asked for, or done, twice."""
    return _MARK.sub("", text)


def _asked_as(decision: int) -> str:
    try:
        return idempotency_key()
    except LookupError:
        return f"decision {decision}"


def _marked_call(call: ToolCall, ask: int) -> ToolCall:
    args: Mapping[str, object] = {
        name: f"{value}#{ask}" if isinstance(value, str) else value for name, value in call.args.items()
    }
    return ToolCall(call.id, call.name, args)
