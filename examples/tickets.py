"""A durable flow: hold seats, charge the card, mail the tickets. Kill it in any node, start it again.

python examples/tickets.py --crash send     # the process kills itself inside email_tickets
python examples/tickets.py                  # a new one goes on, and asks before it mails again
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from pydantic import BaseModel

from agent_runtime import (
    Call,
    Executor,
    Flow,
    FlowRunner,
    RecoveryNeedsDecision,
    RunContext,
    ToolRegistry,
    idempotency_key,
)
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"  # the same key on every worker
OUTSIDE = Path("tickets.log")  # what happened outside: a line for each thing that was really done
crash_in = sys.argv[sys.argv.index("--crash") + 1] if "--crash" in sys.argv else ""
registry = ToolRegistry()


def outside(node: str, what: str) -> str:
    """Do something outside, once for each key; and die right after it where `--crash` says so."""
    key = idempotency_key()
    line = f"{what} [{key}]\n"
    known = OUTSIDE.read_text() if OUTSIDE.exists() else ""
    if node == "send" or line not in known:  # the theatre and the bank know the key; mail knows none
        with OUTSIDE.open("a") as file:
            file.write(line)
    if node == crash_in:  # SIGKILL, where there is one: nothing of the process is asked any more
        print(f"!!! killed in {node}: it has happened, and nothing about it is written down", flush=True)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    return what


@registry.tool(idempotent=True)
async def hold_seats(show: str, seats: int) -> str:
    """Hold seats for a while."""
    return outside("hold", f"held {seats} seats for {show}")


@registry.tool(idempotent=True)
async def charge_card(show: str, seats: int) -> str:
    """Charge the card on file."""
    return outside("pay", f"charged {seats * 40} for {show}")


@registry.tool
async def email_tickets(show: str) -> str:
    """Mail the tickets. Nobody can tell afterwards whether it went out."""
    return outside("send", f"mailed tickets for {show}")


# The flow.


class Order(BaseModel):
    show: str
    seats: int
    note: str = ""


def args(order: Order) -> dict[str, object]:
    return {"show": order.show, "seats": order.seats}


flow = (
    Flow("tickets", state=Order)
    .node("hold", Call("hold_seats", args=args, into="note"))
    .node("pay", Call("charge_card", args=args, into="note"))
    .node("send", Call("email_tickets", args=lambda order: {"show": order.show}, into="note"))
    .edge("hold", "pay")
    .edge("pay", "send")
    .end("send")
)


def worker(path: Path) -> FlowRunner:
    return FlowRunner(Executor(registry), checkpoints=SQLiteCheckpointStore(path), checkpoint_key=KEY)


# A worker's life.


async def main() -> None:
    runner = worker(Path("tickets.db"))
    order = Order(show="Hamlet", seats=2)
    try:
        out = await runner.start_or_recover(flow, order, run_id="order-7", ctx=RunContext(user="u-1", thread="t-9"))
        print(out.status, "-", out.state.note)
    except RecoveryNeedsDecision as error:
        print("in doubt:", [tool for tool, _ in error.calls])
        results = await runner.recover_all(flow, rerun_in_doubt=True)
        for run_id, result in results.items():
            print("after the decision:", run_id, result.status if not isinstance(result, Exception) else result)
    await runner.close()


if __name__ == "__main__":
    asyncio.run(main())
    print(OUTSIDE.read_text(), end="")
