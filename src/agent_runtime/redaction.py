"""What is shown and announced without what nobody should see: a hook over plain values, and hooks that are ready.

Rules of this file:

* A hook gets a plain value and where it stands, and gives the value to show. It may be called for any part of a run.
* One that raises shows nothing of the value: what cannot be made harmless is not shown.
* Arguments and results that are stored stay as they are, since a restart has to send the very same bytes: who reads the
  store reads them, unless the key encrypts. An error's text is nothing that a restart needs, and is stored as it is shown.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, TypeAlias

from agent_runtime.errors import InvalidSetting
from agent_runtime.events import Event, Sink

HIDDEN = "[redacted]"
"""Stands where something was."""
UNREDACTED = "[not shown: the redaction hook failed]"


class Part(Enum):
    """Where a value stands that is to be shown."""

    ARGUMENT = "argument"
    """The arguments of a call: a mapping by name."""
    RESULT = "result"
    """What a call gave."""
    ERROR = "error"
    """The text of an error."""
    MESSAGE = "message"
    """What a person or a model said."""


Redact: TypeAlias = Callable[[Any, Part], Any]
"""From a plain value and where it stands to the value that is shown."""

_PARTS = {
    "args": Part.ARGUMENT, "sent": Part.ARGUMENT, "edit": Part.ARGUMENT, "result": Part.RESULT, "value": Part.RESULT,
    "error": Part.ERROR, "message": Part.ERROR, "why": Part.ERROR, "note": Part.MESSAGE, "text": Part.MESSAGE,
    "content": Part.MESSAGE, "output": Part.MESSAGE,
}  # fmt: skip
"""What stands under which name in events and in the details of a record."""
_NESTED = frozenset({"calls", "tool_calls", "ending", "outcome", "verdict", "settled"})
"""What holds such names in turn."""


def redact_names(*names: str) -> Redact:
    """A hook that hides what stands under these names, at any depth; case and `_`, `-` do not count."""
    hidden = frozenset(_bare(name) for name in names)
    if not hidden or "" in hidden:
        raise InvalidSetting(f"name what to hide, as in redact_names('password', 'token'); found {names!r}")

    def redact(value: Any, part: Part) -> Any:
        if type(value) is dict:
            return {key: HIDDEN if _bare(key) in hidden else redact(item, part) for key, item in value.items()}
        return [redact(item, part) for item in value] if type(value) is list else value

    return redact


def redact_pattern(*patterns: str) -> Redact:
    """A hook that hides every piece of text that one of these regular expressions matches, wherever it stands."""
    try:
        found = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise InvalidSetting(f"redact_pattern takes regular expressions; {error}") from error
    if not found:
        raise InvalidSetting("redact_pattern takes one regular expression at least")

    def redact(value: Any, part: Part) -> Any:
        if type(value) is str:
            for pattern in found:
                value = pattern.sub(HIDDEN, value)
            return value
        if type(value) is dict:
            return {redact(key, part): redact(item, part) for key, item in value.items()}
        return [redact(item, part) for item in value] if type(value) is list else value

    return redact


def redact_all(*hooks: Redact) -> Redact:
    """One hook of several, one after another."""

    def redact(value: Any, part: Part) -> Any:
        for hook in hooks:
            value = hook(value, part)
        return value

    return redact


def shown(redact: Redact | None, value: object, part: Part) -> Any:
    """The value as it may be shown."""
    if redact is None:
        return value
    try:
        return redact(_plain(value), part)
    except Exception:  # of a hook that is somebody else's: it has not said what may be seen
        return UNREDACTED


def redact_mapping(redact: Redact | None, data: Mapping[str, object]) -> dict[str, object]:
    """What an event, or a record's details, say by name, as it may be shown."""
    return {name: by_name(redact, name, value) for name, value in data.items()}


def shown_args(redact: Redact | None, args: Mapping[str, object]) -> Mapping[str, object]:
    """Arguments by name as they may be shown; under one name where a hook makes no mapping of them."""
    told = shown(redact, args, Part.ARGUMENT)
    return told if isinstance(told, Mapping) else {"arguments": told}


def shown_text(redact: Redact | None, text: str, part: Part = Part.ERROR) -> str:
    """Words in which something may be quoted, as they may be shown."""
    return str(shown(redact, text, part)) if text else text


def find_marks(shown_value: object, value: object) -> frozenset[str]:
    """What stands, in what is shown, for parts of the value that are not: no such text is meant as it is by anybody."""
    return frozenset(_leaves(shown_value)) - frozenset(_leaves(value)) | {HIDDEN, UNREDACTED}


def holds_mark(value: object, marks: Collection[str]) -> bool:
    """Whether the value, or a part of it, is one of these."""
    return any(leaf in marks for leaf in _leaves(value))


def redacting(sink: Sink, redact: Redact) -> Sink:
    """A sink that hears of events as they may be shown."""
    return _Redacting(sink, redact)


class _Redacting:
    def __init__(self, sink: Sink, redact: Redact) -> None:
        self._sink = sink
        self._redact = redact

    def __call__(self, event: Event) -> None:
        self._sink(replace(event, data=redact_mapping(self._redact, event.data)))

    def __repr__(self) -> str:
        return f"redacting({self._sink!r})"


def by_name(redact: Redact | None, name: str, value: object) -> object:
    """What stands under a name in an event, or in the details of a record, as it may be shown."""
    part = _PARTS.get(name)
    if name == "error" and isinstance(value, Mapping):
        return {**value, "message": shown(redact, value.get("message", ""), Part.ERROR)}
    if part is not None:
        return shown(redact, value, part)
    if name in _NESTED and isinstance(value, Mapping):
        return redact_mapping(redact, value)
    if name in _NESTED and isinstance(value, list):
        return [redact_mapping(redact, each) if isinstance(each, Mapping) else each for each in value]
    return value


def _leaves(value: object) -> Iterator[str]:
    """Every name and every value that holds no others, as text."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value if isinstance(value, str) else repr(value)


def _bare(name: object) -> str:
    return str(name).casefold().replace("_", "").replace("-", "")


def _plain(value: object) -> Any:
    """A value of a declared type as plain data, which is all that a hook knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, serialize_unknown=True)
