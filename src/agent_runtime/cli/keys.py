"""`agent-runtime keygen`, `reseal`: a fresh key, and the moving of stored runs to the active one."""

from __future__ import annotations

import argparse
import base64
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator

from agent_runtime.cli.decide import add_command, user_name
from agent_runtime.cli.tables import json_line, printable
from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.journal.keys import check_key_id, write_key
from agent_runtime.rekeying import Resealed
from agent_runtime.runs import Runs

KEY_SIZE = 32
PROGRESS_EVERY = 20


def add_keygen(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command that looks at no store."""
    keygen = commands.add_parser("keygen", help="make a fresh checkpoint key, base64: print it, or write it to a file")
    keygen.add_argument("--out", metavar="PATH", help="write it there, for its owner alone; what is there is never replaced")
    keygen.add_argument("--id", metavar="ID", help="its id on a ring; what to put in CHECKPOINT_KEY is printed with it")


def keygen(chosen: argparse.Namespace) -> int:
    """Run it; gives the exit code."""
    if chosen.id is not None:
        check_key_id(chosen.id)
    fresh = SYSTEM_ENTROPY.draw(KEY_SIZE)
    value = base64.b64encode(fresh).decode()
    if chosen.out is not None:
        write_key(chosen.out, fresh)
        value = f"file:{os.path.abspath(chosen.out)}"
    print(value if chosen.id is None else f"{chosen.id}={value}")
    return 0


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands that look at a store."""
    command = add_command(
        commands, "reseal", "move a run, or all, to the active key; exit code 1 where any is left under another one"
    )
    command.add_argument("run", metavar="RUN", nargs="?")
    command.add_argument("--by", metavar="NAME", help="who says so; it is recorded (default: the user)")
    command.add_argument("--even-revoked", action="store_true", help="also runs under a revoked key that you know are genuine")


async def reseal(runs: Runs, chosen: argparse.Namespace) -> int:
    """Run it; gives the exit code."""
    counted: Counter[str] = Counter()
    async for resealed in _each(runs, chosen):
        counted[_word(resealed)] += 1
        if chosen.json:
            plain = {"run": resealed.run_id, "was": resealed.was, "now": resealed.now, "moved": resealed.moved}
            print(json_line({**plain, "why": resealed.why}))
        elif resealed.why:
            _clear_progress()
            print(printable(f"left  {resealed.run_id}  {resealed.why}"))
        _show_progress(counted)
    _clear_progress()
    if not chosen.json:
        total, moved = counted.total(), counted["moved"]
        print(f"{moved} of {total} {'run' if total == 1 else 'runs'} moved; left as they were: {counted['left'] or 'none'}")
    return 1 if counted["left"] else 0


def _word(resealed: Resealed) -> str:
    if resealed.why:
        return "left"
    return "moved" if resealed.moved else "there"


async def _each(runs: Runs, chosen: argparse.Namespace) -> AsyncIterator[Resealed]:
    by = chosen.by or user_name()
    if chosen.run is not None:
        [resealed] = await runs.reseal(chosen.run, by=by, even_revoked=chosen.even_revoked)
        yield resealed
        return
    async for resealed in runs.reseal_each(by=by, even_revoked=chosen.even_revoked):
        yield resealed


def _show_progress(counted: Counter[str]) -> None:
    if counted.total() % PROGRESS_EVERY == 0 and sys.stderr.isatty():
        print(f"\r{counted.total()} runs, {counted['moved']} moved", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
