"""`agent-runtime doctor`: what this machine has, and what is not as it should be."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sqlite3

from agent_runtime import __version__
from agent_runtime.cli.migrate import read_layout
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.settings import read_settings
from agent_runtime.stores import file_at, shown_url
from agent_runtime.stores.layouts import Layout
from agent_runtime.stores.sqlite_file import WAL_RESET_FIXED_IN, has_wal_reset_fix, refuse_network


def main(*, as_json: bool, store: str | None = None) -> int:
    """Print it; `store` is the URL of the one to look at, if it is not that of the settings."""
    settings = read_settings(os.environ)
    url = store or settings.database_url
    layout, troubles = _layout_of(url)
    facts = {
        "agent_runtime": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "wal_reset_fix": "in this SQLite" if has_wal_reset_fix() else "not in this SQLite",
        "store": shown_url(url),
        "layout": layout.found,
        "newest_layout": layout.newest or None,
        "key": "set" if settings.checkpoint_key else "in its file, beside the store or in the working directory",
    }
    failover, about_failover = _about_failover(url)
    facts |= {"failover": failover} if failover else {}
    warnings = list(dict.fromkeys([*_about_sqlite(), *_about_its_place(url), *troubles, *about_failover]))
    if as_json:
        print(json.dumps({**facts, "warnings": warnings}))
    else:
        for name, value in facts.items():
            print(f"{name:14} {'none' if value is None else value}")
        for warning in warnings:
            print(f"warning        {warning}")
    return 0


def _layout_of(url: str) -> tuple[Layout, list[str]]:
    """The layout of the store, and what there is to say of it. Looking at one makes none."""
    nothing = Layout(None, 0)
    if url.startswith("memory:"):
        return nothing, []
    try:
        layout = asyncio.run(read_layout(url))
    except AgentRuntimeError as error:
        return nothing, [str(error)]
    if not layout.is_old:
        return layout, []
    return layout, [
        f"the store has layout {layout.found}, and this version makes {layout.newest}: once no older version works on it, run "
        "`agent-runtime migrate`"
    ]


def _about_sqlite() -> list[str]:
    if has_wal_reset_fix():
        return []
    *branches, fixed = (".".join(map(str, version)) for version in WAL_RESET_FIXED_IN)
    return [
        f"SQLite {sqlite3.sqlite_version} is older than {fixed} (of older branches: {', '.join(branches)}), which fixed a "
        "rare corruption of the write-ahead log when several processes write one file; use a Python with a newer SQLite where "
        "many processes share a store"
    ]


def _about_its_place(url: str) -> list[str]:
    """What would make the store refuse its file."""
    try:
        path = file_at(url)
        if path is not None:
            refuse_network(path)
    except AgentRuntimeError as error:
        return [str(error)]
    return []


def _about_failover(url: str) -> tuple[str, list[str]]:
    """What a failover of a Postgres server keeps, and what is to be done about it."""
    if not url.startswith(("postgresql:", "postgres:")):
        return "", []
    from agent_runtime.stores.postgres_standbys import read_standbys

    try:
        standbys = asyncio.run(read_standbys(url))
    except AgentRuntimeError as error:
        return "cannot be told", [str(error)]
    return standbys.told, standbys.warnings
