"""`agent-runtime purge`, `archive`, `verify`: what is kept, for how long, and whether it is as it was written."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress

from agent_runtime.archive import archives_in, verify_archive
from agent_runtime.cli.decide import add_command, user_name
from agent_runtime.cli.tables import json_line, print_rows, printable, told_at
from agent_runtime.errors import CheckpointStoreCorrupt, InvalidSetting, NewerFormat
from agent_runtime.journal.seal import KeyRing
from agent_runtime.journal.store import CheckpointStore, Roomy
from agent_runtime.provision import stored_key
from agent_runtime.retention import FINISHED, UNDECIDED, Purged, parse_duration
from agent_runtime.runs import Runs, Verified
from agent_runtime.settings import Settings

BAR_WIDTH = 30
PROGRESS_EVERY = 50
MOST_SHOWN = 1000
"""So many runs a purge lists for people; for programs it lists all."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands, and their options."""
    verify = add_command(
        commands,
        "verify",
        "open every seal of runs, of archives, or of the whole store; exit code 1 where anything is corrupt",
    )
    verify.add_argument(
        "what", metavar="RUN|FILE|FOLDER", nargs="*", help="what is there as a file or a folder counts as such"
    )
    archive = add_command(commands, "archive", "write a run that has ended to one file, which `verify` checks without a store")
    archive.add_argument("run", metavar="RUN")
    archive.add_argument("file", metavar="FILE", help="the file to make")
    archive.add_argument("--delete", action="store_true", help="then remove the run from its store")
    _add_by(archive)
    purge = add_command(commands, "purge", "remove runs that ended long ago; their ids are not used again")
    purge.add_argument(
        "--older-than", metavar="AGE", type=_duration, required=True, help="since their last write: 30d, 12h, 90m, 2w"
    )
    purge.add_argument(
        "--status", action="append", choices=(*FINISHED, *UNDECIDED), help=f"only these; may be repeated (default: {FINISHED})"
    )
    purge.add_argument("--name", metavar="NAME", help="only runs of that name")
    purge.add_argument("--limit", metavar="N", type=_count, help="no more than N runs")
    purge.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    purge.add_argument("--force", action="store_true", help="also with calls in doubt, and statuses that wait for somebody")
    purge.add_argument("--archive-to", metavar="FOLDER", help="archive each run there first")
    purge.add_argument("--vacuum", action="store_true", help="then give the room back to the file system, where the store can")
    _add_by(purge)


def _add_by(command: argparse.ArgumentParser) -> None:
    command.add_argument("--by", metavar="NAME", help="who says so (default: the user)")


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except InvalidSetting as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a whole number from 1, found {text!r:.50}")
    return int(text)


def needs_no_store(chosen: argparse.Namespace) -> bool:
    """Whether all that the command names are files."""
    match chosen.command:
        case "show":
            return os.path.isfile(chosen.run)
        case "verify":
            return bool(chosen.what) and all(map(os.path.exists, chosen.what))
        case _:
            return False


# Verifying.


async def verify(runs: Runs | None, chosen: argparse.Namespace, settings: Settings) -> int:
    """Open the seals of what is named, or of all runs; `runs` is none where only files are named."""
    count, records, corrupt = 0, 0, 0
    under: Counter[str] = Counter()
    progress = Progress("runs")
    async for where, verified in _to_verify(runs, chosen.what, settings):
        count, records, corrupt = count + 1, records + verified.records, corrupt + (not verified.holds)
        under.update([verified.key_id] if verified.holds else [])
        if chosen.json:
            plain = {
                "run": verified.run_id, "records": verified.records, "holds": verified.holds, "why": verified.why,
                "key": verified.key_id,
            }  # fmt: skip
            print(json_line({**plain, "file": where} if where else plain))
        elif not verified.holds:
            progress.clear()
            print(printable(f"corrupt  {where or verified.run_id}  {verified.why}"))
        progress.show(count)
    progress.clear()
    if not chosen.json:
        print(f"verified {count} {'run' if count == 1 else 'runs'}, {records} records: {corrupt or 'none'} corrupt")
        for key_id, runs_under in sorted(under.items()):
            print(printable(f"under key {key_id}: {runs_under} {'run' if runs_under == 1 else 'runs'}"))
    return 1 if corrupt else 0


async def _to_verify(runs: Runs | None, what: Sequence[str], settings: Settings) -> AsyncIterator[tuple[str, Verified]]:
    """Each file or run, and where it is, if it is a file."""
    ring: KeyRing | None = None
    for each in what:
        files = _archives_at(each)
        if files is not None:
            ring = ring or stored_key(settings)
            for path in files:
                yield path, _verify_file(path, ring)
        elif runs is not None:
            for verified in await runs.verify(each):
                yield "", verified
    if not what and runs is not None:
        async for verified in runs.verify_each():
            yield "", verified


def _archives_at(path: str) -> Iterable[str] | None:
    """The files to look at; none at all where nothing is there, and it is the id of a run."""
    if os.path.isdir(path):
        return archives_in(path)
    return [path] if os.path.exists(path) else None


def _verify_file(path: str, ring: KeyRing) -> Verified:
    try:
        archived = verify_archive(path, checkpoint_key=ring)
    except (CheckpointStoreCorrupt, NewerFormat) as error:
        return Verified("", why=str(error))
    return Verified(archived.run_id, archived.records, key_id=archived.key_id)


# Archiving.


async def archive(runs: Runs, chosen: argparse.Namespace) -> int:
    """Archive a run, and remove it where that is asked for."""
    archived = await runs.archive(chosen.run, chosen.file)
    if chosen.delete:
        await runs.delete(chosen.run, by=chosen.by or user_name())
    if chosen.json:
        plain = {"run": chosen.run, "file": chosen.file, "records": archived.records, "bytes": archived.size}
        print(json_line({**plain, "deleted": chosen.delete}))
    else:
        then = ", and removed from the store" if chosen.delete else ""
        print(printable(f"run {chosen.run} is archived in {chosen.file}: {archived.records} records{then}"))
    return 0


# Purging.


async def purge(runs: Runs, store: CheckpointStore, chosen: argparse.Namespace) -> int:
    """Remove what is old, and say what stays and why."""
    progress, removed, left, records, size = Progress("runs"), 0, 0, 0, 0
    shown: list[Sequence[str]] = []
    options = {"name": chosen.name, "limit": chosen.limit, "archive_to": chosen.archive_to, "force": chosen.force}
    found = runs.purge_each(
        chosen.older_than, by=chosen.by or user_name(), status=chosen.status or FINISHED, dry_run=chosen.dry_run, **options
    )
    async for purged in found:
        if purged.left:
            left += 1
        else:
            removed, records, size = removed + 1, records + purged.records, size + purged.size
        if chosen.json:
            print(json_line(_plain(purged, dry_run=chosen.dry_run)), flush=True)
        elif purged.left or (chosen.dry_run and len(shown) < MOST_SHOWN):
            shown.append(_cells(purged))
        progress.show(removed + left)
    progress.clear()
    if shown:
        print_rows(shown)
    if chosen.vacuum and not chosen.dry_run:
        await _vacuum(store, as_json=chosen.json)
    if not chosen.json:
        did = "would remove" if chosen.dry_run else "removed"
        stay = f"; {left} stay" if left else ""
        print(f"{did} {removed} {'run' if removed == 1 else 'runs'}, {records} records, {size:,} bytes{stay}")
    return 0


def _plain(purged: Purged, *, dry_run: bool) -> dict[str, object]:
    plain = {
        "run": purged.run_id, "status": purged.status, "updated_at": purged.updated_at, "records": purged.records,
        "bytes": purged.size, "removed": not (purged.left or dry_run), "left": purged.left,
    }  # fmt: skip
    return {**plain, "archive": purged.archive} if purged.archive else plain


def _cells(purged: Purged) -> Sequence[str]:
    said = f"stays: {purged.left}" if purged.left else f"{purged.records} records, {purged.size:,} bytes"
    return purged.run_id, purged.status, told_at(purged.updated_at), said


async def _vacuum(store: CheckpointStore, *, as_json: bool) -> None:
    freed = await store.vacuum() if isinstance(store, Roomy) else None
    if as_json:
        print(json_line({"vacuum": freed is not None, "bytes": freed or 0}))
    else:
        print("this store gives room back by itself" if freed is None else f"gave back {freed:,} bytes")


class Progress:
    """How far a long command is: a bar on a terminal that comes and goes, and nothing elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = sys.stderr.isatty()

    def show(self, count: int) -> None:
        """So many are done; how many there are nobody knows, so the bar runs round."""
        if self._is_shown and count % PROGRESS_EVERY == 0:
            at = count // PROGRESS_EVERY % BAR_WIDTH
            bar = "".join("=" if place == at else "-" for place in range(BAR_WIDTH))
            self._print(f"\r[{bar}] {count} {self._what}")

    def clear(self) -> None:
        if self._is_shown:
            self._print("\r\x1b[K")

    @staticmethod
    def _print(text: str) -> None:
        with suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)
