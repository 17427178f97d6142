"""The SQLite file itself: making it, setting it up once among many processes, and what its errors mean."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointStoreCorrupt,
    ForeignStore,
    ReadOnlyStore,
    StoreRefused,
    StoreUnavailable,
)
from agent_runtime.stores.layouts import Layout, newer, say_old
from agent_runtime.stores.statements import read_statements

APPLICATION_ID = 0x41675274
LAYOUT = 2
"""The layout of tables that this version makes. Those from 1 on it works with as they are."""
BUSY_MS = 30_000
"""How long a write waits for its turn."""

SQL = read_statements("sqlite.sql")
_MAKING = (
    "create_runs",
    "create_unfinished",
    "create_ended",
    "create_journal",
    "create_numbers",
    "create_checkpoints",
    "create_inbox",
)
_STEPS = {2: ("create_ended",)}
"""What makes a layout of the one before it."""
_COLUMNS = {
    table: set(re.findall(r"(?m)^    ([a-z_]+) ", SQL[f"create_{table}"]))
    for table in ("runs", "journal", "checkpoints", "inbox")
}

MOUNTS = "/proc/self/mounts"
NETWORKS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.ceph", "fuse.cephfs", "fuse.davfs2", "fuse.gcsfuse",
    "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs", "glusterfs", "lustre",
    "ncpfs", "nfs", "nfs4", "orangefs", "prl_fs", "smb3", "smbfs", "vboxsf",
}  # fmt: skip
"""Kinds of file systems whose files other hosts have open too, or that answer locks as if nobody else had."""
WAL_RESET_FIXED_IN = ((3, 44, 6), (3, 50, 7), (3, 51, 3))
"""Where the fault is mended that corrupts a log when connections checkpoint and write at once: of two older branches the
release from which on it is, and the release from which on it is in all that follow."""


class Cursor(Protocol):
    """What we use of what a statement gives."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> Sequence[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """What we use of a connection: that of `sqlite3`, or one that behaves so."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> Cursor: ...


class Busy(Exception):
    """Another connection is writing."""


def has_wal_reset_fix(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> bool:
    """Whether a SQLite writes and checkpoints a log from several connections without a known fault."""
    return version >= WAL_RESET_FIXED_IN[-1] or any(
        version[:2] == fixed[:2] and version >= fixed for fixed in WAL_RESET_FIXED_IN
    )


def file_system_of(path: str) -> str:
    """The kind of file system that a file is on, or will be; empty where the system does not say."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            mounted = [line.split()[1:3] for line in mounts]
    except OSError:
        return ""
    place = os.path.realpath(path)
    kind, longest = "", -1
    for where, found in mounted:
        above = _unescaped(where)
        if len(above) >= longest and os.path.commonpath((above, place)) == above:
            kind, longest = found, len(above)  # of those mounted on one place, the last is the one that is seen
    return "" if (kind, longest) == ("9p", 1) else kind  # the whole disk of a sandbox may come so, and is its own


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def refuse_network(path: str) -> None:
    """Refuse a file that is not on this host's own disk, where that can be told."""
    kind = file_system_of(path)
    if kind in NETWORKS:
        raise StoreRefused(
            f"SQLite file {path!r} is on a file system of kind {kind}, which is no disk of this host: its locks, and the "
            "memory that processes on a SQLite file share, do not reach other hosts, so that two of them would write over "
            "each other; name a file on a local disk, or use a Postgres store for several hosts"
        )


def make_private(path: str) -> None:
    """The file, made with mode 0600 where there is none; SQLite gives its side files the same mode."""
    refuse_network(path)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        if not os.access(path, os.W_OK):  # said here: SQLite would open it all the same, and refuse the first write
            raise ReadOnlyStore(f"SQLite file {path!r} cannot be written; allow it, or name another file") from None
    except OSError as error:
        raise StoreRefused(
            f"no SQLite file can be made at {path!r}: {error.strerror}; name a path in a folder that exists and can be written"
        ) from error


class Place:
    """Which file a store is in: the one that it found, or made, at its path with the first use.

    `path` leads there from any working directory once the file is prepared.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._found: tuple[int, int] | None = None

    def prepare(self) -> None:
        """Have the file there, to be opened. Once it was, none is made in its place."""
        if self._found is not None:
            self.check()
        self.path = os.path.abspath(self.path)
        make_private(self.path)
        self._found = self._now()

    def check(self) -> None:
        """Refuse to go on where the path leads elsewhere by now: what a removed file takes is gone with its last user."""
        if not self.is_as_found():
            raise StoreRefused(
                f"SQLite file {self.path!r} was removed, or another was put in its place, while it was in use; what "
                "is written now would be lost. Put the file back that was there, or open the store again on the one that is"
            )

    def is_as_found(self) -> bool:
        return self._now() == self._found

    def _now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def keep_index(path: str) -> sqlite3.Connection:
    """A connection that is there so that others may be closed: as long as one is, none reads the log anew.

    Whoever does so takes a transaction for committed that is whole in the log, even if its flush failed and its writer was
    told so. It is in the system's memory then, and perhaps never on the disk.
    """
    db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA schema_version").fetchone()
    return db


def set_up(db: Database, path: str) -> None:
    """Make the tables in an empty file; refuse a file that is not ours; set and read back what durability needs."""
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("BEGIN")  # what tells our file from another's is read at one moment: somebody may be setting it up just now
    layout = _read_layout(db, path)
    db.execute("COMMIT")
    if layout is None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        layout = _read_layout(db, path)
        if layout is None:
            layout = LAYOUT
            for name in _MAKING:
                db.execute(SQL[name])
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {LAYOUT}")
        db.execute("COMMIT")
    say_old(f"SQLite file {path!r}", Layout(layout, LAYOUT))
    db.execute("PRAGMA synchronous = FULL")
    mode, level = _pragma(db, "journal_mode"), _pragma(db, "synchronous")
    if (mode, level) != ("wal", 2):
        raise StoreRefused(
            f"SQLite file {path!r} is in journal mode {mode!r} at synchronous level {level}, expected 'wal' and 2 (FULL): "
            "with less, acknowledged writes are lost in a power cut. Put it on a local disk."
        )


def vacuum(db: Database, path: str) -> int:
    """Write the file anew without the room of what was removed; how many bytes file and log are shorter."""
    before = _size(path)
    db.execute(SQL["vacuum"])
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return max(0, before - _size(path))


def _size(path: str) -> int:
    return sum(os.path.getsize(name) for name in (path, f"{path}-wal") if os.path.exists(name))


def find_layout(path: str) -> Layout:
    """The layout of the file at a path, of which nothing is made or changed."""
    if not os.path.exists(path):
        return Layout(None, LAYOUT)
    with readable(path):
        db = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None)
        try:
            db.execute("PRAGMA query_only = ON")
            db.execute("BEGIN")
            return Layout(_read_layout(db, path), LAYOUT)
        finally:
            db.close()


def migrate(db: Database, path: str) -> Layout:
    """Bring the file to the newest layout, inside a transaction that writes: whoever else would do so waits for its end."""
    found = _read_layout(db, path)
    for layout in range(LAYOUT if found is None else found + 1, LAYOUT + 1):
        for name in _STEPS[layout]:
            db.execute(SQL[name])
        db.execute(f"PRAGMA user_version = {layout}")
    return Layout(found, LAYOUT)


def _read_layout(db: Database, path: str) -> int | None:
    """The layout of a store; None of an empty file. Refuses a file that is another program's, or newer."""
    application, layout = _pragma(db, "application_id"), _pragma(db, "user_version")
    if application != APPLICATION_ID:
        [objects] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if objects or application:
            raise ForeignStore(
                f"SQLite file {path!r} belongs to another program ({objects} objects, application id {application}); name "
                "another file"
            )
        return None
    assert isinstance(layout, int)
    if layout > LAYOUT:
        raise newer(f"SQLite file {path!r}", layout, LAYOUT)
    found: dict[str, set[str]] = {}
    for table, column in db.execute(SQL["find_columns"]):
        found.setdefault(table, set()).add(column)
    wrong = [table for table, columns in _COLUMNS.items() if found.get(table) != columns]
    if layout < 1 or wrong:
        raise ForeignStore(
            f"SQLite file {path!r} calls itself a store and is none (layout {layout}; other columns, or none, in the tables: "
            f"{', '.join(wrong) or 'none'}); restore it from a copy, or name another file"
        )
    return layout


def _pragma(db: Database, name: str) -> object:
    found: object = db.execute(f"PRAGMA {name}").fetchone()[0]
    return found


@contextmanager
def translated(path: str) -> Iterator[None]:
    """SQLite's errors as ours. Inside, nothing has been committed."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error


@contextmanager
def readable(path: str) -> Iterator[None]:
    """The same for reads, which nobody's turn is waited for."""
    try:
        with translated(path):
            yield
    except Busy as error:
        raise StoreUnavailable(f"SQLite file {path!r} cannot be read now: {error}") from error


def translate(error: sqlite3.Error, path: str) -> AgentRuntimeError | Busy:
    code = getattr(error, "sqlite_errorcode", None)
    match None if code is None else code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Busy(str(error))
        case sqlite3.SQLITE_READONLY:
            return ReadOnlyStore(f"SQLite file {path!r} cannot be written ({error}); allow it, or name another file")
        case sqlite3.SQLITE_NOTADB:
            return ForeignStore(f"{path!r} is no SQLite file ({error}); name another file")
        case sqlite3.SQLITE_CORRUPT:
            return CheckpointStoreCorrupt(f"SQLite file {path!r} is damaged ({error}); restore it from a copy")
        case sqlite3.SQLITE_FULL:
            return StoreUnavailable(f"no room to write SQLite file {path!r} ({error}); free some, then recover the run")
        case None if "decode to UTF-8" in str(error):  # the driver's own error, over a changed byte
            return CheckpointStoreCorrupt(f"SQLite file {path!r} holds text that is none ({error}); restore it from a copy")
        case sqlite3.SQLITE_TOOBIG:
            return StoreRefused(f"SQLite takes no row of that size ({error}); nothing was written: record less in one call")
        case sqlite3.SQLITE_CANTOPEN:
            return StoreRefused(
                f"SQLite file {path!r} cannot be opened ({error}); name a file in a folder that can be written"
            )
        case _:
            return StoreUnavailable(f"SQLite file {path!r}: {error}; nothing was written")


def lenient(text: bytes) -> str:
    """Text of the file, whatever bytes it is: what somebody broke is for the seal of its own run to find."""
    return text.decode("utf-8", "surrogateescape")
