"""The command line of the benchmark: which measures, how long, and where the table goes."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import agent_runtime
from bench.backends import Backend, RedisBackend, postgres_backend, redis_backend
from bench.measures import MEASURES, ON_REDIS, WITH_SERVER_ALONE, WITHOUT_SERVER
from bench.table import Row, between_marks, markdown
from bench.turns import QUICK, TOP, Bench, Sizes

PAGE = TOP / "docs" / "speed.md"
ROUNDS = 3


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, whether or not the goals are reached."""
    chosen = _parser().parse_args(arguments)
    peers = os.environ.get("PEERS")
    _compile_package()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=chosen.dir) as base:
        bench = Bench(
            QUICK if chosen.quick else Sizes(),
            chosen.rounds or (1 if chosen.quick else ROUNDS),
            Path(base),
            Path(peers).resolve() if peers else None,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        with _backends(chosen.store, Path(chosen.dir) if chosen.dir else None) as backends:
            sections = {
                backend.name: measure(replace(bench, backend=backend), chosen.measures or list(MEASURES))
                for backend in backends
            }
            facts = machine_facts(Path(base), bench, backends)
    print(as_json(facts, sections) if chosen.json else as_text(facts, sections))
    if chosen.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(between_marks(page, as_text(facts, sections)), encoding="utf-8")
    return 0


@contextmanager
def _backends(stores: str, parent: Path | None) -> Iterator[list[Backend]]:
    """What is measured on, for as long as it is."""
    with ExitStack() as stack:
        backends = [Backend()] if stores in ("sqlite", "both") else []
        if stores in ("postgres", "both"):
            backends.append(stack.enter_context(postgres_backend(parent)))
        if stores == "redis":
            backends.append(stack.enter_context(redis_backend()))
        yield backends


def _compile_package() -> None:
    """As an installer does: a checkout that was just edited would else be compiled anew by every process measured."""
    home = agent_runtime.__file__
    assert home is not None, "the package is a folder with a file"
    for folder in (Path(home).parent, Path(__file__).parent):
        compileall.compile_dir(folder, quiet=2)


def measure(bench: Bench, names: Sequence[str]) -> list[Row]:
    """The rows of the measures named, on the backend of the bench."""
    rows = []
    for name in names:
        if name in (WITH_SERVER_ALONE if bench.backend.name == Backend.name else WITHOUT_SERVER):
            continue
        if name not in ON_REDIS and bench.backend.name == RedisBackend.name:
            continue
        began = time.monotonic()
        rows += MEASURES[name](bench)
        bench.say(f"{bench.backend.name}, {name}: {time.monotonic() - began:.0f} s")
    return rows


def as_text(facts: str, sections: Mapping[str, Sequence[Row]]) -> str:
    """A table for each store that was measured on."""
    return "\n\n".join([facts, *(f"### {name}\n\n{markdown(rows).strip()}" for name, rows in sections.items() if rows)])


def as_json(facts: str, sections: Mapping[str, Sequence[Row]]) -> str:
    """Every figure of every round."""
    plain = [{"store": name, **row.to_plain()} for name, rows in sections.items() for row in rows]
    return json.dumps({"machine": facts, "rows": plain}, ensure_ascii=False, indent=1)


def machine_facts(base: Path, bench: Bench, backends: Sequence[Backend]) -> str:
    """What the figures were measured on, without a date."""
    rounds = "one round" if bench.rounds == 1 else f"medians of {bench.rounds} rounds"
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, {platform.python_implementation()} "
        f"{platform.python_version()}, {', '.join(backend.facts for backend in backends)}, on {file_system(base)}; {rounds}."
    )


def file_system(path: Path) -> str:
    """The kind of file system that the files are on; durable writes cost nothing on some."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "an unknown file system"
    mounts = [line.split()[1:3] for line in lines]
    inside = [(where, kind) for where, kind in mounts if path.resolve().is_relative_to(where)]
    return max(inside, key=lambda mount: len(mount[0]), default=("", "an unknown file system"))[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/run.py", description="Our speed beside the floor, in turns in one pass.")
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"which of {', '.join(MEASURES)}; all by default")
    parser.add_argument(
        "--store", choices=("sqlite", "postgres", "both", "redis"), default="both", help="what runs are kept in"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds of each measure, {ROUNDS} by default")
    parser.add_argument("--quick", action="store_true", help="less work and one round: to see that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="every figure of every round as JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="also write the table to docs/speed.md")
    parser.add_argument("--dir", help="where the files are made; by default the system's temporary folder")
    return parser
