"""`agent-runtime doctor`: what this machine has, and what is not as it should be."""

from __future__ import annotations

import json
import os
import platform
import sqlite3

from agent_runtime import __version__
from agent_runtime.settings import read_settings
from agent_runtime.stores import shown_url

WAL_RESET_FIXED = (3, 51, 3)
"""The SQLite release that fixed a corruption when two connections checkpoint and write at once (its release notes)."""


def main(*, as_json: bool) -> int:
    settings = read_settings(os.environ)
    facts = {
        "agent_runtime": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "store": shown_url(settings.database_url),
        "key": "set" if settings.checkpoint_key else "in its file, beside the store or in the working directory",
    }
    warnings = _warnings()
    if as_json:
        print(json.dumps({**facts, "warnings": warnings}))
    else:
        for name, value in facts.items():
            print(f"{name:14} {value}")
        for warning in warnings:
            print(f"warning        {warning}")
    return 0


def _warnings() -> list[str]:
    if sqlite3.sqlite_version_info >= WAL_RESET_FIXED:
        return []
    fixed = ".".join(map(str, WAL_RESET_FIXED))
    return [
        f"SQLite {sqlite3.sqlite_version} is older than {fixed}, which fixed a rare corruption of the write-ahead log when "
        "several processes write one file; use a Python with a newer SQLite where many processes share a store"
    ]
