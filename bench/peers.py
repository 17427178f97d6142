"""The floor of the peers' comparison, where a checkout of it is named: its own file, run by its own command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.job import Figures
from bench.turns import LONGEST_SECONDS, Bench, Measure


def floor_file(peers: Path) -> Path:
    """The adapter that is the peers' floor."""
    path = peers / "adapters" / "floor.py"
    if not path.is_file():
        raise FileNotFoundError(f"expected the peers' floor at {path}; set PEERS to the folder that holds adapters/floor.py")
    return path


def ask_floor(
    bench: Bench, peers: Path, form: str, command: str, folder: str, *options: object, killed: bool = False
) -> Figures:
    """What a form of the peers' floor measured; nothing where it was to be `killed`."""
    variant = f"{bench.backend.floors}-{form}"
    more, environment = bench.backend.for_peers(fresh=command != "recover")
    arguments = [sys.executable, str(floor_file(peers)), variant, command, "--dir", folder, *more, *map(str, options)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )  # fmt: skip
    if done.returncode != (-9 if killed else 0):
        raise RuntimeError(f"{variant} {command} of the peers ended with {done.returncode}:\n{done.stderr[-2000:]}")
    if killed:
        return {}
    plain = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: value for name, value in plain.items() if isinstance(value, int | float)}


def floor_job(bench: Bench, form: str, command: str, *options: object) -> list[Measure]:
    """A measurement of the peers' floor; none where no peers are named."""
    peers = bench.peers
    if peers is None:
        return []
    return [lambda: bench.in_folder(lambda folder: ask_floor(bench, peers, form, command, folder, *options))]
