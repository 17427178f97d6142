"""The clock that a test moves by hand."""

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from agent_runtime.clock import Clock
from agent_runtime.testing.manual_clock import ManualClock

START = datetime(2031, 5, 6, tzinfo=UTC)


async def turns(until: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    for _ in range(1000):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("a thousand turns of the loop, and it is not so")


def test_it_is_a_clock() -> None:
    clock: Clock = ManualClock(START)
    assert clock.now() == START
    assert clock.now().tzinfo is UTC


def test_it_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(START)
    before = clock.monotonic()
    assert clock.monotonic() == before
    clock.advance(1.5)
    assert clock.monotonic() == before + 1.5
    assert clock.now() == START + timedelta(seconds=1.5)


def test_ten_tenths_are_one_second() -> None:
    clock = ManualClock(START)
    before = clock.monotonic()
    for _ in range(10):
        clock.advance(0.1)
    assert clock.monotonic() == before + 1
    assert clock.now() == START + timedelta(seconds=1)


def test_a_jump_moves_the_wall_clock_alone() -> None:
    clock = ManualClock(START)
    before = clock.monotonic()
    clock.jump_wall(-3600)
    assert clock.now() == START - timedelta(hours=1)
    assert clock.monotonic() == before


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="jump_wall"):
        ManualClock(START).advance(-1)


def test_it_starts_at_an_aware_moment() -> None:
    with pytest.raises(ValueError, match="aware"):
        ManualClock(datetime(2031, 5, 6))


async def test_a_sleeper_waits_until_its_time_has_come() -> None:
    clock = ManualClock(START)
    sleeper = asyncio.create_task(clock.sleep(10))
    await turns(lambda: clock.sleepers == 1)
    clock.advance(9.999)
    await asyncio.sleep(0)
    assert not sleeper.done()
    clock.advance(0.001)
    await sleeper
    assert clock.sleepers == 0


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = ManualClock(START)
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (3, 1, 2, 1.5):
            group.create_task(sleep(seconds))
        await turns(lambda: clock.sleepers == 4)
        clock.advance(2.5)
        await turns(lambda: len(woken) == 3)
        assert clock.sleepers == 1
        clock.advance(1)
    assert woken == [1, 1.5, 2, 3]


async def test_a_jump_of_the_wall_clock_wakes_nobody() -> None:
    clock = ManualClock(START)
    sleeper = asyncio.create_task(clock.sleep(1))
    await turns(lambda: clock.sleepers == 1)
    clock.jump_wall(3600)
    await asyncio.sleep(0)
    assert not sleeper.done()
    clock.advance(1)
    await sleeper


async def test_a_sleeper_that_is_cancelled_is_forgotten() -> None:
    clock = ManualClock(START)
    sleeper = asyncio.create_task(clock.sleep(1))
    await turns(lambda: clock.sleepers == 1)
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert clock.sleepers == 0
    clock.advance(1)


async def test_no_time_to_sleep_is_one_turn_of_the_loop() -> None:
    clock = ManualClock(START)
    await clock.sleep(0)
    await clock.sleep(-1)
    assert clock.now() == START


async def test_on_auto_a_sleeper_moves_the_clock_and_wakes_the_others() -> None:
    clock = ManualClock(START, auto=True)
    await clock.sleep(60)
    await clock.sleep(-1)
    assert clock.now() == START + timedelta(seconds=60)


async def test_it_may_be_moved_from_another_thread() -> None:
    clock = ManualClock(START)
    sleeper = asyncio.create_task(clock.sleep(5))
    await turns(lambda: clock.sleepers == 1)
    await asyncio.to_thread(clock.advance, 5)
    await sleeper


def test_a_sleeper_whose_loop_has_closed_stops_nobody() -> None:
    clock = ManualClock(START)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)  # it would say that a task was left behind, as it was
    left = loop.create_task(clock.sleep(1))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert clock.sleepers == 1
    clock.advance(1)
    assert clock.sleepers == 0
    assert not left.done()


def start_waiting(clock: ManualClock, event: threading.Event, seconds: float) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(clock.wait(event, seconds)))
    thread.start()
    while clock.sleepers == 0:
        pass
    return thread, answers


def test_a_thread_waits_until_its_event_is_set() -> None:
    clock, event = ManualClock(START), threading.Event()
    thread, answers = start_waiting(clock, event, 5)
    event.set()
    thread.join()
    assert answers == [True]
    assert clock.sleepers == 0


def test_a_thread_waits_until_its_time_is_over() -> None:
    clock, event = ManualClock(START), threading.Event()
    thread, answers = start_waiting(clock, event, 5)
    clock.advance(5)
    thread.join()
    assert answers == [False]


def test_a_thread_does_not_move_the_clock_on_auto() -> None:
    clock, event = ManualClock(START, auto=True), threading.Event()
    thread, answers = start_waiting(clock, event, 5)
    assert clock.now() == START
    clock.advance(5)
    thread.join()
    assert answers == [False]


def test_an_event_that_is_set_needs_no_wait() -> None:
    clock, event = ManualClock(START), threading.Event()
    event.set()
    assert clock.wait(event, 5) is True
    assert clock.wait(event, 0) is True
    assert clock.wait(threading.Event(), 0) is False
