"""What a store holds as one value, and whether a file that a power cut left is right: opened by our own store."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from agent_runtime.errors import AgentRuntimeError
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.stores.sqlite_file import Database
from agent_runtime.testing.store_contract.draft import RING, TENANT, Draft, Entry

MOST = 10_000
TABLES = ("runs", "journal", "checkpoints", "inbox")


async def digest_of(store: SQLiteCheckpointStore) -> bytes:
    """Two stores that hold the same have the same: every column of every table, as our own store reads them."""

    def dump(db: Database) -> list[Sequence[object]]:
        return [db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in TABLES]

    return blake2b(repr(await store._read(dump)).encode(), digest_size=16).digest()


async def verify(store: CheckpointStore) -> None:
    """Read all that there is by the verbs of the store, and have every seal checked."""
    for run in await store.load_many([row.run_id for row in await store.list_runs(limit=MOST)]):
        assert run is not None
        open_run(RING, run, tenant=TENANT)
        sealer = Draft.of(run.row.run_id).sealer
        for message in await store.inbox(run.row.run_id):
            assert message.seal == sealer.message(message.kind, message.body)
    for row in await store.list_runs(status=RunStatus.DELETED, limit=MOST):
        assert (await store.calls(row.run_id), await store.inbox(row.run_id)) == ([], [])


class Judge:
    """Judges stores by what each move of the workload left, which is all that may ever be seen."""

    def __init__(self, states: Sequence[bytes]) -> None:
        """`states`: the digest of what was held at first, and after each move."""
        self._states = states
        self._verified: set[bytes] = set()

    async def judge(self, store: SQLiteCheckpointStore, *, acked: int, begun: int) -> str:
        """What is wrong; "" where the store is as a move left it that was begun, and none is missing that was acknowledged."""
        try:
            state = await digest_of(store)
        except AgentRuntimeError as error:
            return f"refused: {type(error).__name__}: {error}"
        if state in self._states[acked : begun + 1]:
            if state not in self._verified:  # what is equal to the last byte is verified once
                await verify(store)
                self._verified.add(state)
            return ""
        if state in self._states:
            return f"lost: {acked} moves were acknowledged, {self._states.index(state)} are there"
        return "half: it is as no move left it"


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
