"""Sweep our own scenarios on every store: `python -m agent_runtime.testing.crash_sweep [--json]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agent_runtime.testing.crash_sweep.matrix import ALL, STORES, plan, work_all
from agent_runtime.testing.crash_sweep.mixtures import MIXTURES
from agent_runtime.testing.crash_sweep.sweep import COMMITS

BAR = 30
SHOW_EVERY_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, print what was found, and give the exit code: 1 on any violation."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "postgres" in (options.store or ()) and not options.postgres:
        parser.error("--store postgres needs --postgres URL: the server to sweep on")
    jobs = plan(
        scenarios=options.scenario,
        commits=options.commits,
        stores=options.store,
        depth=options.depth,
        postgres=options.postgres,
    )
    bar = _Bar(len(jobs))
    with tempfile.TemporaryDirectory(prefix="crash-sweep-") as folder:
        report = work_all(jobs, Path(folder), processes=options.jobs, show=bar.show)
    bar.clear()
    print(json.dumps(report.to_plain()) if options.json else report)
    return 0 if report.holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agent_runtime.testing.crash_sweep", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.add_argument("--store", choices=STORES, action="append", help="only on this store (repeatable)")
    parser.add_argument("--postgres", metavar="URL", help="sweep on this server too; without TLS, as its messages are cut")
    parser.add_argument("--scenario", choices=[*ALL, *MIXTURES], action="append", help="only this scenario (repeatable)")
    parser.add_argument("--commits", choices=COMMITS, action="append", help="only in this commit mode")
    parser.add_argument("--depth", type=_number, help="most deaths of a run (default: 2, in short scenarios 3)")
    parser.add_argument("--jobs", type=_number, default=os.cpu_count() or 1, help="how many processes (default: one a core)")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


class _Bar:
    """A progress bar on the error stream, where that is a terminal."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._shown_at = 0.0
        self._is_shown = sys.stderr.isatty()

    def show(self, done: int, cells: int) -> None:
        now = time.monotonic()
        if self._is_shown and now - self._shown_at >= SHOW_EVERY_SECONDS:
            self._shown_at = now
            full = BAR * done // self._rows
            bar = "█" * full + "·" * (BAR - full)
            print(f"\r\x1b[K{bar} {done}/{self._rows} rows, {cells:,} cells", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
