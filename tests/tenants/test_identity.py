"""Who knows a run's id may do nothing with it: on every store another user, and nobody at all, are refused, told nothing."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from agent_runtime import Outcome, RunContext, Runs
from agent_runtime.errors import IdentityMismatch, InvalidSetting, VerdictRefused
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.ids import RunId
from agent_runtime.testing.store_contract.witness import untouched
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from tests.golden.program import KEY, Ask, Order, Tools
from tests.tenants.house import SOME, House

ANA, BEN = RunContext(user="ana", thread="the thread"), RunContext(user="ben", thread="the thread")
STRANGERS = [BEN, RunContext(user="ana"), RunContext(thread="the thread"), RunContext()]
SECRETS = ("ana", "the thread", "refund", "amount", "1234")


async def refusal(work: Awaitable[object]) -> Exception:
    with pytest.raises((IdentityMismatch, VerdictRefused)) as refused:
        await work
    assert isinstance(refused.value, IdentityMismatch), refused.value
    return refused.value


@pytest.mark.parametrize("house", SOME, indirect=True)
async def test_another_user_and_nobody_are_refused_by_every_verb_and_told_nothing(house: House) -> None:
    store, tools = house.open(), Tools()
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    flow = (
        Flow("refunds", state=Order).node("pay", Call("refund", args=lambda order: {"amount": 1234}, into="note")).end("pay")
    )
    runner = FlowRunner(Executor(tools.registry), **options)
    result = await run_tool_loop(Ask("refund"), tools.registry, "go", run_id="loop", ctx=ANA, **options)
    assert (result.status, (await runner.run(flow, Order(), run_id="flow", ctx=ANA)).status) == ("paused", "paused")
    operator = Runs(store, checkpoint_key=KEY)
    async with untouched(store, RunId("loop"), RunId("flow")):
        for stranger in STRANGERS:
            runs = operator.for_context(stranger)
            assert (list(await runs.list()), list(await runs.pending())) == ([], [])
            for run_id in ("loop", "flow"):
                [request] = await operator.pending(run_id)
                for verb in (
                    runs.show(run_id), runs.pending(run_id), runs.verify(run_id), runs.verify(), runs.release(run_id, by="b"),
                    runs.cancel(run_id, by="b"), runs.delete(run_id, by="b", force=True), runs.undo(run_id, by="b", why="x"),
                    runs.settle(run_id, request.id, Outcome.done(1), by="b", why="x"), runs.approve(request, by="b"),
                    runs.approve((run_id, request.id), by="b"), runs.deny(request, by="b"),
                    runs.edit(request, {"amount": 1}, by="b"), runs.answer(request.approve(by="b")),
                ):  # fmt: skip
                    said = str(await refusal(verb))
                    assert not [secret for secret in SECRETS if secret in said]
                verdicts = [request.approve(by="b")]
                if run_id == "loop":
                    again = recover_tool_loop(
                        Ask("refund"), tools.registry, run_id, ctx=stranger, verdicts=verdicts, **options
                    )
                    works: list[Awaitable[object]] = [again]
                else:
                    works = [
                        runner.recover(flow, run_id, ctx=stranger),
                        runner.resume(flow, run_id, verdicts, ctx=stranger),
                        runner.resume(flow, run_id, verdicts),
                    ]
                for work in works:
                    said = str(await refusal(work))
                    assert not [secret for secret in SECRETS if secret in said]
        nobody: Any = None
        with pytest.raises(InvalidSetting):
            operator.for_context(nobody)
    assert tools.acted.total() == 0
    hers = operator.for_context(ANA)
    assert [info.run_id for info in await hers.list()] == ["flow", "loop"]
    for request in await hers.pending():
        await hers.approve(request, by="ana")
    assert (await runner.resume(flow, "flow", ctx=ANA)).status == "done"
    assert (await recover_tool_loop(Ask("refund"), tools.registry, "loop", ctx=ANA, **options)).status == "done"
    assert tools.acted == {"refund": 2}
