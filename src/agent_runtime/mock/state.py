"""What the two remotes remember: one SQLite file, safely shared by all mock processes that name it.

A verb of `MockState` is one transaction, and it is on disk when the verb returns: what a remote answered, a
kill or a power cut cannot make it forget. Writers take the write lock at once (BEGIN IMMEDIATE), so that ids
are dense and one key creates once, however many processes serve the file.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agent_runtime.mock.pauses import rest
from agent_runtime.mock.switches import DEFAULTS, Switches
from agent_runtime.mock.troubles import StateUnusable

BUSY_SECONDS = 30.0
SET_UP_ATTEMPTS = 400
SET_UP_REST_SECONDS = 0.02
OUR_APPLICATION_ID = 0x4D4F434B  # "MOCK" in ASCII; tells our file from any other SQLite file

TABLES = (
    # A subject is what a remote counts its requests by: the key at the cloud ('' for none), the run at the model.
    """CREATE TABLE calls (
        remote TEXT NOT NULL, subject TEXT NOT NULL,
        requests INTEGER NOT NULL DEFAULT 0, created INTEGER NOT NULL DEFAULT 0,
        already_done INTEGER NOT NULL DEFAULT 0, conflict INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (remote, subject)) WITHOUT ROWID""",
    """CREATE TABLE resources (
        kind TEXT NOT NULL, number INTEGER NOT NULL, key TEXT, args TEXT NOT NULL,
        UNIQUE (kind, number))""",
    "CREATE INDEX resources_by_key ON resources (key)",
    """CREATE TABLE switches (
        remote TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL CHECK (value >= 0),
        PRIMARY KEY (remote, name)) WITHOUT ROWID""",
)
COUNT_REQUEST = """
    INSERT INTO calls (remote, subject, requests) VALUES (?, ?, 1)
    ON CONFLICT (remote, subject) DO UPDATE SET requests = requests + 1 RETURNING requests"""
COUNT_OUTCOME = """
    UPDATE calls SET created = created + (:outcome = 'created'),
        already_done = already_done + (:outcome = 'already_done'), conflict = conflict + (:outcome = 'conflict')
    WHERE remote = :remote AND subject = :subject"""
READ_CALLS = """
    SELECT subject, requests, created, already_done, conflict FROM calls WHERE remote = ? ORDER BY subject"""
FIND_NEWEST = "SELECT kind, number, args FROM resources WHERE key = ? ORDER BY rowid DESC LIMIT 1"
ADD_RESOURCE = """
    INSERT INTO resources (kind, number, key, args)
    SELECT :kind, COALESCE(MAX(number), 0) + 1, :key, :args FROM resources WHERE kind = :kind RETURNING number"""
READ_RESOURCES = "SELECT kind, number, key FROM resources ORDER BY rowid"
READ_SWITCHES = "SELECT name, value FROM switches WHERE remote = ?"
SET_SWITCH = """
    INSERT INTO switches (remote, name, value) VALUES (?, ?, ?)
    ON CONFLICT (remote, name) DO UPDATE SET value = excluded.value"""
TAKE_ONE = "UPDATE switches SET value = value - 1 WHERE remote = ? AND name = ? AND value > 0"


class Outcome(StrEnum):
    """What a request to create came to."""

    CREATED = "created"
    ALREADY_DONE = "already_done"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that was counted: the how manieth of its subject, and what the switches have in store for it."""

    number: int
    switches: Switches
    is_refused: bool
    is_dropped: bool


@dataclass(frozen=True, slots=True)
class Creation:
    """The outcome, and the resource that the key stands for."""

    outcome: Outcome
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that was created, and the key that it was created under."""

    kind: str
    number: int
    key: str | None


@dataclass(frozen=True, slots=True)
class CallCount:
    """How often one subject was asked for, and what came of it."""

    requests: int
    created: int
    already_done: int
    conflict: int


class MockState:
    """The state file, open; threads may share it."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._connection = _open(path)

    def arrive(self, remote: str, subject: str) -> Arrival:
        """Counts a request, and takes its turn from the switches that count."""
        with self._transaction("IMMEDIATE") as db:
            (number,) = db.execute(COUNT_REQUEST, (remote, subject)).fetchone()
            switches = _read_switches(db, remote)
            is_refused = _take_one(db, remote, "refuse") if switches.refuse else False
            is_dropped = _take_one(db, remote, "drop") if switches.drop and not is_refused else False
        return Arrival(number=number, switches=switches, is_refused=is_refused, is_dropped=is_dropped)

    def create(self, remote: str, key: str | None, kind: str, args: str, *, honours_key: bool) -> Creation:
        """Creates a resource, unless the key is honoured and already stands for one."""
        with self._transaction("IMMEDIATE") as db:
            earlier = db.execute(FIND_NEWEST, (key,)).fetchone() if honours_key else None
            creation = _add(db, key, kind, args) if earlier is None else _compare(earlier, kind, args)
            db.execute(COUNT_OUTCOME, {"outcome": creation.outcome, "remote": remote, "subject": key or ""})
        return creation

    def resources(self) -> list[Resource]:
        """Everything that was created, oldest first."""
        with self._transaction("DEFERRED") as db:
            return [Resource(*row) for row in db.execute(READ_RESOURCES)]

    def calls(self, remote: str) -> dict[str, CallCount]:
        """The counters of a remote by subject."""
        with self._transaction("DEFERRED") as db:
            return {subject: CallCount(*counts) for subject, *counts in db.execute(READ_CALLS, (remote,))}

    def switches(self, remote: str) -> Switches:
        """The switches in force at a remote."""
        with self._transaction("DEFERRED") as db:
            return _read_switches(db, remote)

    def change_switches(self, remote: str, changes: Mapping[str, object]) -> Switches:
        """Sets the named switches of a remote, all or none, and gives back the whole set."""
        with self._transaction("IMMEDIATE") as db:
            switches = _read_switches(db, remote).changed(changes)
            values = switches.values()
            db.executemany(SET_SWITCH, [(remote, name, int(values[name])) for name in changes])
        return switches

    def close(self) -> None:
        """Lets go of the file; later verbs fail."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, mode: str) -> Iterator[sqlite3.Connection]:
        # One connection for all threads of the process: they queue here, and only processes meet at the file.
        with self._lock, _transaction(self._connection, mode) as db:
            yield db


def _add(db: sqlite3.Connection, key: str | None, kind: str, args: str) -> Creation:
    (number,) = db.execute(ADD_RESOURCE, {"kind": kind, "key": key, "args": args}).fetchone()
    return Creation(Outcome.CREATED, kind, number)


def _compare(earlier: tuple[str, int, str], kind: str, args: str) -> Creation:
    earlier_kind, number, earlier_args = earlier
    same = (earlier_kind, earlier_args) == (kind, args)
    return Creation(Outcome.ALREADY_DONE if same else Outcome.CONFLICT, earlier_kind, number)


def _read_switches(db: sqlite3.Connection, remote: str) -> Switches:
    rows = db.execute(READ_SWITCHES, (remote,))
    return Switches().changed({name: type(DEFAULTS[name])(value) for name, value in rows})


def _take_one(db: sqlite3.Connection, remote: str, name: str) -> bool:
    return db.execute(TAKE_ONE, (remote, name)).rowcount == 1


@contextmanager
def _transaction(connection: sqlite3.Connection, mode: str) -> Iterator[sqlite3.Connection]:
    connection.execute(f"BEGIN {mode}")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StateUnusable(path, str(error)) from error
    try:
        _set_up(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise StateUnusable(path, str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: sqlite3.Connection, path: Path) -> None:
    # Looked at before the journal mode is touched, so that a foreign file stays as it was; in one transaction, or
    # else the tables that another process makes meanwhile would look like someone else's.
    with _transaction(connection, "DEFERRED"):
        _is_ours(connection, path)
    _use_wal(connection, path)
    connection.execute("PRAGMA synchronous = FULL")
    with _transaction(connection, "IMMEDIATE") as db:
        if not _is_ours(db, path):
            for statement in TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {OUR_APPLICATION_ID}")


def _is_ours(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the tables stand. False for an empty file; a file of something else is refused."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if application_id != OUR_APPLICATION_ID and tables:
        raise StateUnusable(path, "it is the database of something else")
    return bool(tables)


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    # SQLite does not always wait its busy time for a change of the journal mode, so two processes that set up
    # the same file at once can see "locked" here; the loser tries again.
    for _ in range(SET_UP_ATTEMPTS):
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode == "wal":
                return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
        rest(SET_UP_REST_SECONDS)
    raise StateUnusable(path, "it cannot be switched to write-ahead logging (is it on a network drive?)")
