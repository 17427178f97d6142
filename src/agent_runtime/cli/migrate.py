"""`agent-runtime migrate`: bring a store that an older version made to the layout of this one, or say what there is to do."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import cast

from agent_runtime.cli.decide import add_command
from agent_runtime.cli.operate import check_there
from agent_runtime.cli.tables import json_line, printable
from agent_runtime.errors import InvalidSetting
from agent_runtime.settings import read_settings
from agent_runtime.stores import open_store, shown_url
from agent_runtime.stores.layouts import Layout, Migratable


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command and its options."""
    migrate = add_command(commands, "migrate", "bring a store of an older version to the layout of this one")
    migrate.add_argument("--check", action="store_true", help="change nothing; exit code 1 where there is something to do")


def main(chosen: argparse.Namespace) -> int:
    """Migrate, or look whether that is needed; gives the exit code."""
    url = chosen.store or read_settings(os.environ).database_url
    check_there(url)
    before = asyncio.run(_work(url, is_check=chosen.check))
    if before.found is None:
        raise InvalidSetting(f"there is no store at {shown_url(url)} yet; the first worker makes one, in the newest layout")
    is_done = before.is_old and not chosen.check
    if chosen.json:
        plain = {"store": shown_url(url), "layout": before.found, "newest": before.newest, "migrated": is_done}
        print(json_line(plain))
    else:
        print(printable(f"{shown_url(url)} {_said(before, is_done=is_done)}"))
    return 1 if chosen.check and before.is_old else 0


async def read_layout(url: str) -> Layout:
    """Which layout the store has at a URL that leads to one. Nothing is made or changed."""
    return await _work(url, is_check=True)


async def _work(url: str, *, is_check: bool) -> Layout:
    store = open_store(url)
    try:
        migratable = cast(Migratable, store)  # every store that a URL leads to and that outlives its process is
        found = await migratable.read_layout()
        if is_check or not found.is_old:
            return found
        _say_progress(found)
        return await migratable.migrate()
    finally:
        await store.close()


def _say_progress(found: Layout) -> None:
    if sys.stderr.isatty():
        print(f"migrating from layout {found.found} to {found.newest} …", file=sys.stderr, flush=True)


def _said(before: Layout, *, is_done: bool) -> str:
    if not before.is_old:
        return f"has layout {before.found}, the newest; nothing to migrate"
    if is_done:
        return f"had layout {before.found}, and has {before.newest} now; every run is as it was"
    return f"has layout {before.found}, and this version makes {before.newest}: run `agent-runtime migrate` without --check"
