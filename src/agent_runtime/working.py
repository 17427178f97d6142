"""Works a run's program: whatever stops it, the run is left so that another worker can pick it up."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from agent_runtime.errors import AgentRuntimeError, CheckpointConflict, Fenced, StoreUnavailable
from agent_runtime.inbox import Cancel
from agent_runtime.journal.records import RunStatus
from agent_runtime.run import FIRST_WAKE_SECONDS, LONGEST_WAKE_SECONDS, Run

T = TypeVar("T")


class Parked(Exception):
    """The run was let go until somebody decides, and perhaps somebody has: look at it again. Never given to a user."""


class RunCancelled(Parked):
    """Somebody has cancelled the run, and it is stored so."""


async def work(run: Run, program: Awaitable[T]) -> T:
    """What the program gives. Whatever it raises, the run is left so that another worker can pick it up.

    `Parked` where the run is to be looked at again: `RunCancelled` once somebody's word has ended it, or it had ended.
    """
    with _Held(run):
        task = asyncio.current_task()
        run.listen(task)
        try:
            try:
                result = await program
            except asyncio.CancelledError:
                await _end_if_told(run, task)
                raise
            except BaseException:
                await _forget_cancel(run, task)
                raise
            if run.hear_no_more() is not None:
                await _forget_cancel(run, task)
            return result
        except Parked:
            raise
        except Fenced as fenced:
            await run.leave_late_results()
            if run.has_sinks:
                run.announce("run.fenced", {"kind": run.journal.kind, "step": run.journal.step})
            raise CheckpointConflict(f"{fenced}; this worker has stopped and will start nothing more of it") from fenced
        except asyncio.CancelledError:
            await _leave(run, "cancelled", counts=False)
            raise
        except Exception as error:
            if isinstance(error, StoreUnavailable):
                await run.leave_late_results()
            await _leave(run, type(error).__name__, counts=True)
            raise


class _Held:
    """Whatever ends the work, the run is let go."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._run.let_go(None if isinstance(error, Parked) else error)


async def _end_if_told(run: Run, task: asyncio.Task[Any] | None) -> None:
    """Where it was a message that stopped the program: end the run. That is no cancelling of the task that waits."""
    cancel = run.hear_no_more()
    if cancel is None or task is None or task.uncancel() > 0:
        return
    await asyncio.shield(asyncio.ensure_future(_end_by(run, cancel)))
    raise RunCancelled from None


async def _end_by(run: Run, cancel: Cancel) -> None:
    if run.journal.is_released:
        await run.barrier()  # its end was noted when the word came
    else:
        await run.cancel(cancel.by, cancel.why)


async def _forget_cancel(run: Run, task: asyncio.Task[Any] | None) -> None:
    """The program has ended by itself: what was to stop it must stop nothing else."""
    if run.hear_no_more() is None or task is None or task.uncancel() > 0:
        return
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def _leave(run: Run, why: str, *, counts: bool) -> None:
    """Give back a run whose program stopped; where the store cannot take that now, the lease tells it later."""
    journal = run.journal
    if journal.failure is not None or journal.is_released or journal.status is not RunStatus.RUNNING:
        return
    wake_at = next_wake(run) if counts else None
    giving_back = asyncio.ensure_future(run.give_back(RunStatus.RUNNING, why, counts=counts, wake_at=wake_at))
    with suppress(AgentRuntimeError, Fenced):
        await asyncio.shield(giving_back)


def next_wake(run: Run) -> int:
    """When a run that came to nothing is worth another try: later each time it makes no progress."""
    seconds = min(FIRST_WAKE_SECONDS * 2.0 ** min(run.journal.attempts, 20), LONGEST_WAKE_SECONDS)
    return run.backing.clock.now_ms() + int(seconds * 1000)
