"""A worker as a process: `clerk.py FOLDER KIND [VERDICTS]` starts a folder's run, or goes on with it, and says how it stands.

What the remote and the model were asked is one line a request in a file of the folder. VERDICTS is a JSON list of verdicts,
each as the text that `to_json` gave. `CRASH_AT` and `CRASH_SEQ` end the process as they end the provisioning agent; a tool
that finds the file `kill` in the folder takes that away and kills its process by SIGKILL once it has acted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent_runtime import Executor, Flow, FlowRunner, Message, NodeRun, Reply, ToolCall, ToolRegistry, ToolSpec, Verdict
from agent_runtime.crash import plan_from
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import idempotency_key

KEY = b"a key for tests, which guards nothing"


class Case(BaseModel):
    advice: str = ""
    paid: list[str] = []


class Clerk:
    """The tools, the model and the flow, over one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = ToolRegistry()
        registry = self.registry

        @registry.tool
        async def email(to: str) -> str:
            return self.act("email", to)

        @registry.tool(idempotent=True)
        async def fee(amount: int) -> str:
            return self.act("fee", amount)

        @registry.tool(pure=True)
        async def advise(about: str) -> str:
            return self.act("advise", about)

        @registry.tool(idempotent=True, needs_approval=True)
        async def refund(amount: int) -> str:
            return self.act("refund", amount)

    def act(self, what: str, about: object, key: str | None = None) -> str:
        """Ask the remote, which counts what it has done; a key that it knows it does not act upon again."""
        key = idempotency_key() if key is None else key
        known = [json.loads(line) for line in self._lines()]
        is_new = not any(each["key"] == key for each in known)
        line = json.dumps({"what": what, "about": about, "key": key, "is_new": is_new}) + "\n"
        with open(self.folder / "remote.jsonl", "ab", buffering=0) as file:
            file.write(line.encode())
        if what == "refund" and (self.folder / "kill").exists():
            (self.folder / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{what} {about}"

    def _lines(self) -> list[str]:
        path = self.folder / "remote.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        """A model that pays a fee and three refunds in one reply, and is done; asked again it would say more."""
        self.act("model", len(messages), key=f"model {len(self._lines())}")
        if any(message.role == "tool" for message in messages):
            return Reply("done")
        amounts = [10, 20, 30] if len(self._lines()) == 1 else [999]
        refunds = [ToolCall(f"r{amount}", "refund", {"amount": amount}) for amount in amounts]
        return Reply("", [ToolCall("f", "fee", {"amount": 1}), *refunds])

    @property
    def flow(self) -> Flow[Case]:
        async def upstream(case: Case, run: NodeRun) -> dict[str, object]:
            advice = await run.call("advise", about="refunds")
            await run.call("email", to="ana")
            return {"advice": advice}

        async def work(case: Case, run: NodeRun) -> dict[str, object]:
            paid = [await run.call("fee", amount=1)]
            for amount in (10, 20, 30):
                paid.append(await run.call("refund", amount=amount))
            return {"paid": paid}

        return Flow("case", state=Case).node("up", upstream).node("work", work).edge("up", "work").end("work")

    async def go_on(self, kind: str, verdicts: list[Verdict] | None = None) -> dict[str, Any]:
        """Start the run, or go on with it; how it stands then, as plain data."""
        is_new = not (self.folder / "runs.db").exists()
        store = SQLiteCheckpointStore(self.folder / "runs.db")
        try:
            result = await self._go_on(kind, store, is_new, verdicts)
        finally:
            await store.close()
        told: dict[str, Any] = {"status": result.status, "pending": [request.to_json() for request in result.pending]}
        if kind == "loop":
            told["results"] = [message.content for message in result.messages if message.role == "tool"]
        return told

    async def _go_on(self, kind: str, store: SQLiteCheckpointStore, is_new: bool, verdicts: list[Verdict] | None) -> Any:
        options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY, "crash": plan_from(os.environ)}
        if kind == "loop" and is_new:
            return await run_tool_loop(self.reply, self.registry, "go", run_id="run", **options)
        if kind == "loop":
            return await recover_tool_loop(self.reply, self.registry, "run", verdicts=verdicts, **options)
        runner = FlowRunner(Executor(self.registry), **options)
        if is_new:
            return await runner.run(self.flow, Case(), run_id="run")
        if verdicts is None:
            return await runner.recover(self.flow, "run")
        return await runner.resume(self.flow, "run", verdicts)


async def main(folder: str, kind: str, given: str | None = None) -> None:
    verdicts = None if given is None else [Verdict.from_json(text) for text in json.loads(given)]
    told = await Clerk(Path(folder)).go_on(kind, verdicts)
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
