"""What the processes of a chaos run say, each line with the moment at which it was seen."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

CLAIMED = re.compile(r"INFO claimed run=(\S+) epoch=(\d+) ")
STARTED = re.compile(r"INFO started run=(\S+)$")
ENDED = re.compile(r"INFO done run=(\S+) ")
PAUSING = re.compile(r"INFO pausing run=(\S+) seconds=(\S+) ")


@dataclass(slots=True)
class Heard:
    """The moments that the lines tell of, in seconds from the start."""

    claims: dict[tuple[str, int], float] = field(default_factory=dict)
    """When a run was claimed under an epoch."""
    pauses: list[tuple[str, float]] = field(default_factory=list)
    """When a supervisor made a run wait, because its workers come to nothing."""
    started: Counter[str] = field(default_factory=Counter)
    """How often a worker said that it has started a run: from then on the store knows it."""
    deaths: int = 0
    """How many workers died at a crash point."""
    at_work: set[str] = field(default_factory=set)
    """Runs that were claimed, and whose worker has neither ended them nor was taken from them since."""

    def take(self, line: str, at: float) -> None:
        if claimed := CLAIMED.match(line):
            self.claims.setdefault((claimed[1], int(claimed[2])), at)
            self.at_work.add(claimed[1])
        elif started := STARTED.match(line):
            self.started[started[1]] += 1
            self.at_work.add(started[1])
        elif ended := ENDED.match(line):
            self.at_work.discard(ended[1])
        elif line.startswith("!!! CRASH_AT="):
            self.deaths += 1
        elif pausing := PAUSING.match(line):
            self.pauses.append((pausing[1], at))


class Ears:
    """Follows files that others write."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [Followed(open(file, "rb")) for file in files]  # noqa: SIM115 - closed by `close`
        self.heard = Heard()

    def listen(self, at: float) -> None:
        """Take what was written since."""
        for followed in self._files:
            for line in followed.lines():
                self.heard.take(line, at)

    def close(self) -> None:
        for followed in self._files:
            followed.file.close()


@dataclass(slots=True)
class Followed:
    """A file that grows."""

    file: BinaryIO
    rest: bytes = b""

    def lines(self) -> list[str]:
        """The whole lines that came since."""
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
