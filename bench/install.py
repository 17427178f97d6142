"""What a bare install of the package brings: its distributions, and their size without caches."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distribution, requires
from pathlib import Path

import agent_runtime

DISTRIBUTION = "durable-agent-runtime"


def core_install() -> tuple[set[str], float]:
    """The names of the distributions, and the megabytes of their files and ours."""
    names: set[str] = set()
    waiting = [DISTRIBUTION]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += needed_by(name)
    folder = Path(agent_runtime.__file__).parent
    own = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return names, (own + sum(bytes_of(distribution(name)) for name in names - {DISTRIBUTION})) / 1e6


def needed_by(name: str) -> list[str]:
    """What a distribution needs here; what an extra or another Python needs is left out."""
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requires(name) or () if not re.search(r";.*(extra|<)", line))
    return [re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match is not None]


def bytes_of(dist: Distribution) -> int:
    """The bytes of an installed distribution's files."""
    paths = (Path(str(file.locate())) for file in dist.files or () if "__pycache__" not in file.parts)
    return sum(path.stat().st_size for path in paths if path.is_file())
