"""Workers that stand still inside a call, as real processes: while they may still send, nobody says that nothing was sent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from agent_runtime import codec
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RecordKind, RunStatus, StoredRun
from agent_runtime.journal.seal import sealer_for
from agent_runtime.settlements import Outcome, said_to_plain, say
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from tests.bench import RING
from tests.doubts import sender
from tests.processes.hired import Worker
from tests.processes.job import PATIENCE_SECONDS, until


class Stage:
    """A store, an outbox, and a first worker that is about to send."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store, self.outbox, self.options = folder / "runs.db", folder / "outbox", options

    @contextmanager
    def hired(self, verb: str, *, waits: bool) -> Iterator[Worker]:
        given = json.dumps({"waits": waits, **self.options})
        program = [sys.executable, "-m", "tests.doubts.sender", str(self.store), str(self.outbox), verb, given]
        worker = Worker(program, PYTHONPATH=str(Path(__file__).parents[2]))
        try:
            assert worker.hear() == {"ready": worker.pid}
            yield worker
        finally:
            worker.dismiss()

    @contextmanager
    def frozen(self) -> Iterator[Worker]:
        """A worker that was stopped inside its call, before it sends."""
        with self.hired("start", waits=True) as worker:
            assert worker.hear() == {"acting": "run:0"}
            os.kill(worker.pid, signal.SIGSTOP)
            worker.wait_until_frozen()
            yield worker

    @property
    def sent(self) -> list[str]:
        return sender.sent(self.outbox)

    async def recover(self) -> str:
        """What comes of recovering it in this process, as soon as its lease lets anybody."""
        deadline = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return (await sender.work(self.store, self.outbox, "recover", waits=False, **self.options)).output
            except CheckpointConflict:
                assert monotonic() < deadline
                await asyncio.sleep(0.02)
            except RecoveryNeedsDecision as needed:
                return needed.doubts[0].why

    async def stored(self) -> StoredRun:
        store = SQLiteCheckpointStore(self.store)
        [run] = await store.load_many([RunId("run")])
        await store.close()
        assert run is not None
        return run

    async def say_not_done(self) -> None:
        """Somebody's word, left to the run without a look at its worker."""
        store = SQLiteCheckpointStore(self.store)
        said = say("0", 1, Outcome.not_done(), by="ana", why="it is not in the outbox")
        await post_message(store, sealer_for(RING, tenant="", run_id="run"), MessageKind.SETTLE, said_to_plain(said))
        await store.close()


MAY_SEND = "its probe says that it did not happen, but its worker is not known to be gone, and may still send"


async def test_a_frozen_workers_call_is_not_made_again_until_its_process_is_gone(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.frozen() as worker:
        for _ in range(2):
            assert MAY_SEND in await stage.recover()
            row = (await stage.stored()).row
            assert (row.status, row.wake_at) == (RunStatus.BLOCKED, None)
        assert stage.sent == []
        worker.kill()
        assert await stage.recover() == "letter run:0"
        assert stage.sent == ["run:0"]


async def test_a_frozen_worker_that_thaws_and_sends_has_sent_once_and_its_result_is_taken_over(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.frozen() as worker:
        assert MAY_SEND in await stage.recover()
        worker.go_on()
        worker.thaw()
        assert worker.hear() == {"ended": "CheckpointConflict"}
        row = (await stage.stored()).row
        assert row.wake_at is not None, "what it left wakes the run"
        with stage.hired("recover", waits=False) as second:
            assert second.hear() == {"ended": "letter run:0"}
        [settled] = [record for record in (await stage.stored()).records if record.kind == RecordKind.SETTLED]
        assert codec.decode(settled.body)["by"] == "its worker"
        assert stage.sent == ["run:0"]


@pytest.mark.parametrize("has_probe", [True, False])
async def test_what_a_person_said_of_a_frozen_worker_makes_nothing_run_twice(tmp_path: Path, has_probe: bool) -> None:
    """It is said that nothing was sent; then the worker sends, and is killed before it can tell."""
    stage = Stage(tmp_path, has_probe=has_probe)
    with stage.frozen() as worker:
        await stage.recover()
        await stage.say_not_done()
        assert "its worker" in await stage.recover()
        worker.go_on()
        worker.thaw()
        until(lambda: bool(stage.sent), "it has sent")
        worker.kill()
        ended = await stage.recover()
        assert stage.sent == ["run:0"]
        if has_probe or ended == "letter run:0":  # by its probe, or by the result that it left in the last moment
            assert ended == "letter run:0"
        else:
            assert "its worker stopped before it could write one" in ended


async def test_what_a_frozen_worker_may_have_sent_when_it_was_killed_has_its_time_from_when_that_is_known(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, settles=0.5)
    with stage.frozen() as worker:
        assert MAY_SEND in await stage.recover()
        worker.kill()
        killed_at = monotonic()
        assert "may still take effect" in await stage.recover()
        claim = codec.decode([each for each in (await stage.stored()).records if each.kind == RecordKind.CLAIMED][-1].body)
        assert claim["over"] == [1]
        wake_at = (await stage.stored()).row.wake_at
        assert wake_at is not None
        while (ended := await stage.recover()) != "letter run:0":
            assert "may still take effect" in ended
            await asyncio.sleep(0.02)
        assert monotonic() - killed_at >= 0.5
        assert stage.sent == ["run:0"]


async def test_two_processes_that_pick_up_a_killed_workers_call_make_it_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.frozen() as worker:
        worker.kill()
        with stage.hired("recover", waits=False) as one, stage.hired("recover", waits=False) as two:
            ended = [each.hear()["ended"] for each in (one, two)]
        assert set(ended) <= {"letter run:0", "CheckpointConflict"}
        assert "letter run:0" in ended
        assert stage.sent == ["run:0"]
