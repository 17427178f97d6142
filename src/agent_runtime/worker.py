"""One process working one run: the signals that stop it, and the exit code that says what came of it.

What a worker is told to work, and by whom, is none of its business: it works the same for a person and for a supervisor.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import IntEnum
from typing import Any

from agent_runtime.errors import AgentRuntimeError, CheckpointConflict, RecoveryNeedsDecision, RunQuarantined
from agent_runtime.telemetry import plain_line
from agent_runtime.transport import is_transport

PROVISION = "provision"
"""The name that the runs of the provisioning agent have."""

Work = Callable[[], Coroutine[Any, Any, object]]


class Exit(IntEnum):
    """What came of a worker's run. After all but `DONE` the run is as it was left, and can be picked up or decided."""

    DONE = 0
    ERROR = 1
    IN_DOUBT = 3
    NOT_MINE = 4
    QUARANTINED = 5
    INTERRUPTED = 130
    TERMINATED = 143


def work_in_process(work: Work, *, advice: str, is_rival: bool = False) -> int:
    """Do the work in this process until it ends or a signal stops it; gives the exit code. Errors go to standard error.

    `advice`: what to do where a remote does not answer. `is_rival`: several workers were sent for this run, so that one
    which finds it taken has nothing to complain of.
    """
    try:
        return asyncio.run(_until_told_to_stop(work))
    except KeyboardInterrupt:
        _say("INFO stopped by Ctrl-C; the run can be picked up again")
        return Exit.INTERRUPTED
    except CheckpointConflict as conflict:
        is_quiet = is_rival and not isinstance(conflict, RunQuarantined)
        return _left_alone(conflict) if is_quiet else _failed(conflict, code_of(conflict))
    except AgentRuntimeError as error:
        return _failed(error, code_of(error))
    except Exception as error:
        if not is_transport(error):
            raise
        return _failed(error, Exit.ERROR, f"a remote did not answer as it should: {error}; {advice}")


def code_of(error: AgentRuntimeError) -> Exit:
    """The exit code of a worker that ends with the error."""
    match error:
        case RecoveryNeedsDecision():
            return Exit.IN_DOUBT
        case RunQuarantined():
            return Exit.QUARANTINED
        case CheckpointConflict():
            return Exit.NOT_MINE
        case _:
            return Exit.ERROR


async def _until_told_to_stop(work: Work) -> int:
    """Do the work; on SIGTERM stop at once, so that the run is given back and can be picked up."""
    task = asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def stop() -> None:
        told.append(1)
        task.cancel()

    with suppress(NotImplementedError):  # where the event loop takes no signals, SIGTERM ends the process as a kill would
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        await work()
    except asyncio.CancelledError:
        if not told:
            raise
        _say("INFO stopped by SIGTERM; the run can be picked up again")
        return Exit.TERMINATED
    return Exit.DONE


def _left_alone(conflict: CheckpointConflict) -> int:
    _say(plain_line("left-alone", {"why": str(conflict)}))
    return Exit.NOT_MINE


def _failed(error: Exception, code: Exit, what: str | None = None) -> int:
    print(f"ERROR {type(error).__name__}: {error if what is None else what}", file=sys.stderr, flush=True)
    return code


def _say(line: str) -> None:
    print(line, flush=True)
