"""The benchmark: its arithmetic and its table, and that every measure runs, on the smallest amount of work."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import scale
from bench.backends import PostgresBackend, postgres_backend, redis_backend
from bench.command import as_json, as_text, file_system, machine_facts
from bench.install import core_install
from bench.job import Figures, work
from bench.measures import MEASURES, ON_REDIS, WITH_SERVER_ALONE, WITHOUT_SERVER, run_again
from bench.meter import LogPin, ServerMeter, file_bytes
from bench.table import BEGIN_MARK, END_MARK, Goal, Row, Unit, at_least, at_most, between_marks, markdown, ours_is, written
from bench.turns import TOP, Bench, Sizes, ask_process
from bench.workload import late_to_early, payload_of

TINY = Sizes(
    runs=4, steps=3, crowds=(2,), long_steps=10, slow_steps=3, kept_steps=(1, 5), counted_steps=(1, 3), killed=3,
    recover_in_flight=2, records=20, loads=1, idle_runs=20, starts=1, beating_runs=30, beats=2, answers=1, waited=5,
    idle_seconds=0.02,
)  # fmt: skip

# Of each measure some rows, and what both sides come to where that is certain.
ROWS: dict[str, dict[str, tuple[list[float], list[float]] | None]] = {
    "crowd": {"4 runs × 3 steps, 2 in flight": None, "4 runs × 3 steps, 2 in flight: the journal alone": None},
    "long": {"one run of 10 steps": None},
    "disk": {"one run of 3 steps, each flush 1 ms longer": None},
    "start": {"first 3-step run of a fresh process": None, "peak resident memory of it": None},
    "kept": {"stored bytes a step over the payload": None, "commits a step, counted": ([2.0], [4.0])},
    "recovery": {"finished calls run again": ([0.0], [])},
    "flows": {"finished calls of flows run again": ([0.0], [])},
    "people": {"from a verdict to its call, a worker waiting beside the run": None},
    "load": {"load and verify a run of 20 records": None},
    "beats": {"heartbeats of 30 runs": None},
    "sqlalchemy": {"4 runs × 3 steps, 2 in flight, SQLAlchemy with asyncpg to native": None},
    "size": {"memory of an open idle run above its messages": None, "size of the core install": None},
}


TIMED = (Unit.STEPS_A_SECOND, Unit.SECONDS, Unit.MILLISECONDS, Unit.MICROSECONDS)


def ask_here(name: str, options: dict[str, Any]) -> Figures:
    """A job in this process, where it does not kill the process it is in."""
    return ask_process(name, options) if name.endswith(".crash") else work(name, options)


@pytest.fixture
def tiny(tmp_path: Path) -> Bench:
    return Bench(TINY, 1, tmp_path, ask=ask_here)


@pytest.fixture(scope="module")
def on_postgres() -> Iterator[PostgresBackend]:
    with postgres_backend() as backend:
        yield backend


@pytest.mark.parametrize("name", [name for name in MEASURES if name not in WITH_SERVER_ALONE])
def test_every_measure_runs_and_leaves_nothing_behind(name: str, tiny: Bench, tmp_path: Path) -> None:
    check_measure(name, tiny, tmp_path)


@pytest.mark.parametrize("name", [name for name in MEASURES if name not in WITHOUT_SERVER])
def test_every_measure_of_a_store_runs_on_postgres_and_leaves_no_database_behind(
    name: str, tiny: Bench, tmp_path: Path, on_postgres: PostgresBackend
) -> None:
    check_measure(name, replace(tiny, backend=on_postgres), tmp_path)
    assert on_postgres.server.sql("SELECT datname FROM pg_database WHERE NOT datistemplate") == "postgres"


@pytest.mark.parametrize("name", sorted(ON_REDIS))
def test_a_measure_of_redis_runs_beside_the_least_that_is_guarded_there(name: str, tiny: Bench, tmp_path: Path) -> None:
    with redis_backend() as backend:
        check_measure(name, replace(tiny, backend=backend), tmp_path)
        assert backend.server.tell("DBSIZE") == 0


def check_measure(name: str, bench: Bench, tmp_path: Path) -> None:
    rows = {row.measure: row for row in MEASURES[name](bench)}
    assert ROWS[name].keys() <= rows.keys()
    assert all(row.ours and len(row.floor) in (0, len(row.ours)) for row in rows.values())
    assert all(ours > 0 for row in rows.values() for ours in row.ours if row.unit in TIMED)
    certain = {measure: figures for measure, figures in ROWS[name].items() if figures is not None}
    assert {measure: (list(rows[measure].ours), list(rows[measure].floor)) for measure in certain} == certain
    assert list(tmp_path.iterdir()) == []


def test_calls_made_again_are_counted_and_missing_ones_refused(tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    tally.write_text("model r0 0\ntool r0 0\nmodel r0 0\nmodel r0 0\n")
    assert run_again(tally, expected=2) == 2
    with pytest.raises(AssertionError, match="expected 3 calls"):
        run_again(tally, expected=3)


def test_commits_are_counted_in_the_write_ahead_log(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE t (x)")
    with LogPin(path) as pin:
        for _ in range(5):
            db.execute("BEGIN")
            db.executemany("INSERT INTO t VALUES (zeroblob(3000))", [()] * 3)
            db.execute("COMMIT")
        assert pin.commits() == 5
    db.close()
    assert file_bytes(path) > 5 * 3 * 3000


def test_commits_and_bytes_are_told_by_the_server(on_postgres: PostgresBackend) -> None:
    with on_postgres.place() as place, ServerMeter(place["url"]) as meter:
        assert (meter.commits(), meter.bytes()) == (0, 0)
        database = place["url"].rpartition("/")[2]
        on_postgres.server.sql("CREATE TABLE t (x text PRIMARY KEY)", database=database)
        for i in range(5):
            on_postgres.server.sql(
                f"INSERT INTO t SELECT repeat(n::text, 99) FROM generate_series({i}00, {i}99) n", database=database
            )
        on_postgres.server.sql("SELECT count(*) FROM t", database=database)
        assert meter.commits() == 6
        assert meter.bytes() > 2 * 5 * 100 * 99


def test_a_server_to_measure_on_keeps_what_it_acknowledges_through_a_power_cut(on_postgres: PostgresBackend) -> None:
    settings = ("fsync", "synchronous_commit", "full_page_writes")
    assert [on_postgres.server.sql(f"SHOW {name}") for name in settings] == ["on"] * 3


def test_ours_is_measured_between_two_turns_of_each_floor(tmp_path: Path) -> None:
    asked: list[str] = []

    def job(name: str, *walls: float) -> Any:
        left = iter(walls)

        def measure() -> Figures:
            asked.append(name)
            return {"wall": next(left)}

        return measure

    bench = Bench(TINY, 1, tmp_path)
    ours, floors = bench.in_turns("work", job("ours", 5.0), job("floor", 1.0, 3.0), job("other", 10.0, 20.0))
    assert asked == ["floor", "other", "ours", "other", "floor"]
    assert (ours, floors) == ([{"wall": 5.0}], [[{"wall": 2.0}], [{"wall": 15.0}]])


def test_a_ratio_is_taken_round_by_round_and_its_median_is_judged() -> None:
    row = Row("speed", Unit.STEPS_A_SECOND, [50.0, 90.0, 60.0], [100.0, 100.0, 200.0], at_least(0.5))
    assert row.ratios == [0.5, 0.9, 0.3]
    assert row.reached is True
    assert replace(row, goal=at_least(0.51)).reached is False
    assert Row("speed", Unit.STEPS_A_SECOND, [49.0], [100.0], at_least(0.5)).reached is False
    assert Row("time", Unit.SECONDS, [1.21], [1.0], at_most(1.2)).reached is False
    assert Row("time", Unit.SECONDS, [1.21], [1.0]).reached is None


@pytest.mark.parametrize(
    ("relation", "reaching", "missing"), [("≥", (2.0, 3.0), (1.9,)), ("≤", (2.0, 1.0), (2.1,)), ("=", (2.0,), (1.9, 2.1))]
)
def test_a_goal_says_what_reaches_it(relation: Any, reaching: tuple[float, ...], missing: tuple[float, ...]) -> None:
    goal = Goal("ours", relation, 2.0)
    assert all(goal.is_reached(found) for found in reaching)
    assert not any(goal.is_reached(found) for found in missing)


def test_the_table_shows_both_sides_the_ratio_the_goal_and_whether_it_is_reached() -> None:
    rows = [
        Row("fast", Unit.STEPS_A_SECOND, [12_345.0, 12_345.0], [24_690.0, 12_345.0], at_least(0.5)),
        Row("again", Unit.COUNT, [0.0], goal=ours_is(0)),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(rows).splitlines()]
    assert lines[0] == ["measure", "ours", "floor", "ratio (least to most)", "goal", "reached"]
    assert lines[2] == ["fast", "12,345 steps/s", "18,518 steps/s", "0.75 (0.50–1.00)", "ratio ≥ 0.5", "yes"]
    assert lines[3] == ["again", "0", "–", "–", "= 0", "yes"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (61.4, Unit.MICROSECONDS, "61 µs"),
        (4.53, Unit.MILLISECONDS, "4.5 ms"),
        (241.3, Unit.MILLISECONDS, "241 ms"),
        (0.134, Unit.SECONDS, "0.13 s"),
        (3.52, Unit.KILOBYTES, "3.5 KB"),
        (10.0, Unit.COUNT, "10"),
        (2.0, Unit.COUNT, "2"),
        (2.25, Unit.COUNT, "2.25"),
        (0.6, Unit.TIMES, "0.60 ×"),
    ],
)
def test_a_figure_is_written_with_its_unit(value: float, unit: Unit, text: str) -> None:
    assert written(value, unit) == text


def test_the_table_goes_between_the_marks_of_the_page_and_nowhere_else() -> None:
    page = f"before\n{BEGIN_MARK}\nold\n{END_MARK}\nafter\n"
    assert between_marks(page, "new\n") == f"before\n{BEGIN_MARK}\n\nnew\n\n{END_MARK}\nafter\n"
    with pytest.raises(ValueError, match="put them where the table is to stand"):
        between_marks("before\nafter\n", "new")


def test_the_page_on_speed_has_a_place_for_the_table_and_names_every_measure() -> None:
    page = (TOP / "docs" / "speed.md").read_text(encoding="utf-8")
    assert "\nnew\n" in between_marks(page, "new")
    assert [name for name in MEASURES if f"| `{name}` |" not in page] == []


def test_early_and_late_steps_are_told_apart() -> None:
    stamps = [0.0]
    for step in range(1000):
        stamps.append(stamps[-1] + (2.0 if step >= 900 else 1.0))
    assert late_to_early(stamps) == 2.0


def test_the_payload_of_a_step_is_its_reply_and_its_result() -> None:
    assert 400 < payload_of(0) < 550


def test_the_core_install_is_the_package_and_what_pydantic_needs() -> None:
    names, megabytes = core_install()
    assert {"durable-agent-runtime", "pydantic", "pydantic-core"} <= names
    assert not {"pytest", "mypy", "email-validator"} & names
    assert megabytes > 1


def test_every_figure_of_every_round_can_be_had_as_json(tiny: Bench, tmp_path: Path) -> None:
    row = Row("speed", Unit.STEPS_A_SECOND, [50.0, 90.0], [100.0, 100.0], at_least(0.5))
    told = json.loads(as_json(machine_facts(tmp_path, tiny, [tiny.backend]), {"SQLite": [row]}))
    assert f"SQLite {sqlite3.sqlite_version}, on {file_system(tmp_path)}; one round." in told["machine"]
    found = [(each["store"], each["ours"], each["ratio"], each["reached"]) for each in told["rows"]]
    assert found == [("SQLite", [50.0, 90.0], [0.5, 0.9], True)]


def test_each_store_has_a_table_of_its_own() -> None:
    row = Row("speed", Unit.STEPS_A_SECOND, [50.0], [100.0])
    text = as_text("On this machine.", {"SQLite": [row], "Postgres": [row], "nothing": []})
    assert [line for line in text.splitlines() if line.startswith(("On", "#"))] == [
        "On this machine.",
        "### SQLite",
        "### Postgres",
    ]
    assert text.count("| speed") == 2


def test_the_command_line_names_every_measure() -> None:
    command = [sys.executable, str(TOP / "bench" / "run.py"), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TOP.parent).stdout
    assert [name for name in MEASURES if name not in told] == []


async def test_what_a_crowd_of_runs_asks_for_is_read_by_index_however_many_are_kept(on_postgres: PostgresBackend) -> None:
    measured = await scale.measure(on_postgres, 20_000)
    readings = measured.readings
    assert len(measured.pages) == 4, "each of them was answered"
    assert [reading.what for reading in readings if not reading.is_by_index or not reading.scans] == []
    rows = {reading.what: reading.rows for reading in readings}
    assert rows["list 100 unfinished runs"] > 50
    newest = {name: rows[f"list the newest 51 runs, {name}"] for name in ("all", "failed", "running")}
    assert newest == {"all": 51, "failed": 20, "running": 51}
    [failed] = [reading for reading in readings if reading.what == "list the newest 51 runs, failed"]
    assert failed.pages < 100, "whoever asks for runs that ended reads none of the unfinished ones"
    assert (rows["claim 64 runs"], rows["append to a run"], rows["heartbeat of 64 runs"]) == (64, 1, 64)
    assert (rows["read its records"], rows["read the records of 64 runs"]) == (4, 256)
    assert max(reading.pages for reading in readings) < 1_000, "pages that grow with the runs that are kept"


def test_a_table_that_is_read_from_end_to_end_is_not_called_read_by_index() -> None:
    seq = {"Node Type": "Seq Scan", "Relation Name": "agent_runtime_runs"}
    top = {"Node Type": "Limit", "Plans": [seq], "Actual Rows": 1, "Shared Hit Blocks": 5, "Shared Read Blocks": 6}
    reading = scale.reading_of("list", {"Plan": top, "Execution Time": 1.5})
    assert (reading.scans, reading.is_by_index, reading.pages) == (("Seq Scan runs",), False, 11)


PEERS_COMMON = """
import argparse, asyncio, json

FIRST_MESSAGE = {"role": "user", "content": "go"}

class Base:
    def __init__(self, args):
        self.args = args

def model_stub(run, step, history_len):
    called.append(("model", run, step))
    return {"content": "text", "tool_call": {"id": f"call_{step}", "name": "lookup", "args": {"q": "q", "i": step}}}

async def tool_stub_async(run, step, args=None):
    called.append(("tool", run, step))
    return "result"

called = []

def db_url(args, name):
    return args.pg.rsplit("/", 1)[0] + "/" + name

async def work(ours):
    await ours.setup()
    await ours.run_one("r0", 2)
    ours.args.cmd = "recover"
    await ours.run_one("r0", 2)
    await ours.run_one("r1", 1)
    await ours.close()
    print(json.dumps(called))

def main(cls):
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("--dir")
    parser.add_argument("--pg")
    args = parser.parse_args()
    args.cmd = "seq"
    asyncio.run(work(cls(args)))
"""


@pytest.mark.parametrize("variant", ["ours-sqlite", "ours-pg"])
def test_our_adapter_works_and_recovers_runs_for_the_harness_of_the_peers(
    variant: str, tmp_path: Path, on_postgres: PostgresBackend
) -> None:
    (tmp_path / "common.py").write_text(PEERS_COMMON, encoding="utf-8")
    if variant == "ours-pg":
        on_postgres.server.sql("CREATE DATABASE p_ours")
    options = ["--dir", str(tmp_path), "--pg", on_postgres.server.url]
    done = subprocess.run(
        [sys.executable, str(TOP / "bench" / "peer_adapter.py"), variant, *options],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    calls = [
        ["model", "r0", 0],
        ["tool", "r0", 0],
        ["model", "r0", 1],
        ["tool", "r0", 1],
        ["model", "r1", 0],
        ["tool", "r1", 0],
    ]
    assert json.loads(done.stdout) == calls
    if variant == "ours-pg":
        runs = on_postgres.server.sql("SELECT run_id FROM agent_runtime_runs ORDER BY run_id", database="p_ours")
        on_postgres.server.sql("DROP DATABASE p_ours")
        assert runs.split() == ["r0", "r1"]
