"""One attempt at a call: the tool is called under its key, and what came of it is one of four things.

Only what the tool declares is an answer. Only proof that nothing went out makes an attempt unsent. Everything else is
unknown, whatever raised it.
"""

import asyncio
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from agent_runtime.errors import NotSent
from agent_runtime.journal.records import new_tuple
from agent_runtime.offload import Job
from agent_runtime.run import Run
from agent_runtime.side_by_side import is_being_cancelled
from agent_runtime.tools import CALL_KEY, Tool
from agent_runtime.transport import find_conflict, is_transport


class Returned(NamedTuple):
    """The tool returned."""

    value: object


class Answered(NamedTuple):
    """The tool answered with an error."""

    error: BaseException


class Unsent(NamedTuple):
    """Nothing went out."""

    error: NotSent


class Unknown(NamedTuple):
    """Nobody knows whether it happened. `on_thread`: the attempt is still on a thread that cannot be stopped."""

    why: str
    error: BaseException
    on_thread: bool = False


Came: TypeAlias = Returned | Answered | Unsent | Unknown


async def act(run: Run, tool: Tool, arguments: dict[str, Any], key: str) -> Came:
    """Call the tool under its idempotency key, and say what is known afterwards."""
    job: Job[Any] | None = None
    deadline = None if tool.timeout_seconds is None else asyncio.timeout(tool.timeout_seconds)
    token = CALL_KEY.set(key)
    try:
        if tool.is_async:
            answer = tool.function(**arguments)
        else:
            job = run.backing.offload.start(partial(tool.function, **arguments))
            run.keep_alive_for(job)
            answer = job.outcome
        if deadline is None:
            return new_tuple(Returned, (await answer,))
        async with deadline:
            return Returned(await answer)
    except (Exception, asyncio.CancelledError) as error:
        return _after(tool, error, job, is_late=deadline is not None and deadline.expired())
    finally:
        CALL_KEY.reset(token)


def _after(tool: Tool, error: BaseException, job: Job[Any] | None, *, is_late: bool) -> Came:
    """What is known of a call that raised. Only what the tool declares is an answer; the rest is as its rule says."""
    if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
        raise error  # it is this worker that is being stopped: the call stays as its intent says, in doubt
    if (conflict := find_conflict(error)) is not None:
        raise conflict  # an alarm, whatever the tool calls an answer
    if is_late:
        return _timed_out(tool, error, job)  # our own deadline raised, whatever the tool calls an answer
    if isinstance(error, NotSent):
        return Unsent(error)
    if isinstance(error, tool.answers):
        return Answered(error)
    if not tool.may_repeat or is_transport(error):
        return Unknown(_why_unknown(error), error)
    return Answered(error)


def named(error: BaseException) -> str:
    """An error as events name it."""
    return f"{type(error).__name__}: {error}"


def _timed_out(tool: Tool, error: BaseException, job: Job[Any] | None) -> Unknown:
    on_thread = job is not None and job.running
    still = "its thread still runs" if on_thread else "the remote may have acted, or may yet"
    return Unknown(f"it took longer than {tool.timeout_seconds} s; {still}", error, on_thread)


def _why_unknown(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer in time; the remote may have acted, or may yet: {error}"
    return f"it raised {type(error).__name__}, after which nobody knows whether it happened: {error}"
