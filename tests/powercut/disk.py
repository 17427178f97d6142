"""What a power cut may leave of files on a disk: which states there are after each call, and each state's bytes.

The disk promises little here. What was asked of a file before it was flushed (fsync, fdatasync) is there. Of what was asked
since, each sector of 512 bytes of each write may be there or not, whatever became of the others: so a write may be missing,
torn, or there before an earlier one; the file may have grown without the bytes that made it grow; a truncation may be
missing. Which files there are is flushed with their folder alone: until then each making, linking and removing of a name
may be missing by itself. A file that was mapped as memory holds nobody knows what, or is not there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.powercut.recording import Call, Create, Link, Mapped, Said, Sync, SyncFolder, Truncate, Unlink, Write

SECTOR = 512
Files = dict[str, bytes]
"""What there is after a power cut: the bytes of each file by its name."""

_JUNK = random.Random(5).randbytes(1024)


@dataclass
class _File:
    flushed: bytes = b""
    asked: list[Write | Truncate] = field(default_factory=list)
    is_mapped: bool = False


class _Named(NamedTuple):
    """A name that was asked to stand for a file, or for none any more."""

    name: str
    file: int | None


class Part(NamedTuple):
    """Something that may be there or not. Parts of one `call` (the number of it) were asked for together."""

    call: int
    what: _Named | Write | Truncate | Mapped
    file: int = 0


class Disk:
    """The files of one folder, as the calls come in."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._now: dict[str, int] = {}
        self._flushed: dict[str, int] = {}
        self._asked: list[_Named] = []

    def take(self, call: Call) -> None:
        """Have a call done."""
        match call:
            case Create(name):
                if name not in self._now:
                    self._files.append(_File())
                    self._call(name, len(self._files) - 1)
            case Unlink(name):
                self._call(name, None)
            case Link(name, other, renamed):
                self._call(other, self._now[name])
                if renamed:
                    self._call(name, None)
            case Write() | Truncate():
                self._file(call.name).asked.append(call)
            case Sync(name):
                file = self._file(name)
                file.flushed = bytes(_written(file.flushed, file.asked))
                file.asked = []
            case SyncFolder():
                self._flushed, self._asked = dict(self._now), []
            case Mapped(name):
                self._file(name).is_mapped = True
            case Said():
                pass

    def cut(self) -> Cut:
        """The power goes now."""
        there = {*self._flushed.values(), *(named.file for named in self._asked if named.file is not None)}
        files = {number: self._files[number] for number in sorted(there)}
        parts = [Part(at, named) for at, named in enumerate(self._asked)]
        for number, file in files.items():
            if file.is_mapped:
                parts.append(Part(len(parts), Mapped(""), number))
                continue
            whole = _written(file.flushed, file.asked)
            if len(whole) > len(file.flushed):
                parts.append(Part(len(parts), Truncate("", len(whole)), number))  # it has grown, by bytes that are not there
            for asked in file.asked:
                at = len(parts)
                parts += [Part(at, piece, number) for piece in _pieces(asked)]
        return Cut(dict(self._flushed), {number: file.flushed for number, file in files.items()}, parts)

    def _call(self, name: str, file: int | None) -> None:
        self._asked.append(_Named(name, file))
        if file is None:
            del self._now[name]
        else:
            self._now[name] = file

    def _file(self, name: str) -> _File:
        return self._files[self._now[name]]


@dataclass(frozen=True)
class Cut:
    """One moment at which the power goes: what is there for certain, and the parts that may be there."""

    names: dict[str, int]
    files: dict[int, bytes]
    parts: Sequence[Part]

    @property
    def possible(self) -> int:
        return 1 << len(self.parts)

    def state(self, choice: int) -> Files:
        """What is there if the parts are whose bits are set."""
        names, files = dict(self.names), {number: bytearray(flushed) for number, flushed in self.files.items()}
        for bit, part in enumerate(self.parts):
            if not choice >> bit & 1:
                continue
            match part.what:
                case _Named(name, None):
                    names.pop(name, None)
                case _Named(name, file) if file is not None:
                    names[name] = file
                case Mapped():
                    files[part.file] += _JUNK
                case Write() | Truncate():
                    _do(files[part.file], part.what)
        return {name: bytes(files[file]) for name, file in names.items()}

    def choices(self, most: int, draw: random.Random) -> Iterator[int]:
        """At most so many choices, each once: all there are where they are so few, else telling ones and drawn ones."""
        if self.possible <= most:
            yield from range(self.possible)
            return
        found: set[int] = set()
        for choice in self._all(draw):
            if choice not in found:
                found.add(choice)
                yield choice
            if len(found) == most:
                return

    def _all(self, draw: random.Random) -> Iterator[int]:
        everything = self.possible - 1
        yield from (everything, 0)
        yield from self._telling(draw)
        size = len(self.parts)
        while True:
            often = draw.choice((0.1, 0.5, 0.9, 0.97))
            yield sum((draw.random() < often) << bit for bit in range(size))

    def _telling(self, draw: random.Random) -> Iterator[int]:
        """One call missing, one alone, the first ones, the last ones, the last one torn; in any order."""
        everything, calls = self.possible - 1, self._calls()
        alone = [choice for call in calls for choice in (call, everything & ~call)]
        parted = [choice for call in calls for choice in (everything & (call - 1 | call), everything & ~(call - 1))]
        torn = [everything & ((1 << bit) - 1) for bit in range(len(self.parts))]
        found = [*alone, *parted, *torn]
        draw.shuffle(found)
        yield from found

    def _calls(self) -> list[int]:
        """The parts of each call."""
        calls: dict[int, int] = {}
        for bit, part in enumerate(self.parts):
            calls[part.call] = calls.get(part.call, 0) | 1 << bit
        return list(calls.values())


def _pieces(asked: Write | Truncate) -> Iterator[Write | Truncate]:
    """A write by the sectors that it touches."""
    if isinstance(asked, Truncate):
        yield asked
        return
    name, at, data = asked
    end = at + len(data)
    while at < end:
        until = min(end, (at // SECTOR + 1) * SECTOR)
        yield Write(name, at, data[at - end :][: until - at])
        at = until


def _written(flushed: bytes, asked: Sequence[Write | Truncate]) -> bytearray:
    content = bytearray(flushed)
    for each in asked:
        _do(content, each)
    return content


def _do(content: bytearray, asked: Write | Truncate) -> None:
    match asked:
        case Write(_, at, data):
            content.extend(bytes(max(0, at - len(content))))
            content[at : at + len(data)] = data
        case Truncate(_, size):
            del content[size:]
            content.extend(bytes(size - len(content)))
