"""Work off the event loop; the only module that starts threads.

All threads are daemons: neither a store left open nor a tool that never returns keeps the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

T = TypeVar("T")


class Serial(Protocol):
    """One thread that does one piece of work after another, in the order given."""

    async def run(self, work: Callable[[], T]) -> T:
        """Hand the work over and wait for what it gives; cancelling the wait does not stop the work."""

    def close(self) -> None:
        """Let the thread end after what is queued."""


class Offload(Protocol):
    """Where blocking work goes."""

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin the work on a thread, in a copy of the present context."""

    def serial(self, name: str) -> Serial:
        """A thread of one's own."""

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        """Run the target on a thread of its own until it returns."""


class Job(Generic[T]):
    """A piece of work on a thread: `outcome` to await, `running` to ask whether the thread is still in it."""

    __slots__ = ("_after", "_lock", "_loop", "outcome", "running")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._after: Callable[[], None] | None = None
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        self.running = True

    def when_ended(self, action: Callable[[], None]) -> None:
        """Call the action once the thread has left the work: at once if it has."""
        with self._lock:
            if self.running:
                self._after = action
                return
        action()

    def finish(self, value: T | None, error: BaseException | None) -> None:
        """Called by the thread: hand the outcome to whoever waits for it."""
        with self._lock:
            self.running = False
            after = self._after
        if after is not None:
            after()
        _post(self._loop, self.outcome, value, error)


class ThreadOffload:
    """Threads of this process; idle ones are used again."""

    def __init__(self) -> None:
        self.forget_threads()

    def forget_threads(self) -> None:
        """Begin without any thread: for a copy of the process, which has none of those that it remembers."""
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def start(self, work: Callable[[], T]) -> Job[T]:
        job: Job[T] = Job()
        context = contextvars.copy_context()
        self._submit(lambda: _perform(job.finish, lambda: context.run(work)))
        return job

    def serial(self, name: str) -> Serial:
        return SerialThread(name)

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _submit(self, task: Callable[[], None]) -> None:
        with self._lock:
            needs_thread = self._idle == 0
            if not needs_thread:
                self._idle -= 1
        if needs_thread:
            self.spawn("agent-runtime-work", lambda: self._work(task))
        else:
            self._tasks.put(task)

    def _work(self, first: Callable[[], None]) -> None:
        task = first
        while True:
            task()
            with self._lock:
                self._idle += 1
            task = self._tasks.get()


class SerialThread:
    """A `Serial` on a thread that is started with the first piece of work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    async def run(self, work: Callable[[], T]) -> T:
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def finish(value: T | None, error: BaseException | None) -> None:
            _post(loop, outcome, value, error)

        self._tasks.put(lambda: _perform(finish, work))
        return await outcome

    def close(self) -> None:
        if self._started:
            self._started = False
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _perform(finish: Callable[[T | None, BaseException | None], None], work: Callable[[], T]) -> None:
    """Do the work and report either what it gave or what it raised: nothing it raises may end the thread."""
    try:
        value = work()
    except BaseException as error:  # the thread only carries it to the one who waits
        finish(None, error)
    else:
        finish(value, None)


def _post(loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[T], value: T | None, error: BaseException | None) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, outcome, value, error)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more


def _resolve(outcome: asyncio.Future[T], value: T | None, error: BaseException | None) -> None:
    if outcome.done():
        return
    if isinstance(error, StopIteration):  # a future cannot carry it
        error = RuntimeError(f"the work raised StopIteration({error.value!r})")
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(cast(T, value))  # without an error the value is what the work gave


_of_this_process = ThreadOffload()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_this_process.forget_threads)

SYSTEM_OFFLOAD: Offload = _of_this_process
