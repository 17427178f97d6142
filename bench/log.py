"""What a SQLite file and its write-ahead log tell from outside: bytes kept, transactions committed."""

from __future__ import annotations

import os
import sqlite3


class LogPin:
    """Keeps a write-ahead log from being begun anew, so that every commit since can be counted in it."""

    def __init__(self, path: str) -> None:
        self._path = path + "-wal"
        self._reader = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> LogPin:
        self._reader.execute("BEGIN")
        self._reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        self._before = commits_in_log(self._path)
        return self

    def commits(self) -> int:
        """How many transactions were committed since."""
        return commits_in_log(self._path) - self._before

    def __exit__(self, *raised: object) -> None:
        self._reader.close()


def commits_in_log(path: str) -> int:
    """The transactions in a SQLite write-ahead log: each ends in a frame that names the size of the database."""
    with open(path, "rb") as file:
        log = file.read()
    page_size, salt = int.from_bytes(log[8:12], "big"), log[16:24]
    frames = (log[at : at + 24] for at in range(32, len(log) - 23, 24 + page_size))
    return sum(frame[8:16] == salt and frame[4:8] != bytes(4) for frame in frames)


def file_bytes(path: str) -> int:
    """The size of a SQLite file with its log folded in."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    db.close()
    return os.path.getsize(path)
