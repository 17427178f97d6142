"""`agent-runtime runs`, `show`, `release`: the commands of an operator who looks."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict

from agent_runtime.cli import decide, keep, keys
from agent_runtime.cli.decide import add_command, add_redact, user_name
from agent_runtime.cli.drawn import FINE, PLAIN, Ink, draw_text
from agent_runtime.cli.tables import cut, json_line, print_rows, print_table, printable, told_at
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.described import CORRUPT, Left, told_sound
from agent_runtime.errors import CheckpointStoreCorrupt, InvalidSetting
from agent_runtime.picture import draw
from agent_runtime.provision import stored_key
from agent_runtime.redaction import Redact, redact_names
from agent_runtime.runs import STATUSES, RunInfo, RunReport, Runs, report_of_archive
from agent_runtime.settings import Settings, read_settings
from agent_runtime.stores import file_at, open_store
from agent_runtime.timeline import Call, Moment

HEAD = ("RUN", "STATUS", "PROGRAM", "STEP", "ATTEMPTS", "WORKER", "UPDATED", "WHY")
LONGEST_DETAIL = 200
MOMENT = 48
"""About how many columns stand before the details of a record."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The operator's commands and their options."""
    runs = add_command(commands, "runs", "list the runs, the dead and the doubtful by what they are")
    runs.add_argument("--status", choices=STATUSES, help="only runs that stand so")
    show = add_command(commands, "show", "say what happened to a run, claim by claim")
    show.add_argument("run", metavar="RUN", help="its id, or the file that it is archived in")
    for command in (runs, show):
        add_redact(command)
    release = add_command(commands, "release", "let a quarantined run go again")
    release.add_argument("run", metavar="RUN")
    release.add_argument("--by", metavar="NAME", help="who says so; it is recorded (default: the user)")
    keep.add_commands(commands)
    keys.add_commands(commands)
    decide.add_commands(commands)


def main(chosen: argparse.Namespace) -> int:
    """Run one of them; gives its exit code."""
    settings = read_settings(os.environ)
    return asyncio.run(_operate(chosen, settings._replace(database_url=chosen.store or settings.database_url)))


async def _operate(chosen: argparse.Namespace, settings: Settings) -> int:
    if keep.needs_no_store(chosen):
        return _show_file(chosen, settings) if chosen.command == "show" else await keep.verify(None, chosen, settings)
    check_there(settings.database_url)
    store = open_store(settings.database_url)
    try:
        key = stored_key(settings)
        runs = Runs(store, checkpoint_key=key, max_value_bytes=settings.max_value_bytes, redact=_redact(chosen))
        match chosen.command:
            case "runs":
                return await _list(runs, chosen)
            case "show":
                return await _show_run(runs, chosen)
            case "release":
                return await _release(runs, chosen)
            case "verify":
                return await keep.verify(runs, chosen, settings)
            case "archive":
                return await keep.archive(runs, chosen)
            case "purge":
                return await keep.purge(runs, store, chosen)
            case "reseal":
                return await keys.reseal(runs, chosen)
            case _:
                return await decide.decide(runs, chosen)
    finally:
        await store.close()


def check_there(url: str) -> None:
    """Looking at a store makes none: who mistypes its name is told so."""
    if url.startswith("memory:"):
        raise InvalidSetting("a store in memory holds nothing of other processes; name another with --store or DATABASE_URL")
    path = file_at(url)
    if path is not None and not os.path.exists(path):
        raise InvalidSetting(f"there is no store at {path!r}; name another with --store or DATABASE_URL")


# Listing.


async def _list(runs: Runs, chosen: argparse.Namespace) -> int:
    found = runs.each(status=chosen.status)
    if chosen.json:
        async for info in found:
            print(json_line(_plain(info)))
    else:
        await print_table(HEAD, _cells(found))
    return 0


async def _cells(found: AsyncIterator[RunInfo]) -> AsyncIterator[Sequence[str]]:
    async for info in found:
        numbers = (str(info.step), str(info.attempts)) if info.kind else ("", "")
        yield info.run_id, info.status, _program(info), *numbers, info.owner, told_at(info.updated_at), info.why


def _program(info: RunInfo) -> str:
    return f"{info.kind} {info.name}".strip()


def _plain(info: RunInfo) -> dict[str, object]:
    """What is known of a run: of a corrupt one, no more than that."""
    plain = {"run": info.run_id, **asdict(info)}
    del plain["run_id"]
    return plain if info.kind else {name: plain[name] for name in ("run", "status", "why")}


# Showing.


def _redact(chosen: argparse.Namespace) -> Redact | None:
    """What hides what stands under the names that were given."""
    names = getattr(chosen, "redact", None)
    return redact_names(*names) if names else None


async def _show_run(runs: Runs, chosen: argparse.Namespace) -> int:
    """What happened to a run; what of a corrupt one still holds, and then what is wrong with it."""
    try:
        report = await runs.show(chosen.run)
    except CheckpointStoreCorrupt:
        report = await runs.inspect(chosen.run)
        if report.sound:
            _show(report, as_json=chosen.json)
        raise
    return _show(report, as_json=chosen.json)


def _show(report: RunReport, *, as_json: bool) -> int:
    if as_json:
        waiting, doubts = ([call.call for call in calls] for calls in (report.timeline.pending, report.timeline.doubts))
        held = {"sound": report.sound, "broken": report.broken} if report.info.status == CORRUPT else {}
        open_ones = {"pending": waiting, "doubts": doubts, "left": [left._asdict() for left in report.left]}
        print(json_line({**_plain(report.info), **held, **asdict(report.timeline), **open_ones}))
    else:
        _print_report(report)
    return 0


def _show_file(chosen: argparse.Namespace, settings: Settings) -> int:
    """What happened to an archived run, once every seal in its file holds."""
    report = report_of_archive(chosen.run, checkpoint_key=stored_key(settings), redact=_redact(chosen))
    return _show(report, as_json=chosen.json)


def _print_report(report: RunReport) -> None:
    info, timeline = report.info, report.timeline
    print_rows([*_of_corrupt(report)] if info.status == CORRUPT else [*_facts(info), *_counts(report)])
    print()
    print_picture(report)
    for segment in timeline.segments:
        who = f"process {segment.pid} on {segment.host}" if segment.pid else "unknown"
        left = segment.left or ("no more of it holds" if info.status == CORRUPT else "no word of its end")
        print()
        print(printable(f"claim {segment.epoch} ({segment.why}) by {who}: {left}"))
        print_rows([_moment(moment) for moment in segment.moments])
    if info.status == CORRUPT:
        return
    words = {(each.what, each.call): each for each in report.left}
    for call in timeline.pending:
        said = _said(words.get(("verdict", call.call)), "answered") or "answer it with `agent-runtime approve` or `deny`"
        print()
        print(printable(f"waiting for approval: {_told(call)}; {said}"))
    for call in timeline.doubts:
        said = _said(words.get(("settlement", call.call)), "settled") or "nobody knows whether it happened"
        print()
        print(printable(f"in doubt: {_told(call)}; {said}"))


def _said(left: Left | None, what: str) -> str:
    """What somebody said of a call that no worker has taken up yet."""
    if left is None:
        return ""
    return f"{what}: {left.how}, by {left.by}{f' ({left.why})' if left.why else ''}; whoever works the run takes it up"


def print_picture(report: RunReport) -> None:
    """The run on a time axis, as wide as the terminal."""
    picture = draw(report.timeline, now_ms=SYSTEM_CLOCK.now_ms(), is_running=report.info.status == "running")
    if picture is None:
        return
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in draw_text(picture, width=_columns(), ink=_ink(), colour=has_colour):
        print(line)


def _ink() -> Ink:
    """The characters that this terminal has."""
    return FINE if (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf") else PLAIN


def _columns() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _facts(info: RunInfo) -> Iterator[tuple[str, str]]:
    yield "run", info.run_id
    yield "status", f"{info.status}: {info.why}" if info.why else info.status
    yield "program", _program(info)
    yield "step", str(info.step)
    yield "attempts", f"{info.attempts} since the last progress"
    if info.owner:
        yield "worker", info.owner
    if info.wake_at is not None:
        yield "wakes", told_at(info.wake_at)
    yield "created", told_at(info.created_at)
    yield "updated", told_at(info.updated_at)


def _of_corrupt(report: RunReport) -> Iterator[tuple[str, str]]:
    """What is to be said of a corrupt run: its row may be what was changed."""
    yield "run", report.info.run_id
    yield "status", f"{report.info.status}: {report.info.why}"
    yield "holds", told_sound(report)


def _counts(report: RunReport) -> Iterator[tuple[str, str]]:
    timeline = report.timeline
    yield "decisions", f"{len(timeline.decisions)}, model asked {timeline.model_requests} times"
    yield "calls", _counted(report)
    if timeline.usage:
        yield "usage", _usage(timeline.usage)
    if timeline.was_recovered:
        saved = timeline.saved
        spared = f" ({_usage(saved.usage)})" if saved.usage else ""
        yield "recovered", f"not done again: {saved.decisions} decisions{spared}, {saved.calls} calls"


def _usage(usage: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in usage.items())


def _counted(report: RunReport) -> str:
    tools = [call for call in report.timeline.calls.values() if not call.is_decision]
    waiting = f", {len(report.timeline.pending)} waiting for approval" if report.timeline.pending else ""
    return f"{len(tools)}, {len(report.timeline.doubts)} in doubt{waiting}"


def _moment(moment: Moment) -> tuple[str, ...]:
    attempt = f"attempt {moment.attempt}" if moment.attempt else ""
    details = "" if moment.what == "claimed" or not moment.details else json_line(moment.details)
    longest = max(20, _columns() - MOMENT) if sys.stdout.isatty() else LONGEST_DETAIL
    return f"{moment.number:>6}", moment.what, moment.call, attempt, cut(details, longest, _ink().ellipsis)


def _told(call: Call) -> str:
    attempt = f", attempt {call.attempts}" if call.attempts else ""
    return f"call {call.call}, {call.tool}{json_line(call.args)}{attempt}"


# Releasing.


async def _release(runs: Runs, chosen: argparse.Namespace) -> int:
    released = await runs.release(chosen.run, by=chosen.by or user_name())
    if chosen.json:
        print(json_line({"run": chosen.run, "released": released}))
    else:
        said = "goes again" if released else "is in no quarantine; nothing was changed"
        print(printable(f"run {chosen.run} {said}"))
    return 0
