"""The oracle holds its peace over genuine runs, and names what was planted: for each of its rules a bug that it must see."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.mock import start_mocks
from agent_runtime.stores import MemoryCheckpointStore
from agent_runtime.timeline import Moment, Segment
from tests.chaos.facts import read_reports
from tests.chaos.oracle import Facts, Rule, Violation, judge
from tests.chaos.watch import Stand, Watch
from tests.mock.asking import ask, create
from tests.processes.job import Job, statuses

HEAD = b"h" * 32
ALL = ("steady", "healed")
OF_STEADY = " WHERE key = (SELECT key FROM runs WHERE run_id = 'steady')"


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two runs: one in one go, and one that died between act and record and was picked up."""
    job = Job(tmp_path_factory.mktemp("worked"))
    assert job.run(RUN_ID="steady").code == 0
    assert job.run(RUN_ID="healed", CRASH_AT="after_call", CRASH_SEQ="1").code == 1
    assert job.run(RUN_ID="healed").code == 0
    return job


@pytest.fixture
def job(worked: Job, tmp_path: Path) -> Job:
    """A copy of them."""
    copy = Job(tmp_path)
    shutil.copytree(worked.folder, copy.folder, dirs_exist_ok=True)
    return copy


async def facts_of(job: Job, *put_in: str) -> Facts:
    """What the remotes and the store of the folder hold."""
    reports, corrupt = await read_reports(f"sqlite:///{job.store}", f"file:{job.key}", list(statuses(job.store)))
    with start_mocks(job.mocks) as mocks:
        model, cloud, made = (
            ask(url, "GET", path)[1]
            for url, path in ((mocks.model_url, "/calls"), (mocks.cloud_url, "/calls"), (mocks.cloud_url, "/created"))
        )
    told: dict[str, Any] = {
        "asked": model["by_run"], "requests": cloud["by_key"], "resources": made["by_key"], "made": made["total"],
    }  # fmt: skip
    return Facts(put_in=[*ALL, *put_in], poison=[], max_attempts=3, reports=reports, corrupt=corrupt, **told)


def rules(facts: Facts) -> list[tuple[Rule, str]]:
    return [(violation.rule, violation.run) for violation in judge(facts)]


async def test_runs_that_were_worked_as_they_should_break_no_rule(job: Job) -> None:
    assert judge(await facts_of(job)) == []


# Planted in the store, in the remotes, in the runtime's work.


async def test_a_record_that_was_changed_is_named(job: Job) -> None:
    with changed(job.store) as store:
        store.execute("UPDATE journal SET body = CAST(replace(CAST(body AS TEXT), 'srv-1', 'srv-2') AS BLOB)" + OF_STEADY)
    [first, *_] = judge(await facts_of(job))
    assert (first.rule, first.run) == (Rule.SEALED, "steady")


async def test_a_run_that_is_gone_from_the_store_is_lost(job: Job) -> None:
    with changed(job.store) as store:
        for table in ("journal", "checkpoints", "runs"):
            store.execute(f"DELETE FROM {table}" + OF_STEADY)
    assert rules(await facts_of(job)) == [(Rule.LOST, "steady")]


async def test_a_run_that_a_remote_knows_and_nobody_put_in_is_lost_too(job: Job) -> None:
    with start_mocks(job.mocks) as mocks:
        ask(mocks.model_url, "POST", "/decide", {"run": "ghost", "goal": "be", "history": []})
    assert rules(await facts_of(job)) == [(Rule.LOST, "ghost")]


async def test_a_run_that_nobody_works_is_stuck(job: Job) -> None:
    assert job.run(RUN_ID="left", CRASH_AT="after_decide").code == 1
    facts = await facts_of(job, "left")
    assert judge(facts) == [Violation(Rule.STUCK, "left", "it is interrupted at the end")]
    assert str(judge(facts)[0]) == "every run that was put in gets done: run left: it is interrupted at the end"


async def test_a_cloud_that_forgets_its_keys_makes_doubles(job: Job) -> None:
    with start_mocks(job.mocks, cloud_switches={"forget": True}):
        assert job.run(RUN_ID="twice", CRASH_AT="after_call").code == 1
        assert job.run(RUN_ID="twice").code == 0
    assert [rule for rule, _ in rules(await facts_of(job, "twice"))] == [Rule.DOUBLE, Rule.DOUBLE]


async def test_a_key_that_is_used_with_other_arguments_is_named(job: Job) -> None:
    with start_mocks(job.mocks) as mocks:
        create(mocks.cloud_url, "steady:0", args={"name": "another"})
    assert rules(await facts_of(job)) == [(Rule.DOUBLE, "steady"), (Rule.UNASKED, "steady")]


async def test_an_effect_that_no_call_confirms_is_named(job: Job) -> None:
    with start_mocks(job.mocks) as mocks:
        create(mocks.cloud_url, "steady:7")
    assert rules(await facts_of(job)) == [(Rule.EFFECT, "steady")]


async def test_a_request_to_the_model_that_the_journal_does_not_hold_is_named(job: Job) -> None:
    with start_mocks(job.mocks) as mocks:
        ask(mocks.model_url, "POST", "/decide", {"run": "steady", "goal": "be", "history": []})
    assert rules(await facts_of(job)) == [(Rule.UNASKED, "steady")]


# Planted in what was found.


def forget_effect(facts: Facts) -> Facts:
    return replace(facts, resources={key: made for key, made in facts.resources.items() if key != "healed:1"})


def ask_again(facts: Facts) -> Facts:
    segment = facts.reports["healed"].timeline.segments[-1]
    segment.moments.append(Moment(99, "started", "0/model", 2))
    return facts


def lower_epoch(facts: Facts) -> Facts:
    facts.reports["healed"].timeline.segments.append(Segment(1))
    return facts


def set_aside_early(facts: Facts) -> Facts:
    facts.reports["healed"].timeline.segments[0].moments.append(Moment(99, "quarantined"))
    return facts


def never_set_aside(facts: Facts) -> Facts:
    return replace(facts, poison=["healed"], done_meanwhile={"healed": 1})


def stood_still(facts: Facts) -> Facts:
    moments = facts.reports["healed"].timeline.segments[0].moments
    moments += [Moment(90, "claimed"), Moment(91, "claimed"), Moment(92, "claimed"), Moment(93, "quarantined")]
    return replace(facts, poison=["healed"])


def start_twice(facts: Facts) -> Facts:
    return replace(facts, started={"steady": 1, "healed": 2})


def end_early(facts: Facts) -> Facts:
    del facts.reports["healed"].timeline.calls["2"]
    requests = {key: counts for key, counts in facts.requests.items() if key != "healed:2"}
    resources = {key: made for key, made in facts.resources.items() if key != "healed:2"}
    return replace(facts, requests=requests, resources=resources, made=facts.made - 1)


def went_back(facts: Facts) -> Facts:
    return replace(facts, went_back={"healed": "epoch 1 after 2"})


PLANTED: dict[Callable[[Facts], Facts], Rule] = {
    forget_effect: Rule.EFFECT,
    end_early: Rule.EFFECT,
    start_twice: Rule.LOST,
    ask_again: Rule.BOUGHT,
    lower_epoch: Rule.BACK,
    went_back: Rule.BACK,
    set_aside_early: Rule.QUARANTINE,
    never_set_aside: Rule.POISON,
    stood_still: Rule.POISON,
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
async def test_what_is_planted_in_the_facts_is_named_with_its_run(job: Job, plant: Callable[[Facts], Facts]) -> None:
    found = judge(plant(await facts_of(job)))
    assert (PLANTED[plant], "healed") in {(violation.rule, violation.run) for violation in found}
    assert {violation.run for violation in found} == {"healed"}


async def test_what_is_left_behind_is_named_and_comes_last(job: Job) -> None:
    facts = replace(went_back(await facts_of(job)), left=["worker 4711 of run healed"])
    assert [violation.rule for violation in judge(facts)] == [Rule.BACK, Rule.LEFT]


def test_every_rule_was_seen_to_fail() -> None:
    """A rule without a plant above may be one that cannot fail."""
    told = Path(__file__).read_text(encoding="utf-8").partition("def test_every_rule")[0]
    assert [rule.name for rule in Rule if f"Rule.{rule.name}" not in told] == []


# What the watch sees while everything goes on.


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ({}, "it is gone"),
        ({"run": Stand(1, 1, 9, HEAD)}, "epoch 1 after 2"),
        ({"run": Stand(1, 3, 7, HEAD)}, "7 records after 8"),
        ({"run": Stand(1, 2, 8, b"other")}, "another record 8 than before"),
    ],
)
def test_a_row_that_goes_back_is_seen_though_it_comes_forward_again(later: dict[str, Stand], why: str) -> None:
    watch = Watch(MemoryCheckpointStore())
    watch.take({"run": Stand(1, 2, 8, HEAD)})
    watch.take(later)
    watch.take({"run": Stand(8, 4, 20, b"last")})
    assert watch.went_back == {"run": why}


def test_a_run_that_had_ended_and_is_changed_is_seen() -> None:
    watch = Watch(MemoryCheckpointStore())
    watch.take({"run": Stand(8, 2, 8, HEAD)})
    watch.take({"run": Stand(1, 3, 9, b"more")})
    assert "it had ended, and was changed" in watch.went_back["run"]


def test_a_row_that_only_moves_forward_is_no_alarm() -> None:
    watch = Watch(MemoryCheckpointStore())
    for stand in (
        Stand(1, 1, 2, b"a"),
        Stand(1, 1, 2, b"a"),
        Stand(1, 2, 3, b"b"),
        Stand(8, 2, 9, b"c"),
        Stand(8, 2, 9, b"c"),
    ):
        watch.take({"run": stand})
    assert watch.went_back == {}


@contextmanager
def changed(store: Path) -> Iterator[sqlite3.Connection]:
    """The file, open to somebody who has no key."""
    connection = sqlite3.connect(store)
    yield connection
    connection.commit()
    connection.close()
