"""Hostile names of runs and tenants, at every door and on every store: a typed error, or an id like any other."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import Outcome, Runs
from agent_runtime.cli import main
from agent_runtime.errors import InvalidRunId, InvalidSetting
from agent_runtime.executor import Executor
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.stores import open_store
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from tests.golden.program import KEY, Ask, Order, Tools, orders
from tests.tenants.house import NATIVE, SOME, House

GOOD = [
    "'", '"', "`", "\\", "; DROP TABLE runs; --", "'); DELETE FROM agent_runtime_runs; --", "../../etc/passwd", "/", ".", "%",
    "_", "*", "?", "[a-z]", "{00}", "{x", ":", "t1:x", "$1", "%(p1)s", "NULL", "0", "a b", " ", "é", "☃", "\U0001d54f",
    "x" * 512,
]  # fmt: skip
BAD: list[Any] = ["", "x" * 10_000, "a\0b", "a\nb", "\r", "\x1b[31m", "\u202eabc", "\ud800", "\u200b", None, 7, b"run"]


@pytest.mark.parametrize("house", SOME, indirect=True)
async def test_a_hostile_id_is_an_id_like_any_other(house: House) -> None:
    store, tools = house.open(), Tools()
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    for run_id in GOOD:
        await run_tool_loop(Ask(), tools.registry, "go", run_id=run_id, **options)
    runs = Runs(store, checkpoint_key=KEY)
    assert [info.run_id for info in await runs.list()] == sorted(GOOD)
    for run_id in ("%", "*", "_", "[a-z]", "'", "; DROP TABLE runs; --"):
        assert (await runs.show(run_id)).info.status == "done"
        await runs.delete(run_id, by="ana")
    left = sorted(set(GOOD) - {"%", "*", "_", "[a-z]", "'", "; DROP TABLE runs; --"})
    assert [info.run_id for info in await runs.list()] == left
    assert await runs.verify() == []


@pytest.mark.parametrize("house", NATIVE, indirect=True)
async def test_what_is_no_id_is_refused_at_every_door_and_nothing_is_stored(house: House) -> None:
    store, tools = house.open(), Tools()
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    await run_tool_loop(Ask(), tools.registry, "go", run_id="good", **options)
    runner, runs, flow = FlowRunner(Executor(tools.registry), **options), Runs(store, checkpoint_key=KEY), orders()
    doors: list[Callable[[Any], Awaitable[object]]] = [
        lambda bad: run_tool_loop(Ask("send"), tools.registry, "go", run_id=bad, **options),
        lambda bad: recover_tool_loop(Ask("send"), tools.registry, bad, **options),
        lambda bad: runner.run(flow, Order(), run_id=bad),
        lambda bad: runner.recover(flow, bad),
        lambda bad: runner.resume(flow, bad),
        lambda bad: runner.start_or_recover(flow, Order(), run_id=bad),
        runs.show,
        lambda bad: runs.list(after=bad),
        lambda bad: runs.release(bad, by="ana"),
        lambda bad: runs.cancel(bad, by="ana"),
        lambda bad: runs.delete(bad, by="ana"),
        lambda bad: runs.settle(bad, "0", Outcome.done(1), by="ana", why="x"),
        lambda bad: runs.undo(bad, by="ana", why="x", registry=tools.registry),
    ]
    may_be_left_out = {0, 2, 7}
    before = house.content()
    for at, door in enumerate(doors):
        for bad in BAD:
            if bad is None and at in may_be_left_out:
                continue
            with pytest.raises(InvalidRunId) as refused:
                await door(bad)
            assert str(refused.value).isprintable()
    for bad in BAD[:-3]:
        for ask in (runs.pending, runs.verify):
            with pytest.raises(InvalidRunId):
                await ask(bad)
    assert house.content() == before
    assert tools.acted.total() == 0


@pytest.mark.parametrize("option", ["tenant", "namespace"])
@pytest.mark.parametrize("bad", [*BAD[1:-3], None, 7], ids=repr)
async def test_a_tenant_that_is_no_plain_text_is_refused_at_the_door(option: str, bad: Any) -> None:
    tools, store = Tools(), open_store("memory://")
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY, option: bad}
    with pytest.raises(InvalidSetting, match=f"{option}= is text") as refused:
        await run_tool_loop(Ask(), tools.registry, "go", run_id="run", **options)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300
    with pytest.raises(InvalidSetting, match=f"{option}= is text"):
        FlowRunner(Executor(tools.registry), **options)
    if option == "tenant":
        with pytest.raises(InvalidSetting, match="tenant= is text"):
            Runs(store, checkpoint_key=KEY, tenant=bad)
    assert await store.list_runs() == []


WRONG_URLS = [
    "postgresql://h/d?schema=t1;drop", "postgresql://h/d?schema=T1", "postgresql://h/d?schema=", "postgresql://h/d?prefix=t%251",
    "postgresql://h/d?prefix=a%00b", "postgresql://h/d?schema=" + "x" * 10_000, "postgresql://h/d?schema=pg_mine",
    "postgresql://h/d?schema=t1&schema=t2", "postgresql://h/d?pooler=perhaps", "postgresql://h/d?timeout_seconds=soon",
    "postgresql+asyncpg://h/d?schema=..", "postgresql+psycopg://h/d?prefix=t*", "sqlite:///t1.db?schema=t2",
    "sqlite+aiosqlite:///t1.db?schema=t2", "redis://h?prefix=", "redis://h?prefix=t*", "redis://h?prefix=%7Bt%7D",
    "redis://h?prefix=a%0Ab", "redis://h?prefix=t1&prefix=t2", "redis://h?prefix=" + "x" * 65, "redis://h?prefix=t[1]",
]  # fmt: skip


@pytest.mark.parametrize("url", WRONG_URLS, ids=lambda url: url[:60])
def test_a_url_that_names_a_tenant_wrongly_is_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        open_store(url)
    assert str(refused.value).isprintable()


def test_the_command_line_refuses_what_is_no_id_without_harm_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINT_KEY", "a2V5IG9mIHRoZSBnb2xkZW4gc3RvcmVzLCB3aGljaA==")
    (tmp_path / "runs.db").touch()
    for bad in (b"\xff\xfe", b"a\x1b[31mb", b"a\nb", "\u202e".encode()):
        assert main(["show", os.fsdecode(bad), "--store", f"sqlite:///{tmp_path}/runs.db"]) == 1
        said = capsys.readouterr().err
        assert said.startswith("ERROR InvalidRunId: ")
        assert said.removesuffix("\n").isprintable()
