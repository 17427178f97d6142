"""`agent-runtime doctor`: what this machine has, and what is not as it should be."""

from __future__ import annotations

import json
import os
import platform
import sqlite3

from agent_runtime import __version__
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.settings import read_settings
from agent_runtime.stores import file_at, shown_url
from agent_runtime.stores.sqlite_file import WAL_RESET_FIXED_IN, has_wal_reset_fix, refuse_network


def main(*, as_json: bool) -> int:
    settings = read_settings(os.environ)
    facts = {
        "agent_runtime": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "wal_reset_fix": "in this SQLite" if has_wal_reset_fix() else "not in this SQLite",
        "store": shown_url(settings.database_url),
        "key": "set" if settings.checkpoint_key else "in its file, beside the store or in the working directory",
    }
    warnings = [*_about_sqlite(), *_about_its_place(settings.database_url)]
    if as_json:
        print(json.dumps({**facts, "warnings": warnings}))
    else:
        for name, value in facts.items():
            print(f"{name:14} {value}")
        for warning in warnings:
            print(f"warning        {warning}")
    return 0


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
