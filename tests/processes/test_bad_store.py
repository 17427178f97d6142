"""Stores that cannot be used, are full, or are shared by many processes: typed errors, and nothing lost or acted upon."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import ToolSpec
from agent_runtime.errors import StoreUnavailable
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.stores.sqlite_file import set_up
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.processes.job import PATIENCE_SECONDS, Job, assert_refused, dump, environment, statuses
from tests.processes.places import fill, mounted, read_only

RUN = "demo"
SAVER = Path(__file__).with_name("saver.py")
KEY = b"a key for tests, which guards nothing"


# Files that are no store of ours


def write_text(path: Path) -> None:
    path.write_text("shopping list: bread, butter, a server\n" * 200)


def write_foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
        db.execute("INSERT INTO theirs VALUES (1)")
    db.close()


def write_newer_schema(path: Path) -> None:
    asyncio.run(make_store(path))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


async def make_store(path: Path) -> None:
    store = SQLiteCheckpointStore(path)
    await store.list_runs()
    await store.close()


@pytest.mark.parametrize(
    ("write", "error", "said"),
    [
        (write_text, "ForeignStore", "name another file"),
        (write_foreign_database, "ForeignStore", "belongs to another program"),
        (write_newer_schema, "NewerFormat", "has layout 99, and this version knows 2"),
    ],
    ids=["text", "another program's database", "newer schema"],
)
def test_a_file_that_is_no_store_of_this_version_is_refused_and_left_byte_for_byte(
    job: Job, write: Callable[[Path], None], error: str, said: str
) -> None:
    write(job.store)
    content = job.store.read_bytes()
    assert_refused(job.run(RUN_ID=RUN), error, said)
    assert job.store.read_bytes() == content
    assert job.files() == [job.store.name], "no key and no remote is made for a file that is not ours"


def test_a_run_of_a_newer_format_is_refused_by_name_and_left_as_it_was(job: Job) -> None:
    job.run(RUN_ID=RUN, CRASH_AT="after_decide")
    with sqlite3.connect(job.store) as db:
        db.execute("UPDATE runs SET format = 99")
    db.close()
    stored, saw = job.dump(), job.saw()
    said = (f"run {RUN!r} was written in format 99, and this version knows 1", "newer version")
    assert_refused(job.run(RUN_ID=RUN), "NewerFormat", *said)
    assert (job.dump(), job.saw()) == (stored, saw)
    assert job.run(RUN_ID="another").lines[-1] == "done: stand up a web service", "other runs of the store go on"


@pytest.mark.parametrize("path", ["not/there/runs.db", "."], ids=["missing folder", "a folder"])
def test_a_path_at_which_no_file_can_be_is_refused_and_nothing_is_made(job: Job, path: str) -> None:
    assert_refused(job.run(RUN_ID=RUN, DATABASE_URL=f"sqlite:///{path}"), "StoreRefused", path)
    assert job.files() == []
    assert sorted(path.name for path in job.folder.parent.iterdir() if path.is_dir()) == [job.folder.name]


# Read-only places


@pytest.mark.parametrize("is_mount_wanted", [True, False], ids=["by mount", "by mode"])
@pytest.mark.parametrize("is_stored", [True, False], ids=["a stored run", "a new run"])
def test_a_store_that_can_be_read_only_is_refused_and_left_as_it_was(
    tmp_path: Path, is_mount_wanted: bool, is_stored: bool
) -> None:
    with ExitStack() as stack:
        job = Job(tmp_path)
        is_mounted = is_mount_wanted and stack.enter_context(mounted(job.folder, "4m"))
        if is_stored:
            job.run(RUN_ID=RUN, CRASH_AT="after_decide")
        else:
            job.run(RUN_ID="another")
        stored, saw, files = job.dump(), job.saw(), job.files()
        with read_only(job.folder, is_mounted=is_mounted) as prefix:
            ended = job.run(RUN_ID=RUN, prefix=prefix)
            assert_refused(ended, "ReadOnlyStore", str(job.store.name), "cannot be written")
            assert "decided" not in ended.out
            assert "calling" not in ended.out
        assert (job.files(), job.saw()) == (files, saw)
        assert job.dump() == stored
        assert job.run(RUN_ID=RUN).lines[-1] == "done: stand up a web service"


def test_a_folder_that_can_be_read_only_gets_no_store(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = Job(tmp_path)
        is_mounted = stack.enter_context(mounted(job.folder, "4m"))
        with read_only(job.folder, is_mounted=is_mounted) as prefix:
            assert_refused(job.run(RUN_ID=RUN, prefix=prefix), "StoreRefused", "no SQLite file can be made", job.store.name)
        assert job.files() == []


# Full disks


class SmallStore(SQLiteCheckpointStore):
    """A store whose file may not grow any more once it is told so: a full disk, where none can be mounted."""

    room: int | None = None

    def _connect(self, *, wait_seconds: float = 0) -> sqlite3.Connection:
        db = super()._connect(wait_seconds=wait_seconds)
        if self.room is not None:
            db.execute(f"PRAGMA max_page_count = {self.room}")
        return db

    def fill(self) -> None:
        """No page more than there are now."""
        with sqlite3.connect(self.path) as db:
            [self.room] = db.execute("PRAGMA page_count").fetchone()
        db.close()
        self._drop_writer()

    def empty(self) -> None:
        self.room = None
        self._drop_writer()


@pytest.mark.parametrize("is_mount_wanted", [True, False], ids=["by mount", "by page count"])
async def test_a_disk_that_fills_up_in_the_third_step_stops_the_run_and_room_lets_it_go_on(
    tmp_path: Path, is_mount_wanted: bool
) -> None:
    with ExitStack() as stack:
        folder = tmp_path / "small"
        is_mounted = stack.enter_context(mounted(folder, "512k")) if is_mount_wanted else False
        folder.mkdir(exist_ok=True)
        store = SQLiteCheckpointStore(folder / "runs.db") if is_mounted else SmallStore(folder / "runs.db")
        acts: list[str] = []
        asked: list[int] = []
        ballast: list[Path] = []
        registry = ToolRegistry()

        @registry.tool(idempotent=True)
        async def charge(cents: int) -> str:
            acts.append(idempotency_key())
            if len(acts) == 3:
                if isinstance(store, SmallStore):
                    store.fill()
                else:
                    ballast.append(fill(folder))
            return "paid " * 2000

        async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
            answered = sum(message.role == "tool" for message in messages)
            asked.append(answered)
            return Reply("", [ToolCall(f"call_{answered}", "charge", {"cents": answered})]) if answered < 4 else Reply("paid")

        with pytest.raises(StoreUnavailable):
            await run_tool_loop(
                model, registry, "charge them", run_id=RUN, checkpoints=store, checkpoint_key=KEY,
                lease_seconds=1.5, heartbeat_seconds=0.5,
            )  # fmt: skip
        assert acts == ["demo:0", "demo:1", "demo:2"], "nothing starts after a write that failed"
        assert asked == [0, 1, 2]
        assert statuses(folder / "runs.db") == {RUN: 1}

        if isinstance(store, SmallStore):
            store.empty()
        for file in ballast:
            file.unlink()
        result = await recover_tool_loop(model, registry, RUN, checkpoints=store, checkpoint_key=KEY)
        assert result.output == "paid"
        assert acts == ["demo:0", "demo:1", "demo:2", "demo:2", "demo:3"]
        assert asked == [0, 1, 2, 3, 4]
        await store.close()


def test_a_disk_that_is_full_from_the_start_is_named_and_nothing_is_acted_upon(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = Job(tmp_path)
        if stack.enter_context(mounted(job.folder, "1m")):
            fill(job.folder)
            ended = job.run(RUN_ID=RUN)
            assert ended.code not in (0, None)
            assert ended.err.startswith("ERROR Store"), ended.err
            assert "Traceback" not in ended.err
            assert ended.out == ""
            assert not job.mocks.exists()
            (job.folder / "ballast").unlink()
        assert job.run(RUN_ID=RUN).code == 0


# Many processes at one file


def savers(names: Sequence[str], count: int, *stores: Path) -> list[tuple[int, str]]:
    """Exit code and error output of processes that save so many runs each in each store, all begun at the same moment."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SAVER), name, str(count), *map(str, stores)],
                    env=environment({}), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )
            for name in names
        ]  # fmt: skip
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        return [(process.wait(PATIENCE_SECONDS), process.communicate()[1]) for process in running]


def test_eight_processes_may_set_up_one_fresh_file_at_once(tmp_path: Path) -> None:
    stores = [tmp_path / f"runs{i}.db" for i in range(5)]
    names = [f"worker{i}" for i in range(8)]
    assert savers(names, 1, *stores) == [(0, "")] * 8
    for store in stores:
        assert sorted(statuses(store)) == [f"{name}-000" for name in names]
        assert store.stat().st_mode & 0o777 == 0o600


class Overtaken(sqlite3.Connection):
    """A connection that another one overtakes: that sets the file up just before this one's statement `number`."""

    number = 0
    statements = 0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        self.statements += 1
        if self.statements == self.number:
            path = super().execute("PRAGMA database_list").fetchone()[2]
            other = sqlite3.connect(path, timeout=0, isolation_level=None)
            with suppress(sqlite3.OperationalError):  # it was kept out: then it comes too late to overtake
                set_up(other, path)
            other.close()
        return super().execute(sql, parameters)


def test_a_process_may_be_overtaken_by_another_at_any_statement_of_setting_a_file_up(tmp_path: Path) -> None:
    number = statements = 0
    while number <= statements:
        store = tmp_path / f"{number}.db"
        db = sqlite3.connect(store, isolation_level=None, factory=Overtaken)
        db.number = number
        set_up(db, str(store))
        statements = max(statements, db.statements)
        db.close()
        assert dump(store)["runs"] == []
        number += 1
    assert statements > 10


def test_two_processes_that_save_while_a_third_reads_for_long_are_never_locked_out(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    asyncio.run(make_store(store))
    reader = sqlite3.connect(store, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    assert savers(["left", "right"], 200, store) == [(0, "")] * 2
    assert reader.execute("SELECT count(*) FROM runs").fetchone() == (0,), "the reader sees one moment all along"
    reader.close()
    assert {name: len(rows) for name, rows in dump(store).items()}["runs"] == 400


LEFT_OPEN = """
import asyncio, sys
from agent_runtime import ToolRegistry, run_tool_loop
from agent_runtime.messages import Reply
from agent_runtime.stores.sqlite import SQLiteCheckpointStore

store = SQLiteCheckpointStore(sys.argv[1], inline=sys.argv[2] == "inline")

async def model(messages, tools):
    return Reply("hello")

async def main():
    await run_tool_loop(model, ToolRegistry(), "hi", run_id="run", checkpoints=store, checkpoint_key=b"k" * 32,
                        lease_seconds=1000, heartbeat_seconds=500)
    await store.list_runs()

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["inline", "on a thread"])
def test_a_store_left_open_never_keeps_its_process_alive(tmp_path: Path, way: str) -> None:
    words = [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "runs.db"), way]
    ended = subprocess.run(words, env=environment({}), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
