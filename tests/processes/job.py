"""The main job as a process in a folder of its own, and what the remotes and the store hold afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from agent_runtime.mock import start_mocks
from tests.mock.asking import ask

PATIENCE_SECONDS = 30.0
LOOK_AGAIN_SECONDS = 0.005
OURS = (
    "DATABASE_URL", "RUN_ID", "GOAL", "PLANNER", "MOCK_CLOUD_URL", "MOCK_LLM_URL", "CHECKPOINT_KEY", "LEASE", "POLL",
    "HEARTBEAT", "MAX_ATTEMPTS", "STUCK_AFTER", "CRASH_AT", "CRASH_SEQ", "CRASH_IN", "STALL_AT", "STALL_MS",
)  # fmt: skip

Table = list[tuple[object, ...]]
Dump = dict[str, Table]


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@dataclass(frozen=True, slots=True)
class Running:
    """A process that runs. What it prints goes to files, so that it never waits for a reader."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def wait_for(self, text: str) -> None:
        """Until it has printed the text."""
        until(lambda: text in self.out.read_text() or self.process.poll() is not None, f"{text!r} is printed")
        assert text in self.out.read_text(), f"it ended without printing {text!r}: {self.ended()}"

    def ended(self, *, within_seconds: float = PATIENCE_SECONDS) -> Ended:
        code = self.process.wait(within_seconds)
        return Ended(code, self.out.read_text(), self.err.read_text())


@dataclass(frozen=True, slots=True)
class Saw:
    """What the remotes saw, read at their own counters over HTTP."""

    asked: Mapping[str, int]
    """Model requests by run."""
    requests: Mapping[str, Mapping[str, int]]
    """What came of the cloud's requests, by key."""
    ids: Mapping[str, str]
    """What exists, by key."""
    kinds: Mapping[str, int]
    """How many of each kind exist, whatever their key."""


class Job:
    """The main job in one folder, with nothing configured but what a test says."""

    def __init__(self, folder: Path, *, url: str | None = None) -> None:
        """Its store is a file in the folder, unless a URL leads elsewhere."""
        self.folder = folder / "job"
        self.folder.mkdir()
        self._printed = folder
        self._starts = 0
        self.store = self.folder / "agent_runtime.db"
        self.url = url
        self.key = self.folder / ("agent_runtime.key" if url else "agent_runtime.db.key")
        self.mocks = self.folder / "agent_runtime.mock.db"

    def run(self, *, prefix: Sequence[str] = (), module: Sequence[str] = ("agent_runtime",), **settings: str) -> Ended:
        """One process from start to end; `prefix` is a command that starts another."""
        with self.started(prefix=prefix, module=module, **settings) as running:
            return running.ended()

    @contextmanager
    def started(
        self, *, prefix: Sequence[str] = (), module: Sequence[str] = ("agent_runtime",), **settings: str
    ) -> Iterator[Running]:
        """A process that is gone when the block is left."""
        self._starts += 1
        out, err = (self._printed / f"{self._starts}.{stream}" for stream in ("out", "err"))
        command = [*prefix, sys.executable, "-m", *module]
        settings = ({"DATABASE_URL": self.url} if self.url else {}) | settings
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=self.folder, env=environment(settings), stdout=stdout, stderr=stderr)
        try:
            yield Running(process, out, err)
        finally:
            process.kill()
            process.wait()

    def saw(self) -> Saw:
        return saw(self.mocks)

    def dump(self) -> Dump:
        return dump(self.store)

    def statuses(self) -> dict[str, int]:
        """The status of each run."""
        return statuses(self.url or self.store)

    def files(self) -> list[str]:
        """What stands in the folder; the side files of an open database aside."""
        return sorted(path.name for path in self.folder.iterdir() if not path.name.endswith(("-wal", "-shm")))


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, with no setting of ours but those given."""
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**inherited, **settings}


def saw(state: Path) -> Saw:
    """What the remotes of a state file saw."""
    assert state.exists(), f"no remote has ever run: {state} does not exist"
    with start_mocks(state) as mocks:
        model = ask(mocks.model_url, "GET", "/calls")[1]
        calls = ask(mocks.cloud_url, "GET", "/calls")[1]
        created = ask(mocks.cloud_url, "GET", "/created")[1]
    asked, requests, ids, kinds = model["by_run"], calls["by_key"], created["by_key"], created["by_kind"]
    assert isinstance(asked, dict)
    assert isinstance(requests, dict)
    assert isinstance(ids, dict)
    assert isinstance(kinds, dict)
    return Saw(asked, requests, ids, kinds)


def dump(store: Path | str) -> Dump:
    """Every row of every table, as another program would read it, in a file or in a database by its URL."""
    if isinstance(store, str):
        return asyncio.run(_dump_database(store))
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
    try:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
        return {name: connection.execute(f"SELECT * FROM {name} ORDER BY rowid").fetchall() for name in tables}
    finally:
        connection.close()


async def _dump_database(url: str) -> Dump:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
        names: list[str] = [row[0] for row in found]
        tables = [await connection.fetch(f"SELECT * FROM {name} t ORDER BY t") for name in names]
    finally:
        await connection.close()
    return {
        name.removeprefix("agent_runtime_"): [tuple(row) for row in rows] for name, rows in zip(names, tables, strict=True)
    }


def statuses(store: Path | str) -> dict[str, int]:
    """The status of each run."""
    return column(store, "status")


def column(store: Path | str, name: str) -> dict[str, Any]:
    """One column of each run's row."""
    if isinstance(store, str):
        return asyncio.run(_column_of_database(store, name))
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
    try:
        return dict(connection.execute(f"SELECT run_id, {name} FROM runs"))
    finally:
        connection.close()


async def _column_of_database(url: str, name: str) -> dict[str, Any]:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        return dict(await connection.fetch(f"SELECT run_id, {name} FROM agent_runtime_runs"))
    finally:
        await connection.close()


def until(happened: Callable[[], object], what: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Look until it has happened; it never takes longer than it must."""
    deadline = monotonic() + seconds
    while not happened():
        assert monotonic() < deadline, f"expected within {seconds} s that {what}"
        sleep(LOOK_AGAIN_SECONDS)


def assert_refused(ended: Ended, error: str, *said: str) -> None:
    """A typed error on one line, an exit code that says so, and no traceback."""
    assert ended.code not in (0, None), ended
    assert ended.err.startswith(f"ERROR {error}: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    for words in said:
        assert words in ended.err, ended.err


def args_of(values: Mapping[str, str]) -> str:
    """Arguments as a log line shows them."""
    return json.dumps(values)
