"""Purges a store with each run archived first, and is killed by itself where it is told to: `STORE FOLDER [MOMENT NTH]`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from agent_runtime import Runs
from agent_runtime.ids import RunId
from agent_runtime.journal.store import Answer, Guard
from agent_runtime.stores import SQLiteCheckpointStore
from tests.bench import KEY, Delegate


class Deadly(Delegate):
    """A store whose process is killed just before or just after a removal."""

    moment, nth = "", 0

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        self.nth -= 1
        if (self.moment, self.nth) == ("before", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await super().delete(run_id, guard=guard)
        if (self.moment, self.nth) == ("after", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


async def main(path: str, folder: str, moment: str = "", nth: str = "0") -> None:
    store = Deadly(SQLiteCheckpointStore(path))
    store.moment, store.nth = moment, int(nth)
    await Runs(store, checkpoint_key=KEY).purge(0, by="ana", archive_to=folder)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
