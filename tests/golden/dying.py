"""A migration that is killed at each of its steps, one after another: `python -m tests.golden.dying URL EVERY`.

Each try is a process of its own, which ends itself by SIGKILL just before its nth statement. Prints a line for each: at which
statement it died, and the layout that is found afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime.stores import open_store, redis_time


class Dying:
    """Passes everything on, and kills this process before the nth thing that is asked of it."""

    def __init__(self, inner: Any, dies_at: int) -> None:
        self._inner = inner
        self._left = dies_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._counted(found) if name in ("execute", "fetch", "read", "write") else found

    def _counted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*words: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return ask(*words, **options)

        return asked


async def migrate(url: str, dies_at: int) -> None:
    store: Any = open_store(url)
    if url.startswith("redis"):
        store._link = Dying(store._link, dies_at)
    else:
        tables = getattr(store, "_tables", store)
        if url.startswith("sqlite"):
            write = tables._write
            tables._write = lambda work: write(lambda db: work(Dying(db, dies_at)))
        else:
            make_door = tables._at_the_door

            def make_dying_door() -> Any:
                door = make_door()
                carry: Callable[..., Awaitable[Any]] = door._link.write
                door._link.write = lambda work: carry(lambda db: work(Dying(db, dies_at)))
                return door

            tables._at_the_door = make_dying_door
    await store.migrate()
    await store.close()


async def look(url: str) -> int:
    store: Any = open_store(url)
    layout = await store.read_layout()
    await store.close()
    found: int = layout.found
    return found


def main(url: str, every: int) -> None:
    redis_time.HOLD_MS = 20  # nobody waits long for the dead
    asyncio.run(look(url))  # whatever is imported for it is imported once
    dies_at = 1
    while True:
        child = os.fork()
        if child == 0:
            asyncio.run(migrate(url, dies_at))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{dies_at if os.WIFSIGNALED(status) else 0} {asyncio.run(look(url))}\n")
        sys.stdout.flush()
        if not os.WIFSIGNALED(status):
            sys.exit(os.WEXITSTATUS(status))
        dies_at += every


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
