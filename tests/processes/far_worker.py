"""A worker on another host: `far_worker.py URL REMOTE HOURS` works on Postgres as worker.py does on a file.

Its wall clock is so many hours off.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

from agent_runtime.clock import SystemClock
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.lease import own_mark
from agent_runtime.stores.postgres import PostgresCheckpointStore
from tests.processes.worker import Order, Remote, say, work

TIMEOUT_SECONDS = 0.5
"""Short, so that a partition is noticed soon."""


class WrongClock(SystemClock):
    """This machine's clock, set wrong by so many hours."""

    def __init__(self, hours: float) -> None:
        super().__init__()
        self._off = timedelta(hours=hours)

    def now(self) -> datetime:
        return super().now() + self._off

    def now_ms(self) -> int:
        return super().now_ms() + int(self._off.total_seconds() * 1000)


async def serve(url: str, remote_path: str, hours: str) -> None:
    """Work what is ordered until standard input ends."""
    remote, clock = Remote(Path(remote_path)), WrongClock(float(hours))
    store = PostgresCheckpointStore(url, timeout_seconds=TIMEOUT_SECONDS, clock=clock)
    say(mark=own_mark().to_plain())
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = Order(**json.loads(line))
        try:
            ended, message = "done", await work(order, store, remote, clock=clock)
        except AgentRuntimeError as error:
            ended, message = type(error).__name__, str(error)
        say(ended=ended, message=message, run=order.run)
    await store.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
