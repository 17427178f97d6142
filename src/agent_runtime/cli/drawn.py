"""The picture of a run in text: a row of cells for each call, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_runtime.cli.tables import columns_of, cut, printable
from agent_runtime.picture import Band, Gap, Look, Picture

LABEL = 22
"""How many columns the names of the calls take."""
LEAST = 20
"""A narrower chart says nothing; the terminal wraps its lines instead."""


@dataclass(frozen=True, slots=True)
class Ink:
    """The characters that a picture is drawn with."""

    bars: Mapping[Look, str]
    decision: str
    lost: str
    flag: str
    left: str
    line: str
    right: str
    cut: str
    ellipsis: str


FINE = Ink(
    {
        Look.DONE: "█", Look.ERROR: "▒", Look.UNSENT: "·", Look.UNRECORDABLE: "!", Look.LOST: "░", Look.DOUBT: "?",
        Look.OPEN: "▸", Look.REPLAYED: "▫", Look.WAITING: "╌",
    },
    decision="▓", lost="/", flag="◆", left="├", line="─", right="┤", cut="✗", ellipsis="…",
)  # fmt: skip
PLAIN = Ink(
    {
        Look.DONE: "#", Look.ERROR: "e", Look.UNSENT: ".", Look.UNRECORDABLE: "!", Look.LOST: ":", Look.DOUBT: "?",
        Look.OPEN: ">", Look.REPLAYED: "o", Look.WAITING: "-",
    },
    decision="=", lost="/", flag="*", left="|", line="-", right="|", cut="X", ellipsis="~",
)  # fmt: skip
"""For a terminal that has ASCII alone."""

_SAID = {
    Look.DONE: "done",
    Look.REPLAYED: "on record, not made again",
    Look.WAITING: "waits for a person",
    Look.OPEN: "on its way",
    Look.ERROR: "answered with an error",
    Look.UNSENT: "nothing went out",
    Look.LOST: "its worker was lost",
    Look.DOUBT: "in doubt",
    Look.UNRECORDABLE: "happened, no record of its result",
}
_COLOURS = {
    Look.DONE: "32", Look.REPLAYED: "2", Look.WAITING: "33", Look.OPEN: "36", Look.ERROR: "33", Look.UNSENT: "2",
    Look.LOST: "31", Look.DOUBT: "1;31", Look.UNRECORDABLE: "1;31",
}  # fmt: skip
_OWNERS = ("34", "35", "36", "33", "32")
_RED, _MUTED, _DECISION = "31", "2", "34"

Cell = tuple[str, str]
"""A character and its colour; no colour: the terminal's own."""


def draw_text(picture: Picture, *, width: int, ink: Ink = FINE, colour: bool = False) -> list[str]:
    """The picture as lines no wider than `width` columns: owners, calls, axis, and what the signs mean."""
    chart = _Chart(max(LEAST, width - LABEL - 1), ink, colour)
    lines = [f"{'':{LABEL}} {chart.owners(picture)}"]
    for row in picture.rows:
        label = row.label if row.is_decision or not row.call else f"{row.label} {row.call}"
        cells = chart.ground(picture.gaps)
        for bar in row.bars:
            is_plain = row.is_decision and bar.look is Look.DONE
            chart.fill(cells, bar.x, bar.width, ink.decision if is_plain else ink.bars[bar.look],
                       _DECISION if is_plain else _COLOURS[bar.look])  # fmt: skip
        for flag in row.flags:
            chart.fill(cells, flag.x, 0.0, ink.flag, "1")
        shown = cut(printable(label), LABEL, ink.ellipsis)
        lines.append(f"{' ' * (LABEL - columns_of(shown))}{shown} {chart.line(cells)}")
    if picture.flags:
        cells = chart.blank()
        for flag in picture.flags:
            chart.fill(cells, flag.x, 0.0, ink.flag, "1")
        lines.append(f"{'said from outside':>{LABEL}} {chart.line(cells)}")
    lines += [f"{'':{LABEL}} {chart.axis(picture)}", "", *_legend(picture, width, ink, chart)]
    return lines


class _Chart:
    """Cells of a fixed number of columns."""

    def __init__(self, columns: int, ink: Ink, colour: bool) -> None:
        self.columns = columns
        self._ink = ink
        self._colour = colour

    def blank(self) -> list[Cell]:
        return [(" ", "")] * self.columns

    def ground(self, gaps: Sequence[Gap]) -> list[Cell]:
        """A row before its bars: the time between a worker that was lost and the next is hatched."""
        cells = self.blank()
        for gap in gaps:
            if gap.is_crash:
                self.fill(cells, gap.x, gap.width, self._ink.lost, f"{_MUTED};{_RED}")
        return cells

    def at(self, x: float) -> int:
        """The column of a place."""
        return min(self.columns - 1, int(x * self.columns))

    def fill(self, cells: list[Cell], x: float, width: float, char: str, colour: str) -> None:
        """At least one cell."""
        first = self.at(x)
        last = max(first + 1, min(self.columns, round((x + width) * self.columns)))
        cells[first:last] = [(char, colour)] * (last - first)

    def line(self, cells: Sequence[Cell]) -> str:
        """The cells as text; neighbours of one colour in one go."""
        if not self._colour:
            return "".join(char for char, _ in cells).rstrip()
        text, before = "", ""
        for char, colour in cells:
            if colour != before:
                text += f"\x1b[0m\x1b[{colour}m" if colour else "\x1b[0m"
                before = colour
            text += char
        return f"{text.rstrip()}\x1b[0m"

    def paint(self, text: str, colour: str) -> str:
        """The text in a colour, where there are colours."""
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour and colour else text

    def owners(self, picture: Picture) -> str:
        """Who held the run, and where a worker was lost."""
        cells = self.ground(picture.gaps)
        for band in picture.bands:
            self._band(cells, band)
        return self.line(cells)

    def _band(self, cells: list[Cell], band: Band) -> None:
        ink, colour = self._ink, _OWNERS[band.colour % len(_OWNERS)]
        first = self.at(band.x)
        last = max(first + 1, min(self.columns, round((band.x + band.width) * self.columns)))
        room = last - first
        name = printable(band.owner)
        text = f"{ink.left}{ink.line} {name} " if room >= len(name) + 5 else ink.left
        text = text[:room].ljust(room, ink.line)
        cells[first:last] = [(char, colour) for char in text]
        if room > 1:
            cells[last - 1] = (ink.cut, f"1;{_RED}") if band.is_cut else (ink.right, colour)

    def axis(self, picture: Picture) -> str:
        """The ticks that have room for their labels."""
        text = [" "] * self.columns
        free = 0
        for tick in picture.ticks:
            at = self.at(tick.x)
            if at >= free and at + len(tick.label) <= self.columns:
                text[at : at + len(tick.label)] = tick.label
                free = at + len(tick.label) + 2
        return self.paint("".join(text).rstrip(), _MUTED)


def _legend(picture: Picture, width: int, ink: Ink, chart: _Chart) -> list[str]:
    """What the signs mean that are there, as many on a line as it takes."""
    used = {bar.look for row in picture.rows for bar in row.bars}
    entries = [(ink.bars[look], said, _COLOURS[look]) for look, said in _SAID.items() if look in used]
    if any(row.is_decision for row in picture.rows):
        entries.insert(0, (ink.decision, "decision", _DECISION))
    if any(gap.is_crash for gap in picture.gaps):
        entries.append((ink.cut, "worker lost", _RED))
    if picture.flags or any(row.flags for row in picture.rows):
        entries.append((ink.flag, "somebody's word", "1"))
    lines, used_columns = [""], 0
    for sign, said, colour in entries:
        taken = len(said) + 4
        if used_columns and used_columns + taken > width:
            lines.append("")
            used_columns = 0
        lines[-1] += f"{chart.paint(sign, colour)} {said}  "
        used_columns += taken
    return [line.rstrip() for line in lines]
