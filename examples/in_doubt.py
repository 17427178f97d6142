"""A tool with no repeat rule: after a crash nobody knows whether it acted, so the run stops until a person has looked.

    python examples/in_doubt.py

The crash is played in one process: `PowerCut` is no `Exception`, so it leaves the run as a kill would leave it.
Everything happens in a temporary folder.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import Doubt, Message, RecoveryNeedsDecision, Reply, ToolCall, ToolRegistry, ToolSpec, idempotency_key
from agent_runtime import recover_tool_loop as recover
from agent_runtime import run_tool_loop as run
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"
OUTBOX: list[str] = []

registry = ToolRegistry()


class PowerCut(BaseException):
    """The end of the worker."""


class Power:
    """Whether the next mail is cut off before it leaves."""

    fails = True


@registry.tool
async def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    if Power.fails:
        Power.fails = False
        raise PowerCut
    OUTBOX.append(f"{to}: {text} [{idempotency_key()}]")
    return "sent"


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    if messages[-1].role == "tool":
        return Reply(text="Ana knows.")
    return Reply(tool_calls=[ToolCall("call_0", "send_mail", {"to": "ana", "text": "The build is green."})])


async def main(folder: Path) -> None:
    store = SQLiteCheckpointStore(folder / "mail.db")
    try:
        await run(model, registry, "Tell Ana", run_id="mail-1", checkpoints=store, checkpoint_key=KEY)
    except PowerCut:
        print("the worker is gone, in the middle of a call")

    in_doubt: Sequence[Doubt] = ()
    try:
        await recover(model, registry, "mail-1", checkpoints=store, checkpoint_key=KEY)
    except RecoveryNeedsDecision as stopped:
        for doubt in stopped.doubts:
            print(f"in doubt: {doubt.tool}{dict(doubt.args)}, key {doubt.key}, attempt {doubt.attempt}")
            print(f"why: {doubt.why}")
        in_doubt = stopped.doubts

    # A person looks at the outbox. Nothing is there, so sending is right. Only the calls named are permitted to run again.
    print(f"in the outbox: {OUTBOX}")
    result = await recover(model, registry, "mail-1", checkpoints=store, checkpoint_key=KEY, rerun_in_doubt=in_doubt)
    print(f"after the decision: {OUTBOX}")
    print(result.status, "-", result.output)
    await store.close()


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
