"""Our patience ends before the remote's work does: the outcome is unknown, and never failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.journal.records import RecordKind
from tests.bench import Bench, Place, Script, Worker, error_of, results_in


class ReadTimeout(Exception):
    """What a client of its own family raises when an answer does not come."""

    __module__ = "httpx"


class TransportError(ReadTimeout):
    __module__ = "httpx"


class LateAnswer(TransportError):
    """An error of a client that says nothing about what the remote did."""

    __module__ = "some_client"


Silence = Callable[[], Any]


async def our_deadline() -> None:
    await asyncio.Event().wait()


async def its_own_timeout() -> None:
    raise TimeoutError


async def a_reset() -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


async def a_clients_own_error() -> None:
    raise LateAnswer("no answer in 2 s")


async def an_inner_cancellation() -> None:
    raise asyncio.CancelledError


SILENCES = [our_deadline, its_own_timeout, a_reset, a_clients_own_error, an_inner_cancellation]


def silent_once(bench: Bench, silence: Silence) -> None:
    """The remote acts, and its first answer does not come."""
    silences = [silence]

    async def after(tool: str, args: dict[str, object]) -> None:
        if silences:
            await silences.pop()()

    bench.after = after


async def kinds_of_the_call(place: Place) -> list[int]:
    return [record.kind for record in (await place.load("run")).records if record.call == "0"]


@pytest.mark.parametrize("silence", SILENCES, ids=lambda silence: silence.__name__)
async def test_what_knows_its_key_is_sent_again_under_it_and_gets_the_first_effects_result(
    place: Place, silence: Silence
) -> None:
    bench, model = Bench(timeout=0.05), Script([("charge_i", {"amount": 5})], "done")
    silent_once(bench, silence)
    result = await Worker(place).run(model, bench.registry)
    assert bench.remote.keys == ["run:0"] * 2
    assert (bench.effects, bench.entered["charge_i"]) == (1, 2)
    assert results_in(result.messages) == ["effect 1"]
    assert await kinds_of_the_call(place) == [RecordKind.STARTED, RecordKind.STARTED, RecordKind.DONE]


@pytest.mark.parametrize("silence", SILENCES, ids=lambda silence: silence.__name__)
async def test_what_knows_no_key_is_not_sent_again_and_the_run_stops_in_doubt(place: Place, silence: Silence) -> None:
    bench, model = Bench(timeout=0.05), Script([("charge", {"amount": 5})], "done")
    silent_once(bench, silence)
    for attempt in range(3):
        work = Worker(place).recover(model, bench.registry) if attempt else Worker(place).run(model, bench.registry)
        error = await error_of(work)
        assert isinstance(error, RecoveryNeedsDecision)
        assert [tool for tool, _ in error.calls] == ["charge"]
        assert (bench.effects, bench.entered["charge"], model.asked) == (1, 1, 1)
    assert await kinds_of_the_call(place) == [RecordKind.STARTED]


async def test_siblings_of_a_silent_call_end_by_themselves(place: Place) -> None:
    bench = Bench(timeout=0.05)
    model = Script([("charge", {"amount": 5}), ("charge_i", {"amount": 6}), ("lookup", {"name": "a"})], "done")

    async def after(tool: str, args: dict[str, object]) -> None:
        if tool == "charge":
            await our_deadline()

    bench.after = after
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await Worker(place).run(model, bench.registry)
    assert [doubt.call for doubt in needed.value.doubts] == ["0.0"]
    run = await place.load("run")
    assert {record.call for record in run.records if record.kind == RecordKind.DONE} == {"0/model", "0.1", "0.2"}
    bench.after = Bench().after
    result = await Worker(place).recover(model, bench.registry, rerun_in_doubt=True)
    assert results_in(result.messages) == ["effect 3", "effect 2", "what is known of a"]
    assert bench.entered["lookup"] == bench.entered["charge_i"] == 1
