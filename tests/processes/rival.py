"""A process that writes to a shared SQLite file: `python -m tests.processes.rival save|race PATH NAME COUNT`.

`save` moves a run of its own on, step by step. `race` claims the run "shared" again and again, against others who do so too.
It writes JSON: how often it was answered what.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from agent_runtime.ids import RunId
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import AnswerKind
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import RING, TENANT, owner_named

SHARED = "shared"


async def save(store: SQLiteCheckpointStore, name: str, count: int) -> Counter[str]:
    draft, answers = Draft.of(name), Counter[str]()
    append = draft.open(b"input", checkpoint=b"state")
    for n in range(count):
        [answer] = await store.commit([append])
        answers[answer.kind.value] += 1
        draft = draft.after(append)
        append = draft.step_on(b"result %d" % n, checkpoint=b"state %d" % n)
    return answers


async def race(store: SQLiteCheckpointStore, name: str, count: int) -> Counter[str]:
    answers = Counter[str]()
    sealer = sealer_for(RING, tenant=TENANT, run_id=SHARED)
    while answers["ok"] < count:
        run = await store.latest(RunId(SHARED))
        assert run is not None
        draft = Draft(run.row, sealer)
        [answer] = await store.commit([draft.claim(owner_named(name), heartbeat_at=run.row.heartbeat_at)])
        answers[answer.kind.value] += 1
        assert answer.kind is not AnswerKind.UNKNOWN
    return answers


async def main(what: str, path: str, name: str, count: int) -> None:
    store = SQLiteCheckpointStore(path)
    answers = await (save if what == "save" else race)(store, name, count)
    await store.close()
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
