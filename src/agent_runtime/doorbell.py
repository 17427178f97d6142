"""The doorbell: tells those who wait for messages to runs that one has come, quickly, and at next to no cost.

Rules of this file:

* One ear and one task for all who wait in a process, on an event loop, for one store; none while nobody does.
* Whoever comes, and everybody once the ear is new, has the run looked at: a message is there before it is waited for, or
  it is heard. Everybody is looked at from time to time besides: an ear whose server is gone may just be silent.
* A store that is away ends no wait. It is asked again, less and less often.
* It pauses on a thread, by `Clock.wait`: a bell that hangs in the background must not drive a clock that sleepers move.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import CheckpointNotFound
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore, Ear
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload

LOOK_SECONDS = 15.0
"""How often everybody's run is looked at, whatever was heard."""
LINGER_SECONDS = 1.0
"""How long the ear is kept once nobody waits: somebody may come back at once."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""How long a store that is away is left alone: at first, and at last."""
MOMENT = 0.001
"""The least that is rested: what is left of a pause may be no time at all by the clock."""
MOST_ASKED = 1_000
RESTS = 20
"""How many times as long as a look at every run took the bell rests, where the store tells nothing by itself."""


class _Guest:
    """One who wants to be told of a run, and how many messages it knows of."""

    __slots__ = ("seen", "tell")

    def __init__(self, seen: int, tell: Callable[[int | None], None]) -> None:
        self.seen = seen
        self.tell = tell


class Doorbell:
    """Tells of messages to runs of one store, on the event loop that it belongs to. Get it from `doorbell`."""

    def __init__(self, store: CheckpointStore, clock: Clock, offload: Offload) -> None:
        self._known = weakref.ref(store)  # a bell must not keep a store that nobody uses any more
        self._clock = clock
        self._offload = offload
        self._guests: dict[RunId, dict[object, _Guest]] = {}
        self._due: set[RunId] = set()
        self._look_at = float("-inf")
        self._pause = SHORTEST_PAUSE
        self._changed = threading.Event()
        self._store: CheckpointStore | None = None
        self._task: asyncio.Task[None] | None = None

    async def wait(self, run_id: RunId, *, seen: int) -> int:
        """How many messages the run has had, once that is more than `seen`.

        Waits on where the store is away. Raises `CheckpointNotFound` where there is no such run, or it was deleted.
        """
        outcome: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def tell(posted: int | None) -> None:
            if not outcome.done():
                outcome.set_result(posted)

        self._come(run_id, outcome, _Guest(seen, tell))
        try:
            posted = await outcome
        finally:
            self._leave(run_id, outcome)
        if posted is None:
            raise CheckpointNotFound(f"run {run_id!r} is not there, or was deleted: no message comes to it; check the id")
        return posted

    def watch(self, run_id: RunId, callback: Callable[[int], None], *, seen: int = 0) -> None:
        """Call back with how many messages the run has had, each time that it is more, first where it is more than `seen`.

        A run that is deleted is not told of any more.
        """
        loop = asyncio.get_running_loop()

        def tell(posted: int | None) -> None:
            if posted is None:
                self.unwatch(run_id, callback)
            else:
                loop.call_soon(callback, posted)  # whatever it raises does not end the bell

        self._come(run_id, callback, _Guest(seen, tell))

    def unwatch(self, run_id: RunId, callback: Callable[[int], None]) -> None:
        """Call back no more."""
        self._leave(run_id, callback)

    # Who waits.

    def _come(self, run_id: RunId, who: object, guest: _Guest) -> None:
        self._guests.setdefault(run_id, {})[who] = guest
        self._due.add(run_id)
        if self._task is None:
            self._begin()
        self._changed.set()

    def _leave(self, run_id: RunId, who: object) -> None:
        guests = self._guests.get(run_id, {})
        guests.pop(who, None)
        if not guests:
            self._guests.pop(run_id, None)
            self._due.discard(run_id)
        if not self._guests:
            self._changed.set()

    def _tell(self, run_id: RunId, posted: int | None) -> None:
        for guest in list(self._guests.get(run_id, {}).values()):
            if posted is None or posted > guest.seen:
                guest.seen = posted or 0
                guest.tell(posted)

    # The task.

    def _begin(self) -> None:
        store = self._known()
        assert store is not None, "whoever asks for a bell holds its store"
        self._changed = threading.Event()  # a thread may still look at the one before
        self._store = store
        self._task = asyncio.get_running_loop().create_task(self._work(store), name="agent-runtime-doorbell")

    async def _work(self, store: CheckpointStore) -> None:
        """Ends once nobody waits."""
        try:
            while self._guests:
                try:
                    await self._attend(store)
                except Exception:  # the store is away, or breaks its promise: its guests wait on
                    await self._leave_alone(self._pause)
                    self._pause = min(2 * self._pause, LONGEST_PAUSE)
        finally:
            self._store = self._task = None

    async def _attend(self, store: CheckpointStore) -> None:
        """Hear, and tell, until nobody waits."""
        ear = await store.listen(self._ring)
        self._look_at = float("-inf")
        try:
            while await self._somebody_waits():
                self._changed.clear()
                seconds = await self._round(ear)
                self._pause = SHORTEST_PAUSE
                await self._rest(seconds)
        finally:
            await ear.close()

    def _ring(self) -> None:
        self._changed.set()

    async def _somebody_waits(self) -> bool:
        if not self._guests:
            self._changed.clear()
            await self._rest(LINGER_SECONDS)
        return bool(self._guests)

    async def _round(self, ear: Ear) -> float:
        """Tell what has come since the last round; after how many seconds the next one is due."""
        began = self._clock.monotonic()
        heard = await ear.heard()
        if heard is None or began >= self._look_at:
            self._due.update(self._guests)
            self._look_at = began + LOOK_SECONDS
        else:
            self._due.update(run_id for run_id in heard if run_id in self._guests)
        await self._look(ear)
        now = self._clock.monotonic()
        seconds = ear.every if heard is not None else max(ear.every, RESTS * (now - began))
        return max(MOMENT, min(seconds, self._look_at - now))

    async def _look(self, ear: Ear) -> None:
        """Ask how many messages those runs have had that are due, and tell."""
        while self._due:
            asked = [self._due.pop() for _ in range(min(len(self._due), MOST_ASKED))]
            for run_id, posted in zip(asked, await ear.posted(asked), strict=True):
                self._tell(run_id, posted)
            await asyncio.sleep(0)  # a store may answer without letting anybody else run

    # Pauses.

    async def _leave_alone(self, seconds: float) -> None:
        """Pause, whoever comes or rings; not where everybody has left."""
        until = self._clock.monotonic() + seconds
        while self._guests and (left := until - self._clock.monotonic()) > MOMENT:
            self._changed.clear()
            await self._rest(left)

    async def _rest(self, seconds: float) -> None:
        """Until something changes, or the time is over."""
        changed = self._changed
        job = self._offload.start(lambda: self._clock.wait(changed, seconds))
        try:
            await job.outcome
        except asyncio.CancelledError:
            changed.set()  # lets the thread go
            raise


_BELLS: weakref.WeakKeyDictionary[CheckpointStore, dict[asyncio.AbstractEventLoop, Doorbell]] = weakref.WeakKeyDictionary()


def doorbell(store: CheckpointStore, clock: Clock = SYSTEM_CLOCK, offload: Offload = SYSTEM_OFFLOAD) -> Doorbell:
    """The one doorbell of this process for a store, on the event loop that runs."""
    loop = asyncio.get_running_loop()
    bells = _BELLS.setdefault(store, {})
    for ended in [each for each in bells if each.is_closed()]:
        del bells[ended]
    if loop not in bells:
        bells[loop] = Doorbell(store, clock, offload)
    return bells[loop]
