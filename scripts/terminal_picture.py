"""Records a command in a terminal of 80 columns, and writes what was seen there as an SVG.

    python scripts/terminal_picture.py docs/pictures/demo.svg "agent-runtime demo" COMMAND ...

The command runs on a pseudo-terminal, so that it draws and colours as it does for a person. Paths of temporary folders
are shortened: they are others each time.
"""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS = 80
CELL, LINE = 8.4, 18
MARGIN, BAR = 18, 34
_SGR = re.compile(r"\x1b\[([0-9;]*)m")
_CLASSES = {"31": "red", "32": "green", "33": "yellow", "34": "blue", "35": "violet", "36": "cyan", "1": "bold", "2": "dim"}
BUTTONS = ("#ff6159", "#ffbd2e", "#28c941")
STYLE = """
svg { background: none; } rect.window { fill: #171b24; } text { font: 14px ui-monospace, "SF Mono", Menlo, Consolas,
"DejaVu Sans Mono", monospace; fill: #d7dce6; white-space: pre; } .title { fill: #8b93a5; } .prompt { fill: #7ee2a8; }
.red { fill: #ff7a70; } .green { fill: #63d297; }
.yellow { fill: #f0b95a; } .blue { fill: #7aa2ff; } .violet { fill: #c792ea; }
.cyan { fill: #62c9d8; } .bold { font-weight: 700; } .dim { opacity: 0.62; }
"""


def main() -> int:
    """Record it; the exit code is the command's."""
    target, shown, *command = sys.argv[1:]
    text, code = record(command)
    if code == 0:
        Path(target).write_text(draw(shown, text), encoding="utf-8")
        print(f"wrote {target}")
    else:
        print(text, file=sys.stderr)
    return code


def record(command: Sequence[str]) -> tuple[str, int]:
    """What a command writes to its terminal, and its exit code."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES="60", PYTHONIOENCODING="utf-8")
        os.execvp(command[0], list(command))
    seen = bytearray()
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other side has closed
            break
        if not more:
            break
        seen += more
    _, status = os.waitpid(process, 0)
    text = seen.decode("utf-8", "replace").replace("\r\n", "\n")
    return re.sub(r"/tmp/agent-runtime-demo\.\w+", "/tmp/demo", text), os.waitstatus_to_exitcode(status)


def draw(shown: str, text: str) -> str:
    """The SVG of a terminal in which `shown` was typed and `text` was seen."""
    lines = [[("prompt", "$ "), ("", shown)], [], *_styled(text.strip("\n").split("\n"))]
    width, height = COLUMNS * CELL + 2 * MARGIN, BAR + len(lines) * LINE + MARGIN
    body = "\n".join(_line(line, number) for number, line in enumerate(lines))
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="17" r="5.5" fill="{c}"/>' for i, c in enumerate(("#ff6159", "#ffbd2e", "#28c941"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img" '
        f'aria-label="{escape(shown)} in a terminal">\n<style>{STYLE}</style>\n'
        f'<rect class="window" width="{width:.0f}" height="{height}" rx="10"/>\n{dots}\n{body}\n</svg>\n'
    )


def _styled(lines: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Each line as pieces of one style."""
    codes: list[str] = []
    for line in lines:
        pieces, at = [], 0
        for match in _SGR.finditer(line):
            pieces.append((" ".join(codes), line[at : match.start()]))
            given = [code for code in match[1].split(";") if code not in ("", "0")]
            codes = [_CLASSES[code] for code in given if code in _CLASSES]
            at = match.end()
        pieces.append((" ".join(codes), line[at:]))
        yield [piece for piece in pieces if piece[1]]


def _line(pieces: Sequence[tuple[str, str]], number: int) -> str:
    y, column, drawn = BAR + 14 + number * LINE, 0, []
    for style, text in pieces:
        if text.strip():
            lead = len(text) - len(text.lstrip())
            kept = text.strip()
            x = MARGIN + (column + lead) * CELL
            of_class = f' class="{style}"' if style else ""
            drawn.append(f'<text x="{x:.1f}" y="{y}" textLength="{len(kept) * CELL:.1f}"{of_class}>{escape(kept)}</text>')
        column += len(text)
    return "".join(drawn)


if __name__ == "__main__":
    sys.exit(main())
