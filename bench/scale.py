"""What lists, claim, append and heartbeat read where very many runs are kept: `python bench/scale.py`. See docs/scale.md.

Fills a Postgres store of its own, of whose runs one in a hundred is unfinished, and asks the server how it works each
statement, planned as the store has it planned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the modules beside this file are those of a package, `bench`

from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.stores.postgres import PAST_ALL, PostgresCheckpointStore
from agent_runtime.stores.postgres_batch import pack_guards, pack_many, pack_one
from agent_runtime.testing.store_contract import Draft
from agent_runtime.viewer.pages import RUNS_A_PAGE
from bench.backends import PostgresBackend, postgres_backend
from bench.pages import time_pages
from bench.table import between_marks, grid

if TYPE_CHECKING:
    from agent_runtime.stores.postgres_link import Connection

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
RUNS = 1_000_000
RECORDS = 4
CROWD = 64
FACE_PAGE = RUNS_A_PAGE + 1
"""The rows of a page of the viewer, and one that says whether another follows."""
STATUSES_LISTED = [int(status) for status in RunStatus if status != RunStatus.DELETED]
Plan: TypeAlias = dict[str, Any]
Asked: TypeAlias = tuple[str, str, Sequence[object]]

# Ids are spread, as random ones are, and each run last changed a second after the one before; of the unfinished runs, one in
# a hundred, nobody has heard for long. One in a thousand has failed.
_FILL = (
    """
INSERT INTO {runs} (run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
                    lease_ms, heartbeat_at, created_at, updated_at)
SELECT 'run-' || md5(n::text), 1, 'key', '', 'loop', 'orders',
       CASE WHEN n % 100 = 0 THEN 1 WHEN n % 1000 = 7 THEN 9 ELSE 8 END, 2, 1,
       decode(md5('owner' || n), 'hex'), {records}, sha256(n::text::bytea), 0, sha256('seal'), 30000, 0, 0, n * 1000
FROM generate_series(1, {count}) AS n
""",
    """
INSERT INTO {journal} (place, epoch, attempt, kind, call, body, seal)
SELECT (key << 24) + n, 1, 1, 4, n || '/model', sha256(n::text::bytea), sha256('seal')
FROM {runs}, generate_series(1, {records}) AS n
""",
    "VACUUM (ANALYZE) {runs}, {journal}",
    "CHECKPOINT",
)


@dataclass(frozen=True)
class Reading:
    """How one statement was worked."""

    what: str
    rows: int
    milliseconds: float
    pages: int
    scans: Sequence[str]

    @property
    def is_by_index(self) -> bool:
        return not any(scan.startswith(("Seq Scan", "Bitmap")) for scan in self.scans)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.what, f"{self.rows:,}", f"{self.milliseconds:.2f} ms", f"{self.pages:,}", ", ".join(self.scans))


@dataclass(frozen=True)
class Measured:
    """All that is told."""

    readings: Sequence[Reading]
    pages: Mapping[str, float]
    """How many milliseconds a page of the viewer takes, from the request to its last byte, by its address."""


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 where something is not read by index."""
    parser = argparse.ArgumentParser(prog="bench/scale.py", description="What is read where very many runs are kept.")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"how many runs are kept, {RUNS:,} by default")
    parser.add_argument("--write", action="store_true", help="also write the table to docs/scale.md")
    chosen = parser.parse_args(arguments)
    with postgres_backend() as backend:
        measured = asyncio.run(measure(backend, chosen.runs))
        text = as_text(backend, chosen.runs, measured)
    print(text)
    if chosen.write:
        PAGE.write_text(between_marks(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0 if all(reading.is_by_index for reading in measured.readings) else 1


async def measure(backend: PostgresBackend, count: int) -> Measured:
    """Fill a database, ask for the plan of every statement that a crowd of runs needs, and open pages of the viewer."""
    with backend.place() as place:
        store = PostgresCheckpointStore(place["url"], timeout_seconds=60)
        await store.now()
        names = {name: store._sql.table(name) for name in ("runs", "journal")}
        await _fill(place["url"], [statement.format(count=count, records=RECORDS, **names) for statement in _FILL])
        readings = []
        for what, name, values in await _asked(store):
            plan = await store._link.read(partial(_plan_of, sql=store._sql[name], values=values))
            readings.append(reading_of(what, plan))
        pages = await time_pages(store)
        await store.close()
    return Measured(readings, pages)


async def _fill(url: str, statements: Sequence[str]) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def _asked(store: PostgresCheckpointStore) -> list[Asked]:
    """A name for the reader, the statement, and values for it."""
    ring = KeyRing.of(bytes(range(32)))
    rows = await store.list_unfinished(limit=CROWD)
    drafts = [Draft(row, sealer_for(ring, tenant=row.tenant, run_id=row.run_id)) for row in rows]
    run_ids = [row.run_id for row in rows]
    keys = await store._find_keys(run_ids)
    first = drafts[0].add(b"result")
    assert first.guard is not None, "the run is there"
    middle = f"run-{'8' * 32}"
    return [
        ("list 100 unfinished runs", "list_unfinished", (middle, None, 100)),
        ("list 100 runs", "list_runs", (middle, None, 100)),
        *_pages_of_the_viewer(),
        ("read a run's row", "select_run", (run_ids[:1],)),
        ("read its records", "select_records", (run_ids[0], 0)),
        (f"read the records of {len(rows)} runs", "select_all_records", (list(keys.values()),)),
        (f"claim {len(rows)} runs", "append_batch", pack_many([draft.claim(bytes(16)) for draft in drafts], keys)),
        ("append to a run", "append", pack_one(first, first.guard, keys[run_ids[0]])),
        (f"heartbeat of {len(rows)} runs", "renew_all", pack_guards([(keys[each.run_id], each.guard) for each in drafts])),
    ]


def _pages_of_the_viewer() -> list[Asked]:
    """What the first page of its list reads: of all runs, of those that failed, of those that run or were interrupted."""
    wanted = {"all": STATUSES_LISTED, "failed": [int(RunStatus.FAILED)], "running": [int(RunStatus.RUNNING)]}
    return [
        (f"list the newest {FACE_PAGE} runs, {name}", "list_recent", (statuses, *PAST_ALL, FACE_PAGE))
        for name, statuses in wanted.items()
    ]


async def _plan_of(db: Connection, *, sql: str, values: Sequence[object]) -> Plan:
    """How the server works a statement the second time, with what it reads in memory; nothing of it is kept."""
    words = ", ".join(map(_literal, values))
    await db.execute(f"PREPARE asked AS {sql}")
    plans: list[Plan] = []
    for _ in range(2):
        await db.execute("BEGIN")
        [[told]] = await db.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE asked ({words})")
        await db.execute("ROLLBACK")
        plans += json.loads(told)
    await db.execute("DEALLOCATE asked")
    return plans[-1]


def _literal(value: object) -> str:
    match value:
        case None:
            return "NULL"
        case int():
            return str(value)
        case bytes():
            return f"'\\x{value.hex()}'"
        case str():
            return f"'{value}'"
        case list():
            return f"'{{{','.join(map(str, value))}}}'"
        case _:
            raise TypeError(f"no literal for {value!r}")


def reading_of(what: str, told: Plan) -> Reading:
    """What an explained plan says; its rows are those that it gives back, or that it writes where these are more."""
    top = told["Plan"]
    scans = dict.fromkeys(
        _scan(node)
        for node in _nodes(top)
        if "Relation Name" in node and "Scan" in node["Node Type"] and node.get("Actual Loops", 1)  # 0: never executed
    )
    pages = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
    rows = max(int(node["Actual Rows"]) for node in _nodes(top) if node is top or node["Node Type"] == "ModifyTable")
    return Reading(what, rows, told["Execution Time"], pages, tuple(scans))


def _nodes(node: Plan) -> Iterator[Plan]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _scan(node: Plan) -> str:
    place = str(node.get("Index Name", node["Relation Name"]))
    return f"{node['Node Type']} {place.removeprefix('agent_runtime_')}"


def as_text(backend: PostgresBackend, count: int, measured: Measured) -> str:
    """The tables, under what they were measured on."""
    statements = grid([("statement", "rows", "time", "pages", "read by"), *(reading.cells for reading in measured.readings)])
    pages = grid([("page of the viewer", "time"), *((f"`{path}`", f"{ms:.0f} ms") for path, ms in measured.pages.items())])
    told = f"{count:,} runs of {RECORDS} records, 1 % of them unfinished; {backend.facts}."
    return f"{told}\n\n{statements}\n{pages}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
