"""A run's conversation, put together from its timeline: what was said, what was asked of tools, what they gave. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from agent_runtime.ids import reply_call, tool_call
from agent_runtime.timeline import Call, Timeline


class Said(NamedTuple):
    """One message. `asks`: the calls that it asks for, by name and arguments."""

    role: str
    text: str
    asks: Sequence[tuple[str, object]] = ()
    name: str = ""
    call: str = ""
    """The call that it tells the result of, or the decision that it is."""
    result: object = None
    """What a tool gave, as plain data."""
    error: str = ""
    waits: str = ""
    """Why there is no result yet."""


def read_conversation(timeline: Timeline) -> list[Said]:
    """Everything that was said in a loop, the results of calls after the message that asked for them."""
    given = _part(timeline.opened, "input").get("messages")
    said = [_given(message) for message in given if isinstance(message, Mapping)] if isinstance(given, list) else []
    seq = 0
    while (decision := timeline.calls.get(reply_call(seq))) is not None and decision.outcome:
        said += _decision(timeline, decision, seq)
        seq += 1
    return said


def read_input(timeline: Timeline) -> Mapping[str, object]:
    """What a run was given besides a conversation and a graph: the state of a flow."""
    return {name: value for name, value in _part(timeline.opened, "input").items() if name not in ("messages", "graph")}


def _given(message: Mapping[str, object]) -> Said:
    asked = message.get("tool_calls")
    asks = [(str(each.get("name", "")), each.get("args", {})) for each in asked] if isinstance(asked, list) else []
    role, name = str(message.get("role", "")), str(message.get("name") or "")
    text = str(message.get("content", ""))
    return Said(role, "", name=name, result=text) if role == "tool" else Said(role, text, asks, name)


def _decision(timeline: Timeline, decision: Call, seq: int) -> Iterator[Said]:
    if (error := _error(decision)) is not None:
        yield Said("assistant", "", call=decision.call, error=error)
        return
    reply = decision.outcome.get("result", decision.outcome)
    reply = reply if isinstance(reply, Mapping) else {}
    asked = reply.get("tool_calls")
    calls = [each for each in asked if isinstance(each, Mapping)] if isinstance(asked, list) else []
    asks = [(str(each.get("name", "")), each.get("args", {})) for each in calls]
    yield Said("assistant", str(reply.get("text", "")), asks, call=decision.call)
    for index, each in enumerate(calls):
        place = tool_call(seq, index, len(calls))
        yield _result(timeline.calls.get(place), place, str(each.get("name", "")))


def _result(call: Call | None, place: str, tool: str) -> Said:
    if call is None:
        return Said("tool", "", name=tool, call=place, waits="not started yet")
    if (error := _error(call)) is not None:
        return Said("tool", "", name=tool, call=place, error=error)
    if call.outcome:
        return Said("tool", "", name=tool, call=place, result=call.outcome.get("result"))
    return Said("tool", "", name=tool, call=place, waits="waits for approval" if call.is_waiting else "no result on record")


def _error(call: Call) -> str | None:
    error = call.outcome.get("error")
    if not isinstance(error, Mapping):
        return None
    return f"{error.get('type', 'Error')}: {error.get('message', '')}"


def _part(plain: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = plain.get(name)
    return value if isinstance(value, Mapping) else {}
