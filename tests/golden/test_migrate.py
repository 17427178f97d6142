"""`agent-runtime migrate`: what it does to a store, when several do it, and when it dies in the middle."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from typing import Any

import pytest

from agent_runtime.cli import main
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.stores import shown_url
from agent_runtime.testing.store_contract import Draft
from tests.golden.test_golden import STOOD, held, judge, newest_layouts
from tests.tenants.house import NATIVE, SOME, House

[NEWEST] = set(newest_layouts())
on_native_stores = pytest.mark.parametrize("house", NATIVE, indirect=True)
"""SQLAlchemy's do the same work: theirs is tried where its way there differs."""


def said(capsys: pytest.CaptureFixture[str], house: House, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a command, and what it says for programs."""
    code = main([*words, "--store", house.url(), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("house", SOME, indirect=True)
def test_a_check_changes_nothing_and_a_migration_is_done_once(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.put_golden(1)
    told = {"store": shown_url(house.url()), "layout": 1, "newest": NEWEST, "migrated": False}
    before = house.content()
    assert said(capsys, house, "migrate", "--check") == (1, told)
    assert main(["migrate", "--check", "--store", house.url()]) == 1
    assert "run `agent-runtime migrate` without --check" in capsys.readouterr().out
    _, doctor = said(capsys, house, "doctor")
    assert (doctor["layout"], doctor["newest_layout"]) == (1, NEWEST)
    assert [warning for warning in doctor["warnings"] if "run `agent-runtime migrate`" in warning]
    assert house.content() == before
    assert said(capsys, house, "migrate") == (0, {**told, "migrated": True})
    told["layout"] = NEWEST
    for words in (["migrate", "--check"], ["migrate"]):
        assert said(capsys, house, *words) == (0, told)
    _, doctor = said(capsys, house, "doctor")
    assert [warning for warning in doctor["warnings"] if "migrate" in warning] == []


@on_native_stores
def test_where_there_is_no_store_nothing_is_made(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["migrate"], ["migrate", "--check"]):
        assert main([*words, "--store", house.url()]) == 1
        assert "ERROR InvalidSetting: there is no store at" in capsys.readouterr().err
    code, doctor = said(capsys, house, "doctor")
    assert (code, doctor["layout"]) == (0, None)
    assert not house.content()


@on_native_stores
async def test_a_store_that_is_made_today_has_the_newest_layout(house: House) -> None:
    store = house.open()
    await store.list_runs()
    assert await store.read_layout() == (NEWEST, NEWEST)


@on_native_stores
async def test_several_migrate_at_once_while_a_worker_writes(house: House) -> None:
    house.put_golden(1)
    worker = house.open()
    draft = Draft.of("written meanwhile")
    await worker.commit([draft.open()])
    draft = draft.after(draft.open())
    stop = asyncio.Event()
    writing = asyncio.ensure_future(write_until(worker, draft, stop))
    before = await held(house.open())
    migrations = await asyncio.gather(*(house.open().migrate() for _ in range(3)))
    stop.set()
    written = await writing
    assert {each.found for each in migrations} <= {1, NEWEST}
    store = house.open()
    assert await store.read_layout() == (NEWEST, NEWEST)
    after = await held(store)
    assert {run: after[run] for run in STOOD} == {run: before[run] for run in STOOD}
    [run] = await store.load_many([draft.run_id])
    assert run is not None
    assert len(run.records) == written


async def write_until(store: CheckpointStore, draft: Draft, stop: asyncio.Event) -> int:
    """Append record after record; how many there are at the end."""
    while not stop.is_set():
        append = draft.add(b"one")
        [answer] = await store.commit([append])
        assert answer.kind is AnswerKind.OK
        draft = draft.after(append)
        await asyncio.sleep(0)
    return draft.row.number


@on_native_stores
async def test_whoever_migrates_waits_for_another_that_does(house: House) -> None:
    house.put_golden(1)
    with Holding(house):
        waiting = asyncio.ensure_future(house.open().migrate())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        assert (await house.open().read_layout()).found == 1
    assert (await asyncio.wait_for(waiting, 60)).found == 1
    assert (await house.open().read_layout()).found == NEWEST


class Holding:
    """Somebody else migrates the house's store, or so it looks."""

    def __init__(self, house: House) -> None:
        self._house = house

    def __enter__(self) -> None:
        house = self._house
        if house.is_file:
            self._db = sqlite3.connect(house.file(), isolation_level=None)
            self._db.execute("BEGIN IMMEDIATE")
        elif house.is_postgres:
            psql = [str(house.postgres.bindir / "psql"), "-X", "-q", "-A", "-t", "-d", house.postgres.url]
            self._session = subprocess.Popen(psql, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._session.stdin is not None
            assert self._session.stdout is not None
            self._session.stdin.write("BEGIN; SELECT pg_advisory_xact_lock(4715532104317); SELECT 'held';\n")
            self._session.stdin.flush()
            while self._session.stdout.readline() != "held\n":
                pass
        else:
            until = "9999999999999"
            mark = f"{house.name}.t1:store"
            house.redis.tell("HSET", mark, "migrator", "another", "migrates_until", until)

    def __exit__(self, *_: object) -> None:
        if self._house.is_file:
            self._db.close()
        elif self._house.is_postgres:
            self._session.communicate("ROLLBACK;\n", timeout=60)
        else:
            self._house.redis.tell("HSET", f"{self._house.name}.t1:store", "migrates_until", "1")


EVERY = {"redis": 97}
"""Of so many statements one is died before; else before each."""


@on_native_stores
async def test_a_migration_that_is_killed_at_any_step_is_finished_by_the_next(house: House) -> None:
    house.put_golden(1)
    before = await held(house.open())
    words = [sys.executable, "-m", "tests.golden.dying", house.url(), str(EVERY.get(house.kind, 1))]
    ended = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    steps = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert len(steps) > 4
    assert steps[-1] == (0, NEWEST)
    assert {layout for _, layout in steps[:-1]} <= ({1, NEWEST} if house.kind == "redis" else {1}), "all of it, or nothing"
    store = house.open()
    assert await held(store) == before
    await judge(store, STOOD)


@on_native_stores
async def test_an_older_version_that_goes_on_with_a_migrated_store_hides_no_run_from_the_list_by_time(house: House) -> None:
    """In Redis such a version writes an ended run without its place in the index."""
    house.put_golden(1)
    await house.open().migrate()
    if house.kind == "redis":
        for bucket in range(64):
            house.redis.tell("DEL", f"{house.name}.t1:{{{bucket:02}}}:ended")
    await judge(house.open(), STOOD)
