"""Runs in every state that a viewer shows, in one SQLite file: tickets that are held, charged, mailed and refunded."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from agent_runtime import Call, Executor, Flow, FlowRunner, Message, Reply, RunContext, Runs, ToolCall, ToolRegistry, ToolSpec
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.crash import CrashPoint
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import KEY, Place, Worker, error_of

Asked = tuple[str, dict[str, object]]
LONG_TEXT = "The hall has three balconies, and each of them its own stairs. " * 60


class Talk:
    """A model that says and asks for these things in turn, and takes its time."""

    def __init__(self, *steps: tuple[str, Sequence[Asked]], clock: ManualClock | None = None) -> None:
        self.steps = steps
        self.clock = clock

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        seq = sum(message.role == "assistant" for message in messages)
        if self.clock is not None:
            self.clock.advance(1.3 + seq * 0.4)
        text, asks = self.steps[min(seq, len(self.steps) - 1)]
        calls = [ToolCall(f"call_{seq}_{at}", name, args) for at, (name, args) in enumerate(asks)]
        return Reply(text, calls, {"input": 210 + 140 * seq, "output": 34 + 7 * seq})


class Box:
    """The box office: its tools, each of which takes a moment."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.registry = ToolRegistry()
        self._clock = clock
        add = self.registry.tool

        @add(pure=True)
        async def seats_left(show: str) -> dict[str, object]:
            """How many seats are left."""
            self._take(0.18)
            return {"show": show, "left": 4, "rows": ["F", "G"], "about": LONG_TEXT if show == "Hamlet" else ""}

        @add(idempotent=True)
        async def charge_card(order: str, amount: int) -> dict[str, object]:
            """Charge the card on file."""
            self._take(2.4)
            return {"receipt": f"r-{order}", "amount": amount, "currency": "EUR"}

        @add
        async def email_tickets(to: str, show: str) -> str:
            """Mail the tickets."""
            self._take(0.9)
            return f"sent to {to}"

        @add(needs_approval=True, approval_expires=86_400)
        async def refund(order: str, amount: int) -> str:
            """Give the money back."""
            self._take(1.1)
            return f"refunded {amount} for {order}"

    def _take(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.advance(seconds)


SEATS: Asked = ("seats_left", {"show": "Hamlet"})
MAIL: Asked = ("email_tickets", {"to": "ana@example.org", "show": "Hamlet"})


def charge(order: str, amount: int = 80) -> Asked:
    return "charge_card", {"order": order, "amount": amount}


def refund(order: str, amount: int) -> Asked:
    return "refund", {"order": order, "amount": amount}


def buying(order: str, clock: ManualClock | None = None) -> Talk:
    return Talk(
        ("Let me see what is left for that evening.", [SEATS]),
        ("Two seats in row F. I charge the card.", [charge(order)]),
        ("Now the tickets.", [MAIL]),
        ("Done: two seats for Hamlet, row F. The tickets are in your mail.", []),
        clock=clock,
    )


async def fill(folder: Path, *, wait: float = 45.0) -> Place:
    """A store with runs in every state but running; `wait`: how many seconds nobody worked those that were recovered."""
    place = Place("sqlite", folder)
    clock = ManualClock(SYSTEM_CLOCK.now() - timedelta(minutes=20), auto=True)
    box = Box(clock).registry
    await Worker(place, clock=clock).run(
        buying("4", clock), box, "order-4", messages="Two seats for Hamlet, please.", clock=clock
    )
    dying = Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL, 1)
    await dying.run_and_die(buying("7", clock), box, "order-7", messages="Two seats for Hamlet, please.", clock=clock)
    clock.advance(wait)
    await Worker(place, clock=clock).recover(buying("7", clock), box, "order-7", clock=clock)
    await make_doubtful(place, clock=clock)
    await pause(place, clock=clock)
    failing = Talk(("I look again.", [SEATS]), clock=clock)
    await error_of(
        Worker(place, clock=clock).run(failing, box, "search-2", messages="Find me four seats.", max_steps=2, clock=clock)
    )
    dead = Worker(place, clock=clock).killed_at(CrashPoint.AFTER_DECIDE, 2)
    await dead.run_and_die(buying("9", clock), box, "order-9", messages="Two for Hamlet.", clock=clock)
    await pause(place, "order-3", 20, clock=clock)
    await Runs(place.open(), checkpoint_key=KEY).cancel("order-3", by="ana", why="the customer called it off")
    await make_poisonous(place, clock=clock)
    await walk(place, clock=clock)
    return place


class Order(BaseModel):
    """What the flow works on."""

    show: str = "Othello"
    order: str = "8"
    amount: int = 120
    seats: dict[str, object] = {}
    receipt: dict[str, object] = {}
    mailed: str = ""


def tickets() -> Flow[Order]:
    """Look, charge, mail; or say that there is nothing left."""
    look = Call("seats_left", args=lambda order: {"show": order.show}, into="seats")
    pay = Call("charge_card", args=lambda order: {"order": order.order, "amount": order.amount}, into="receipt")
    mail = Call("email_tickets", args=lambda order: {"to": "bo@example.org", "show": order.show}, into="mailed")
    sorry = Call("email_tickets", args=lambda order: {"to": "bo@example.org", "show": "nothing left"}, into="mailed")
    flow = Flow("tickets", state=Order).node("look", look).node("pay", pay).node("mail", mail).node("sorry", sorry)
    flow.edge("look", "pay", when=lambda order: bool(order.seats)).edge("look", "sorry", when=lambda order: not order.seats)
    return flow.edge("pay", "mail").end("mail", "sorry")


async def walk(place: Place, run_id: str = "tickets-8", *, clock: ManualClock | None = None) -> None:
    """A run of the flow, to its end."""
    worker = Worker(place, clock=clock)
    runner = FlowRunner(
        Executor(Box(clock).registry), checkpoints=worker, checkpoint_key=KEY, clock=SYSTEM_CLOCK if clock is None else clock
    )  # fmt: skip
    await runner.run(tickets(), Order(), run_id=run_id)


async def pause(
    place: Place, run_id: str = "refund-12", amount: int = 900, *, clock: ManualClock | None = None, user: str | None = None
) -> None:
    """A run that waits for approval of a refund."""
    talk = Talk(
        ("The show was called off. I give the money back.", [refund("B-2", amount)]), ("It is refunded.", []), clock=clock
    )
    options = {} if clock is None else {"clock": clock}
    context = RunContext(user=user)
    await Worker(place, clock=clock).run(
        talk, Box(clock).registry, run_id, messages="Refund order B-2, please.", ctx=context, **options
    )  # fmt: skip


async def make_doubtful(place: Place, run_id: str = "mail-5", *, clock: ManualClock | None = None) -> None:
    """A run that died while it mailed tickets, and that nobody can go on with."""
    talk = Talk(("I mail the tickets.", [MAIL]), ("They are on their way.", []), clock=clock)
    options = {} if clock is None else {"clock": clock}
    await Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL).run_and_die(
        talk, Box(clock).registry, run_id, messages="Mail me the tickets again.", **options
    )  # fmt: skip
    await error_of(Worker(place, clock=clock).recover(talk, Box(clock).registry, run_id, **options))


async def make_poisonous(place: Place, run_id: str = "import-1", *, clock: ManualClock | None = None) -> None:
    """A run that kills its workers, and is set aside."""
    talk, box = Talk(("I charge.", [charge("1")]), ("Done.", [])), Box(clock).registry
    options = {} if clock is None else {"clock": clock}
    await Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL).run_and_die(talk, box, run_id, **options)
    await Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL).recover_and_die(talk, box, run_id, **options)
    await error_of(Worker(place, clock=clock).recover(talk, box, run_id, max_attempts=1, **options))


def corrupt(place: Place, run_id: str) -> None:
    """Change a stored record of the run behind everybody's back."""
    place.is_tampered = True
    connection = sqlite3.connect(place.path)
    with connection:
        changed = connection.execute(
            "UPDATE journal SET body = CAST(CAST(body AS TEXT) || ' ' AS BLOB) "
            "WHERE key = (SELECT key FROM runs WHERE run_id = ?) AND number = 5",
            (run_id,),
        )
        assert changed.rowcount == 1
    connection.close()
