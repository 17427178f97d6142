"""A worker may die at any moment, the one that recovers too, and no rule of the runtime is broken.

Here each scenario is swept with one death a run on every store, and two in memory; `make sweep` goes further.
"""

import itertools
import json
from pathlib import Path

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.crash_sweep import (
    FLOWS,
    FLOWS_WITH_PEOPLE,
    PEOPLE,
    SCENARIOS,
    SHORT_SCENARIOS,
    FlowScenario,
    Row,
    Scenario,
    SweepReport,
    sweep,
)
from agent_runtime.testing.crash_sweep.__main__ import main
from agent_runtime.testing.crash_sweep.matrix import LONGEST, plan
from agent_runtime.testing.crash_sweep.mixtures import KINDS, MIXTURES, State, mixtures, sweep_mixtures
from agent_runtime.testing.faults import Where
from agent_runtime.tools import RepeatRule

BY_NAME = {scenario.name: scenario for scenario in (*SCENARIOS, *FLOWS, *PEOPLE, *FLOWS_WITH_PEOPLE, *SHORT_SCENARIOS)}


ON_A_FILE = [scenario.name for scenario in (*SCENARIOS, *FLOWS) if scenario.name != LONGEST]
"""With so many moments one store is enough here."""
WITH_PEOPLE = [scenario.name for scenario in (*PEOPLE, *FLOWS_WITH_PEOPLE)]
IN_MEMORY = [*ON_A_FILE, LONGEST, *WITH_PEOPLE]


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize(
    ("name", "store"), [*((name, "memory") for name in IN_MEMORY), *((name, "sqlite") for name in ON_A_FILE)]
)
async def test_a_run_recovers_from_a_death_at_every_moment(name: str, store: str, commits: str, tmp_path: Path) -> None:
    report = await _sweep(BY_NAME[name], store, commits, tmp_path, depth=1)
    [row] = report.rows
    assert report.holds, str(report)
    assert row.cells == [
        1,
        2 * row.moments[Where.AFTER_WRITE] + row.moments[Where.AFTER_ACT] + row.moments[Where.AFTER_ANSWER],
    ]


@pytest.mark.parametrize(
    ("name", "commits"),
    [("three side by side", "grouped"), ("one doubt", "each"), ("flow: one after another", "grouped")],
)
async def test_a_recovery_recovers_from_its_own_death_at_every_moment(name: str, commits: str, tmp_path: Path) -> None:
    report = await _sweep(BY_NAME[name], "memory", commits, tmp_path, depth=2)
    assert report.holds, str(report)
    assert report.rows[0].cells[2] > 100


async def test_a_recovery_recovers_from_its_own_death_on_a_real_file(tmp_path: Path) -> None:
    report = await _sweep(BY_NAME["one doubt"], "sqlite", "grouped", tmp_path, depth=2)
    assert report.holds, str(report)


@pytest.mark.parametrize("name", ["people: by message", "flow: ask three at the port"])
async def test_a_run_that_needs_people_recovers_from_a_death_at_every_moment_on_a_real_file(name: str, tmp_path: Path) -> None:
    report = await _sweep(BY_NAME[name], "sqlite", "grouped", tmp_path, depth=1)
    assert report.holds, str(report)


@pytest.mark.parametrize("name", MIXTURES)
async def test_calls_left_behind_in_any_mixture_come_to_the_same_on_a_real_file(name: str, tmp_path: Path) -> None:
    async def make_store() -> CheckpointStore:
        return SQLiteCheckpointStore(tmp_path / "runs.db")

    row = await sweep_mixtures(name, make_store, store_name="sqlite", commits="grouped", depth=0, each=200)
    assert row.violations == [], str(SweepReport([row]))
    assert row.cells[0] >= 20


@pytest.mark.parametrize("name", MIXTURES)
async def test_calls_left_behind_in_any_mixture_come_to_what_they_come_to_without_faults(
    name: str,
) -> None:
    async def make_store() -> CheckpointStore:
        return MemoryCheckpointStore()

    row = await sweep_mixtures(name, make_store, commits="grouped", depth=1, each=400)
    assert row.violations == [], str(SweepReport([row]))
    assert row.cells[0] >= 20
    assert row.cells[1] > 100


def test_the_mixtures_hold_each_state_beside_each_other_under_each_rule() -> None:
    threes = {frozenset(three) for three in mixtures()}
    assert all(frozenset((one, other)) in threes for one in KINDS for other in KINDS)
    assert {(left.rule, left.state) for left in KINDS} == {(rule, state) for rule in RepeatRule for state in State}


async def test_every_call_without_a_repeat_rule_that_dies_before_its_record_needs_a_decision(tmp_path: Path) -> None:
    report = await _sweep(BY_NAME["one doubt"], "memory", "each", tmp_path, depth=1)
    # Its intent is durable, and its ending is not: after the write of the one, at the act, before the write of the other.
    assert report.rows[0].decisions == 3


async def test_a_call_with_a_repeat_rule_never_needs_a_decision(tmp_path: Path) -> None:
    report = await _sweep(BY_NAME["one key"], "memory", "each", tmp_path, depth=1)
    assert report.rows[0].decisions == 0


async def test_a_sweep_tells_how_far_it_is_after_each_cell(tmp_path: Path) -> None:
    told: list[int] = []

    async def make_store() -> CheckpointStore:
        return MemoryCheckpointStore()

    def progress(row: Row) -> None:
        told.append(sum(row.cells))

    report = await sweep(BY_NAME["one key"], make_store, commits=["grouped"], depth=1, progress=progress)
    assert told == list(range(1, report.cells + 1))


def test_the_whole_sweep_has_both_modes_on_every_store_and_a_third_death() -> None:
    jobs = plan()
    assert {(job.store, job.commits) for job in jobs} == {(s, c) for s in ("memory", "sqlite") for c in ("grouped", "each")}
    assert {job.scenario for job in jobs if job.depth == 3} == {scenario.name for scenario in SHORT_SCENARIOS}
    whole = [(job.scenario, job.store) for job in jobs if job.scenario in MIXTURES and job.each == 1]
    assert sorted(whole) == sorted(itertools.product(MIXTURES, ("memory", "sqlite"))), "every mixture, on each of them"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_command_prints_its_table_and_exits_with_zero_when_all_rules_hold(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--scenario", "one key", "--store", "memory", "--depth", "1", "--jobs", jobs]
    assert main(chosen) == 0
    shown = capsys.readouterr()
    assert "one key" in shown.out
    assert " cells, 0 violations" in shown.out
    assert shown.err == ""


def test_the_command_speaks_json_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--scenario", "one doubt", "--store", "memory", "--commits", "each", "--depth", "1", "--jobs", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["violations"] == []
    assert report["rows"][0]["moments"] == {"before write": 8, "after write": 8, "after act": 1, "after answer": 2}


@pytest.mark.parametrize("wrong", [["--store", "tape"], ["--depth", "0"], ["--jobs", "many"], ["--scenario", "none"]])
def test_the_command_refuses_what_it_does_not_know(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(wrong)
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err


async def _sweep(scenario: Scenario | FlowScenario, store: str, commits: str, folder: Path, *, depth: int) -> SweepReport:
    async def make_store() -> CheckpointStore:
        return MemoryCheckpointStore() if store == "memory" else SQLiteCheckpointStore(folder / "runs.db")

    return await sweep(scenario, make_store, store_name=store, commits=[commits], depth=depth)
