"""What becomes of a SQLite file under its users: removed, replaced, locked for long, set to another level, full in a batch."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.clock import SystemClock
from agent_runtime.errors import CheckpointStoreCorrupt, StoreRefused, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.stores import open_store, sqlalchemy_sqlite, sqlite, sqlite_file
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.stores.sqlite_file import Database
from agent_runtime.testing.store_contract.draft import Draft
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from tests.bench import KEY, Bench, Script

OPENED = ["sqlite", "sqlite+aiosqlite"]


@pytest.fixture(params=OPENED)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    opened = open_store(f"{request.param}:///{tmp_path}/runs.db")
    yield opened
    await opened.close()


async def opened(store: CheckpointStore, name: str) -> AnswerKind:
    [answer] = await store.commit([Draft.of(name).open()])
    return answer.kind


def moved(folder: Path) -> Callable[[], None]:
    """Take the file away; what is given puts it back."""
    away = folder / "away"
    away.mkdir()
    files = found(folder)
    for name in files:
        (folder / name).rename(away / name)

    def put_back() -> None:
        for name in files:
            (away / name).rename(folder / name)

    return put_back


def found(folder: Path) -> list[str]:
    return [file.name for file in folder.glob("runs.db*")]


def garble(file: Path) -> None:
    """Everything but the first page is noise."""
    content = file.read_bytes()
    file.write_bytes(content[:4096] + os.urandom(len(content) - 4096))


async def test_a_store_whose_file_was_removed_refuses_and_makes_none_in_its_place(
    store: CheckpointStore, tmp_path: Path
) -> None:
    assert await opened(store, "before") is AnswerKind.OK
    put_back = moved(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreRefused, match=r"removed, or another was put.*Put the file back"):
            await opened(store, "gone")
        with pytest.raises(StoreRefused):
            await store.list_runs()
    assert found(tmp_path) == []
    put_back()
    assert await opened(store, "after") is AnswerKind.OK
    assert [row.run_id for row in await store.list_runs()] == ["after", "before"]


async def test_a_store_whose_file_was_replaced_writes_to_neither(store: CheckpointStore, tmp_path: Path) -> None:
    assert await opened(store, "before") is AnswerKind.OK
    other = SQLiteCheckpointStore(tmp_path / "other.db")
    await opened(other, "theirs")
    await other.close()
    os.replace(tmp_path / "other.db", tmp_path / "runs.db")
    with pytest.raises(StoreRefused, match="another was put in its place"):
        await opened(store, "ours")
    with pytest.raises(StoreRefused):
        await store.latest(RunId("before"))
    with closing(sqlite3.connect(f"file:{tmp_path}/runs.db?immutable=1", uri=True)) as other_file:  # without the old log
        assert other_file.execute("SELECT run_id FROM runs").fetchall() == [("theirs",)]


async def test_a_program_that_changes_its_working_directory_stays_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    store = SQLiteCheckpointStore("runs.db")
    assert await opened(store, "before") is AnswerKind.OK
    monkeypatch.chdir(elsewhere)
    store._drop_writer()
    assert await opened(store, "after") is AnswerKind.OK
    assert [row.run_id for row in await store.list_runs()] == ["after", "before"]
    assert found(elsewhere) == []
    await store.close()


class Remover(SystemClock):
    """A clock that, once it is told to, removes a file when it is asked for the time of a write."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.is_due = False

    def now_ms(self) -> int:
        if self.is_due:
            self.file.unlink(missing_ok=True)
        return super().now_ms()


async def test_a_write_into_a_file_that_is_removed_meanwhile_is_not_acknowledged(tmp_path: Path) -> None:
    clock = Remover(tmp_path / "runs.db")
    store = SQLiteCheckpointStore(tmp_path / "runs.db", clock=clock)
    assert await opened(store, "before") is AnswerKind.OK
    clock.is_due = True
    assert await opened(store, "struck") is AnswerKind.UNKNOWN
    with pytest.raises(StoreRefused):
        await store.list_runs()
    await store.close()


async def test_a_run_whose_file_was_away_ends_with_one_effect_once_it_is_back(tmp_path: Path) -> None:
    store, bench = SQLiteCheckpointStore(tmp_path / "runs.db"), Bench()
    put_back: list[Callable[[], None]] = []

    @bench.registry.tool(idempotent=True)
    async def unplug() -> str:
        if not put_back:
            put_back.append(moved(tmp_path))
        return "it is away"

    script = Script([("charge_i", {"amount": 1})], [("unplug", {})], [("charge_i", {"amount": 2})], "done")
    terms: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY, "lease_seconds": 1, "heartbeat_seconds": 0.3}
    with pytest.raises((StoreRefused, StoreUnavailable)):
        await run_tool_loop(script, bench.registry, "go", run_id="r", **terms)
    assert found(tmp_path) == []
    put_back[0]()
    ended = await recover_tool_loop(script, bench.registry, "r", **terms)
    assert (ended.status, bench.effects) == ("done", 2)
    await store.close()


async def test_a_file_that_is_locked_beyond_all_patience_is_named_and_works_on_once_it_is_free(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite, sqlalchemy_sqlite):
        monkeypatch.setattr(module, "BUSY_MS", 150)
    assert await opened(store, "before") is AnswerKind.OK
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"locked by another process.*nothing was written"):
            await opened(store, "struck")
        assert [row.run_id for row in await store.list_runs()] == ["before"]
        other.execute("COMMIT")
    assert await opened(store, "struck") is AnswerKind.OK


# What the disk is asked for is read back.


async def test_a_file_that_somebody_took_out_of_its_mode_is_refused(tmp_path: Path) -> None:
    first = SQLiteCheckpointStore(tmp_path / "runs.db")
    await opened(first, "before")
    await first.close()
    with closing(sqlite3.connect(tmp_path / "runs.db")) as operator:
        assert operator.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    for scheme in OPENED:
        store = open_store(f"{scheme}:///{tmp_path}/runs.db")
        with pytest.raises(StoreRefused, match=r"journal mode 'delete' at synchronous level 2, expected 'wal' and 2"):
            await opened(store, "after")
        await store.close()


class Deaf:
    """A connection that will not change how durable it is."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> sqlite3.Cursor:
        return self._db.execute("SELECT 1" if sql == "PRAGMA synchronous = FULL" else sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> sqlite3.Cursor:
        return self._db.executemany(sql, parameters)


def test_a_level_that_did_not_take_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "runs.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = NORMAL")
        with pytest.raises(StoreRefused, match=r"synchronous level 1, expected 'wal' and 2 \(FULL\)"):
            sqlite_file.set_up(Deaf(db), path)


def mode_and_level(db: Database) -> list[object]:
    return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]


async def test_every_connection_that_writes_is_at_the_level_that_was_promised(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    await opened(store, "one")
    engine = open_store(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    for tables in (store, engine._tables):  # type: ignore[attr-defined]
        assert await tables._write(mode_and_level) == ["wal", 2]
    await engine.close()
    await store.close()


async def test_a_batch_that_fails_by_itself_leaves_no_key_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    """SQLite rolls back by itself where there is no room, so that nobody has to ask it to."""
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    await opened(store, "before")
    assert store._writer is not None
    [[pages]] = store._writer.execute("PRAGMA page_count").fetchall()
    store._writer.execute(f"PRAGMA max_page_count = {pages + 4}")
    draft = Draft.of("struck")
    first = draft.open()
    again = draft.after(first).add(b"more")
    with pytest.raises(StoreUnavailable, match="no room"):
        await store.commit([first, again, Draft.of("large").open(b"x" * 100_000)])
    other = store.reopen()
    await opened(other, "theirs")
    assert await store.calls(RunId("struck")) == []
    await other.close()
    await store.close()


async def test_a_file_that_is_damaged_says_so_whatever_of_it_is_read(store: CheckpointStore, tmp_path: Path) -> None:
    await opened(store, "before")
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    garble(tmp_path / "runs.db")
    again = open_store(f"sqlite:///{tmp_path}/runs.db")
    for read in (again.list_runs, lambda: again.calls(RunId("before")), lambda: again.load_many([RunId("before")])):
        with pytest.raises(CheckpointStoreCorrupt):
            await read()
    await again.close()
