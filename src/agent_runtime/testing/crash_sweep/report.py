"""What a sweep found: a row for each scenario, mode and store, and every violation with the cell that showed it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_runtime.testing.crash_sweep.rules import Rule
from agent_runtime.testing.faults import Where


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that did not hold in a cell: `deaths` says at which moments the workers died, one after another."""

    scenario: str
    commits: str
    store: str
    deaths: str
    rule: Rule
    found: str

    def __str__(self) -> str:
        return f"{self.scenario}, {self.commits}, {self.store}, dead {self.deaths}: {self.rule.value}: {self.found}"


@dataclass(slots=True)
class Row:
    """One scenario in one commit mode on one store."""

    scenario: str
    commits: str
    store: str
    moments: dict[Where, int] = field(default_factory=dict)
    """How many moments of each kind the run without faults has."""
    cells: list[int] = field(default_factory=list)
    """How many cells have no death, one, two …"""
    decisions: int = 0
    """In how many cells recovery named a call in doubt."""
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found."""

    rows: Sequence[Row]

    @property
    def cells(self) -> int:
        """How many cells were worked."""
        return sum(sum(row.cells) for row in self.rows)

    @property
    def violations(self) -> list[Violation]:
        """Every rule that did not hold, with its cell."""
        return [violation for row in self.rows for violation in row.violations]

    @property
    def rules_broken(self) -> set[Rule]:
        """The rules that did not hold somewhere."""
        return {violation.rule for violation in self.violations}

    @property
    def holds(self) -> bool:
        """Whether there was a cell, and no violation in any."""
        return self.cells > 0 and not self.violations

    def to_plain(self) -> dict[str, object]:
        """The same as plain data, for programs."""
        return {
            "cells": self.cells,
            "rows": [
                {
                    "scenario": row.scenario, "commits": row.commits, "store": row.store,
                    "moments": {where.value: count for where, count in row.moments.items()}, "cells": row.cells,
                    "decisions": row.decisions, "violations": len(row.violations), "seconds": round(row.seconds, 3),
                }
                for row in self.rows
            ],
            "violations": [
                {
                    "scenario": each.scenario, "commits": each.commits, "store": each.store, "deaths": each.deaths,
                    "rule": each.rule.name, "sentence": each.rule.value, "found": each.found,
                }
                for each in self.violations
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [_HEAD, *(_line(row) for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
        table = ["  ".join(_aligned(cell, width, at) for at, (cell, width) in enumerate(zip(line, widths, strict=True)))
                 for line in lines]  # fmt: skip
        total = f"{self.cells:,} cells, {len(self.violations):,} violations, {sum(row.seconds for row in self.rows):.1f} s"
        return "\n".join([*table, "", total, *(f"  {violation}" for violation in self.violations[:50])])


_HEAD = ("scenario", "commits", "store", "writes", "acts", "answers", "1 death", "2", "3", "decisions", "bad", "s")


def _line(row: Row) -> tuple[str, ...]:
    seen = [row.moments.get(where, 0) for where in (Where.AFTER_WRITE, Where.AFTER_ACT, Where.AFTER_ANSWER)]
    cells = [*row.cells[1:], 0, 0, 0][:3]
    numbers = [*seen, *cells, row.decisions, len(row.violations)]
    return (row.scenario, row.commits, row.store, *(f"{number:,}" for number in numbers), f"{row.seconds:.1f}")


def _aligned(text: str, width: int, at: int) -> str:
    return text.ljust(width) if at < 3 else text.rjust(width)
