"""Power cuts of the SQLite store, as many as you like: `python -m tests.powercut [--states 50000] [--json]`.

Prints how many states were opened and what was wrong with them, for our store and for the control below its level. The exit
code is 0 if nothing was wrong with ours, and the control was seen to lose what it had acknowledged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from time import monotonic

from tests.powercut.states import Tally, enumerate_states, record_workload

BAR = 30
CONTROL_SHARE = 10
"""Of so many states one more is of the control."""
KINDS = ("lost", "half", "refused", "stuck")


def main(arguments: Sequence[str] | None = None) -> int:
    """Enumerate, print; gives the exit code."""
    chosen = _parser().parse_args(arguments)
    tallies: dict[str, Tally] = {}
    for level, wanted in (("FULL", chosen.states), ("NORMAL", max(chosen.states // CONTROL_SHARE, 500))):
        began = monotonic()
        recorded = record_workload(level, chosen.rounds)
        tallies[level] = enumerate_states(recorded, wanted, jobs=chosen.jobs, told=_shown(level, wanted))
        _show(f"{level}: {tallies[level].enumerated:,} states in {monotonic() - began:.0f} s\n")
    print(_as_json(tallies) if chosen.json else _as_table(tallies))
    return 0 if not tallies["FULL"].wrong and tallies["NORMAL"].wrong["lost"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.powercut", description=__doc__)
    parser.add_argument("--states", type=int, default=50_000, help="how many states to open (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="how long the workload is (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line for programs")
    return parser


def _as_table(tallies: dict[str, Tally]) -> str:
    lines = [f"{'synchronous':<12}{'states':>9}{'distinct':>10}" + "".join(f"{kind:>9}" for kind in KINDS)]
    for level, tally in tallies.items():
        wrong = "".join(f"{tally.wrong[kind]:>9,}" for kind in KINDS)
        lines.append(f"{level:<12}{tally.enumerated:>9,}{len(tally.distinct):>10,}{wrong}")
    lines += [f"{level}: {tally.example}" for level, tally in tallies.items() if tally.example]
    return "\n".join(lines)


def _as_json(tallies: dict[str, Tally]) -> str:
    return json.dumps(
        {level: {"states": t.enumerated, "distinct": len(t.distinct), "wrong": dict(t.wrong)} for level, t in tallies.items()}
    )


def _shown(level: str, wanted: int) -> Callable[[int], None]:
    def show(done: int) -> None:
        filled = min(BAR, BAR * done // wanted)
        _show(f"\r{level} [{'#' * filled}{'.' * (BAR - filled)}] {done:,} of {wanted:,} ")

    return show


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(text if text.startswith("\r") else f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
