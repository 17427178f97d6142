"""Purges old runs beside a supervisor, now and then: in a process of its own, which has the key and may take its time.

A supervisor holds no key and never waits. So it starts the purge as it starts its workers, looks whether it has ended, and
has one at most. A purge that is ended in the middle has removed what was removed; the next one goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from agent_runtime.clock import Clock
from agent_runtime.errors import InvalidSetting
from agent_runtime.retention import FINISHED, Age, seconds_of

EVERY_SECONDS = 600.0
"""How long after a purge began the next one may."""
COMMAND = (sys.executable, "-m", "agent_runtime", "purge")

Tell = Callable[[str, Mapping[str, object]], None]


class Purge(NamedTuple):
    """Which runs go: those of these statuses that were last written so many seconds ago."""

    after_seconds: float
    statuses: Sequence[str] = FINISHED
    command: Sequence[str] = COMMAND

    @staticmethod
    def of(after: Age | None, statuses: Collection[str], command: Sequence[str] = COMMAND) -> Purge | None:
        """The purge that is meant; none where there is no age. `InvalidSetting` where it cannot be."""
        if after is None:
            return None
        words = [statuses] if isinstance(statuses, str) else list(statuses)
        unknown = [word for word in words if word not in FINISHED]
        if unknown or not words:
            raise InvalidSetting(
                f"a supervisor purges runs that are {', '.join(FINISHED)}; found {', '.join(map(repr, unknown)) or 'none'}"
            )
        seconds = seconds_of(after)
        if seconds < 1:
            raise InvalidSetting(f"a supervisor purges runs after a second or more, found {after!r}")
        return Purge(seconds, words, command)


class Housekeeper:
    """Starts a purge where it is time for one, and tells of its end."""

    def __init__(self, purge: Purge | None, *, name: str, environ: Mapping[str, str], clock: Clock, tell: Tell) -> None:
        self._purge = purge
        self._name = name
        self._environ = environ
        self._clock = clock
        self._tell = tell
        self._began_at = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_busy(self) -> bool:
        return self._process is not None

    def look(self) -> None:
        """Note the end of a purge, or begin one. Never waits, and whatever goes wrong with a purge is told and no more."""
        if self._process is not None:
            self._note_end(self._process)
        elif self._purge is not None and self._clock.monotonic() - self._began_at >= EVERY_SECONDS:
            self._began_at = self._clock.monotonic()
            self._begin(self._purge)

    def stop(self) -> None:
        """End a purge that is on its way, and wait until it has: it stops between two runs, or in one that it leaves."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _begin(self, purge: Purge) -> None:
        age = f"{int(purge.after_seconds)}s"
        statuses = [word for status in purge.statuses for word in ("--status", status)]
        command = [*purge.command, "--older-than", age, *statuses, f"--name={self._name}", "--by", "supervisor"]
        try:
            self._process = subprocess.Popen(
                command, env=dict(self._environ), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
            )
        except OSError as error:
            self._tell("cannot-purge", {"why": f"{type(error).__name__}: {error}"})
            return
        self._tell("purging", {"older": age, "pid": self._process.pid})

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.poll()
        if code is not None:
            self._process = None
            self._tell("purged", {"code": code})
