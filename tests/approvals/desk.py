"""What the tests of approvals share: tools that need a person, runs that wait for one, and what is stored of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RecordKind, RunStatus, StoredRun
from agent_runtime.journal.seal import sealer_for
from agent_runtime.tool_loop import LoopResult
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import RING, Asked, Bench, Place, Script, Worker

CHARGE: list[Asked] = [("charge", {"amount": 100})]


def needing(**options: Any) -> Bench:
    """The tools of the bench, each of which needs a person's approval."""
    return Bench(needs_approval=True, **options)


class Mixed(Bench):
    """The bench, with one more tool that needs a person."""

    def __init__(self, **options: Any) -> None:
        super().__init__()

        @self.registry.tool(needs_approval=True, **options)
        async def refund(amount: int) -> str:
            self.entered["refund"] += 1
            await self.before("refund", {"amount": amount})
            key = idempotency_key() if options.get("idempotent") else None
            return self.remote.act("refund", {"amount": amount}, key)


class Clamping:
    """A tool whose check lets no more through than so much, and what it was called with."""

    def __init__(self, most: int, **options: Any) -> None:
        self.sent: list[int] = []
        self.registry = ToolRegistry()

        async def charge(amount: int) -> str:
            self.sent.append(amount)
            return f"charged {amount}"

        charge.__annotations__["amount"] = Annotated[int, AfterValidator(lambda value: min(value, most))]
        self.registry.tool(**{"needs_approval": True, **options})(charge)


def charging() -> Script:
    """A model that asks for one charge and is done."""
    return Script(CHARGE, "done")


def the_request(result: Any) -> ApprovalRequest:
    """The one request of a paused run."""
    assert result.status == "paused", result
    [request] = result.pending
    assert isinstance(request, ApprovalRequest)
    return request


async def paused(place: Place, bench: Bench, model: Script | None = None, **options: Any) -> ApprovalRequest:
    """A new run that waits for a person, and its request."""
    return the_request(await Worker(place).run(model or charging(), bench.registry, **options))


async def resume(place: Place, bench: Bench, *verdicts: Verdict, model: Script | None = None, **options: Any) -> LoopResult:
    """Go on with the run on a fresh worker, with these verdicts."""
    return await Worker(place).recover(model or charging(), bench.registry, verdicts=list(verdicts), **options)


async def look(place: Place, bench: Bench, model: Script | None = None, **options: Any) -> LoopResult:
    """Go on with the run on a fresh worker, with nothing new."""
    return await Worker(place).recover(model or charging(), bench.registry, **options)


async def post(place: Place, verdict: Verdict, *, kind: MessageKind = MessageKind.VERDICT) -> None:
    """Leave a verdict in the inbox of its run."""
    sealer = sealer_for(RING, tenant="", run_id=verdict.run_id)
    await post_message(place.open(), sealer, kind, verdict.to_plain())


def kinds(run: StoredRun, call: str) -> list[RecordKind]:
    """The records of a call, in their order."""
    return [RecordKind(record.kind) for record in run.records if record.call == call]


async def stands(place: Place, run_id: str = "run") -> tuple[RunStatus, int, int]:
    """A run's status, step and number of records: what a refusal leaves as it was."""
    row = (await place.load(run_id)).row
    return RunStatus(row.status), row.step, row.number
