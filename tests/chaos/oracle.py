"""Judges a chaos run by what the remotes counted and what the journals say. Pure.

The remotes are no part of the system: what they counted has happened, whatever a journal says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from agent_runtime.ids import build_key, key_prefix
from agent_runtime.runs import RunReport
from agent_runtime.timeline import Call, Moment, Timeline

CALLS = 3
"""How many calls the provisioning agent makes."""


class Rule(Enum):
    """What must be true at the end, in the order in which a reader should look at what is not."""

    SEALED = "every journal verifies"
    LOST = "a run that was put in, or that a remote knows, stands in the store"
    STUCK = "every run that was put in gets done"
    DOUBLE = "one key, one effect, one set of arguments"
    EFFECT = "each confirmed call has its effect, and each effect its confirmed call"
    UNASKED = "a request stands in the journal before it is sent"
    BOUGHT = "a decision on record is never asked for again"
    BACK = "epochs and journals only grow, and what has ended stays"
    QUARANTINE = "a run is set aside after so many claims without progress, and not before"
    POISON = "a poison run is set aside while others get done, and gets done once it is released"
    LEFT = "no process, session or file is left behind"


class Violation(NamedTuple):
    """A rule that did not hold, of which run (empty: of none), and what was found."""

    rule: Rule
    run: str
    found: str

    def __str__(self) -> str:
        return f"{self.rule.value}: {f'run {self.run}: ' if self.run else ''}{self.found}"


@dataclass(slots=True)
class Facts:
    """What there is to judge."""

    put_in: Sequence[str]
    poison: Sequence[str]
    max_attempts: int
    reports: Mapping[str, RunReport]
    """What is stored, each run verified as a whole."""
    corrupt: Mapping[str, str]
    """Runs that do not verify, and why."""
    asked: Mapping[str, int]
    """How many requests the model had, by run."""
    requests: Mapping[str, Mapping[str, int]]
    """How many requests the cloud had by key, and what came of them."""
    resources: Mapping[str, str]
    """What exists at the cloud, by key."""
    made: int
    """How many resources exist, whatever their key."""
    started: Mapping[str, int] = field(default_factory=dict)
    """How often a worker said that it has started a run as a new one."""
    went_back: Mapping[str, str] = field(default_factory=dict)
    done_meanwhile: Mapping[str, int] = field(default_factory=dict)
    """How many other runs got done between a poison run's start and the moment it was set aside."""
    left: Sequence[str] = ()


def judge(facts: Facts) -> list[Violation]:
    """Everything that is not as it must be, the gravest first."""
    order = {rule: place for place, rule in enumerate(Rule)}
    return sorted(_all(facts), key=lambda violation: (order[violation.rule], violation.run))


def count_set_aside(reports: Mapping[str, RunReport]) -> int:
    """How often runs were set aside."""
    return sum(moment.what == "quarantined" for report in reports.values() for moment in _moments(report.timeline))


def _all(facts: Facts) -> Iterator[Violation]:
    for run, why in facts.corrupt.items():
        yield Violation(Rule.SEALED, run, why)
    yield from _lost_and_stuck(facts)
    yield from _doubles(facts)
    for run, report in facts.reports.items():
        yield from _of_run(facts, run, report)
    for run, why in facts.went_back.items():
        yield Violation(Rule.BACK, run, why)
    for run in facts.poison:
        yield from _of_poison(facts, run)
    for what in facts.left:
        yield Violation(Rule.LEFT, "", what)


def _lost_and_stuck(facts: Facts) -> Iterator[Violation]:
    stored = {*facts.reports, *facts.corrupt}
    known = {*facts.asked, *(key.rpartition(":")[0] for key in facts.requests)}
    for run in sorted({*facts.put_in, *known} - stored):
        yield Violation(Rule.LOST, run, "the store does not know it")
    for run, times in facts.started.items():
        if times > 1:
            yield Violation(Rule.LOST, run, f"it was started {times} times as a new run")
    for run in facts.put_in:
        if run in facts.reports and facts.reports[run].info.status != "done":
            yield Violation(Rule.STUCK, run, f"it is {facts.reports[run].info.status} at the end")


def _doubles(facts: Facts) -> Iterator[Violation]:
    for key, counts in facts.requests.items():
        if counts["created"] > 1:
            yield Violation(Rule.DOUBLE, key.rpartition(":")[0], f"key {key} created {counts['created']} resources")
        if counts["conflict"]:
            yield Violation(Rule.DOUBLE, key.rpartition(":")[0], f"key {key} was used with other arguments")
    once = sum(counts["created"] > 0 for counts in facts.requests.values())
    if facts.made != once:
        yield Violation(Rule.DOUBLE, "", f"{facts.made} resources exist for {once} keys")


def _of_run(facts: Facts, run: str, report: RunReport) -> Iterator[Violation]:
    timeline = report.timeline
    confirmed: dict[str, object] = {}
    for call in timeline.calls.values():
        if call.is_decision:
            continue
        key = build_key(key_prefix(run, ""), call.call)
        yield from _of_call(facts, run, key, call)
        if call.outcome:
            confirmed[key] = _resource(call)
    yield from _of_effects(facts, run, confirmed, is_done=report.info.status == "done")
    starts = sum(moment.what == "started" for moment in _of_decisions(timeline))
    if facts.asked.get(run, 0) > starts:
        yield Violation(Rule.UNASKED, run, f"the model had {facts.asked[run]} requests, the journal has {starts}")
    yield from _bought_again(run, timeline)
    epochs = [segment.epoch for segment in timeline.segments]
    if any(later <= earlier for earlier, later in pairwise(epochs)) or epochs[-1:] != [report.info.epoch]:
        yield Violation(Rule.BACK, run, f"its epochs are {epochs}, and {report.info.epoch} on its row")
    yield from _of_quarantines(facts, run, timeline)


def _of_call(facts: Facts, run: str, key: str, call: Call) -> Iterator[Violation]:
    sent = facts.requests.get(key, {}).get("requests", 0)
    if sent > call.attempts:
        yield Violation(Rule.UNASKED, run, f"the cloud had {sent} requests under {key}, the journal has {call.attempts}")


def _resource(call: Call) -> object:
    result = call.outcome.get("result")
    return result.get("id") if isinstance(result, Mapping) else call.outcome


def _of_effects(facts: Facts, run: str, confirmed: Mapping[str, object], *, is_done: bool) -> Iterator[Violation]:
    for key, resource in confirmed.items():
        if facts.resources.get(key) != resource:
            found = facts.resources.get(key, "nothing")
            yield Violation(Rule.EFFECT, run, f"{key} is confirmed as {resource}, and the cloud has {found}")
    made = {key for key in facts.resources if key.rpartition(":")[0] == run}
    if is_done and made != set(confirmed):
        yield Violation(Rule.EFFECT, run, f"the cloud has {sorted(made)}, and {sorted(confirmed)} are confirmed")
    elif is_done and len(made) != CALLS:
        yield Violation(Rule.EFFECT, run, f"it is done with {len(made)} calls of {CALLS}")


def _moments(timeline: Timeline) -> Iterator[Moment]:
    for segment in timeline.segments:
        yield from segment.moments


def _of_decisions(timeline: Timeline) -> Iterator[Moment]:
    decisions = {call.call for call in timeline.decisions}
    return (moment for moment in _moments(timeline) if moment.call in decisions)


def _bought_again(run: str, timeline: Timeline) -> Iterator[Violation]:
    ended: set[str] = set()
    for moment in _of_decisions(timeline):
        if moment.call in ended:
            yield Violation(Rule.BOUGHT, run, f"{moment.call} was asked for again in record {moment.number}")
        if moment.what == "done":
            ended.add(moment.call)


def _of_quarantines(facts: Facts, run: str, timeline: Timeline) -> Iterator[Violation]:
    claims = 0
    for moment in _moments(timeline):
        match moment.what:
            case "claimed":
                claims += 1
            case "done":
                claims = 0
            case "quarantined":
                if claims < facts.max_attempts:
                    yield Violation(Rule.QUARANTINE, run, f"it was set aside after {claims} claims without progress")
                claims = 0
            case _:
                continue


def _of_poison(facts: Facts, run: str) -> Iterator[Violation]:
    report = facts.reports.get(run)
    if report is None:
        return  # lost, or corrupt, and named so
    if not any(moment.what == "quarantined" for moment in _moments(report.timeline)):
        yield Violation(Rule.POISON, run, "it was never set aside")
    elif not facts.done_meanwhile.get(run):
        yield Violation(Rule.POISON, run, "no other run got done while it was there")
