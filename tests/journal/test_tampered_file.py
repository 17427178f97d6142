"""A real SQLite file, changed by another program: refused, and left exactly as it was found."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_runtime import codec
from agent_runtime.errors import AgentRuntimeError, CheckpointStoreCorrupt, NewerFormat, UnknownKey
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import recover_tool_loop
from tests.bench import KEY, Bench, Place, Script, error_of
from tests.journal.genuine import RUN, calls_of, script, work_until_killed

REFUSED = (CheckpointStoreCorrupt, NewerFormat)
ROW_COLUMNS = ("format", "key_id", "tenant", "kind", "name", "status", "step", "epoch", "owner", "number", "head", "attempts",
               "seal")  # fmt: skip
RECORD_COLUMNS = ("number", "epoch", "kind", "call", "attempt", "body", "seal")
HINTS = ("lease_ms", "wake_at", "heartbeat_at", "posted", "created_at", "updated_at")


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two unfinished runs that anybody may pick up, in one piece and with nobody at it."""
    folder = tmp_path_factory.mktemp("genuine")
    asyncio.run(write_runs(Place("sqlite", folder)))
    path = folder / "genuine.db"
    with closing(sqlite3.connect(folder / "runs.db")) as source, closing(sqlite3.connect(path)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = WAL")
    return path


async def write_runs(place: Place) -> None:
    for run_id in (RUN, "order-8"):
        await work_until_killed(place, Bench(), run_id)
    await place.close()


class Copy:
    """A copy of the genuine file, for one change."""

    def __init__(self, genuine: Path) -> None:
        self.path = genuine.with_name("changed.db")
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        shutil.copy(genuine, self.path)

    def change(self, *statements: str, values: tuple[object, ...] = ()) -> None:
        """What somebody does who may write to the file: no constraint of ours holds them."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("PRAGMA ignore_check_constraints = ON")
            db.execute("PRAGMA synchronous = OFF")
            for statement in statements:
                db.execute(statement, values)

    def value(self, sql: str) -> object:
        with closing(sqlite3.connect(self.path)) as db:
            found: object = db.execute(sql).fetchone()[0]
            return found

    def content(self) -> list[str]:
        """Everything the file says."""
        with closing(sqlite3.connect(self.path)) as db:
            db.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
            return list(db.iterdump())


async def recover(path: Path, model: Script, bench: Bench) -> None:
    store = SQLiteCheckpointStore(path)
    try:
        await recover_tool_loop(model, bench.registry, RUN, checkpoints=store, checkpoint_key=KEY)
    finally:
        await store.close()


async def assert_refused(copy: Copy, how: str) -> None:
    """Refused, with nothing decoded, written, asked or run."""
    before, model, bench = copy.content(), script(), Bench()
    with calls_of(codec.decode) as decoded:
        error = await error_of(recover(copy.path, model, bench))
    assert isinstance(error, REFUSED), (how, error)
    assert decoded == [], how
    assert copy.content() == before, how
    assert (model.asked, bench.entered.total(), bench.effects) == (0, 0, 0), how


def changed(value: object) -> Iterator[object]:
    """A value changed in its first, middle and last byte, and made shorter."""
    match value:
        case int():
            yield from (value + 1, value - 1, value ^ (1 << 32))
        case bytes() if value:
            places = {0, len(value) // 2, len(value) - 1}
            yield from (value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :] for at in places)
            yield value[:-1]
        case str() if value:
            places = {0, len(value) // 2, len(value) - 1}
            yield from (value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :] for at in places)
            yield value[:-1]
        case bytes() | str():
            yield value * 0 + ("x" if isinstance(value, str) else b"x")  # type: ignore[operator]  # each with its own kind
        case _:
            raise AssertionError(value)


async def test_the_genuine_file_is_picked_up(genuine: Path) -> None:
    model, bench = script(), Bench()
    await recover(Copy(genuine).path, model, bench)
    assert (model.asked, bench.effects) == (1, 1)


@pytest.mark.parametrize("column", ROW_COLUMNS)
async def test_a_changed_column_of_the_row_is_refused(genuine: Path, column: str) -> None:
    value = Copy(genuine).value(f"SELECT {column} FROM runs WHERE run_id = '{RUN}'")
    for new in changed(value):
        copy = Copy(genuine)
        copy.change(f"UPDATE runs SET {column} = ? WHERE run_id = '{RUN}'", values=(new,))
        await assert_refused(copy, f"{column} from {value!r} to {new!r}")


@pytest.mark.parametrize("column", RECORD_COLUMNS)
@pytest.mark.parametrize("number", [1, 2, 7, 13])
async def test_a_changed_column_of_a_record_is_refused(genuine: Path, column: str, number: int) -> None:
    own = f"key = (SELECT key FROM runs WHERE run_id = '{RUN}') AND number = {number}"
    value = Copy(genuine).value(f"SELECT {column} FROM journal WHERE {own}")
    for new in changed(value):
        copy = Copy(genuine)
        copy.change("DROP INDEX numbers", f"UPDATE journal SET {column} = {literal(new)} WHERE {own}")
        await assert_refused(copy, f"{column} from {value!r} to {new!r}")


def literal(value: object) -> str:
    match value:
        case bytes():
            return f"x'{value.hex()}'"
        case str():
            return "'" + value.replace("'", "''") + "'"
        case _:
            return str(value)


@pytest.mark.parametrize("status", [2, 3, 4, 8, 9, 10, 11, 0, 12])
async def test_a_flipped_status_is_refused(genuine: Path, status: int) -> None:
    copy = Copy(genuine)
    copy.change(f"UPDATE runs SET status = {status} WHERE run_id = '{RUN}'")
    await assert_refused(copy, f"status {status}")


OWN = f"(SELECT key FROM runs WHERE run_id = '{RUN}')"
OTHER = "(SELECT key FROM runs WHERE run_id = 'order-8')"


@pytest.mark.parametrize(
    ("how", "statements"),
    [
        ("the last record is gone", [f"DELETE FROM journal WHERE key = {OWN} AND number = 13"]),
        ("the first record is gone", [f"DELETE FROM journal WHERE key = {OWN} AND number = 1"]),
        ("a record in the middle is gone", [f"DELETE FROM journal WHERE key = {OWN} AND number = 6"]),
        ("all records are gone", [f"DELETE FROM journal WHERE key = {OWN}"]),
        ("all records are gone, and counted so", [f"DELETE FROM journal WHERE key = {OWN}", "UPDATE runs SET number = 0"]),
        (
            "the tail is cut, and the row says so",
            [
                f"DELETE FROM journal WHERE key = {OWN} AND number > 8",
                f"UPDATE runs SET number = 8, head = (SELECT seal FROM journal WHERE key = {OWN} AND number = 8) "
                f"WHERE run_id = '{RUN}'",
            ],
        ),
        (
            "two records have changed places",
            [
                f"UPDATE journal SET number = -1 WHERE key = {OWN} AND number = 4",
                f"UPDATE journal SET number = 4 WHERE key = {OWN} AND number = 5",
                f"UPDATE journal SET number = 5 WHERE key = {OWN} AND number = -1",
            ],
        ),
        (
            "a record is that of another run",
            [
                f"DELETE FROM journal WHERE key = {OWN} AND number = 5",
                f"UPDATE journal SET key = {OWN} WHERE key = {OTHER} AND number = 5",
            ],
        ),
        (
            "the journals of two runs have changed places",
            [
                f"UPDATE journal SET key = -1 WHERE key = {OWN}",
                f"UPDATE journal SET key = {OWN} WHERE key = {OTHER}",
                f"UPDATE journal SET key = {OTHER} WHERE key = -1",
            ],
        ),
        (
            "another run goes by this one's name",
            [
                f"UPDATE runs SET run_id = 'gone' WHERE run_id = '{RUN}'",
                f"UPDATE runs SET run_id = '{RUN}' WHERE key = {OTHER}",
            ],
        ),
        ("a record was added", [f"INSERT INTO journal SELECT key, 99, epoch, kind, call, attempt, body, seal FROM journal "
                                f"WHERE key = {OWN} AND number = 13"]),
        ("a record stands twice", ["DROP INDEX numbers", f"INSERT INTO journal SELECT * FROM journal WHERE key = {OWN} "
                                   "AND number = 5"]),
        ("the epoch is lowered", ["UPDATE runs SET epoch = 1"]),
        ("the owner is taken away", ["UPDATE runs SET owner = zeroblob(16)"]),
        ("the seal is taken away", ["UPDATE runs SET seal = x''"]),
        ("a checkpoint that nobody sealed", [f"INSERT INTO checkpoints VALUES ({OWN}, 1, x'7b7d', zeroblob(32))"]),
        ("a body is a pickle", [f"UPDATE journal SET body = x'80049528000000000000008c05706f736978948c0673797374656d9493948c' "
                                f"WHERE key = {OWN} AND number = 4"]),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)  # fmt: skip
async def test_records_and_rows_that_were_moved_removed_or_added_are_refused(
    genuine: Path, how: str, statements: list[str]
) -> None:
    copy = Copy(genuine)
    copy.change(*statements)
    await assert_refused(copy, how)


async def test_a_key_id_and_a_format_that_this_worker_does_not_know_are_named(genuine: Path) -> None:
    copy = Copy(genuine)
    copy.change("UPDATE runs SET key_id = 'key-of-2030'")
    with pytest.raises(UnknownKey, match="key-of-2030"):
        await recover(copy.path, script(), Bench())
    copy = Copy(genuine)
    copy.change("UPDATE runs SET format = 2")
    with pytest.raises(NewerFormat, match="format 2"):
        await recover(copy.path, script(), Bench())


# Tables that somebody made again without types: any column may hold anything.

LOOSE = [
    "CREATE TABLE loose AS SELECT * FROM runs", "DROP TABLE runs", "ALTER TABLE loose RENAME TO runs",
    "CREATE TABLE loose AS SELECT * FROM journal", "DROP TABLE journal", "ALTER TABLE loose RENAME TO journal",
]  # fmt: skip


@pytest.mark.parametrize("value", ["NULL", "'text'", "x'00'", "1.5", "CAST(x'ff' AS TEXT)"])
async def test_a_column_of_another_type_is_refused(genuine: Path, value: str) -> None:
    for column in ROW_COLUMNS:
        copy = Copy(genuine)
        copy.change(*LOOSE, f"UPDATE runs SET {column} = {value} WHERE run_id = '{RUN}'")
        await assert_refused(copy, f"{column} = {value}")
    for column in RECORD_COLUMNS:
        copy = Copy(genuine)
        copy.change(*LOOSE, f"UPDATE journal SET {column} = {value} WHERE key = {OWN} AND number = 5")
        await assert_refused(copy, f"{column} = {value}")


@pytest.mark.parametrize("column", ["key_id", "kind", "name"])
async def test_text_that_is_no_text_is_refused_also_in_typed_tables(genuine: Path, column: str) -> None:
    copy = Copy(genuine)
    copy.change(f"UPDATE runs SET {column} = CAST(x'6fff' AS TEXT) WHERE run_id = '{RUN}'")
    await assert_refused(copy, column)
    copy = Copy(genuine)
    copy.change(f"UPDATE journal SET call = CAST(x'30ff' AS TEXT) WHERE key = {OWN} AND number = 5")
    await assert_refused(copy, "call")


@pytest.mark.parametrize("column", HINTS)
@pytest.mark.parametrize("value", ["NULL", "'text'", "x'00'", "-1", "9223372036854775807", "-9223372036854775808"])
async def test_a_changed_hint_makes_nothing_run_twice_and_nothing_crash(genuine: Path, column: str, value: str) -> None:
    """Hints are not sealed: with any value the run goes on as ever, or is refused by an error of ours."""
    copy = Copy(genuine)
    copy.change(*LOOSE, f"UPDATE runs SET {column} = {value} WHERE run_id = '{RUN}'")
    model, bench = script(), Bench()
    try:
        await recover(copy.path, model, bench)
    except AgentRuntimeError:
        assert (model.asked, bench.effects) == (0, 0)
    else:
        assert (model.asked, bench.effects) == (1, 1)


# What is not promised.


async def test_a_file_put_back_to_an_older_genuine_state_is_not_seen_and_only_the_remote_could_tell(genuine: Path) -> None:
    now, older = Copy(genuine), genuine
    bench, model = Bench(), script()
    await recover(now.path, model, bench)
    assert (model.asked, bench.effects) == (1, 1)
    await recover(Copy(older).path, model, bench)
    assert (model.asked, bench.effects) == (2, 1)
    assert bench.remote.keys == [f"{RUN}:2"] * 2


async def test_text_that_somebody_broke_hides_no_other_run_from_the_lists(genuine: Path) -> None:
    copy = Copy(genuine)
    copy.change("UPDATE runs SET name = CAST(x'ff' AS TEXT) WHERE run_id = ?", values=(RUN,))
    await assert_refused(copy, "a name that is no text")
    store = SQLiteCheckpointStore(copy.path)
    try:
        assert [row.run_id for row in await store.list_unfinished()] == [RUN, "order-8"]
        assert [row.run_id for row in await store.list_runs()] == [RUN, "order-8"]
        result = await recover_tool_loop(script(), Bench().registry, "order-8", checkpoints=store, checkpoint_key=KEY)
        assert result.status == "done"
    finally:
        await store.close()
