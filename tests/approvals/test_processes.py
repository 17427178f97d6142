"""Each decision in a process of its own, everything as text between them, and processes that are killed on the way."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agent_runtime.approvals import ApprovalRequest, Verdict
from tests.approvals.clerk import Clerk

PROGRAM = Path(__file__).with_name("clerk.py")
TOP = PROGRAM.parents[2]
LONG_SECONDS = 60.0


class Folder:
    """A run's folder, and processes that work on it."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        path.mkdir(exist_ok=True)

    async def here(self) -> dict[str, Any]:
        """What a worker in this process says, with nothing new."""
        return await Clerk(self.path).go_on(self.kind)

    async def worker(self, *verdicts: Verdict, dies: bool = False, **settings: str) -> Any:
        """What one more process says; it must end well, unless it is to die."""
        given = [json.dumps([verdict.to_json() for verdict in verdicts])] if verdicts else []
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), str(self.path), self.kind, *given, cwd=TOP,
            env={**os.environ, "PYTHONPATH": str(TOP), **settings},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), LONG_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert bool(process.returncode) is dies, f"it ended with {process.returncode}: {err.decode()}"
        return None if dies else json.loads(out.splitlines()[-1])

    def requests(self, what: str) -> list[dict[str, Any]]:
        """What the remote or the model was asked for."""
        lines = (self.path / "remote.jsonl").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["what"] == what]

    def effects(self, what: str) -> list[Any]:
        return [each["about"] for each in self.requests(what) if each["is_new"]]


def pending(told: Any) -> list[ApprovalRequest]:
    assert told["status"] == "paused", told
    return [ApprovalRequest.from_json(text) for text in told["pending"]]


async def test_three_decisions_one_after_another_in_fresh_processes_do_what_was_before_them_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "flow", "flow")
    told = await folder.here()
    asked = []
    for amount in (10, 20, 30):
        [request] = pending(told)
        asked.append(request.id)
        assert request.args == {"amount": amount}
        told = await folder.worker(request.approve(by="ana"))
        for what in ("fee", "email", "advise"):
            assert len(folder.requests(what)) == 1, what
    assert told["status"] == "done"
    assert (folder.effects("refund"), len(set(asked))) == ([10, 20, 30], 3)


async def test_three_requests_of_one_reply_are_answered_out_of_order_through_text_in_fresh_processes(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "loop", "loop")
    told = await folder.here()
    ten, twenty, thirty = pending(told)
    told = await folder.worker(thirty.edit({"amount": 3}, by="ana"))
    assert [request.id for request in pending(told)] == [ten.id, twenty.id]
    told = await folder.worker(ten.deny(by="bo", note="no"))
    assert [request.id for request in pending(told)] == [twenty.id]
    told = await folder.worker(twenty.approve(by="ana"))
    assert told["status"] == "done"
    assert told["results"] == ["fee 1", "error: Denied: bo did not approve this call: no", "refund 20", "refund 3"]
    assert (folder.effects("refund"), folder.effects("fee"), len(folder.requests("model"))) == ([3, 20], [1], 2)


async def test_a_process_that_dies_on_an_approved_call_is_followed_by_one_that_asks_nobody(tmp_path: Path) -> None:
    """At each point between the verdict that is stored and the result that is recorded; and by SIGKILL inside the tool."""
    points = ["before_intent", "after_call", "kill"]
    await asyncio.gather(*(_dies_and_goes_on(tmp_path, point) for point in points))


async def _dies_and_goes_on(tmp_path: Path, point: str) -> None:
    folder = Folder(tmp_path / point, "loop")
    ten, twenty, thirty = pending(await folder.here())
    settings = {} if point == "kill" else {"CRASH_AT": point}
    if point == "kill":
        (folder.path / "kill").touch()
    answers = (ten.edit({"amount": 1}, by="ana"), twenty.approve(by="ana"), thirty.deny(by="bo"))
    await folder.worker(*answers, dies=True, **settings)
    told = await folder.here()
    assert told["status"] == "done", point
    assert told["results"][:3] == ["fee 1", "refund 1", "refund 20"], point
    assert (sorted(folder.effects("refund")), len(folder.requests("model"))) == ([1, 20], 2), point
