"""Workers and supervisors under every fault, judged by what the remotes counted: `python -m tests.chaos [--json]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from tests.chaos.driver import Options, drive
from tests.chaos.plan import Kind
from tests.chaos.stores import STORES

BAR = 30
SHOW_EVERY_SECONDS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Strike, wait, judge, print; gives the exit code: 1 where a rule did not hold."""
    chosen = _parser().parse_args(arguments)
    seconds = chosen.seconds or chosen.minutes * 60
    options = Options(
        chosen.store, chosen.seed, seconds, chosen.workers, chosen.supervisors, chosen.kills, chosen.latency_ms,
        chosen.max_attempts, chosen.rest_within, frozenset(Kind[name.upper()] for name in chosen.only or ()),
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="chaos-")) if chosen.folder is None else chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"chaos on {options.store} for {seconds:.0f} s, seed {options.seed}", file=sys.stderr, flush=True)
    bar = _Bar()
    try:
        result = asyncio.run(drive(options, folder, bar.show))
    except KeyboardInterrupt:
        bar.clear()
        print(f"stopped; what was written is kept in {folder}", file=sys.stderr)
        return 130
    bar.clear()
    if result.holds and chosen.folder is None:
        shutil.rmtree(folder)
    result = replace(result, folder=str(folder), again=_again(chosen, seconds))
    print(json.dumps(result.to_plain()) if chosen.json else result)
    return 0 if result.holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--store", choices=STORES, default="postgres", help="where the runs are kept (default: %(default)s)")
    parser.add_argument("--minutes", type=_positive, default=2.0, help="how long faults strike (default: %(default)s)")
    parser.add_argument("--seconds", type=_positive, help="the same in seconds")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="draws the faults (default: a fresh one)")
    names = [kind.name.lower() for kind in Kind]
    parser.add_argument("--only", choices=names, action="append", help="only faults of this kind (repeatable)")
    parser.add_argument("--workers", type=_count, default=10, help="runs at work at once (default: %(default)s)")
    parser.add_argument("--supervisors", type=_count, default=2, help="(default: %(default)s)")
    parser.add_argument("--kills", type=_positive, default=2.0, help="kills of workers a second (default: %(default)s)")
    parser.add_argument("--latency-ms", type=int, default=400, help="how long a remote takes (default: %(default)s)")
    parser.add_argument("--max-attempts", type=_count, default=5, help="claims without progress (default: %(default)s)")
    parser.add_argument(
        "--rest-within", type=_positive, default=120.0, metavar="SECONDS",
        help="how long everything may take to get done after the last fault (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="keep everything here (default: a temporary folder, kept on violations)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def _again(chosen: argparse.Namespace, seconds: float) -> str:
    only = "".join(f" --only {name}" for name in chosen.only or ())
    return (
        f"python -m tests.chaos --store {chosen.store} --seconds {seconds:g} --seed {chosen.seed} --workers {chosen.workers} "
        f"--supervisors {chosen.supervisors} --kills {chosen.kills:g} --latency-ms {chosen.latency_ms} "
        f"--max-attempts {chosen.max_attempts}{only}"
    )


class _Bar:
    """A progress line on the error stream, where that is a terminal."""

    def __init__(self) -> None:
        self._shown_at = 0.0
        self._is_shown = sys.stderr.isatty()

    def show(self, fraction: float, runs: int, done: int, faults: int) -> None:
        if self._is_shown and monotonic() - self._shown_at >= SHOW_EVERY_SECONDS:
            self._shown_at = monotonic()
            full = min(BAR, int(BAR * fraction))
            phase = "faults" if fraction < 1 else "coming to rest"
            line = f"{'█' * full}{'·' * (BAR - full)} {phase}: {faults:,} faults, {done:,} of {runs:,} runs done"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
