"""Values as people read them: JSON, sizes, times, and every character that would not show as itself made visible. Pure."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import NamedTuple

from agent_runtime.clock import moment

ONE_LINE = 72
SHORT = 600
"""A value of so many characters stands open; a longer one is folded."""
LONGEST = 20_000
"""So many characters of a value are on a page; the whole of it has an address of its own."""

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """The text with each control, direction mark and lone surrogate in it shown by name. Line ends and tabs stay."""
    return text if text.isprintable() else _UNSEEN.sub(_named, text)


def _named(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def pretty(value: object) -> str:
    """A value as JSON, over several lines where one would be long; text as it is."""
    if isinstance(value, str):
        return value
    told = line(value)
    return told if len(told) <= ONE_LINE else json.dumps(value, indent=2, ensure_ascii=False, default=repr)


def line(value: object) -> str:
    """A value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def editable(value: object) -> str:
    """A value as JSON that comes back from a form as it was: in ASCII."""
    return json.dumps(value, indent=2)


class Folded(NamedTuple):
    """A value as it stands on a page."""

    text: str
    """What of it is on the page."""
    size: int
    """How many characters it has in all."""
    head: str
    """Its beginning, on one line."""

    @property
    def is_short(self) -> bool:
        return self.size <= SHORT and self.text.count("\n") <= 16

    @property
    def is_cut(self) -> bool:
        return self.size > len(self.text)


def fold(value: object) -> Folded:
    """A value as it stands on a page, whatever its size."""
    whole = pretty(value)
    return Folded(whole[:LONGEST], len(whole), " ".join(whole[:160].split())[:80])


def size(characters: int) -> str:
    """`812 characters`, `4.1 kB`, `5.0 MB`."""
    if characters < 1000:
        return f"{characters} characters"
    return f"{characters / 1000:.1f} kB" if characters < 1_000_000 else f"{characters / 1_000_000:.1f} MB"


def duration(milliseconds: int) -> str:
    """`12 ms`, `3.4 s`, `2 min 5 s`, `3 h 12 min`, `4 d 2 h`."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    seconds = milliseconds // 1000
    for unit, name, part, part_name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            rest = seconds % unit // part
            return f"{seconds // unit} {name} {rest} {part_name}" if rest else f"{seconds // unit} {name}"
    return f"{seconds} s"


def at(milliseconds_utc: int | None) -> datetime | None:
    """A moment of a record; what no calendar holds is not shown."""
    try:
        return moment(milliseconds_utc) if milliseconds_utc else None
    except (ValueError, OverflowError, OSError):
        return None


def clock(when: datetime) -> str:
    """`12:03:44.120`."""
    return when.astimezone(UTC).isoformat(" ", "milliseconds")[11:23]


def date(when: datetime) -> str:
    """`2026-01-31 12:03:44 UTC`."""
    return f"{when.astimezone(UTC).isoformat(' ', 'seconds')[:19]} UTC"


def machine(when: datetime) -> str:
    """A moment as a program reads it."""
    return when.astimezone(UTC).isoformat("T", "milliseconds").replace("+00:00", "Z")
