"""Tasks side by side: all of them end before anything is raised, and a signal to stop ends them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def run_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each of them gives, in their order. An error of one lets the others end; then the gravest is raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await _wait(tasks)
    except asyncio.CancelledError:
        await _cancel(tasks)
        raise
    _raise_gravest(tasks)
    return [task.result() for task in tasks]


async def _wait(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Until all have ended: an error of one lets the others end, a signal to stop ends them now."""
    pending: set[asyncio.Task[Any]] = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        if any(_is_signal(task) for task in done):
            await _cancel(list(pending))
            return


def _is_signal(task: asyncio.Task[Any]) -> bool:
    error = None if task.cancelled() else task.exception()
    return error is not None and not isinstance(error, Exception)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _raise_gravest(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Raise what stopped a task, if anything did: a signal to stop before an error."""
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Exception)):
        raise error


def is_being_cancelled() -> bool:
    """Whether it is this task that is being stopped, and not something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
