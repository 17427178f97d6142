"""How a call ended: as it is recorded, as it is read back, and as a model sees it."""

from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.journal.records import new_tuple
from agent_runtime.redaction import Part, Redact, shown
from agent_runtime.tools import Tool

_RESULT = b'{"result":'
_ERROR = b'{"error":'


class Ending(NamedTuple):
    """How a call ended: with a value, or with an error that is the tool's answer."""

    value: Any = None
    error_type: str | None = None
    error: str = ""
    text: str = ""
    """The same as the model sees it."""


def read_ending(body: bytes, tool: Tool | None, *, is_settled: bool = False) -> Ending:
    """The ending that a `done` record holds. Without its tool, the value is plain data.

    `is_settled`: somebody else than the tool says what it gave. Where that is none of the declared type it is plain data,
    too: the run goes on, and whoever takes the value judges it, as a flow's state does.
    """
    body = codec.untimed(body)
    if body.startswith(_RESULT):
        data = body[len(_RESULT) : -1]
        if tool is None or tool.result.is_plain or (is_settled and not tool.result.fits(data)):
            value = codec.decode(data)
            return text_ending(value) if type(value) is str else new_tuple(Ending, (value, None, "", _text(data)))
        return Ending(tool.result.decode(data), text=_text(data))
    error = codec.decode(body)["error"]
    return Ending(None, error["type"], error["message"], f"error: {error['type']}: {error['message']}")


def text_ending(value: str) -> Ending:
    """The ending of a call that gave this text."""
    return new_tuple(Ending, (value, None, "", codec.readable(value)))


def _text(data: bytes) -> str:
    """A result as the model sees it: text as it is, other data as JSON.

    A lone surrogate, which no request can hold, is shown as U+FFFD; the recorded result keeps it.
    """
    if not data.startswith(b'"'):
        return data.decode() if b"\\ud" not in data else codec.encode_readable(codec.readable(codec.decode(data)))
    return str(codec.readable(codec.decode(data)))


def error_body(error: BaseException, redact: Redact | None = None) -> bytes:
    """The body of an ending that is an error, whose text is stored as it may be shown."""
    message = str(shown(redact, str(error), Part.ERROR)).encode("utf-8", "replace").decode()
    return _ERROR + codec.encode({"type": type(error).__name__, "message": message[:10_000]}) + b"}"


def answer_body(kind: str, message: str) -> bytes:
    """The body of an ending that no tool gave: an error of that kind, readable whatever stands in it."""
    return _ERROR + codec.encode(codec.readable({"type": kind, "message": message})) + b"}"


def result_body(tool: Tool, value: object, most: int) -> bytes:
    """The body of an ending with a result of at most `most` bytes; `Unrecordable` where that cannot be recorded."""
    return _RESULT + tool.result.encode(value, most) + b"}"
