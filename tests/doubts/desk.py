"""What tests of calls in doubt share: a tool whose remote can be asked, what people post, and the records that come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime import codec
from agent_runtime.clock import Clock
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RecordKind, RunStatus, StoredRun
from agent_runtime.journal.seal import sealer_for
from agent_runtime.settlements import Outcome, Settling, said_to_plain, say
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import RING, Asked, NoHeartbeat, Place, Remote, Script, Worker, until

MAIL: list[Asked] = [("mail", {"to": "ana"})]


class Outbox:
    """A remote that does not know keys, and can be asked whether a key was ever sent; and the tool that sends there.

    `before` and `after` are awaited around the act, `saying` replaces what the probe says.
    """

    def __init__(self, **options: Any) -> None:
        self.remote = Remote()
        self.entered = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Every question of the probe: the key and the arguments."""
        self.saying: Callable[[str], Awaitable[object]] | None = None
        self.before: Callable[[], Awaitable[None]] = _nothing
        self.after: Callable[[], Awaitable[None]] = _nothing
        self.registry = ToolRegistry()
        self.registry.tool(**{"name": "mail", "probe": self.probe, "pause": 0.001, **options})(self._mail())

    def _mail(self) -> Callable[..., Awaitable[str]]:
        async def mail(to: str) -> str:
            self.entered += 1
            await self.before()
            self.sent.append(idempotency_key())
            await self.after()
            return f"mail {len(self.sent)}"

        return mail

    @property
    def sent(self) -> list[str]:
        """The keys of what really went out, in order."""
        return self.remote.keys

    async def probe(self, key: str, args: dict[str, Any]) -> object:
        self.asked.append((key, args))
        assert key == idempotency_key(), "a probe may ask for its key, too"
        if self.saying is not None:
            return await self.saying(key)
        return Outcome.done(f"mail {self.sent.index(key) + 1}") if key in self.sent else Outcome.not_done()


async def _nothing() -> None:
    return None


def says(what: object) -> Callable[[str], Awaitable[object]]:
    """A probe that always says that, or raises it."""

    async def saying(_: str) -> object:
        if isinstance(what, BaseException):
            raise what
        return what

    return saying


class Frozen:
    """A worker that is stuck inside its call and not heard any more, and goes on when it is thawed."""

    def __init__(self, place: Place, outbox: Outbox, script: Script, *, clock: Clock | None = None, **options: Any) -> None:
        self.thawed, self.is_inside = asyncio.Event(), False
        self._outbox, self._first = outbox, True

        async def hold() -> None:
            if self._first:
                self._first, self.is_inside = False, True
                await self.thawed.wait()

        setattr(outbox, options.pop("at", "before"), hold)
        timing = {} if clock is None else {"clock": clock}
        worker = Worker(place, clock=clock)
        self.work = asyncio.ensure_future(worker.run(script, outbox.registry, offload=NoHeartbeat(), **{**timing, **options}))

    async def inside(self) -> None:
        await until(lambda: self.is_inside)


async def post(place: Place, kind: MessageKind, body: dict[str, object], *, run_id: str = "run") -> None:
    """Leave a message to the run, as whoever has the key does."""
    await post_message(place.open(), sealer_for(RING, tenant="", run_id=run_id), kind, body)


async def post_settling(place: Place, settling: Settling, *, attempt: int = 1, call: str = "0", drained: bool = False) -> None:
    said = say(call, attempt, settling, by="ana", why="looked at the outbox")
    await post(place, MessageKind.SETTLE, said_to_plain(said, drained=drained))


def settled_in(run: StoredRun) -> list[dict[str, Any]]:
    """What the settlements of a run say, in order."""
    return [
        {**codec.decode(each.body), "call": each.call, "attempt": each.attempt}
        for each in run.records
        if each.kind == RecordKind.SETTLED
    ]


async def status(place: Place) -> tuple[RunStatus, int | None]:
    """Where the run stands, and when it wakes."""
    stored = await place.open().latest(RunId("run"))
    assert stored is not None
    return RunStatus(stored.row.status), stored.row.wake_at
