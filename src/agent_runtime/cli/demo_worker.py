"""The worker of `agent-runtime demo`: one small agent on one run, that may be told to die at the worst moment.

    python -m agent_runtime.cli.demo_worker FOLDER [TOOL]

It creates a server, pays for it and mails that it is up. TOOL is the tool in which it kills itself: after the remote has
acted, before anything is written down. The remote is a file in the folder; it knows the keys it was called with.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_runtime.errors import AgentRuntimeError, CheckpointNotFound
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.settlements import Outcome
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key

RUN = "demo"
KEY = b"the demo's own key: never use it"
AMOUNT = 120
STORE = "runs.db"
LATENCY_SECONDS = 0.03


class Remote:
    """What is out there: it makes each thing once a key, and counts what it is asked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "remote.jsonl"

    def entries(self) -> list[dict[str, Any]]:
        """Everything it was ever asked, in order."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def find(self, key: str) -> str | None:
        """What a key has made, if anything."""
        return next((str(entry["id"]) for entry in self.entries() if entry.get("key") == key and entry["is_new"]), None)

    def do(self, what: str, key: str, args: Mapping[str, object]) -> str:
        """Make it, or give back what the key has made before."""
        found = self.find(key)
        made = sum(1 for entry in self.entries() if entry["what"] == what and entry["is_new"])
        name = found or f"{what}-{made + 1}"
        self._note({"what": what, "key": key, "args": dict(args), "id": name, "is_new": found is None})
        return name

    def ask(self) -> None:
        """A request to the model is a request, too."""
        self._note({"what": "reply", "is_new": True, "id": ""})

    def made(self, what: str) -> int:
        """How many of these there are."""
        return sum(1 for entry in self.entries() if entry["what"] == what and entry["is_new"])

    def _note(self, entry: Mapping[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def make_tools(remote: Remote, deadly: str = "") -> ToolRegistry:
    """Three tools of three kinds: one may be repeated, one asks a person, one can find out whether it was done."""
    registry = ToolRegistry()

    async def act(what: str, args: Mapping[str, object], tool: str) -> str:
        await asyncio.sleep(LATENCY_SECONDS)
        made = remote.do(what, idempotency_key(), args)
        if tool == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    async def find_mail(key: str, args: dict[str, object]) -> Outcome:
        found = remote.find(key)
        return Outcome.not_done() if found is None else Outcome.done(found)

    @registry.tool(idempotent=True)
    async def create_server(name: str) -> str:
        """Create a server."""
        return await act("server", {"name": name}, "create_server")

    @registry.tool(idempotent=True, needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay the bill."""
        return await act("payment", {"amount": amount}, "pay")

    @registry.tool(probe=find_mail)
    async def send_mail(to: str) -> str:
        """Mail that it is up."""
        return await act("mail", {"to": to}, "send_mail")

    return registry


class Model:
    """Answers from a script, by how far the conversation has come."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def reply(self, messages: Sequence[Message], tools: Sequence[object]) -> Reply:
        """The next answer."""
        await asyncio.sleep(LATENCY_SECONDS)
        self._remote.ask()
        said = sum(1 for message in messages if message.role == "assistant")
        usage = {"input_tokens": 200 + 100 * said, "output_tokens": 20}
        if said == len(_DECISIONS):
            return Reply(text="The server is up and paid for, and Ana knows.", usage=usage)
        name, args = _DECISIONS[said]
        return Reply(tool_calls=[ToolCall(id=f"call_{said}", name=name, args=args)], usage=usage)


_DECISIONS: Sequence[tuple[str, Mapping[str, object]]] = (
    ("create_server", {"name": "web"}),
    ("pay", {"amount": AMOUNT}),
    ("send_mail", {"to": "ana@example.org"}),
)


async def work(folder: Path, deadly: str) -> str:
    """Start the run, or go on with it; gives how it stands."""
    remote = Remote(folder)
    store = SQLiteCheckpointStore(folder / STORE)
    tools, model = make_tools(remote, deadly), Model(remote)
    try:
        try:
            result = await recover_tool_loop(model, tools, RUN, checkpoints=store, checkpoint_key=KEY)
        except CheckpointNotFound:
            result = await run_tool_loop(
                model, tools, "Set up a web server, pay for it, tell Ana.", run_id=RUN, checkpoints=store, checkpoint_key=KEY
            )
    finally:
        await store.close()
    return result.status


def main() -> int:
    """Work, and say how the run stands."""
    try:
        print(asyncio.run(work(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")))
    except AgentRuntimeError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
