"""A program whose system calls are recorded: it works a SQLite store through everything that is written to one.

    python -m tests.powercut.workload FILE SIDE LEVEL ROUNDS

Before each move it writes `begin N` to the file SIDE, in one system call, and `acked N` once the store has acknowledged it.
What the store held after each move is written beside it at the end, as a digest, `SIDE.states`. LEVEL is what SQLite is to
run at: FULL as our store has it, or NORMAL, the control, of which power cuts must be seen to take acknowledged moves away.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract.draft import BOB, Draft
from tests.powercut.judge import digest_of

PAGES_OF_LOG = 40
"""After how many pages the log is folded into the file: soon, so that this and the log's reset come often."""
Move = Callable[[CheckpointStore], Awaitable[list[Answer]]]


class Store(SQLiteCheckpointStore):
    """The store as it is, but for when its log is folded, and for the level of the control."""

    level = "FULL"

    def _connect(self, *, wait_seconds: float = 0) -> sqlite3.Connection:
        db = super()._connect(wait_seconds=wait_seconds)
        db.execute(f"PRAGMA wal_autocheckpoint = {PAGES_OF_LOG}")
        db.execute(f"PRAGMA synchronous = {self.level}")
        return db


class Desk:
    """The runs as their writer believes them to be stored; each move changes some of them."""

    def __init__(self) -> None:
        self.drafts: dict[str, Draft] = {}
        self._draw = random.Random(11)

    async def appended(self, store: CheckpointStore, *appends: Append) -> list[Answer]:
        answers = await store.commit(appends)
        for append in appends:
            self.drafts[append.row.run_id] = self.drafts[append.row.run_id].after(append)
        return answers

    def new(self, *names: str) -> Move:
        for name in names:
            self.drafts[name] = Draft.of(name)
        return lambda store: self.appended(store, *(self.drafts[name].open(checkpoint=self._body(900)) for name in names))

    def step_all(self, *names: str) -> Move:
        """One batch over several runs, some with large checkpoints."""
        return lambda store: self.appended(
            store,
            *(
                self.drafts[name].step_on(self._body(60), checkpoint=self._body(7000) if at % 2 else None)
                for at, name in enumerate(names)
            ),
        )

    def add(self, name: str) -> Move:
        """One append by the way of a lone one."""

        async def lone(store: CheckpointStore) -> list[Answer]:
            assert isinstance(store, SQLiteCheckpointStore)
            append = self.drafts[name].add(self._body(300))
            answer = store.commit_at_once(append)
            if answer is None:
                [answer] = await store.commit([append])
            self.drafts[name] = self.drafts[name].after(append)
            return [answer]

        return lone

    def claim(self, name: str) -> Move:
        return lambda store: self.appended(store, self.drafts[name].claim(BOB))

    def end(self, name: str) -> Move:
        return lambda store: self.appended(store, self.drafts[name].end())

    def settle(self, name: str) -> Move:
        return lambda store: self.appended(store, self.drafts[name].settle())

    def renew(self, name: str) -> Move:
        draft = self.drafts[name]

        async def beat(store: CheckpointStore) -> list[Answer]:
            return [await store.renew(draft.run_id, guard=self.drafts[name].guard)]

        return beat

    def post(self, name: str, body: bytes) -> Move:
        async def leave(store: CheckpointStore) -> list[Answer]:
            return [await store.post(self.drafts[name].run_id, self.drafts[name].message(body))]

        return leave

    def delete(self, name: str) -> Move:
        async def remove(store: CheckpointStore) -> list[Answer]:
            return [await store.delete(self.drafts[name].run_id, guard=self.drafts[name].guard)]

        return remove

    def _body(self, size: int) -> bytes:
        return self._draw.randbytes(size)


async def set_up(store: CheckpointStore) -> list[Answer]:
    """The first move: the file is made."""
    assert await store.list_runs() == []
    return []


async def plan(desk: Desk, rounds: int) -> AsyncIterator[Move]:
    yield set_up
    for at in range(rounds):
        names = [f"run-{at}-{n}" for n in range(3)]
        yield desk.new(*names)
        yield desk.step_all(*names)
        yield desk.add(names[0])
        yield desk.renew(names[1])
        yield desk.post(names[1], b"approved")
        yield desk.claim(names[1])
        yield desk.step_all(*names[:2])
        yield desk.end(names[0])
        yield desk.settle(names[0])
        yield desk.delete(names[2])


async def work(file: Path, side: Path, rounds: int) -> None:
    """Every move; half-way a second connection writes too, as another worker has it, and later all close the file and open it
    again, whose log is gone then."""
    channel = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = Store(file)
    stores: list[SQLiteCheckpointStore] = [store]
    states, number = [await digest_of(SQLiteCheckpointStore(side.with_suffix(".empty")))], 0
    async for move in plan(Desk(), rounds):
        number += 1
        os.write(channel, f"begin {number}\n".encode())
        answers = await move(stores[number % len(stores)])
        assert all(answer.kind is AnswerKind.OK for answer in answers), answers
        os.write(channel, f"acked {number}\n".encode())
        states.append(await digest_of(store))
        if number == 4 * rounds:
            stores.append(store.reopen())
        if number == 7 * rounds:
            for each in stores:
                await each.close()
            store = Store(file)
            stores = [store]
    os.close(channel)
    side.with_suffix(".states").write_text(json.dumps([state.hex() for state in states]))
    await store.close()


def main() -> None:
    file, side, Store.level, rounds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    asyncio.run(work(file, side, rounds))


if __name__ == "__main__":
    main()
