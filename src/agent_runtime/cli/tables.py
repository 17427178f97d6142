"""What the commands print: aligned tables for people, JSON lines for programs. No control character reaches a terminal."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from enum import Enum

WIDTHS_FROM = 200
"""So many rows are read before the first is printed: the columns get their widths from them."""


def json_line(plain: object) -> str:
    """One line for a program, in ASCII."""
    return json.dumps(plain, default=_as_plain).replace("\x7f", "\\u007f")  # the one control that JSON leaves as it is


def printable(text: str) -> str:
    """The text with every character escaped that a terminal would not show as itself."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def columns_of(text: str) -> int:
    """How many columns of a terminal the text takes: some characters take two, some stand on the one before."""
    return len(text) if text.isascii() else sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def padded(text: str, columns: int) -> str:
    """The text and blanks up to so many columns."""
    return text + " " * (columns - columns_of(text))


def cut(text: str, columns: int, ellipsis: str) -> str:
    """As much of the text as so many columns take; that something is missing is seen."""
    if columns_of(text) <= columns:
        return text
    kept, room = "", columns - columns_of(ellipsis)
    for char in text:
        room -= _columns(char)
        if room < 0:
            break
        kept += char
    return kept + ellipsis


def told_at(moment: datetime | None) -> str:
    """A moment as people read it, to the second."""
    return "" if moment is None else moment.isoformat(" ", "seconds").replace("+00:00", "Z")


async def print_table(head: Sequence[str], rows: AsyncIterator[Sequence[str]]) -> None:
    """The rows under their head, in columns. The last column is as wide as it likes."""
    waiting: list[Sequence[str]] = [head]
    widths: list[int] | None = None
    async for row in rows:
        waiting.append([printable(cell) for cell in row])
        if len(waiting) > WIDTHS_FROM:
            widths = widths or _widths(waiting)
            _print(waiting, widths)
    _print(waiting, widths or _widths(waiting))


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """The same for rows without a head that are all there."""
    shown = [[printable(cell) for cell in row] for row in rows]
    _print(shown, _widths(shown))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(columns_of(cell) for cell in column) for column in zip(*rows, strict=True)]


def _print(rows: list[Sequence[str]] | list[list[str]], widths: Sequence[int]) -> None:
    for row in rows:
        print("  ".join(padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip())
    rows.clear()


def _as_plain(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat()
        case Enum():
            return value.value
        case _:
            return repr(value)
