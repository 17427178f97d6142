"""A refund that a person must agree to: the run pauses, its process ends, and another one goes on with the answer.

    python examples/refund.py

Three processes take part, and share nothing but the store: one works until the run pauses, one is the person's, one
resumes. Refunds up to 50 need nobody. Everything happens in a temporary folder.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import (
    ApprovalRequest,
    CheckpointConflict,
    LoopResult,
    Message,
    Reply,
    ToolCall,
    ToolRegistry,
    ToolSpec,
    Verdict,
    idempotency_key,
    run_tool_loop,
)
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"  # the same key on every worker
registry = ToolRegistry()


def bank(what: str) -> str:
    """The bank keeps a line for each refund that was really made."""
    with Path("bank.log").open("a") as log:
        log.write(f"{what}\n")
    return f"refunded {what}"


@registry.tool(idempotent=True, needs_approval=lambda args: args["amount"] > 50)
async def refund(order: str, amount: int) -> str:
    """Refund an order."""
    return bank(f"{amount} for {order} [{idempotency_key()}]")


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    """A model that follows a script; put your own in its place."""
    results = [message.content for message in messages if message.role == "tool"]
    if not results:
        small, large = {"order": "A-1", "amount": 20}, {"order": "B-2", "amount": 900}
        return Reply("", [ToolCall("a", "refund", small), ToolCall("b", "refund", large)])
    return Reply("; ".join(results))


async def work() -> ApprovalRequest:
    """The first worker: the small refund is made at once, the large one waits."""
    store = SQLiteCheckpointStore("runs.db")
    result = await run_tool_loop(model, registry, "refund both", run_id="refund-7", checkpoints=store, checkpoint_key=KEY)
    [request] = result.pending
    print(f"{result.status}: {request.tool} {request.args} waits for a person")
    await store.close()
    return request


def answer() -> None:
    """The person: no store, no tools, nothing but the request."""
    request = ApprovalRequest.from_json(Path("request.json").read_text())
    verdict = request.edit({"amount": 90}, by="ana", note="900 was a slip")
    Path("verdict.json").write_text(verdict.to_json())
    print(f"ana: {verdict.args}")


async def resume(verdict: Verdict, late: Verdict) -> None:
    """Another worker: nothing that was done or decided is done or asked for again."""
    store = SQLiteCheckpointStore("runs.db")
    result: LoopResult = await run_tool_loop(
        model, registry, run_id="refund-7", verdicts=[verdict], checkpoints=store, checkpoint_key=KEY
    )
    print(f"{result.status}: {result.output}")
    print(f"{result.llm_calls} model calls")
    try:
        await run_tool_loop(model, registry, run_id="refund-7", verdicts=[late], checkpoints=store, checkpoint_key=KEY)
    except CheckpointConflict as conflict:
        print(f"too late: {conflict}")
    await store.close()


def main() -> None:
    match sys.argv[1:]:
        case ["work"]:
            Path("request.json").write_text(asyncio.run(work()).to_json())  # or mail it, or show it on a page
        case ["answer"]:
            answer()
        case ["resume"]:
            request = ApprovalRequest.from_json(Path("request.json").read_text())
            verdict = Verdict.from_json(Path("verdict.json").read_text())
            asyncio.run(resume(verdict, request.approve(by="ben")))
            print(f"at the bank: {Path('bank.log').read_text().splitlines()}")
        case _:
            this_file = Path(__file__).resolve()
            with TemporaryDirectory() as folder:
                for part in ("work", "answer", "resume"):
                    subprocess.run([sys.executable, this_file, part], cwd=folder, env=os.environ, check=True)


main()
