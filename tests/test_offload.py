"""Work off the loop: what it gives and raises, in which context, in which order, and that nothing keeps a process alive."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from agent_runtime.offload import Job, ThreadOffload
from tests.bench import LONG_SECONDS, until


class Signal(BaseException):
    pass


@pytest.fixture
def offload() -> ThreadOffload:
    return ThreadOffload()


async def test_work_gives_its_value_from_another_thread(offload: ThreadOffload) -> None:
    job = offload.start(threading.get_ident)
    assert await job.outcome != threading.get_ident()
    assert not job.running


@pytest.mark.parametrize("error", [ValueError("x"), Signal(), SystemExit(3), KeyboardInterrupt()])
async def test_what_work_raises_is_raised_to_whoever_waits_and_ends_no_thread(
    offload: ThreadOffload, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    job = offload.start(fail)
    await until(job.outcome.done)
    assert job.outcome.exception() is error
    assert await offload.start(lambda: 5).outcome == 5


async def test_a_stop_iteration_comes_as_an_error_that_a_future_can_carry(offload: ThreadOffload) -> None:
    def stop() -> None:
        raise StopIteration(3)

    with pytest.raises(RuntimeError, match="StopIteration"):
        await offload.start(stop).outcome


async def test_work_sees_the_context_of_its_start_and_changes_it_for_nobody(offload: ThreadOffload) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")

    def look() -> str:
        seen = variable.get()
        variable.set("changed")
        return seen

    jobs = [offload.start(look) for _ in range(3)]
    assert [await job.outcome for job in jobs] == ["mine"] * 3
    assert variable.get() == "mine"


async def test_work_side_by_side_never_waits_for_other_work(offload: ThreadOffload) -> None:
    barrier = threading.Barrier(20)
    jobs = [offload.start(lambda: barrier.wait(LONG_SECONDS)) for _ in range(20)]
    assert sorted([await job.outcome for job in jobs]) == list(range(20))


async def test_idle_threads_are_used_again(offload: ThreadOffload) -> None:
    first = await offload.start(threading.get_ident).outcome
    threads = {first}
    for _ in range(20):
        await until(lambda: offload._idle == 1)
        threads.add(await offload.start(threading.get_ident).outcome)
    assert threads == {first}


async def test_a_job_tells_when_its_thread_has_left_whether_it_is_asked_before_or_after(offload: ThreadOffload) -> None:
    leave, told = threading.Event(), list[str]()
    job: Job[bool] = offload.start(lambda: leave.wait(LONG_SECONDS))
    job.when_ended(lambda: told.append("asked before"))
    assert job.running
    assert told == []
    leave.set()
    assert await job.outcome
    job.when_ended(lambda: told.append("asked after"))
    assert told == ["asked before", "asked after"]


async def test_a_wait_that_is_cancelled_stops_no_work(offload: ThreadOffload) -> None:
    leave, left = threading.Event(), threading.Event()

    def work() -> None:
        leave.wait(LONG_SECONDS)
        left.set()

    job = offload.start(work)
    job.outcome.cancel()
    assert job.running
    leave.set()
    await until(left.is_set)
    await until(lambda: not job.running)


def test_work_that_ends_after_its_loop_is_nobodys_error(offload: ThreadOffload) -> None:
    leave = threading.Event()

    async def begin() -> Job[bool]:
        return offload.start(lambda: leave.wait(LONG_SECONDS))

    job = asyncio.run(begin())
    leave.set()
    for _ in range(int(LONG_SECONDS * 1000)):
        if not job.running:
            break
        threading.Event().wait(0.001)
    assert not job.running


async def test_a_serial_thread_does_one_piece_after_another(offload: ThreadOffload) -> None:
    serial, order = offload.serial("one by one"), list[int]()

    def work(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    threads = await asyncio.gather(*(serial.run(lambda n=n: work(n)) for n in range(50)))  # type: ignore[misc]  # bound early
    assert order == list(range(50))
    assert len(set(threads)) == 1
    with pytest.raises(ValueError, match="x"):
        await serial.run(lambda: (_ for _ in ()).throw(ValueError("x")))
    serial.close()
    serial.close()
    assert await serial.run(lambda: 5) == 5
    serial.close()


LEFT_BEHIND = """
import asyncio, threading
from agent_runtime.offload import SYSTEM_OFFLOAD

async def main():
    SYSTEM_OFFLOAD.start(threading.Event().wait)
    SYSTEM_OFFLOAD.spawn("for ever", threading.Event().wait)
    await SYSTEM_OFFLOAD.serial("open").run(lambda: None)

asyncio.run(main())
print("ends")
"""

FORKED = """
import asyncio, os, sys
from agent_runtime.offload import SYSTEM_OFFLOAD

async def work():
    return await asyncio.wait_for(SYSTEM_OFFLOAD.start(lambda: 5).outcome, 10)

assert asyncio.run(work()) == 5
child = os.fork()
if child == 0:
    os._exit(0 if asyncio.run(work()) == 5 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("program", [LEFT_BEHIND, FORKED], ids=["left behind", "forked"])
def test_threads_keep_no_process_alive_and_a_copy_of_the_process_gets_threads_of_its_own(program: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
