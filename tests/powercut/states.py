"""Works a store, and then opens it as each power cut may have left it: how many states there were, and which were wrong."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path

from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from tests.powercut.disk import Disk, Files
from tests.powercut.judge import Judge, must_take_another
from tests.powercut.recording import Call, Said, record

FILE = "runs.db"
GOES_ON_EVERY = 20
"""Of so many stores one is written to as well."""
IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Recorded:
    """What one workload asked of the disk, and what it held after each of its moves."""

    calls: Sequence[Call]
    states: Sequence[bytes]

    def moments(self) -> Iterator[tuple[int, int, Disk]]:
        """Each moment at which the power may go: how many moves were acknowledged by then and begun, and the disk."""
        disk, acked, begun = Disk(), 0, 0
        for call in self.calls:
            disk.take(call)
            if isinstance(call, Said):
                word, number = call.line.split()
                begun, acked = (int(number), acked) if word == "begin" else (begun, int(number))
            yield acked, begun, disk


@dataclass
class Tally:
    """How many states were opened, how many of them differ, and what was wrong with how many, by kind."""

    enumerated: int = 0
    distinct: set[bytes] = field(default_factory=set)
    wrong: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, other: Tally) -> None:
        self.enumerated += other.enumerated
        self.distinct |= other.distinct
        self.wrong += other.wrong
        self.example = self.example or other.example


def record_workload(level: str, rounds: int) -> Recorded:
    """Run the workload at this level of SQLite's `synchronous`, and note what it asked of the disk."""
    with tempfile.TemporaryDirectory(dir=in_memory()) as name:
        files, side = Path(name, "files"), Path(name, "side")
        files.mkdir()
        program = ["-m", "tests.powercut.workload", str(files / FILE), str(side), level, str(rounds)]
        calls = record(files, side, Path(name, "log"), program)
        return Recorded(calls, [bytes.fromhex(state) for state in json.loads(side.with_suffix(".states").read_text())])


def most_for(possible: Sequence[int], wanted: int) -> int:
    """How many states to take of each cut, so that together they are as many as wanted, or all there are."""
    low, high = 1, max(wanted, 1)
    while low < high:
        middle = (low + high) // 2
        if sum(min(many, middle) for many in possible) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def enumerate_states(
    recorded: Recorded, wanted: int, *, jobs: int = 1, every: int = 1, told: Callable[[int], None] = lambda done: None
) -> Tally:
    """Open as many states as wanted, spread over every so many moments, and tell how many are done."""
    possible = [disk.cut().possible for at, (_, _, disk) in enumerate(recorded.moments()) if at % every == 0]
    most = most_for(possible, wanted)
    total = Tally()
    if jobs == 1:
        total.add(_judge_some(recorded, most, 0, every))
        return total
    shares = 8 * jobs
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork"), initializer=_inherit, initargs=(recorded,)) as pool:
        for share in [pool.submit(_judge_share, most, at * every, shares * every) for at in range(shares)]:
            total.add(share.result())
            told(total.enumerated)
    return total


_INHERITED: list[Recorded] = []
"""What a process of the pool judges: given once, not with each share."""


def _inherit(recorded: Recorded) -> None:
    _INHERITED.append(recorded)


def _judge_share(most: int, first: int, every: int) -> Tally:
    return _judge_some(_INHERITED[0], most, first, every)


def _judge_some(recorded: Recorded, most: int, first: int, every: int) -> Tally:
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        return asyncio.run(_judge_moments(recorded, most, first, every, Path(folder)))


async def _judge_moments(recorded: Recorded, most: int, first: int, every: int, folder: Path) -> Tally:
    judge, tally = Judge(recorded.states), Tally()
    for number, (acked, begun, disk) in enumerate(recorded.moments()):
        if number % every != first:
            continue
        cut = disk.cut()
        for choice in cut.choices(most, random.Random(number)):
            state = cut.state(choice)
            tally.enumerated += 1
            if not _is_new(tally, state, acked, begun):
                continue
            goes_on = len(tally.distinct) % GOES_ON_EVERY == 0
            trouble = await _judge(judge, state, folder, acked, begun, goes_on=goes_on)
            if trouble:
                tally.wrong[trouble.partition(":")[0]] += 1
                tally.example = tally.example or f"after call {number} ({acked} acknowledged), choice {choice:x}: {trouble}"
    return tally


def _is_new(tally: Tally, state: Files, acked: int, begun: int) -> bool:
    """Whether nothing of the same bytes was judged by the same measure."""
    name = blake2b(f"{acked} {begun}".encode(), digest_size=16)
    for file in sorted(state):
        name.update(f"\0{file}\0{len(state[file])}\0".encode() + state[file])
    before = len(tally.distinct)
    tally.distinct.add(name.digest())
    return len(tally.distinct) > before


def _put(state: Files, folder: Path) -> None:
    """Have these files in the folder, and no others."""
    for old in folder.iterdir():
        old.unlink()
    for name, content in state.items():
        (folder / name).write_bytes(content)


async def _judge(judge: Judge, state: Files, folder: Path, acked: int, begun: int, *, goes_on: bool) -> str:
    _put(state, folder)
    store = SQLiteCheckpointStore(folder / FILE)
    try:
        trouble = await judge.judge(store, acked=acked, begun=begun)
        return trouble or (await must_take_another(store) if goes_on else "")
    finally:
        await store.close()


def in_memory() -> Path | None:
    """Where files cost no disk; None for wherever temporary files are."""
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 1 << 28 else None
