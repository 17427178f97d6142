"""Every store that outlives its process, by the URLs of its tenants; and golden stores put where such a URL leads."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores import open_store
from tests.redis_servers import RedisServer
from tests.servers import Server

NATIVE = ("sqlite", "postgres", "redis")
KINDS = ("sqlite", "aiosqlite", "postgres", "asyncpg", "psycopg", "redis")
SOME = (*NATIVE, "psycopg")
"""Of SQLAlchemy's one that differs most from its native store."""
PREFIXED = "postgres prefix"
DRIVERS = {"postgres": "", PREFIXED: "", "asyncpg": "+asyncpg", "psycopg": "+psycopg"}
GOLDEN = Path(__file__).parent.parent / "golden"


class House:
    """One kind of store, and the places of its tenants in one server or folder."""

    def __init__(self, kind: str, folder: Path, name: str, postgres: Server, redis: RedisServer) -> None:
        """`name` is nobody else's on the servers."""
        self.kind = kind
        self.folder = folder
        self.name = name
        self.postgres = postgres
        self.redis = redis
        self._opened: list[CheckpointStore] = []

    @property
    def is_file(self) -> bool:
        return self.kind in ("sqlite", "aiosqlite")

    @property
    def is_postgres(self) -> bool:
        return self.kind in DRIVERS

    def url(self, tenant: str = "t1", **options: str) -> str:
        """Where the runs of a tenant are."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        match self.kind:
            case "sqlite":
                return f"sqlite:///{self.folder}/{tenant}.db"
            case "aiosqlite":
                return f"sqlite+aiosqlite:///{self.folder}/{tenant}.db"
            case "redis":
                return f"{self.redis.url}?prefix={self.name}.{tenant}&may_lose_writes=no{more}"
            case _:
                place = f"schema={self.name}&prefix={tenant}" if self.kind == PREFIXED else f"schema={self.schema(tenant)}"
                return f"{self.postgres.url}?{place}{more}".replace(":", f"{DRIVERS[self.kind]}:", 1)

    def schema(self, tenant: str = "t1") -> str:
        return f"{self.name}_{tenant}"

    def file(self, tenant: str = "t1") -> Path:
        return self.folder / f"{tenant}.db"

    def open(self, tenant: str = "t1") -> Any:
        """A store object on it, closed with the house."""
        store = open_store(self.url(tenant))
        self._opened.append(store)
        return store

    def put_golden(self, layout: int, tenant: str = "t1") -> None:
        """Put the golden store of a layout where the tenant's is."""
        made = GOLDEN / f"layout-{layout}"
        if self.is_file:
            shutil.copyfile(made / "sqlite.db", self.file(tenant))
        elif self.is_postgres:
            self.postgres.sql(f"CREATE SCHEMA {self.schema(tenant)}")
            self.postgres.psql_file(made / "postgres.sql", schema=self.schema(tenant))
        else:
            kept = json.loads((made / "redis.json").read_text(encoding="utf-8"))
            with self.redis.client() as client:
                for key, held in kept.items():
                    place = key.replace("golden", f"{self.name}.{tenant}", 1)
                    for words in _written(held["type"], held["value"]):
                        client.execute_command(words[0], place, *words[1:])

    def content(self, tenant: str = "t1") -> object:
        """All that is stored there, as it is."""
        if self.is_file:
            return self.file(tenant).read_bytes() if self.file(tenant).exists() else None
        if self.is_postgres:
            return self._tables(self.name if self.kind == PREFIXED else self.schema(tenant))
        with self.redis.client() as client:
            keys = sorted(client.scan_iter(match=f"{self.name}.{tenant}:*", count=1000))
            return {key: client.dump(key) for key in keys}

    async def close(self) -> None:
        """Let go of all stores, and of what is on the servers."""
        for store in self._opened:
            await store.close()
        if self.is_postgres:
            listed = f"SELECT nspname FROM pg_namespace WHERE starts_with(nspname, '{self.name}')"
            drop = "EXECUTE format('DROP SCHEMA %I CASCADE', name)"
            self.postgres.sql(f"DO $$ DECLARE name text; BEGIN FOR name IN {listed} LOOP {drop}; END LOOP; END $$")

    def _tables(self, schema: str) -> str:
        listed = self.postgres.sql(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}' ORDER BY 1").split()
        rows = [f"SELECT '{table}', t::text FROM {schema}.{table} t" for table in listed]
        return self.postgres.sql(f"{' UNION ALL '.join(rows)} ORDER BY 1, 2") if rows else ""


def _written(kind: str, value: Any) -> Iterator[list[Any]]:
    """The commands that make a key hold what a dump says."""
    match kind:
        case "string":
            yield ["SET", _bytes(value)]
        case "hash":
            yield ["HSET", *(part for name, each in value.items() for part in (name.encode("latin-1"), _bytes(each)))]
        case "list":
            yield ["RPUSH", *map(_bytes, value)]
        case "set":
            yield ["SADD", *map(_bytes, value)]
        case _:
            assert kind == "zset"
            for member, score in value:
                yield ["ZADD", score, _bytes(member)]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
