"""A real terminal of 80 columns, and what is seen in it: tmux, found or unpacked from its package (scripts/tmux.sh)."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

COLUMNS, LINES = 80, 50
PATIENCE_SECONDS = 30
BIN = Path(sys.executable).parent

LOCALE = {"LC_ALL": "C.UTF-8"}
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""A terminal that has ASCII alone, as Python sees it."""


class Seen(NamedTuple):
    """What a command came to: what is on the screen, and what reached the terminal."""

    code: int
    lines: list[str]
    """As they stand on the screen, each as wide as it is at most; with what was scrolled away above it."""
    whole: list[str]
    """The same lines as they were written: those that the terminal broke are in one piece."""
    raw: bytes
    """Every byte that the commands wrote to the terminal."""

    @property
    def text(self) -> str:
        return "\n".join(self.whole)

    @property
    def broken(self) -> list[str]:
        """The lines that the terminal had to break."""
        return [line for line in self.whole if width_of(line) > COLUMNS]


def width_of(line: str) -> int:
    """How many columns a terminal takes for it."""
    wide = sum(unicodedata.east_asian_width(char) in ("W", "F") for char in line)
    return len(line) + wide - sum(unicodedata.combining(char) > 0 for char in line)


@cache
def tmux() -> str:
    """The program. None to be had is an error that says what to do, never a skip."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "tmux.sh"
    with open(script) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(["sh", script], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


class Terminal:
    """One terminal, in which one script runs. It ends with this process, however that ends."""

    def __init__(self, folder: Path, script: str, settings: Mapping[str, str]) -> None:
        self._folder = folder
        hold = folder / "hold"
        os.mkfifo(hold)
        self._hold = os.open(hold, os.O_RDWR)  # whoever reads it hears when nobody has it open any more
        told = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
        (folder / "script").write_text(
            f"exec 9<{hold}\nunset LD_LIBRARY_PATH COLUMNS LINES NO_COLOR CHECKPOINT_KEY DATABASE_URL\n{told}"
            f"export PATH={shlex.quote(str(BIN))}:$PATH\n({script})\necho $? >{folder}/code.new\n"
            f"mv {folder}/code.new {folder}/code\nread -r _ <&9\n"
        )
        self._ask(
            "-f", "/dev/null", "set", "-g", "history-limit", "5000", ";", "new-session", "-d", "-x", str(COLUMNS), "-y",
            str(LINES), f"sh {folder}/script", ";", "pipe-pane", f"cat >{folder}/raw",
        )  # fmt: skip

    def type(self, *keys: str) -> None:
        """Press these keys; `Tab` and `Enter` are such, and text is typed."""
        self._ask("send-keys", *keys)

    def capture(self, *options: str) -> list[str]:
        """The lines as they stand on the screen."""
        return self._ask("capture-pane", "-p", "-S", "-", *options).rstrip("\n").split("\n")

    def until(self, text: str) -> list[str]:
        """The lines, once that text is among them."""
        give_up_at = monotonic() + PATIENCE_SECONDS
        while text not in "\n".join(lines := self.capture()):
            assert monotonic() < give_up_at, f"{text!r} was never seen:\n" + "\n".join(lines)
            sleep(0.05)
        return lines

    def end(self) -> Seen:
        """What is seen once the script is over."""
        code = self._folder / "code"
        give_up_at = monotonic() + PATIENCE_SECONDS
        while not code.exists():
            assert monotonic() < give_up_at, "the script did not end:\n" + "\n".join(self.capture())
            sleep(0.05)
        self._ask("pipe-pane")
        lines, whole = self.capture(), [line.rstrip() for line in self.capture("-J")]
        return Seen(int(code.read_text()), lines, whole, (self._folder / "raw").read_bytes())

    def close(self) -> None:
        with suppress(AssertionError):  # it ends by itself with its last window
            self._ask("kill-server")
        os.close(self._hold)

    def _ask(self, *words: str) -> str:
        command = [tmux(), "-u", "-S", str(self._folder / "socket"), *words]
        ended = subprocess.run(
            command, capture_output=True, check=False, timeout=PATIENCE_SECONDS, env={**os.environ, "TERM": "xterm-256color"}
        )
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout.decode()


@contextmanager
def terminal(script: str, settings: Mapping[str, str] = LOCALE) -> Iterator[Terminal]:
    """A terminal in which the shell runs a script; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ar-tmux-") as folder:  # sockets have short paths
        opened = Terminal(Path(folder), script, settings)
        try:
            yield opened
        finally:
            opened.close()


def see(script: str, settings: Mapping[str, str] = LOCALE) -> Seen:
    """What is seen of a script once it is over."""
    with terminal(script, settings) as opened:
        return opened.end()
