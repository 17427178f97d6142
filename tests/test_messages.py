"""Messages and replies: what a conversation may be, how it is written down, and what a model may not answer."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime import codec
from agent_runtime.errors import AgentRuntimeError, InvalidSetting, Unrecordable
from agent_runtime.messages import (
    Message,
    Reply,
    Role,
    ToolCall,
    Transcript,
    check_history,
    decode_messages,
    decode_reply,
    encode_messages,
    encode_reply,
    read_messages,
    record_reply,
    reply_message,
)
from tests.bench import assert_acceptable

ASK = Message("assistant", "", (ToolCall("a", "f", {"x": 1}), ToolCall("b", "g")))
A, B = Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b")
GO = Message("user", "go")


@pytest.mark.parametrize(
    "history",
    [
        [GO],
        [Message("system", "be good"), GO],
        [GO, ASK, A, B],
        [GO, ASK, A, B, Message("assistant", "done"), GO],
        [GO, ASK, A, B, ASK, A, B],
    ],
)
def test_a_conversation_that_providers_accept_is_taken(history: list[Message]) -> None:
    check_history(history)
    assert_acceptable(history)
    assert read_messages(history) == history


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ([GO, ASK], "has no result"),
        ([GO, ASK, A], "has no result"),
        ([GO, ASK, B, A], "answers call 'b'"),
        ([GO, ASK, A, A], "answers call 'a'"),
        ([GO, ASK, A, B, B], "answers call 'b'"),
        ([GO, A], "answers call 'a'"),
        ([GO, ASK, GO, A, B], "before call 'a' has its result"),
        ([GO, ASK, A, GO, B], "before call 'b' has its result"),
        ([GO, Message("assistant", "", (ToolCall("a", "f"), ToolCall("a", "g"))), A, A], "two calls with one id"),
        ([GO, ASK, A, Message("tool", "2")], "answers call None"),
    ],
)
def test_a_conversation_that_no_provider_accepts_is_refused(history: list[Message], why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        read_messages(history)
    with pytest.raises(AssertionError):
        assert_acceptable(history)


def test_text_and_chat_style_dicts_become_messages() -> None:
    assert read_messages("go") == [GO]
    given: list[Message | dict[str, object]] = [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [{"id": "a", "name": "f", "args": {"x": 1}}, ToolCall("b", "g")]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        B,
    ]
    assert read_messages(given) == [Message("system", "be good"), GO, ASK, A, B]


def asking(*calls: object) -> list[object]:
    """A conversation in which the model asked for these."""
    results = [{"role": "tool", "tool_call_id": "a"}] * len(calls)
    return [{"role": "assistant", "tool_calls": list(calls)}, *results]


@pytest.mark.parametrize(
    "given",
    [
        [], [5], ["go"], [None], [{}], 5, None, GO, {"role": "user", "content": "x"},
        [{"role": "robot", "content": "x"}], [{"role": ["user"], "content": "x"}], [Message("robot", "x")],  # type: ignore[arg-type]  # on purpose
        [{"role": "user", "content": 5}], [{"role": "user", "content": None}], [{"role": "user", "content": ["x"]}],
        [Message("user", 5)], [Message("user", "x", name=5)],  # type: ignore[arg-type]  # on purpose
        [{"role": "user", "content": "x", "extra": 1}], [{"role": "user", "content": "x", "name": 5}],
        [{"role": "assistant", "tool_calls": 5}], asking("a"), asking({"id": "a"}), asking({"id": 1, "name": "f", "args": {}}),
        asking({"id": "a", "name": 5}), asking({"id": "a", "name": "f", "args": None}), asking(ToolCall("a", "f", {1: 2})),  # type: ignore[dict-item]  # on purpose
        asking({"id": "a", "name": "f", "args": {1: 2}}), asking({"id": "a", "name": "f", "args": {"x": (1,)}}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_conversation_is_refused_at_the_door(given: Any) -> None:
    with pytest.raises(InvalidSetting):
        encode_messages(read_messages(given))


texts = st.text(max_size=10)
args = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers() | texts | st.lists(st.integers(), max_size=3), max_size=3
)
calls = st.lists(st.builds(ToolCall, texts, texts, args), max_size=3, unique_by=lambda call: call.id)


def plain_message(role: Role, text: str) -> Message:
    return Message(role, text)


@given(texts, calls, st.dictionaries(texts, st.integers(), max_size=2))
def test_a_reply_comes_back_as_it_was(text: str, calls: list[ToolCall], usage: dict[str, int]) -> None:
    reply = decode_reply(encode_reply(Reply(text, calls, usage)))
    assert (reply.text, list(reply.tool_calls), reply.usage) == (text, calls, usage)
    assert reply_message(reply) == Message("assistant", text, tuple(calls))


any_texts = st.text(st.characters(exclude_categories=()), max_size=4)
any_args = st.dictionaries(any_texts, st.recursive(any_texts | st.floats(allow_nan=False, allow_infinity=False), st.lists))


@given(
    any_texts,
    st.lists(st.builds(ToolCall, any_texts, any_texts, any_args), max_size=3),
    st.dictionaries(any_texts, st.integers()),
)
def test_a_reply_is_recorded_and_read_back_alike_whatever_its_parts_are_made_of(
    text: str, calls: list[ToolCall], usage: dict[str, int]
) -> None:
    wrapped = [call._replace(args=MappingProxyType(call.args)) for call in calls]
    given = [Reply(text, calls, usage), Reply(text, tuple(calls), usage), Reply(text, wrapped, MappingProxyType(usage))]
    found = [recorded(reply) for reply in given]
    assert found[0] == found[1] == found[2]
    if isinstance(found[0], tuple):
        data, reply = found[0]
        assert reply == decode_reply(data)
        assert type(reply.tool_calls) is tuple
        assert all(
            type(call.args) is dict and call.args is not own.args for call, own in zip(reply.tool_calls, calls, strict=True)
        )


def recorded(reply: Reply) -> tuple[bytes, Reply] | type[Exception]:
    try:
        return record_reply(reply)
    except (InvalidSetting, Unrecordable) as error:
        return type(error)


@given(st.lists(st.builds(plain_message, st.sampled_from(["system", "user"]), texts), min_size=1, max_size=4), calls)
def test_a_conversation_comes_back_as_it_was(history: list[Message], asked: list[ToolCall]) -> None:
    history = [*history, Message("assistant", "x", tuple(asked)), *(Message("tool", "r", (), c.id, c.name) for c in asked)]
    plain = encode_messages(history)
    codec.encode(plain)
    assert decode_messages(plain) == history


@pytest.mark.parametrize("text", ["cut \ud83d", "\ude00", "both \ud83d\ude00", "é\udfff"])
def test_what_no_request_can_hold_is_shown_as_a_replacement_from_the_decision_on(text: str) -> None:
    reply = decode_reply(encode_reply(Reply(text, [ToolCall(text, "f", {text: [{"x": text}]})])))
    shown = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert (reply.text, reply.tool_calls[0].id, reply.tool_calls[0].args) == (shown, shown, {shown: [{"x": shown}]})
    assert_acceptable([GO, reply_message(reply), Message("tool", "r", tool_call_id=shown)])
    assert read_messages(text) == read_messages([Message("user", text)]) == [Message("user", shown)]


def test_ids_that_only_a_replacement_makes_equal_are_refused_too() -> None:
    with pytest.raises(InvalidSetting, match="one id"):
        encode_reply(Reply("", [ToolCall("a\ud83d", "f"), ToolCall("a\ud83e", "f")]))


class Text(str):
    pass


@pytest.mark.parametrize(
    "reply",
    [
        None, "text", {"text": "x"}, 5, Message("assistant", "x"),
        Reply(None), Reply(5), Reply(b"x"), Reply(["x"]), Reply(Text("x")),  # type: ignore[arg-type]  # on purpose
        Reply("", 5), Reply("", "call"), Reply("", ToolCall("a", "f")),  # type: ignore[arg-type]  # on purpose
        Reply("", ["call"]), Reply("", [None]), Reply("", [{"id": "a", "name": "f", "args": {}}]),  # type: ignore[list-item]  # on purpose
        Reply("", [ToolCall(None, "f")]), Reply("", [ToolCall("a", None)]), Reply("", [ToolCall("a", 5)]),  # type: ignore[arg-type]  # on purpose
        Reply("", [ToolCall("a", "f", None)]), Reply("", [ToolCall("a", "f", [1])]),  # type: ignore[arg-type]  # on purpose
        Reply("", [ToolCall("a", "f", '{"x": 1}')]),  # type: ignore[arg-type]  # on purpose
        Reply("", [ToolCall("a", "f"), ToolCall("a", "g")]),
        Reply("", [ToolCall("", "f"), ToolCall("", "g")]),
        Reply("", [], {"input": None}), Reply("", [], {"input": 1.5}), Reply("", [], {"input": "5"}),  # type: ignore[dict-item]  # on purpose
        Reply("", [], {"details": {"cached": 1}}), Reply("", [], {"input": True}), Reply("", [], [("input", 1)]),  # type: ignore[dict-item, arg-type]  # on purpose
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_reply_is_refused_before_it_counts(reply: Any) -> None:
    with pytest.raises(InvalidSetting):
        encode_reply(reply)


@pytest.mark.parametrize("args", [{1: 2}, {"x": (1,)}, {"x": float("nan")}, {"x": object()}, {"x": 2**20_000}])
def test_arguments_that_cannot_be_recorded_are_refused_with_their_path(args: dict[str, object]) -> None:
    with pytest.raises(Unrecordable, match=r"\$\.tool_calls\[0\]\.args"):
        encode_reply(Reply("", [ToolCall("a", "f", args)]))


def test_every_refusal_is_one_of_ours() -> None:
    assert issubclass(InvalidSetting, AgentRuntimeError)
    assert issubclass(Unrecordable, AgentRuntimeError)


# The messages up to a moment.


def test_a_transcript_shows_what_was_there_and_nothing_that_came_later() -> None:
    items = [GO, ASK, A]
    seen = Transcript(items)
    items += [B, GO]
    assert len(seen) == 3
    assert list(seen) == [GO, ASK, A]
    assert seen == [GO, ASK, A]
    assert seen != [GO, ASK, A, B]
    assert (seen[0], seen[-1], seen[1:], seen[::-1]) == (GO, A, [ASK, A], [A, ASK, GO])
    assert B not in seen
    for index in (3, -4, 99):
        with pytest.raises(IndexError):
            seen[index]
    assert "Transcript" in repr(seen)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(-8, 8), st.integers(-8, 8), st.integers(1, 3))
def test_a_transcript_is_the_list_that_it_was_made_of(before: int, later: int, start: int, stop: int, step: int) -> None:
    items = [Message("user", str(at)) for at in range(before)]
    wanted: Sequence[Message] = list(items)
    seen = Transcript(items)
    items += [Message("user", "later")] * later
    assert seen == wanted
    assert seen[start:stop:step] == wanted[start:stop:step]
    assert list(reversed(seen)) == list(reversed(wanted))


def test_a_transcript_is_no_key_and_nobody_can_change_it() -> None:
    seen = Transcript([GO])
    with pytest.raises(TypeError):
        hash(seen)
    assert not hasattr(seen, "append")
