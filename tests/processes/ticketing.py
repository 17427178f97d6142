"""A worker of the tickets example that can be killed at a commit: `python -m tests.processes.ticketing VERB …`.

work N before|after     start or recover the order, and die by SIGKILL at commit N; 0: never
recover                 recover the order once, deciding nothing
stop                    start the order, and stop (SIGSTOP) inside charge_card, once the bank has acted
abandon COUNT           start so many orders, and die by SIGKILL when each is inside its first call
recover-all             pick up every order
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from agent_runtime import Executor, FlowResult, FlowRunner, RecoveryNeedsDecision
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.journal.store import Answer, Append
from agent_runtime.stores import SQLiteCheckpointStore
from tests.bench import Delegate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
tickets: Any = import_module("tickets")

Outside: TypeAlias = "Callable[[str, str], str]"

RUN_ID = "order-7"
ORDER = tickets.Order(show="Hamlet", seats=2)


class DyingStore(Delegate):
    """The process is killed just before or just after its nth commit."""

    def __init__(self, nth: int, when: str) -> None:
        super().__init__(SQLiteCheckpointStore("tickets.db"))
        self._left = nth
        self._when = when

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self._left -= 1
        if self._left == 0 and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answers = await super().commit(appends)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers


def runner(nth: int = 0, when: str = "before", **options: Any) -> FlowRunner:
    return FlowRunner(Executor(tickets.registry), checkpoints=DyingStore(nth, when), checkpoint_key=tickets.KEY, **options)


async def main(verb: str, *rest: str) -> None:
    try:
        match verb:
            case "work":
                result = await runner(int(rest[0]), rest[1]).start_or_recover(tickets.flow, ORDER, run_id=RUN_ID)
                say(status=result.status, note=result.state.note)
            case "recover":
                result = await runner().recover(tickets.flow, RUN_ID)
                say(status=result.status, note=result.state.note, replayed=result.replayed, rerun=result.rerun)
            case "stop":
                stop_in("pay")
                result = await runner(lease_seconds=1.0, heartbeat_seconds=0.2).run(tickets.flow, ORDER, run_id=RUN_ID)
                say(status=result.status)
            case "abandon":
                await abandon(int(rest[0]))
            case "recover-all":
                await recover_all()
    except RecoveryNeedsDecision as error:
        say(in_doubt=[list(call) for call in error.calls])
    except AgentRuntimeError as error:
        say(error=type(error).__name__, told=str(error))


def stop_in(node: str) -> None:
    """From now on the process stops itself inside that node, once, when it has happened."""
    outside: Outside = tickets.outside

    def stopping(where: str, what: str) -> str:
        happened = outside(where, what)
        if where == node:
            os.kill(os.getpid(), signal.SIGSTOP)
        return happened

    tickets.outside = stopping


async def abandon(count: int) -> None:
    entered = 0
    outside: Outside = tickets.outside

    async def hold(show: str, seats: int) -> str:
        nonlocal entered
        happened = outside("hold", f"held {seats} seats for {show}")
        entered += 1
        if entered == count:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
        return happened

    tool = tickets.registry.get("hold_seats")
    object.__setattr__(tool, "function", hold)
    work = runner()
    await asyncio.gather(*(work.run(tickets.flow, ORDER, run_id=f"order-{at:04}") for at in range(count)))


async def recover_all() -> None:
    results = await runner().recover_all(tickets.flow)
    ended = [result for result in results.values() if isinstance(result, FlowResult)]
    say(found=len(results), done=sum(result.status == "done" for result in ended), rerun=sum(each.rerun for each in ended))


def say(**told: object) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


# Many processes, without a fresh interpreter for each.


def kill_everywhere(commits: int) -> None:
    """For each commit: a process that is killed there, one that goes on, one that looks again; and what happened outside."""
    for nth in range(1, commits + 1):
        for when in ("before", "after"):
            folder = Path(f"{when}-{nth}")
            folder.mkdir()
            killed, _ = forked(folder, "work", str(nth), when)
            _, then = forked(folder, "work", "0", "before")
            _, again = forked(folder, "recover")
            log = folder / "tickets.log"
            happened = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
            say(nth=nth, when=when, killed=killed, then=then, again=again, happened=happened)


def forked(folder: Path, *words: str) -> tuple[int, Any]:
    """How a copy of this process ended that did so in the folder, and what it said last."""
    said = folder / "said"
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        sys.stdout = open("said", "w", encoding="utf-8")  # noqa: SIM115  # closed with its process
        asyncio.run(main(*words))
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    lines = said.read_text().splitlines()
    said.unlink()
    return os.waitstatus_to_exitcode(status), json.loads(lines[-1]) if lines else None


if __name__ == "__main__":
    if sys.argv[1] == "kill-everywhere":
        kill_everywhere(int(sys.argv[2]))
    else:
        asyncio.run(main(*sys.argv[1:]))
