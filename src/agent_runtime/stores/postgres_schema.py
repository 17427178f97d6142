"""The tables of a Postgres store: their names, making them once among many processes, and refusing what is not ours."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import NamedTuple

from agent_runtime.errors import ForeignStore, StoreRefused
from agent_runtime.stores.layouts import Layout, newer, say_old
from agent_runtime.stores.postgres_errors import refused_as_replica
from agent_runtime.stores.postgres_link import Connection
from agent_runtime.stores.statements import read_statements

LAYOUT = 2
"""The layout of tables that this version makes. Those from 1 on it works with as they are."""
BY_TIME = 2
"""Since this layout there is an index of the final runs by their time."""
TABLES = ("store", "runs", "journal", "checkpoints", "inbox")
INDEXES = ("unfinished", "ended", "numbers")
_MAKING = (
    "create_store",
    "create_runs",
    "create_unfinished",
    "create_ended",
    "create_journal",
    "create_numbers",
    "create_checkpoints",
    "create_inbox",
    "write_format",
)
_STEPS = {2: ("add_ended_at", "create_ended", "raise_format")}
"""What makes a layout of the one before it."""
_ADDED = {("runs", "ended_at"): 2}
"""Columns that not every layout has, and since which they are there."""
MOST_IN_LINE = 4
"""How many records an append may have for a statement in which each is a line of values; more come packed."""
_RECORD_LINE = re.compile(r"\(1, \$(\d+)::[^()]*\)")
MIGRATION_SECONDS = 3600.0
"""How long a step may take, waiting for others included: the table of runs is written anew."""
_HEAD = (
    "-- The tables of the Postgres store, as it makes them itself. Loaded by hand, they are accepted:\n"
    "--   psql postgresql://durable:durable@localhost:5433/durable -f schema.sql"
)
_CHANNEL_SIZE = 32
"""A channel has a name as a table has, which is too short for the longest schema and prefix: a digest stands for them."""
_LOCALLY_DURABLE = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' "
    "ELSE 'on' END, true) IS NOT NULL"
)
_DURABLE = ("on", "remote_apply")


class Session(NamedTuple):
    """What `read_session` tells."""

    is_standby: bool
    is_read_only: bool
    synchronous_commit: str
    isolation: str
    encoding: str
    version: int


class Statements:
    """The statements of `postgres.sql` for the tables of one store."""

    def __init__(self, schema: str, prefix: str, *, pooler: bool) -> None:
        self.schema = schema
        self.tables = {table: f"{prefix}{table}" for table in TABLES}
        names = {table: self.table(table) for table in TABLES}
        names |= {index: f"{prefix}{index}" for index in INDEXES}
        self.channel = f"agent_runtime_{sha256(f'{schema}.{prefix}'.encode()).hexdigest()[:_CHANNEL_SIZE]}"
        names["channel"] = self.channel
        names["durably"] = _LOCALLY_DURABLE if pooler else "true"
        self._sql = {name: _filled(text, names) for name, text in read_statements("postgres.sql").items()}
        self.appends = [_with_records(self._sql["append"], count) for count in range(1, MOST_IN_LINE + 1)]
        """`append` for one record, for two, and so on."""

    def __getitem__(self, name: str) -> str:
        return self._sql[name]

    def table(self, table: str) -> str:
        """The full name of a table, as it stands in statements."""
        return f'"{self.schema}"."{self.tables[table]}"' if self.schema else self.tables[table]

    @property
    def making(self) -> list[str]:
        """What makes the tables, statement by statement."""
        return [self._sql[name] for name in _MAKING]

    def columns(self, table: str, layout: int) -> set[str]:
        """The columns that a table has in a layout, by the statement that makes it."""
        columns = re.findall(r"(?m)^    ([a-z_]+) ", self._sql[f"create_{table}"])
        return {column for column in columns if _ADDED.get((table, column), 0) <= layout}


def schema_sql(prefix: str = "agent_runtime_") -> str:
    """What `psql -f` loads to make the tables in the first schema of the search path: the text of `schema.sql`."""
    made = ";\n\n".join(Statements("", prefix, pooler=False).making)
    return f"{_HEAD}\n\nBEGIN;\n\n{made};\n\nCOMMIT;\n"


def _with_records(append: str, count: int) -> str:
    """`append` for so many records: the line of values that stands for one is repeated, each with parameters of its own."""
    line = _RECORD_LINE.search(append)
    assert line is not None, "the statement has a line for one record"
    types = re.findall(r"::(\w+)", line[0])
    first = int(line[1])
    lines = []
    for at in range(count):
        values = (f"${first + at * len(types) + i}::{kind}" for i, kind in enumerate(types))
        lines.append(f"({at + 1}, {', '.join(values)})")
    return append.replace(line[0], ",\n        ".join(lines))


def _filled(text: str, names: dict[str, str]) -> str:
    return re.sub(r"\{([a-z]+)\}", lambda found: names[found[1]], text)


async def check_session(connection: Connection, statements: Statements, place: str, *, pooler: bool) -> None:
    """Set what durability needs and read it back; refuse a server, a user or a database that does not let us have it."""
    [found] = await connection.fetch(statements["read_session"])
    session = Session._make(found)
    if session.is_standby or session.is_read_only:
        what = "a read replica" if session.is_standby else "read-only for this user (default_transaction_read_only)"
        raise refused_as_replica(place, what)
    if session.encoding != "UTF8":
        raise StoreRefused(
            f"{place} keeps text as {session.encoding}, expected UTF8; create the database with ENCODING 'UTF8'"
        )
    if session.isolation != "read committed":
        raise StoreRefused(
            f"{place} gives sessions the isolation level {session.isolation!r}, expected 'read committed'; "
            "ALTER ROLE … SET default_transaction_isolation = 'read committed'"
        )
    if pooler or session.synchronous_commit in _DURABLE:
        return  # behind a pooler no setting of a session lasts: each write sets it for itself
    await connection.execute("SET synchronous_commit = on")
    [found] = await connection.fetch(statements["read_session"])
    session = Session._make(found)
    if session.synchronous_commit not in _DURABLE:
        raise StoreRefused(
            f"{place} has synchronous_commit={session.synchronous_commit!r} although it was set to 'on': acknowledged "
            "writes would be lost; if a pooler stands before the server, open the store with pooler=True"
        )


async def set_up(connection: Connection, statements: Statements, place: str) -> int:
    """Make the tables where there are none; which layout there is. Refuses those of another program, or of a newer version."""
    layout = await find_layout(connection, statements, place)
    if layout is None:
        async with connection.transaction():
            await connection.execute(statements["lock_set_up"])
            layout = await find_layout(connection, statements, place)
            if layout is None:
                await _make(connection, statements)
                return LAYOUT
    say_old(_named(statements, place), Layout(layout, LAYOUT))
    return layout


async def migrate(connection: Connection, statements: Statements, place: str) -> Layout:
    """Bring the tables to the newest layout, all of it or nothing. One at a time does so in a database."""
    async with connection.transaction():
        await connection.execute(statements["lock_set_up"], timeout=MIGRATION_SECONDS)
        found = await find_layout(connection, statements, place)
        for layout in range(LAYOUT if found is None else found, LAYOUT):
            for name in _STEPS[layout + 1]:
                await connection.execute(statements[name], timeout=MIGRATION_SECONDS)
    return Layout(found, LAYOUT)


async def find_layout(connection: Connection, statements: Statements, place: str) -> int | None:
    """The layout of the tables that are there; None where there are none. Refuses what is not ours, and what is newer."""
    names = {name: table for table, name in statements.tables.items()}
    found = await connection.fetch(statements["find_columns"], statements.schema, list(names))
    if not found:
        return None
    columns = {names[name]: set(has) for name, has in found}
    layout = None
    if "format" in columns.get("store", ()):
        [[layout]] = await connection.fetch(statements["read_format"])
    if isinstance(layout, int) and layout > LAYOUT:
        raise newer(_named(statements, place), layout, LAYOUT)
    known = layout if isinstance(layout, int) else LAYOUT
    wrong = [name for table, name in statements.tables.items() if columns.get(table) != statements.columns(table, known)]
    if not isinstance(layout, int) or layout < 1 or wrong:
        raise ForeignStore(
            f"schema {statements.schema!r} of {place} holds tables under our names that are not ours (other columns, or some "
            f"are missing: {', '.join(wrong) or 'no format is written'}); name another database, or choose schema= or prefix="
        )
    return layout


async def _make(connection: Connection, statements: Statements) -> None:
    [[schemas]] = await connection.fetch(statements["find_schema"], statements.schema)
    if not schemas:
        await connection.execute(f'CREATE SCHEMA "{statements.schema}"')
    for statement in statements.making:
        await connection.execute(statement)


def _named(statements: Statements, place: str) -> str:
    return f"schema {statements.schema!r} of {place}"
