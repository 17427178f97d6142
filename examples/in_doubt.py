"""A mail that may or may not have left: after a crash its probe asks the outbox, and where that cannot say, a person does.

    python examples/in_doubt.py

The crash is played in one process: `PowerCut` is no `Exception`, so it leaves a run as a kill would leave it. Everything
happens in a temporary folder.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent_runtime import (
    Message,
    Outcome,
    RecoveryNeedsDecision,
    Reply,
    Runs,
    SettlementRefused,
    ToolCall,
    ToolRegistry,
    ToolSpec,
    idempotency_key,
)
from agent_runtime import recover_tool_loop as recover
from agent_runtime import run_tool_loop as run
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"
OUTBOX: dict[str, str] = {}

registry = ToolRegistry()


class PowerCut(BaseException):
    """The end of the worker."""


class World:
    """When the power goes, and whether the outbox can be asked."""

    cut: str = ""
    outbox_is_up = True


async def find_mail(key: str, args: dict[str, Any]) -> Outcome:
    """The probe: what the outbox says of a mail, by its key."""
    if not World.outbox_is_up:
        return Outcome.unknown()
    return Outcome.done(f"sent to {args['to']}") if key in OUTBOX else Outcome.not_done()


@registry.tool(probe=find_mail, settles_after=2)
async def send_mail(to: str) -> str:
    """Send a mail. The outbox takes what it is sent within two seconds, or never."""
    if World.cut == "before":
        raise PowerCut
    OUTBOX[idempotency_key()] = to
    if World.cut == "after":
        raise PowerCut
    return f"sent to {to}"


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    if messages[-1].role == "tool":
        return Reply(f"It was {messages[-1].content}.")
    return Reply("", [ToolCall("call_0", "send_mail", {"to": "ana"})])


async def crash(store: SQLiteCheckpointStore, run_id: str, cut: str) -> None:
    World.cut = cut
    try:
        await run(model, registry, "Tell Ana", run_id=run_id, checkpoints=store, checkpoint_key=KEY)
    except PowerCut:
        print(f"-- {run_id}: the power went {cut} the mail did")
    World.cut = ""


async def pick_up(store: SQLiteCheckpointStore, run_id: str) -> None:
    try:
        result = await recover(model, registry, run_id, checkpoints=store, checkpoint_key=KEY)
        print(f"{result.status}: {result.output} {len(OUTBOX)} in the outbox")
    except RecoveryNeedsDecision as stopped:
        for doubt in stopped.doubts:
            print(f"in doubt: {doubt.tool} {dict(doubt.args)}, key {doubt.key}: {doubt.why.partition(' for ')[0]}")


async def main(folder: Path) -> None:
    store = SQLiteCheckpointStore(folder / "mail.db")

    await crash(store, "mail-1", "after")
    await pick_up(store, "mail-1")  # the probe finds the mail: it is not sent again

    await crash(store, "mail-2", "before")
    await pick_up(store, "mail-2")  # the outbox does not have it, but might yet: what was sent may be on its way
    await asyncio.sleep(2.1)
    await pick_up(store, "mail-2")  # now it did not happen, and will not: it is sent

    await crash(store, "mail-3", "after")
    World.outbox_is_up = False
    await pick_up(store, "mail-3")  # nobody can say: the run is blocked
    runs = Runs(store, checkpoint_key=KEY)  # the person needs neither tools nor model
    try:
        await runs.settle("mail-3", "0", Outcome.not_done(), by="ana", why="I do not see it")
    except SettlementRefused as refused:
        print(f"refused: {str(refused).partition(':')[0]}")
    await runs.settle("mail-3", "0", Outcome.done("sent to ana"), by="ana", why="it is in my inbox")
    await pick_up(store, "mail-3")
    await store.close()


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
