"""Draws the pictures of the concepts into `docs/pictures/`.

    python scripts/pictures.py

A drawing names roles (ink, paper, accent …) and no colours. In a file of its own it follows the reader's system; on the site
its roles are set by `site_css`, so that it follows the switch between light and dark as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH = 760
LIGHT = {"ink": "#1f2430", "dim": "#5d6577", "line": "#9aa3b5", "card": "#f1f3f8", "good": "#177245", "bad": "#b3261e",
         "doubt": "#8a5a00", "doubtful": "#fdf0d5", "accent": "#2f5fd0", "soft": "#dfe8fb", "paper": "#ffffff"}  # fmt: skip
DARK = {"ink": "#e4e8f1", "dim": "#a3acbf", "line": "#6b7488", "card": "#262c3a", "good": "#6fd69b", "bad": "#ff8a80",
        "doubt": "#f3c26b", "doubtful": "#3b3220", "accent": "#8fb0ff", "soft": "#26375f", "paper": "#1a1f2b"}  # fmt: skip
FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
RULES = f"""
svg.picture {{ font: 13px {FONT}; }}
svg.picture text {{ fill: var(--ink); }}
svg.picture .mono {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }}
svg.picture .head {{ font-weight: 700; }}
svg.picture .dim {{ fill: var(--dim); }}
svg.picture .good {{ fill: var(--good); }}
svg.picture .bad {{ fill: var(--bad); }}
svg.picture .doubt {{ fill: var(--doubt); }}
svg.picture .accent {{ fill: var(--accent); }}
svg.picture .paper {{ fill: var(--paper); }}
svg.picture .card {{ fill: var(--card); stroke: var(--line); }}
svg.picture .soft {{ fill: var(--soft); stroke: var(--accent); }}
svg.picture .doubtful {{ fill: var(--doubtful); stroke: var(--doubt); stroke-dasharray: 5 4; }}
svg.picture .hollow {{ fill: none; stroke: var(--good); stroke-dasharray: 4 3; }}
svg.picture .line {{ fill: none; stroke: var(--line); stroke-width: 1.5; }}
svg.picture .way {{ fill: none; stroke: var(--ink); stroke-width: 1.5; }}
svg.picture .dead {{ fill: none; stroke: var(--bad); stroke-width: 2.5; }}
svg.picture .tip {{ fill: var(--ink); }}
"""


def main() -> int:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(f"wrote docs/pictures/{name}.svg")
    return 0


def roles(colours: dict[str, str]) -> str:
    return " ".join(f"--{role}: {colour};" for role, colour in colours.items())


def site_css() -> str:
    """The style of the pictures in a page of the site, and what else the site's pages need."""
    return (
        f"svg.picture {{ {roles(LIGHT)} }}\n"
        f'[data-md-color-scheme="slate"] svg.picture {{ {roles(DARK)} }}\n{RULES}'
        "div.picture { overflow-x: auto; margin: 1.5em 0; }\n"
        "div.picture svg { display: block; width: 100%; min-width: 620px; max-width: 760px; height: auto; }\n"
        ".md-typeset img { max-width: 100%; height: auto; }\n"
        # Whole names: a table that is too wide is scrolled, on its own.
        ".md-typeset table:not([class]) td code { white-space: nowrap; }\n"
        ".md-typeset table:not([class]) td { min-width: 8em; }\n"
    )


def sheet(height: int, says: str, *parts: str) -> str:
    """The whole of a picture."""
    style = f"svg.picture {{ {roles(LIGHT)} }} @media (prefers-color-scheme: dark) {{ svg.picture {{ {roles(DARK)} }} }}"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(says)}">\n<style>{style}{RULES}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def lines(x: float, y: float, words: Sequence[str], kind: str = "", anchor: str = "start") -> str:
    return "\n".join(text(x, y + 17 * number, line, kind, anchor) for number, line in enumerate(words))


def box(x: float, y: float, width: float, height: float, kind: str = "card") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>'


def path(way: str, kind: str = "line") -> str:
    return f'<path d="{way}" class="{kind}"/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """An arrow that is level or upright."""
    tip = f"M{to_x:g},{to_y:g} "
    if y == to_y:
        back = -7 if to_x > x else 7
        tip += f"l{back},-4 l0,8 z"
    else:
        back = -7 if to_y > y else 7
        tip += f"l-4,{back} l8,0 z"
    return path(f"M{x:g},{y:g} L{to_x:g},{to_y:g}", "way") + path(tip, "tip")


def cross(x: float, y: float, size: float = 7) -> str:
    return path(f"M{x - size:g},{y - size:g} l{2 * size:g},{2 * size:g} m0,{-2 * size:g} l{-2 * size:g},{2 * size:g}", "dead")


def call_life() -> str:
    """From the decision to the result: what is written when."""
    stations = (
        (20, "decided", "reply recorded", "card"),
        (170, "intent", "started, durable", "soft"),
        (320, "act", "request goes out", "doubtful"),
        (470, "confirm", "done, durable", "soft"),
        (620, "used", "by the model", "card"),
    )
    boxes = [box(x, 60, 120, 60, kind) for x, _, _, kind in stations]
    heads = [text(x + 60, 85, name, "head", "middle") for x, name, _, _ in stations]
    tells = [text(x + 60, 105, tells, "dim", "middle") for x, _, tells, _ in stations]
    ways = [arrow(x + 120, 90, x + 150, 90) for x, _, _, _ in stations[:-1]]
    return sheet(
        210, "The life of a call: decided, intent committed, act, confirm committed, used",
        text(20, 32, "The life of a call", "head"), *boxes, *heads, *tells, *ways,
        path("M290,140 v10 h180 v-10"), text(380, 170, "here a death leaves doubt", "doubt", "middle"),
        path("M20,140 v10 h250 v-10"), text(145, 170, "nothing has gone out", "good", "middle"),
        path("M490,140 v10 h250 v-10"), text(615, 170, "replayed, never made again", "good", "middle"),
        text(380, 196, "the same key, such as order-7:3, on every attempt and every worker", "dim", "middle"),
    )  # fmt: skip


def crash_windows() -> str:
    """Where a crash can fall, and what the next worker does."""
    rows = (
        (72, "before the reply is recorded", "the model is asked again; nobody acted on the lost answer", "good"),
        (112, "after it, before the intent", "the reply is replayed; the call goes out for the first time", "good"),
        (152, "after the intent, before the act", "in doubt, though nothing went out: its repeat rule decides", "doubt"),
        (192, "after the act, before the confirm", "in doubt, and the remote has acted: the same rule decides", "doubt"),
        (232, "after the confirm", "the result is replayed; the remote hears nothing", "good"),
    )
    marks = [cross(38, y - 5) for y, _, _, _ in rows]
    when = [text(60, y, words, "head") for y, words, _, _ in rows]
    then = [text(310, y, words, kind) for y, _, words, kind in rows]
    rules = [path(f"M20,{y + 14} H740") for y, _, _, _ in rows[:-1]]
    return sheet(
        262, "Where a crash can fall in a step, and what the next worker does",
        text(60, 34, "the worker dies", "dim"), text(310, 34, "the next worker", "dim"), path("M20,46 H740"),
        *marks, *when, *then, *rules,
    )  # fmt: skip


def fencing() -> str:
    """Two workers on one run: a claim, and a late write that is refused."""
    return sheet(
        330, "Worker A freezes, worker B claims the run with epoch 2, the late write of A is refused",
        text(20, 34, "worker A", "head"), text(20, 164, "the row", "head"), text(20, 294, "worker B", "head"),
        path("M620,30 H632"), path("M110,290 H380"),
        box(110, 18, 150, 24, "soft"), text(185, 34, "works, epoch 1", "", "middle"),
        box(260, 18, 270, 24, "hollow"), text(395, 34, "frozen", "dim", "middle"),
        box(530, 18, 90, 24, "soft"), text(575, 34, "thaws", "", "middle"), cross(640, 30),
        text(655, 34, "stops", "bad"),
        box(110, 140, 250, 40, "card"), text(235, 164, "epoch 1 · owner A · 3 records", "mono", "middle"),
        box(380, 140, 360, 40, "card"), text(560, 164, "epoch 2 · owner B · 4, 5, 6 … records", "mono", "middle"),
        arrow(185, 42, 185, 138), text(195, 92, "append: ok", "good"),
        arrow(390, 278, 390, 182), text(400, 222, "claim: epoch 2, owner B", "accent"),
        text(400, 239, "the lease has lapsed", "dim"),
        arrow(575, 42, 575, 138), text(585, 84, "append as epoch 1:", "bad"), text(585, 101, "fenced, nothing written", "bad"),
        box(380, 278, 360, 24, "soft"), text(560, 294, "replays, then goes on, epoch 2", "", "middle"),
        arrow(640, 278, 640, 182), text(650, 222, "append: ok", "good"),
    )  # fmt: skip


def replay() -> str:
    """The journal of a run, and what a worker does with it after a crash."""
    records = (
        ("0/model  started, done", "replayed: the model is not asked", "good", "hollow"),
        ("0        started, done", "replayed: the card is not charged again", "good", "hollow"),
        ("1/model  started, done", "replayed: the same decision", "good", "hollow"),
        ("1        started", "in doubt: same key again, a probe, or a person", "doubt", "doubtful"),
        ("", "from here on it is made for the first time", "accent", "soft"),
    )
    parts = []
    for number, (record, does, kind, frame) in enumerate(records):
        y = 56 + number * 46
        if record:
            parts += [box(20, y, 260, 34, "card"), text(34, y + 22, record, "mono"), arrow(280, y + 17, 338, y + 17)]
        else:
            parts += [text(34, y + 22, "the journal ends", "dim")]
        parts += [box(340, y, 400, 34, frame), text(356, y + 22, does, kind)]
    told = "The journal of a run, and what each record leads to when another worker runs the loop anew"
    heads = (
        text(20, 34, "journal, verified seal by seal", "head"),
        text(340, 34, "the loop runs from its beginning", "head"),
    )
    return sheet(300, told, *heads, *parts)


PICTURES: dict[str, Callable[[], str]] = {
    "call-life": call_life,
    "crash-windows": crash_windows,
    "fencing": fencing,
    "replay": replay,
}

if __name__ == "__main__":
    sys.exit(main())
