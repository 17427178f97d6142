"""What a program asked the kernel to do with the files of one folder, in order: read from what strace wrote down.

Recorded at the system calls and nowhere above them, so that it is what reaches the kernel, whoever asks: SQLite, whichever
it is built of, and Python. A shim of SQLite's own file layer (a VFS) would only show what that layer was asked for, not what
it made of it: it leaves out the flush of the folder, for one. A call on these files that is not understood here is an error,
and so is a shared, writable mapping of a file that counts, for what is written to memory no call shows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.strace import run_traced

CALLS = (
    "open,openat,creat,write,writev,pwrite64,pwritev,pwritev2,sync_file_range,fdatasync,fsync,ftruncate,truncate,fallocate,"
    "unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,mkdir,mkdirat,mmap,copy_file_range,sendfile,"
    "io_submit,io_uring_enter"
)
_LONGEST = 1 << 20
_LINE = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(\(| resumed>)(.*)")
_UNFINISHED = " <unfinished ...>"
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_OPENED = re.compile(r"(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")


class Write(NamedTuple):
    name: str
    at: int
    data: bytes


class Truncate(NamedTuple):
    name: str
    size: int


class Sync(NamedTuple):
    """What was asked of this file before is on the disk now."""

    name: str


class SyncFolder(NamedTuple):
    """Which files there are is on the disk now."""


class Create(NamedTuple):
    """There is a file of this name: a new one, and empty, where there was none."""

    name: str


class Unlink(NamedTuple):
    name: str


class Link(NamedTuple):
    """The file of the first name has the second as well; `renamed`: it had the first until now."""

    name: str
    other: str
    renamed: bool


class Mapped(NamedTuple):
    """From now on it is written as memory, by no call: what of it gets to the disk, and when, nobody knows."""

    name: str


class Said(NamedTuple):
    """A line of the side channel."""

    line: str


Call = Write | Truncate | Sync | SyncFolder | Create | Unlink | Link | Mapped | Said


def record(folder: Path, side: Path, log: Path, program: Sequence[str]) -> list[Call]:
    """Run a Python program and give what it asked of the files in `folder`, and what it wrote to the file `side`."""
    run_traced([sys.executable, *program], log=log, calls=CALLS, options=["-y", "-xx", "-s", str(_LONGEST)])
    return list(_Reader(folder, side).read(log))


class _Reader:
    def __init__(self, folder: Path, side: Path) -> None:
        self._folder, self._side = str(folder), str(side)
        self._sizes: dict[str, int] = {}
        """Of each file that was made here, how much was written to it in a row."""

    def read(self, log: Path) -> Iterator[Call]:
        for call, words, result in _finished(log):
            if not result.startswith("-"):
                yield from self._calls(call, words, _OPENED.findall(words), [_bytes(text) for text in _TEXT.findall(words)])

    def _calls(self, call: str, words: str, opened: list[str], texts: list[bytes]) -> Iterator[Call]:
        """What one call means, if it is about our files. The paths that we record are absolute."""
        paths = [_bytes(path).decode() for path in opened]
        match call:
            case "open" | "openat":
                yield from self._open(words, texts[0].decode())
            case "write" if paths[0] == self._side:
                yield Said(texts[0].decode().strip())
            case "write" if name := self._name(paths[0]):
                at = self._sizes[name]
                self._sizes[name] += len(texts[0])
                yield Write(name, at, texts[0])
            case "pwrite64" if name := self._name(paths[0]):
                yield Write(name, int(words.rsplit(",", 1)[1]), texts[0])
            case "fsync" | "fdatasync" if paths[0] == self._folder:
                yield SyncFolder()
            case "fsync" | "fdatasync" if name := self._name(paths[0]):
                yield Sync(name)
            case "ftruncate" if name := self._name(paths[0]):
                yield Truncate(name, int(words.rsplit(",", 1)[1]))
            case "unlink" | "unlinkat" if name := self._name(texts[0].decode()):
                yield Unlink(name)
            case "link" | "linkat" | "rename" | "renameat" | "renameat2" if name := self._name(texts[0].decode()):
                yield Link(name, Path(texts[1].decode()).name, call.startswith("rename"))
            case "mmap" if paths and "MAP_SHARED" in words and "PROT_WRITE" in words and (name := self._name(paths[0])):
                yield Mapped(name)
            case "mmap":
                pass
            case _:
                ours = [path for path in (*paths, *(text.decode(errors="replace") for text in texts)) if self._name(path)]
                assert not ours, f"{call} of {ours}: what it does to a file is not known here"

    def _open(self, words: str, path: str) -> Iterator[Call]:
        name = self._name(path)
        if name is None or ("O_CREAT" not in words and "O_TRUNC" not in words):
            return
        yield Create(name)  # where there is none; whoever reads this knows which there are
        self._sizes.setdefault(name, 0)
        if "O_TRUNC" in words:
            self._sizes[name] = 0
            yield Truncate(name, 0)

    def _name(self, path: str) -> str | None:
        """A file's name in the folder; None for any other path."""
        above, _, name = path.rpartition("/")
        return name if above == self._folder and name else None


def _finished(log: Path) -> Iterator[tuple[str, str, str]]:
    """Each call that ended: its name, its words, its result. It counts from when it ended."""
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        task, call, opening, rest = found.groups()
        if rest.endswith(_UNFINISHED):
            begun[task] = rest.removesuffix(_UNFINISHED)
            continue
        if opening != "(":
            rest = begun.pop(task) + rest
        words, _, result = rest.rpartition(" = ")
        yield call, words.rstrip().removesuffix(")"), result


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
