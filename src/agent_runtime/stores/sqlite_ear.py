"""How one hears of messages in a SQLite file: by asking ten times a second whether anybody has written, which is cheap."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from agent_runtime.ids import RunId
from agent_runtime.stores.sqlite_file import SQL, readable


class _Mark(NamedTuple):
    """The newest message there was. An id alone does not name it: those of a deleted run's messages are given again."""

    id: int
    key: int
    digest: bytes


_BEFORE_ALL = _Mark(0, 0, b"")


class SQLiteEar:
    """Looks at the file through a connection of its own, which it is given, and which never writes."""

    every = 0.1

    def __init__(self, db: sqlite3.Connection, path: str) -> None:
        self._db = db
        self._path = path
        self._version: int | None = None
        self._mark: _Mark | None = None

    async def heard(self) -> Collection[RunId] | None:
        with readable(self._path):
            # Read before the messages are: what is committed in between changes it again.
            [version] = self._db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return ()
            with self._at_one_moment():
                heard = self._past_mark()
        self._version = version
        return heard

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        with readable(self._path), self._at_one_moment():
            found = [self._db.execute(SQL["find_posted"], (run_id,)).fetchone() for run_id in run_ids]
        return [None if row is None else row[0] for row in found]

    async def close(self) -> None:
        self._db.close()

    def _past_mark(self) -> list[RunId] | None:
        """The runs that got messages past the mark, which moves on; None where there is no such mark any more."""
        mark = self._mark
        last = self._db.execute(SQL["last_message"]).fetchone()
        self._mark = _BEFORE_ALL if last is None else _Mark._make(last)
        if mark is None or not self._stands(mark):
            return None
        return [run_id for (run_id,) in self._db.execute(SQL["runs_posted_to"], (mark.id,))]

    def _stands(self, mark: _Mark) -> bool:
        return mark == _BEFORE_ALL or self._db.execute(SQL["message_at"], (mark.id,)).fetchone() == mark[1:]

    @contextmanager
    def _at_one_moment(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("COMMIT")
