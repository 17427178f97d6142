"""What a store holds as one value, and whether a file that a power cut left is right: opened by our own store."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from agent_runtime.errors import AgentRuntimeError
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus, StoredMessage, StoredRun
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.testing.store_contract.draft import RING, TENANT, Draft, Entry

MOST = 10_000


class Held(NamedTuple):
    """One run with all that belongs to it."""

    run: StoredRun
    messages: tuple[StoredMessage, ...]


async def look(store: CheckpointStore) -> list[Held]:
    """All that a store holds, deleted runs too."""
    rows = [*await store.list_runs(limit=MOST), *await store.list_runs(status=RunStatus.DELETED, limit=MOST)]
    ids = sorted(row.run_id for row in rows)
    runs = await store.load_many(ids)
    messages = [tuple(await store.inbox(run_id)) for run_id in ids]
    return [Held(run, said) for run, said in zip(runs, messages, strict=True) if run is not None]


def digest_of(held: Sequence[Held]) -> bytes:
    """Two stores that hold the same have the same: every column of every row but how long the owner has been silent."""
    known = blake2b(digest_size=16)
    for run, messages in held:
        known.update(repr((run._replace(row=run.row._replace(idle_ms=0)), messages)).encode())
    return known.digest()


class Judge:
    """Judges stores by what each move of the workload left, which is all that may ever be seen."""

    def __init__(self, states: Sequence[bytes]) -> None:
        """`states`: the digest of what was held at first, and after each move."""
        self._states = states
        self._verified: set[bytes] = set()

    async def judge(self, store: CheckpointStore, *, acked: int, begun: int) -> str:
        """What is wrong; "" where the store is as a move left it that was begun, and none is missing that was acknowledged."""
        try:
            held = await look(store)
        except AgentRuntimeError as error:
            return f"refused: {type(error).__name__}: {error}"
        state = digest_of(held)
        if state in self._states[acked : begun + 1]:
            self._verify(state, held)
            return ""
        if state in self._states:
            return f"lost: {acked} moves were acknowledged, {self._states.index(state)} are there"
        return "half: it is as no move left it"

    def _verify(self, state: bytes, held: Sequence[Held]) -> None:
        """Have every seal checked, once for what is equal to the last byte."""
        if state in self._verified:
            return
        for run, _ in held:
            if run.row.status != RunStatus.DELETED:
                open_run(RING, run, tenant=TENANT)
        self._verified.add(state)


async def must_take_another(store: CheckpointStore) -> str:
    """What is wrong with going on in a store that a power cut left; "" where a run of it takes another record."""
    name = RunId("after the cut")
    draft = Draft.of(name)
    appends = [draft.open()]
    running = await store.list_unfinished(limit=1)
    if running:
        row = running[0]
        old = Draft(row._replace(idle_ms=0), Draft.of(row.run_id).sealer)
        appends.append(old.append(old.row, Entry(RecordKind.DONE, b"on", "0", 1)))
    answers = await store.commit(appends)
    if any(answer.kind is not AnswerKind.OK for answer in answers):
        return f"stuck: it takes no more records, {answers}"
    for run in await store.load_many([append.row.run_id for append in appends]):
        assert run is not None
        open_run(RING, run, tenant=TENANT)
    return ""
