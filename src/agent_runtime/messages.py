"""The conversation: messages, tool calls and replies, and the invariants that every provider asks for.

A history is computed from the journal, never edited in place. In it each tool call has exactly one result, right after
the message that asked for it and in the order asked; ids of calls are unique within a message.
Values are named tuples: several are made a step, and one costs a third of a frozen dataclass.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, overload

from agent_runtime import codec
from agent_runtime.codec import readable
from agent_runtime.errors import InvalidSetting, TooLarge, Unrecordable
from agent_runtime.journal.records import new_tuple

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[str, ...] = get_args(Role)
_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ToolCall(NamedTuple):
    """One call that the model asks for: `id` is the model's own name for it and steers nothing."""

    id: str
    name: str
    args: Mapping[str, object] = _NOTHING


class ToolSpec(NamedTuple):
    """What the model sees of a tool: its name, what it does, and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, object]


class Message(NamedTuple):
    """One message. A `tool` message answers the call `tool_call_id`."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Reply(NamedTuple):
    """What a model answers: text, or calls to make, or both. One without calls ends a loop."""

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    usage: Mapping[str, int] = _NOTHING


class Transcript(Sequence[Message]):
    """The messages up to a moment. Later ones do not appear in it, and nobody can change it."""

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[Message], length: int | None = None) -> None:
        self._items = items
        self._length = len(items) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._items[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"message {index} of {self._length}")
        return self._items[index if index >= 0 else self._length + index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._items[: self._length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as for any list

    def __repr__(self) -> str:
        return f"Transcript({list(self)!r})"


def read_messages(given: str | Sequence[Message | Mapping[str, object]]) -> list[Message]:
    """The messages that a loop starts with: text from the user, `Message`s, or chat-style dicts.

    A lone surrogate in them, which no request can hold, has become U+FFFD.
    """
    if isinstance(given, str):
        return [Message("user", readable(str(given)))]
    if not _is_list(given):
        raise InvalidSetting(f"the messages of a loop are text or a list, found {type(given).__name__}; pass messages='…'")
    if not given:
        raise InvalidSetting("a loop starts with at least one message, found none; pass messages='…'")
    plain = encode_messages(decode_messages([_to_plain(item) if isinstance(item, Message) else item for item in given]))
    messages = decode_messages([readable(item) for item in plain])
    check_history(messages)
    return messages


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, Message)


def check_history(messages: Sequence[Message]) -> None:
    """Refuse a conversation that no provider accepts: a call without its one result, or a result without a call."""
    waiting: list[str] = []
    for at, message in enumerate(messages):
        if message.role == "tool":
            if not waiting or message.tool_call_id != waiting[0]:
                raise InvalidSetting(f"message {at} answers call {message.tool_call_id!r}, expected {waiting[:1] or 'none'}")
            waiting.pop(0)
            continue
        if waiting:
            raise InvalidSetting(f"message {at} comes before call {waiting[0]!r} has its result; add a tool message")
        waiting = [call.id for call in message.tool_calls]
        if len(set(waiting)) != len(waiting):
            raise InvalidSetting(f"message {at} has two calls with one id: {waiting}")
    if waiting:
        raise InvalidSetting(f"call {waiting[0]!r} has no result; a loop starts after the results, or asks for the calls anew")


def encode_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages as plain data."""
    return [_to_plain(message) for message in messages]


def decode_messages(plain: Sequence[Mapping[str, object]]) -> list[Message]:
    """The messages that `encode_messages` was given."""
    return [_from_dict(item, at) for at, item in enumerate(plain)]


def record_reply(reply: Reply, most: int = codec.MAX_BYTES) -> tuple[bytes, Reply]:
    """A reply as it is recorded, and as it is read back from there.

    Refuses one that cannot be recorded, or that no history can hold. Past `most` bytes: `TooLarge`.
    """
    found = _record_common(reply, most)
    if found is not None:
        return found
    data = _encode_any(reply, most)
    return data, decode_reply(data)


def encode_reply(reply: Reply, most: int = codec.MAX_BYTES) -> bytes:
    """A reply as it is recorded."""
    return record_reply(reply, most)[0]


def _record_common(reply: Reply, most: int) -> tuple[bytes, Reply] | None:
    """The same for a reply whose parts are of just the types that they are read back as; None for any other.

    It is written piece by piece, and only what can be changed is read back: a text comes back as it is.
    """
    if type(reply) is not Reply:
        return None
    text, asked, usage = reply
    if type(text) is not str or type(asked) not in _LISTS or len(text) > most:
        return None
    size, pieces, calls = len(text), ['{"text":', codec.quote(text)], list[ToolCall]()
    for call in asked:
        if type(call) is not ToolCall:
            return None
        call_id, name, args = call
        if type(call_id) is not str or type(name) is not str or type(args) is not dict:
            return None
        least = codec.least_size(args)
        size += least
        if least == codec.NOT_PLAIN or size > most:
            return None
        written = codec.encode_readable(args)
        pieces.append(f'{"," if calls else _CALLS}{{"id":{codec.quote(call_id)},"name":{codec.quote(name)},"args":{written}}}')
        calls.append(new_tuple(ToolCall, (call_id, name, codec.parse(written))))
    if calls:
        pieces.append("]")
        if len(calls) > 1:
            _check_ids([call.id for call in calls])
    used = _NOTHING
    if usage:
        if codec.least_size(counted := _plain_usage(usage)) == codec.NOT_PLAIN:
            return None
        pieces += (',"usage":', written := codec.encode_readable(counted))
        used = codec.parse(written)
    pieces.append("}")
    try:
        data = "".join(pieces).encode()
    except UnicodeEncodeError:
        return None
    return (data, new_tuple(Reply, (text, tuple(calls), used))) if len(data) <= most else None


_LISTS = (list, tuple)
_CALLS = ',"tool_calls":['


def _encode_any(reply: Reply, most: int) -> bytes:
    """Any reply as it is recorded, with every check; what it cannot be is said with its place."""
    if not isinstance(reply, Reply):
        raise InvalidSetting(f"a model gives a Reply, found {type(reply).__name__}; return Reply(text=…, tool_calls=[…])")
    if type(reply.text) is not str:
        raise InvalidSetting(f"the text of a reply is text, found {type(reply.text).__name__}; where there is none it is ''")
    plain: dict[str, object] = {"text": reply.text}
    calls: list[dict[str, Any]] = []
    if reply.tool_calls:
        plain["tool_calls"] = calls = [_plain_call(call) for call in _checked_calls(reply.tool_calls)]
        if len(calls) > 1:
            _check_ids([call["id"] for call in calls])
    if reply.usage:
        plain["usage"] = _plain_usage(reply.usage)
    try:
        if not _surely_fits(plain, calls, most):
            codec.check_size(plain, most)
        data = codec.encode_checked(plain, most)
    except TooLarge as error:
        raise error.about("the reply of the model") from None
    except Unrecordable:
        if (shown := readable(plain)) == plain:
            raise
        return codec.encode(shown, most)
    # What is decided is what the next request can hold: a lone surrogate has become U+FFFD.
    return data if b"\\ud" not in data else codec.encode(readable(plain), most)


def _surely_fits(plain: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], most: int) -> bool:
    """Whether those parts of a reply are plain that are of no known type, and it can be written to see how large it is.

    Asked before a copy is made. What else is in a reply is seldom large; the encoder refuses it then.
    """
    size = len(plain["text"])
    for call in calls:
        part = codec.least_size(call["args"])
        if part == codec.NOT_PLAIN:
            return False
        size += part
    return size <= most and ("usage" not in plain or codec.least_size(plain["usage"]) != codec.NOT_PLAIN)


def _checked_calls(calls: object) -> Sequence[object]:
    if type(calls) is list:
        return calls
    if not isinstance(calls, Sequence) or isinstance(calls, str | ToolCall):
        raise InvalidSetting(f"the tool calls of a reply are a list of ToolCall, found {type(calls).__name__}")
    return calls


def _plain_usage(usage: object) -> dict[str, object]:
    if not isinstance(usage, Mapping) or any(type(amount) is not int for amount in usage.values()):
        raise InvalidSetting(f"the usage of a reply is whole numbers by name, found {usage!r}; leave out what is not")
    return dict(usage)


def _check_ids(ids: Sequence[object]) -> None:
    if len(set(ids)) != len(ids):
        raise InvalidSetting(f"the model gave two tool calls one id: {ids}; each call needs its own")


def decode_reply(data: bytes) -> Reply:
    """The reply that `encode_reply` was given."""
    plain = codec.decode(data)
    calls = tuple([new_tuple(ToolCall, (call["id"], call["name"], call["args"])) for call in plain.get("tool_calls", ())])
    return new_tuple(Reply, (plain["text"], calls, plain.get("usage", _NOTHING)))


def reply_message(reply: Reply) -> Message:
    """The reply as the message that the history holds."""
    return new_tuple(Message, ("assistant", reply.text, tuple(reply.tool_calls), None, None))


def _plain_call(call: object) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        name, called, args = call
        if type(name) is str and type(called) is str and (type(args) is dict or isinstance(args, Mapping)):
            return {"id": readable(name), "name": called, "args": dict(args)}
    raise InvalidSetting(f"a tool call is a ToolCall with a text id, a text name and a mapping of arguments, found {call!r}")


def _to_plain(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _from_dict(given: Any, at: int) -> Message:
    if not (type(given) is dict or isinstance(given, Mapping)):
        raise InvalidSetting(f"message {at} must be a Message or a dict, found {type(given).__name__}")
    if unknown := given.keys() - _FIELDS:
        raise InvalidSetting(f"message {at} has unknown fields {sorted(map(str, unknown))}")
    role, content = given.get("role"), given.get("content", "")
    if role not in _ROLES:
        raise InvalidSetting(f"message {at} has role {role!r}, expected one of {list(_ROLES)}")
    if not isinstance(content, str):
        raise InvalidSetting(f"message {at} has content of type {type(content).__name__}, expected text")
    asked, names = given.get("tool_calls") or (), (given.get("tool_call_id"), given.get("name"))
    if (asked and not isinstance(asked, list | tuple)) or not all(name is None or isinstance(name, str) for name in names):
        raise InvalidSetting(f"message {at} has tool_calls that are no list, or a tool_call_id or name that is no text")
    calls = tuple([_call_from(call, at) for call in asked]) if asked else ()
    return Message(role, content, calls, *names)


def _call_from(given: ToolCall | Mapping[str, Any], at: int) -> ToolCall:
    try:
        call = given if isinstance(given, ToolCall) else ToolCall(given["id"], given["name"], given.get("args", {}))
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidSetting(f"a tool call of message {at} needs id, name and args: {error!r}") from error
    parts = zip((call.id, call.name, call.args), (str, str, Mapping), strict=True)
    if not all(isinstance(part, kind) for part, kind in parts):
        raise InvalidSetting(f"a tool call of message {at} has a text id, a text name and a mapping of args, found {call!r}")
    try:
        codec.check_plain(dict(call.args))
    except Unrecordable as error:
        raise InvalidSetting(f"the arguments of call {call.id!r} in message {at} cannot be recorded: {error}") from error
    return call
