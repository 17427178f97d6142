"""The nodes of one superstep, worked side by side: all have ended, or are in doubt, before anything is raised."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, assert_never

from agent_runtime.errors import CallFailed, FlowError
from agent_runtime.flow.calls import Calls, Halt, NodeRun, Planned
from agent_runtime.flow.nodes import Call, Code, Graph, Inner, Mapped, Node
from agent_runtime.flow.superstep import (
    Failed,
    NodeError,
    Outcome,
    Position,
    Wrote,
    advance,
    check_writers,
    first_position,
    gather,
)
from agent_runtime.side_by_side import is_being_cancelled, run_all

MAX_SUPERSTEPS = 10_000
"""Of a run, and of a flow inside a node."""


class Place(NamedTuple):
    """A node that is worked: what its calls' places begin with, and how errors name it."""

    prefix: str
    node: Node
    flow: str

    @property
    def call(self) -> str:
        return f"{self.prefix}{self.node.name}"

    @property
    def told(self) -> str:
        return f"node {self.node.name!r} of flow {self.flow!r}"


class Job(NamedTuple):
    """What is left to do of a node once all places are chosen."""

    place: Place
    work: Callable[[], Coroutine[Any, Any, Mapping[str, object]]]


async def work_superstep(
    calls: Calls, graph: Graph, position: Position, state: Any, prefix: str
) -> Mapping[str, Outcome] | None:
    """What each node of the frontier came to; None where a call is in doubt or waits, and all others have ended."""
    check_writers(graph, position.frontier)
    jobs = []
    for name in position.frontier:
        with suppress(Halt):  # the others are looked at all the same, so that every doubt is named
            jobs.append(_prepare(calls, graph, Place(prefix, graph.nodes[name], graph.name), state))
    if calls.doubts:
        return None
    if len(jobs) == 1:
        outcomes = [await _end(jobs[0])]
    else:
        outcomes = await run_all([_end(job) for job in jobs])
    if calls.doubts or calls.paused:
        return None
    return {job.place.node.name: outcome for job, outcome in zip(jobs, outcomes, strict=True) if outcome is not None}


async def _end(job: Job) -> Outcome | None:
    """What a node came to; None where it was halted."""
    name = job.place.node.name
    try:
        return Wrote(await job.work())
    except CallFailed as failed:
        return Failed(NodeError(name, failed.tool, failed.error_type, failed.message))
    except _InnerFailed as failed:
        return Failed(failed.error._replace(node=f"{name}/{failed.error.node}"))
    except Halt:
        return None


class _InnerFailed(Exception):
    """The flow inside a node has failed."""

    def __init__(self, error: NodeError) -> None:
        super().__init__(str(error))
        self.error = error


def _prepare(calls: Calls, graph: Graph, place: Place, state: Any) -> Job:
    """Choose the place of every call that can be known before anything is done."""
    node = place.node
    match node.work:
        case Call() as call:
            planned = _plan(calls, place, place.call, call, (graph.shape.copy(state),))
            return Job(place, partial(_call, calls, call, planned))
        case Mapped() as mapped:
            return _prepare_map(calls, graph, place, mapped, state)
        case Code() as code:
            calls.siblings.running += 1
            return Job(place, partial(_code, calls, place, code, (graph.shape.copy(state),)))
        case Inner() as inner:
            calls.siblings.running += 1
            return Job(place, partial(_inner, calls, graph, place, inner, graph.shape.copy(state)))
        case _:
            assert_never(node.work)


def _plan(calls: Calls, place: Place, at: str, call: Call, given: tuple[Any, ...]) -> Planned:
    whose = f"the args function of {place.told}"
    arguments = partial(_arguments, whose, call, given)
    return calls.plan(at, call.tool, arguments(), whose=whose, again=arguments)


def _arguments(whose: str, call: Call, given: tuple[Any, ...]) -> Mapping[str, object]:
    try:
        return {} if call.args is None else call.args(*given)
    except Exception as error:
        raise FlowError(f"{whose} raised {type(error).__name__}: {error}; nothing was called") from error


async def _call(calls: Calls, call: Call, planned: Planned) -> Mapping[str, object]:
    ending = await calls.make(planned)
    return {} if call.into is None else {call.into: ending.value}


def _prepare_map(calls: Calls, graph: Graph, place: Place, mapped: Mapped, state: Any) -> Job:
    items = _items(place, mapped, graph.shape.copy(state))
    given = [(graph.shape.copy(state), item) for item in items]
    each = mapped.each
    work: list[Callable[[], Coroutine[Any, Any, object]]] = []
    if isinstance(each, Call):
        plans = [_plan(calls, place, f"{place.call}[{at}]", each, pair) for at, pair in enumerate(given)]
        work = [partial(_value, calls, planned) for planned in plans]
    else:
        calls.siblings.running += len(given)
        work = [partial(_item, calls, place, each, at, pair) for at, pair in enumerate(given)]
    return Job(place, partial(_map, mapped, work))


async def _map(mapped: Mapped, work: Sequence[Callable[[], Coroutine[Any, Any, object]]]) -> Mapping[str, object]:
    """The results of all items, in their order; the first item that failed, where one has."""
    results = await run_all([_or_failure(each()) for each in work])
    for result in results:
        if isinstance(result, CallFailed | Halt):
            raise result
    return {mapped.into: results}


async def _or_failure(work: Awaitable[object]) -> object:
    try:
        return await work
    except (CallFailed, Halt) as failed:
        return failed


async def _value(calls: Calls, planned: Planned) -> object:
    return (await calls.make(planned)).value


def _items(place: Place, mapped: Mapped, state: Any) -> list[Any]:
    over = mapped.over
    try:
        items = getattr(state, over) if isinstance(over, str) else over(state)
    except Exception as error:
        raise FlowError(f"`over` of {place.told} raised {type(error).__name__}: {error}; nothing was called") from error
    if not isinstance(items, list | tuple):
        raise FlowError(f"{place.told} maps over a list, found {type(items).__name__}")
    return list(items)


async def _code(calls: Calls, place: Place, code: Code, given: tuple[Any, ...]) -> Mapping[str, object]:
    returned = await _run_code(calls, place, place.call, code, given)
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise FlowError(f"{place.told} returns the changed fields as a dict, or None; found {type(returned).__name__}")
    return _allowed(place, returned, code.writes)


async def _item(calls: Calls, place: Place, code: Code, at: int, given: tuple[Any, ...]) -> object:
    return await _run_code(calls, place, f"{place.call}[{at}]", code, given)


async def _run_code(calls: Calls, place: Place, at: str, code: Code, given: tuple[Any, ...]) -> Any:
    """What a function returns, once every call that it began has ended."""
    handle = NodeRun(calls, at, place.told)
    is_stopped = False
    try:
        returned = code.function(*given, handle) if code.takes_run else code.function(*given)
        return await returned if inspect.isawaitable(returned) else returned
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            is_stopped = True  # which goes before whatever stopped a call
            await handle.cancel()
            raise
        raise FlowError(f"{place.told} let the cancellation of something that it waited for out of its function") from error
    except (CallFailed, Halt):
        raise
    except Exception as error:
        if isinstance(error, ExceptionGroup):
            await handle.close()
            if (failure := handle.first_failure(error)) is not None:  # tasks of a group raise so what a lone call raises
                raise failure from error
        error.add_note(f"raised in {place.told}; its calls are recorded: mend it and recover the run")
        raise
    finally:
        await handle.close()
        calls.siblings.running -= 1
        if not is_stopped:
            handle.raise_signal()


def _allowed(place: Place, values: Mapping[str, object], writes: tuple[str, ...] | None) -> Mapping[str, object]:
    if writes is not None and (others := sorted(set(values) - set(writes))):
        raise FlowError(f"{place.told} declares writes={list(writes)} and gave a value to {others}")
    return values


async def _inner(calls: Calls, graph: Graph, place: Place, inner: Inner, state: Any) -> Mapping[str, object]:
    """Work a whole flow inside a node. Its supersteps are not saved: they are worked again, and their calls replay."""
    try:
        entered = _enter(graph, place, inner, state)
        ended = await _work_inner(calls, place, inner.graph, entered)
    finally:
        calls.siblings.running -= 1
    return _allowed(place, _leave(graph, place, inner, state, ended), inner.writes)


async def _work_inner(calls: Calls, place: Place, graph: Graph, state: Any) -> Any:
    position = first_position(graph)
    while not position.is_over:
        if position.superstep >= MAX_SUPERSTEPS:
            message = f"the flow inside took {MAX_SUPERSTEPS} supersteps and has not ended"
            raise _InnerFailed(NodeError(position.frontier[0], "", "StepLimitReached", message))
        await calls.run.barrier()
        outcomes = await work_superstep(calls, graph, position, state, f"{place.call}/{position.superstep}/")
        if outcomes is None:
            raise Halt
        _, state = graph.shape.freeze(gather(graph, state, outcomes))
        position = advance(graph, position, outcomes, state)
    if position.failure is not None:
        raise _InnerFailed(position.failure)
    return state


def _enter(graph: Graph, place: Place, inner: Inner, state: Any) -> Any:
    shape = inner.graph.shape
    if inner.enter is not None:
        try:
            values = inner.enter(state)
        except Exception as error:
            raise FlowError(f"`enter` of {place.told} raised {type(error).__name__}: {error}") from error
    else:
        values = {name: getattr(state, name) for name in shape.fields if name in graph.shape.fields}
    _, entered = shape.freeze(shape.build(values, by=f"what {place.told} enters its flow with"))
    return entered


def _leave(graph: Graph, place: Place, inner: Inner, state: Any, ended: Any) -> Mapping[str, object]:
    if inner.leave is not None:
        try:
            return inner.leave(state, ended) or {}
        except Exception as error:
            raise FlowError(f"`leave` of {place.told} raised {type(error).__name__}: {error}") from error
    carried = inner.carried_out(graph.shape)
    return {name: getattr(ended, name) for name in carried if getattr(ended, name) != getattr(state, name)}
