"""Our journal alone: the kernel and the store write what the loop would have them write, with no loop, model or tool."""

from __future__ import annotations

import asyncio
import json

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Commits, Journal, new_row
from agent_runtime.journal.records import OWNER_SIZE, RecordKind, RunStatus
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import claimed_body, own_mark
from agent_runtime.run import LEASE_SECONDS
from bench.job import Figures
from bench.places import store_in
from bench.workload import FIRST_MESSAGE, LAST_TEXT, Stopwatch, call_args, call_id, closed_loop, reply_text, tool_result

KEY = bytes(range(32))
WARM_RUN = "warm"


class Bodies:
    """The bodies of a run's records, made beforehand: encoding is the loop's work."""

    def __init__(self, steps: int) -> None:
        message = {"role": "user", "content": FIRST_MESSAGE}
        self.opened = _json({"context": {}, "namespace": "", "input": {"messages": [message]}})
        self.asked = [b'{"messages":%d}' % (2 * step + 1) for step in range(steps + 1)]
        self.replies = [_json(_reply(step)) for step in range(steps)]
        self.calls = [_json({"tool": "lookup", "args": call_args(step)}) for step in range(steps)]
        self.results = [_json({"result": tool_result(step)}) for step in range(steps)]
        self.last = _json({"text": LAST_TEXT})
        self.ended = _json({"status": "done"})


async def write_run(store: CheckpointStore, ring: KeyRing, run_id: str, bodies: Bodies) -> None:
    """The records and the barriers of a run, as the loop sets them."""
    sealer = sealer_for(ring, tenant="", run_id=run_id)
    row = new_row(
        sealer, run_id=RunId(run_id), kind="loop", name="", owner=SYSTEM_ENTROPY.draw(OWNER_SIZE),
        lease_ms=int(LEASE_SECONDS * 1000),
    )  # fmt: skip
    commits = group_commit(store, SYSTEM_CLOCK)
    journal = Journal(commits, sealer, clock=SYSTEM_CLOCK, row=row, guard=None, mode=Commits.GROUPED)
    journal.note(RecordKind.OPENED, body=bodies.opened)
    journal.note(RecordKind.CLAIMED, body=claimed_body(own_mark().pid, "start"))
    for step, reply in enumerate(bodies.replies):
        await _ask(journal, step, bodies)
        journal.note(RecordKind.DONE, f"{step}/model", 1, reply)
        journal.move_to_next_step()
        journal.note(RecordKind.STARTED, str(step), 1, bodies.calls[step])
        await journal.barrier()
        journal.note(RecordKind.DONE, str(step), 1, bodies.results[step])
        journal.move_to_next_step()
    await _ask(journal, len(bodies.replies), bodies)
    journal.note(RecordKind.DONE, f"{len(bodies.replies)}/model", 1, bodies.last)
    journal.note(RecordKind.ENDED, body=bodies.ended)
    journal.move_to_next_step()
    journal.set_status(RunStatus.DONE)
    journal.give_back()
    await journal.barrier()


async def _ask(journal: Journal, step: int, bodies: Bodies) -> None:
    journal.note(RecordKind.STARTED, f"{step}/model", 1, bodies.asked[step])
    await journal.barrier()


def crowd(*, folder: str, runs: int, steps: int, in_flight: int, url: str = "") -> Figures:
    """The journals of many short runs at once."""

    async def work() -> Figures:
        store, ring, bodies = store_in(folder, url), KeyRing.of(KEY), Bodies(steps)
        await write_run(store, ring, WARM_RUN, bodies)
        watch = Stopwatch()
        await closed_loop((f"r{at}" for at in range(runs)), in_flight, lambda run: write_run(store, ring, run, bodies))
        figures = watch.read()
        await store.close()
        return figures

    return asyncio.run(work())


def _reply(step: int) -> dict[str, object]:
    call = {"id": call_id(step), "name": "lookup", "args": call_args(step)}
    return {"text": reply_text(step), "tool_calls": [call]}


def _json(plain: object) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()
