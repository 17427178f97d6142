"""What a person sees of the command line in a real terminal of 80 columns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from agent_runtime import ToolError, ToolRegistry
from agent_runtime.cli.drawn import LABEL
from agent_runtime.crash import CrashPoint
from agent_runtime.journal.keys import key_beside
from agent_runtime.messages import Reply, ToolCall
from scripts import terminal_picture
from tests.bench import KEY, Bench, Place, Script, Worker, error_of
from tests.terminal.screen import ASCII, LOCALE, Seen, see, terminal, width_of

HOSTILE = (
    "\x1b[2J\x1b[31mred\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\\x9b5m bidi\u202eevil\u2066 cr\rover\nnext\ttab\x08\x7f\x00"
    " \u200bzero \ud83d half 表表 e\u0301 ✓"
)
SGR = re.compile(rb"\x1b\[[0-9;]*m")
RUNS = 60
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "demo.svg"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a store: a hostile run, one that waits, one whose workers died, and many that are done."""
    folder = tmp_path_factory.mktemp("terminal")
    asyncio.run(fill(folder))
    key_beside(f"{folder / 'runs.db'}.key", KEY)
    return f"sqlite:///{folder / 'runs.db'}"


async def fill(folder: Path) -> None:
    place = Place("sqlite", folder)
    tools = ToolRegistry()

    @tools.tool(pure=True)
    async def fetch(url: str) -> str:
        return HOSTILE + "x" * 1_000_000

    @tools.tool(pure=True)
    async def fail(url: str) -> str:
        raise ToolError(HOSTILE)

    odd = {HOSTILE.replace("\ud83d", ""): HOSTILE.replace("\ud83d", "")}
    model = Script(
        [("fetch", {"url": "x" * 100_000})],
        [("fail", {"url": HOSTILE.replace("\ud83d", "")})],
        lambda _: Reply("", [ToolCall("odd", "odd\x1b[2J\r\n" + "表" * 30, odd)]),
        "done",
    )
    await Worker(place).run(model, tools, "hostile", name="表é", messages=HOSTILE.replace("\ud83d", ""))
    asking, dying = Bench(needs_approval=True), Bench()
    await Worker(place).run(Script([("email", {"to": HOSTILE.replace("\ud83d", "")})], "done"), asking.registry, "waits")
    charge = Script([("charge_i", {"amount": 1})], [("charge", {"amount": 2})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(charge, dying.registry, "dead")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 1).recover_and_die(charge, dying.registry, "dead")
    await error_of(Worker(place).recover(charge, dying.registry, "dead"))
    for number in range(RUNS):
        await Worker(place).run(Script("done"), ToolRegistry(), f"many-{number:03}")
    await place.close()


def is_harmless(seen: Seen) -> bool:
    """Whether nothing but text, ends of lines and colours reached the terminal."""
    rest = SGR.sub(b"", seen.raw).replace(b"\r\n", b"\n").decode()
    return all(char.isprintable() or char == "\n" for char in rest)


def picture_of(seen: Seen) -> list[str]:
    """The lines of the picture and its legend: between the facts and the claims."""
    blanks = [at for at, line in enumerate(seen.whole) if not line]
    claim = next(at for at, line in enumerate(seen.whole) if line.startswith("claim 1"))
    return seen.whole[blanks[0] + 1 : claim]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return see("agent-runtime demo", {**LOCALE, "TMPDIR": str(tmp_path_factory.mktemp("demo"))})


def test_the_demo_is_told_in_80_columns_and_colours(demo: Seen) -> None:
    seen = demo
    assert (seen.code, seen.text.count("✓")) == (0, 11)
    assert all("agent-runtime view" in line or line.startswith("and remove it") for line in seen.broken), seen.broken
    assert is_harmless(seen)
    assert b"\x1b[" in seen.raw, "the picture has colours"


def test_the_picture_of_the_readme_shows_what_the_demo_tells_today(demo: Seen) -> None:
    shown = list(told_by(drawn_in(PICTURE)[2:]))
    assert shown == list(told_by(demo.whole)), "make it again: make pictures"
    assert len(shown) > 30


def drawn_in(svg: Path) -> list[str]:
    """The lines of a terminal that stand in its picture."""
    lines: dict[int, str] = {}
    for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text"):
        at = int(element.attrib["y"])
        column = round((float(element.attrib["x"]) - terminal_picture.MARGIN) / terminal_picture.CELL)
        lines[at] = lines.get(at, "").ljust(column) + (element.text or "")
    return [lines.get(at, "") for at in range(min(lines), max(lines) + 1, terminal_picture.LINE)]


def told_by(lines: list[str]) -> Iterator[str]:
    """The lines but for what differs each time: how long it took, where it is kept, and of the chart all but its labels."""
    is_chart = False
    for line in lines:
        text = re.sub(r"\d+\.\d s", "N s", re.sub(r"/\S*(agent-runtime-demo\.\w+|/demo\b)", "DEMO", line))
        is_chart = text.startswith("6. ") or (is_chart and not text.startswith("▓"))
        yield text[: LABEL + 1].rstrip() if is_chart and not text.startswith("6. ") else text


@pytest.mark.parametrize("run", ["dead", "hostile"])
def test_the_picture_of_a_run_stands_as_it_was_drawn(store: str, run: str) -> None:
    seen = see(f"agent-runtime show {run} --store {store}")
    assert seen.code == 0
    assert is_harmless(seen)
    picture = picture_of(seen)
    assert len(picture) > 5
    assert "█ done" in "\n".join(picture)
    assert [line for line in picture if line in seen.broken] == []
    assert b"\x1b[32m" in seen.raw
    assert [line for line in seen.broken if re.match(r" +\d+  ", line)] == [], "each record has a line of its own"


def test_without_colour_and_in_ascii_the_same_is_told(store: str) -> None:
    plain = see(f"agent-runtime show dead --store {store}", {**LOCALE, "NO_COLOR": "1"})
    assert (plain.code, b"\x1b" in plain.raw) == (0, False)
    ascii_alone = see(f"for run in dead hostile; do agent-runtime show $run --store {store} || exit; done", ASCII)
    assert ascii_alone.code == 0, ascii_alone.text[-2000:]
    assert SGR.sub(b"", ascii_alone.raw).isascii()
    assert "# done" in ascii_alone.text


def test_lists_tell_of_hostile_runs_and_the_bar_of_verify_comes_and_goes(store: str) -> None:
    seen = see(f"for what in runs approvals verify; do agent-runtime $what --store {store} || exit; done")
    assert seen.code == 0
    bar = re.compile(rb"\r\[[-=]{30}\] 50 runs|\r\x1b\[K")
    assert len(bar.findall(seen.raw)) == 2
    assert is_harmless(seen._replace(raw=bar.sub(b"", seen.raw)))
    assert "[=---" not in seen.text
    assert f"verified {RUNS + 3} runs" in seen.text
    assert "waits  0" in seen.text
    dates = {width_of(line[: line.index(":") - 13]) for line in seen.whole if line.startswith(("many-", "hostile"))}
    assert len(dates) == 1, "columns stand below each other, also after characters that take two"
    assert [line for line in seen.broken if line.startswith("many-")] == []


def test_bash_completes_commands_and_options() -> None:
    ready = "agent-runtime completion bash >complete.sh; echo ready; bash --norc --noprofile -i"
    with terminal(f"cd $(mktemp -d); {ready}; rm -r $PWD") as opened:
        opened.until("ready")
        opened.type("PS1='> '; source ./complete.sh; clear", "Enter", "agent-runtime appr", "Tab")
        opened.until("> agent-runtime approv")
        opened.type("e --no", "Tab")
        opened.until("> agent-runtime approve --note")
        opened.type("C-u", "exit 0", "Enter")
        assert opened.end().code == 0
