"""The table: what was measured, what the floor took beside it, their ratio, and whether the goal was reached. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Literal, assert_never

BEGIN_MARK = "<!-- bench: begin -->"
END_MARK = "<!-- bench: end -->"
HEAD = ("measure", "ours", "floor", "ratio (least to most)", "goal", "reached")


class Unit(Enum):
    """What a figure counts, and so how it is written."""

    STEPS_A_SECOND = "steps/s"
    SECONDS = "s"
    MILLISECONDS = "ms"
    MICROSECONDS = "µs"
    BYTES = "bytes"
    KILOBYTES = "KB"
    MEGABYTES = "MB"
    TIMES = "×"
    PERCENT = "%"
    COUNT = ""


@dataclass(frozen=True)
class Goal:
    """What a figure of ours, or its ratio to the floor, is to reach."""

    of: Literal["ratio", "ours"]
    relation: Literal["≥", "≤", "="]
    value: float

    def is_reached(self, found: float) -> bool:
        match self.relation:
            case "≥":
                return found >= self.value
            case "≤":
                return found <= self.value
            case "=":
                return found == self.value
            case _:
                assert_never(self.relation)


@dataclass(frozen=True)
class Row:
    """One measure: a figure a round, and the floor's of the same round where it has one."""

    measure: str
    unit: Unit
    ours: Sequence[float]
    floor: Sequence[float] = ()
    goal: Goal | None = None

    @property
    def ratios(self) -> list[float]:
        """Ours to the floor, round by round."""
        return [ours / floor for ours, floor in zip(self.ours, self.floor, strict=True) if floor] if self.floor else []

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None where there is none."""
        if self.goal is None:
            return None
        return self.goal.is_reached(median(self.ratios if self.goal.of == "ratio" else self.ours))

    def to_plain(self) -> dict[str, object]:
        goal = self.goal
        return {
            "measure": self.measure,
            "unit": self.unit.value,
            "ours": list(self.ours),
            "floor": list(self.floor),
            "ratio": self.ratios,
            "goal": None if goal is None else {"of": goal.of, "relation": goal.relation, "value": goal.value},
            "reached": self.reached,
        }


def at_least(ratio: float) -> Goal:
    """A goal for the ratio."""
    return Goal("ratio", "≥", ratio)


def at_most(ratio: float) -> Goal:
    """A goal for the ratio."""
    return Goal("ratio", "≤", ratio)


def ours_at_most(value: float) -> Goal:
    """A goal for our own figure."""
    return Goal("ours", "≤", value)


def ours_is(value: float) -> Goal:
    """A goal for our own figure."""
    return Goal("ours", "=", value)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table that reads well as text, too."""
    return grid([HEAD, *(_cells(row) for row in rows)])


def grid(cells: Sequence[tuple[str, ...]]) -> str:
    """A table of these lines, the first of which is its head."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = tuple("-" * width for width in widths)
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    ours, floor = written(median(row.ours), row.unit), written(median(row.floor), row.unit) if row.floor else "–"
    return (row.measure, ours, floor, _ratio(row.ratios), _goal(row), _reached(row.reached))


def _ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    middle = f"{median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f}–{max(ratios):.2f})"


def _goal(row: Row) -> str:
    match row.goal:
        case None:
            return "–"
        case Goal("ratio", relation, value):
            return f"ratio {relation} {value:g}"
        case Goal("ours", relation, value):
            return f"{relation} {written(value, row.unit, exact=True)}"
        case _:
            raise AssertionError(row.goal)


def _reached(reached: bool | None) -> str:
    return "–" if reached is None else "yes" if reached else "no"


def written(value: float, unit: Unit, *, exact: bool = False) -> str:
    """A figure with its unit: as precise as it is steady, or `exact` as it is."""
    if exact:
        return f"{value:g} {unit.value}".rstrip()
    match unit:
        case Unit.STEPS_A_SECOND | Unit.BYTES:
            number = f"{value:,.0f}"
        case Unit.MICROSECONDS:
            number = f"{value:.0f}"
        case Unit.MILLISECONDS:
            number = f"{value:.0f}" if value >= 20 else f"{value:.1f}"
        case Unit.SECONDS | Unit.TIMES | Unit.PERCENT:
            number = f"{value:.2f}"
        case Unit.KILOBYTES | Unit.MEGABYTES:
            number = f"{value:.1f}"
        case Unit.COUNT:
            number = f"{value:.2f}".rstrip("0").rstrip(".")
        case _:
            assert_never(unit)
    return f"{number} {unit.value}".rstrip()


def between_marks(page: str, text: str) -> str:
    """The page with what stands between its marks replaced."""
    before, mark, rest = page.partition(BEGIN_MARK)
    _, end_mark, after = rest.partition(END_MARK)
    if not mark or not end_mark:
        raise ValueError(f"expected {BEGIN_MARK} and then {END_MARK} in the page; put them where the table is to stand")
    return f"{before}{BEGIN_MARK}\n\n{text.strip()}\n\n{END_MARK}{after}"
