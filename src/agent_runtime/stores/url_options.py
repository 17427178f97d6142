"""The options of a store that stand in its URL: read, and taken out before the driver sees the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_plus

from agent_runtime.errors import InvalidSetting

Reader = Callable[[str, str], Any]
_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def take_options(url: str, readers: Mapping[str, Reader]) -> tuple[str, dict[str, Any]]:
    """The URL as the driver gets it, letter by letter, and the options of ours that stood behind its `?`."""
    front, mark, query = url.partition("?")
    theirs: list[str] = []
    options: dict[str, Any] = {}
    for part in query.split("&") if mark else ():
        name, _, value = part.partition("=")
        if name not in readers:
            theirs.append(part)
        elif name in options:
            raise InvalidSetting(f"{name}= stands twice in the URL of a store; say it once")
        else:
            options[name] = readers[name](name, unquote_plus(value))
    return front + (f"?{'&'.join(theirs)}" if theirs else ""), options


def whole_number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise InvalidSetting(f"{name}= in the URL of a store is a whole number, found {value!r}")
    return int(value)


def seconds(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidSetting(f"{name}= in the URL of a store is a number of seconds, found {value!r}") from None


def truth(name: str, value: str) -> bool:
    if value.lower() not in _YES:
        raise InvalidSetting(f"{name}= in the URL of a store is yes or no, found {value!r}")
    return _YES[value.lower()]


def word(name: str, value: str) -> str:
    return value
