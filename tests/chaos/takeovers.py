"""How long a run whose worker was hit waited for the next one: from journals, hits, and the moments of claims. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from agent_runtime.runs import RunReport
from tests.chaos.faults import Hit
from tests.chaos.logs import Heard
from tests.chaos.plan import Kind

PAUSE_SECONDS = 10.0
"""A pause that a supervisor set so long before a hit is over."""


class Takeover(NamedTuple):
    """A run that was claimed again after its worker was hit."""

    hit: Hit
    seconds: float
    is_undisturbed: bool
    """Whether nothing else was wrong meanwhile."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of so many takeovers."""

    count: int
    median: float
    worst: float

    @staticmethod
    def of(takeovers: Iterable[Takeover]) -> Times:
        seconds = [takeover.seconds for takeover in takeovers]
        return Times(len(seconds), median(seconds), max(seconds)) if seconds else Times(0, 0.0, 0.0)


def find_takeovers(
    hits: Sequence[Hit], reports: Mapping[str, RunReport], heard: Heard, troubles: Sequence[tuple[float, float]]
) -> list[Takeover]:
    """Of each hit worker that held its run then, when somebody else claimed it."""
    found = []
    for hit in hits:
        claimed_at = _claimed_after(hit, reports.get(hit.run), heard)
        if claimed_at is None:
            continue
        is_disturbed = any(start <= claimed_at and hit.at <= end for start, end in troubles)
        is_pausing = any(run == hit.run and hit.at - PAUSE_SECONDS <= at <= claimed_at for run, at in heard.pauses)
        found.append(Takeover(hit, claimed_at - hit.at, not is_disturbed and not is_pausing))
    return found


def _claimed_after(hit: Hit, report: RunReport | None, heard: Heard) -> float | None:
    """When the claim after the victim's own one came; None where the victim had none, or the run was not claimed again."""
    if report is None:
        return None
    for own, after in pairwise(report.timeline.segments):
        claimed_at = heard.claims.get((hit.run, after.epoch))
        if own.pid == hit.pid and after.why == "recovery" and claimed_at is not None and claimed_at >= hit.at:
            return claimed_at
    return None


def times_of(takeovers: Sequence[Takeover], kind: Kind, *, undisturbed: bool = False) -> Times:
    """Of the takeovers after hits of a kind; or only of those during which nothing else was wrong."""
    return Times.of(each for each in takeovers if each.hit.kind is kind and (each.is_undisturbed or not undisturbed))
