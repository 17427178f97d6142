"""The calls of a run as rows of a table: how each stands in a word, and how each of its attempts went. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent_runtime.described import CORRUPT
from agent_runtime.ids import RunId, build_key
from agent_runtime.journal.states import CallState
from agent_runtime.run import prefix_of
from agent_runtime.runs import RunReport
from agent_runtime.timeline import Call, Segment, Timeline, Try


class Attempt(NamedTuple):
    """One attempt: when it began, how long it took as far as its worker said, and how it ended."""

    number: int
    epoch: int
    started_ms: int | None
    took_ms: int | None
    ended: str


class Row(NamedTuple):
    """One call. `tone` is the colour of its word."""

    call: Call
    word: str
    tone: str
    attempts: Sequence[Attempt]
    error: str = ""


class Gap(NamedTuple):
    """Nobody worked the run for so long before a segment."""

    took_ms: int


def rows(report: RunReport) -> list[Row]:
    """Every call, in the order in which they began."""
    return [_row(call, report.info.status) for call in report.timeline.calls.values()]


def doubts(report: RunReport) -> Sequence[Call]:
    """The calls of which nobody knows whether they happened: none of a run whose worker is at them, or
    of which not all is known."""
    return () if report.info.status in ("running", CORRUPT) else report.timeline.doubts


def keys(report: RunReport) -> Mapping[str, str]:
    """The idempotency key of each call in doubt: what its remote is asked by."""
    prefix = prefix_of(RunId(report.info.run_id), report.timeline.opened)
    return {call.call: build_key(prefix, call.call) for call in doubts(report)}


def segments(timeline: Timeline) -> list[tuple[Gap | None, Segment]]:
    """The segments, each with the gap before it."""
    told: list[tuple[Gap | None, Segment]] = []
    for before, segment in zip([None, *timeline.segments], timeline.segments, strict=False):
        told.append((_gap(before, segment), segment))
    return told


def _gap(before: Segment | None, segment: Segment) -> Gap | None:
    if before is None or before.last_ms is None or segment.began_ms is None or segment.began_ms <= before.last_ms:
        return None
    return Gap(segment.began_ms - before.last_ms)


def _row(call: Call, status: str) -> Row:
    word, tone = _word(call, status)
    error = call.outcome.get("error")
    told = f"{error.get('type', 'Error')}: {error.get('message', '')}" if isinstance(error, Mapping) else ""
    return Row(call, word, tone, [_attempt(each) for each in call.tries], told)


def _attempt(each: Try) -> Attempt:
    took = None if each.started_ms is None or each.ended_ms is None else max(0, each.ended_ms - each.started_ms)
    return Attempt(each.attempt, each.epoch, each.started_ms, took, each.ended or "never said")


def _word(call: Call, status: str) -> tuple[str, str]:
    if call.state is CallState.DONE:
        return ("error", "bad") if "error" in call.outcome else ("done", "good")
    if status == CORRUPT:
        return "no more holds", "plain"
    if call.is_waiting:
        return "waits for approval", "wait"
    if call.is_decision or (status == "running" and call.is_in_doubt):
        return "under way", "run"
    if call.is_in_doubt:
        return "in doubt", "bad"
    return call.state.value, "plain"
