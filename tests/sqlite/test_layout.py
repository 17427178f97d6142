"""The layout of a SQLite file: which index each list is read by."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.journal.records import RunStatus
from agent_runtime.stores.sqlite_file import SQL, set_up


@pytest.mark.parametrize(
    ("statement", "values", "index"),
    [
        ("list_ended", (0, int(RunStatus.DONE), 2**63 - 1, "", 10), "SEARCH runs USING INDEX ended"),
        ("list_newest", (0, None, 2**63 - 1, "", 10), "USING INDEX unfinished"),
    ],
)
def test_the_list_by_time_is_read_by_index(tmp_path: Path, statement: str, values: tuple[Any, ...], index: str) -> None:
    db = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    set_up(db, "runs.db")
    plan = " ".join(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {SQL[statement]}", values))
    db.close()
    assert index in plan
    assert statement != "list_ended" or "TEMP B-TREE" not in plan
