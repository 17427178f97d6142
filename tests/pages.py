"""The pages of the documentation and what in them is made, not written: quoted files, output of commands, diagrams.

`python -m tests.pages` writes it into the pages again, and the reference from the docstrings.

* A `python` block follows `<!-- examples/FILE.py -->` and is that file, or `<!-- part of examples/FILE.py -->` and is a
  run of lines of it. Code for another runtime is quoted in the same way, from `bench/peers/`.
* What stands between `<!-- list of FOLDER: begin -->` and `<!-- list of FOLDER: end -->` is a line for each page in it.
* A `console` block holds commands after `$ ` and what they print. The commands of a page run in order, in one folder
  that is empty but for a copy of `examples/`.
* A `mermaid` block follows `<!-- drawn by NAME -->`, where NAME is a function of `journal/states.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime.journal import states
from scripts import reference

TOP = Path(__file__).resolve().parent.parent
QUOTED = (TOP / "examples", TOP / "bench" / "peers")
LISTED = re.compile(r"(?ms)^<!-- list of (?P<folder>[\w/-]+): begin -->\n(?P<body>.*?)^<!-- list of (?P=folder): end -->$")
BLOCK = re.compile(r"(?ms)^(?:<!-- (?P<marker>[^\n]+?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$")
SETTINGS = re.compile(
    r"CRASH_|STALL_|MOCK_|(DATABASE_URL|RUN_ID|GOAL|PLANNER|CHECKPOINT_KEY|LEASE|POLL|HEARTBEAT|MAX_ATTEMPTS|STUCK_AFTER|METRICS_PORT|VIEW_TOKEN)$"
)
COMMAND_SECONDS = 60


def pages() -> list[Path]:
    """Every page, in the order of its path."""
    return sorted([*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(TOP).as_posix()


def blocks(text: str) -> Iterator[re.Match[str]]:
    """The fenced blocks of a page."""
    return BLOCK.finditer(text)


def quoted_file(block: re.Match[str]) -> tuple[Path, bool]:
    """The file that a `python` block quotes, and whether it quotes the whole of it."""
    marker = block["marker"] or ""
    path = TOP / marker.removeprefix("part of ")
    if not (marker and path.is_file() and path.parent in QUOTED):
        raise LookupError(f"a python block follows <!-- examples/FILE.py --> or <!-- part of … -->, found {marker!r}")
    return path, not marker.startswith("part of ")


def renewed(text: str) -> str:
    """The page as it is when everything that is made in it is made again."""
    with TemporaryDirectory() as folder:
        shutil.copytree(TOP / "examples", Path(folder) / "examples", ignore=shutil.ignore_patterns("__pycache__"))

        def renew(block: re.Match[str]) -> str:
            start, end = block.start("body") - block.start(), block.end("body") - block.start()
            return block[0][:start] + _renewed_body(block, Path(folder)) + block[0][end:]

        return LISTED.sub(_renewed_list, BLOCK.sub(renew, text))


def _renewed_list(listed: re.Match[str]) -> str:
    folder = TOP / "docs" / listed["folder"]
    lines = [f"* [{_title(page)}]({listed['folder']}/{page.name})\n" for page in sorted(folder.glob("*.md"))]
    start, end = listed.start("body") - listed.start(), listed.end("body") - listed.start()
    return f"{listed[0][:start]}\n{''.join(lines)}\n{listed[0][end:]}"


def _title(page: Path) -> str:
    """A page's first heading."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _renewed_body(block: re.Match[str], folder: Path) -> str:
    body = block["body"]
    match block["language"]:
        case "python" if quoted_file(block)[1]:
            return quoted_file(block)[0].read_text(encoding="utf-8")
        case "console":
            commands = [line for line in body.splitlines() if line.startswith("$ ")]
            return "".join(f"{command}\n{_output(command.removeprefix('$ '), folder)}" for command in commands)
        case "mermaid":
            draw = getattr(states, (block["marker"] or "").removeprefix("drawn by "))
            return f"{draw()}\n"
        case _:
            return body


def _output(command: str, folder: Path) -> str:
    """What a command prints in the folder, with `python` as this interpreter and none of the caller's settings."""
    environment = {name: value for name, value in os.environ.items() if not SETTINGS.match(name)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    ended = subprocess.run(
        command, shell=True, cwd=folder, env=environment, text=True, check=False, timeout=COMMAND_SECONDS,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return ended.stdout if ended.stdout.endswith("\n") or not ended.stdout else f"{ended.stdout}\n"


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(renewed(text), encoding="utf-8")
    reference.main()
