"""The cloud: creates servers, databases and DNS records, once for each idempotency key."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import assert_never

from agent_runtime.mock.listener import Answer, Request, Routes, refusal, shown
from agent_runtime.mock.pauses import Pauses
from agent_runtime.mock.stage import Stage
from agent_runtime.mock.state import Arrival, Creation, MockState, Outcome

CLOUD = "cloud"
LONGEST_KEY = 255  # the limit of well-known payment services


class Kind(StrEnum):
    """What can be created."""

    SERVER = "server"
    DATABASE = "database"
    DNS_RECORD = "dns_record"


PREFIXES = {Kind.SERVER: "i", Kind.DATABASE: "db", Kind.DNS_RECORD: "dns"}


@dataclass(frozen=True, slots=True)
class Order:
    """A request to create, checked. `args` is canonical JSON, so that equal arguments are equal strings."""

    key: str | None
    kind: Kind
    args: str


def cloud_routes(state: MockState, pauses: Pauses) -> Routes:
    """Everything that the cloud answers to."""
    cloud = Cloud(Stage(CLOUD, state, pauses))
    return {
        "/create": {"POST": cloud.create},
        "/created": {"GET": cloud.show_created},
        "/calls": {"GET": cloud.show_calls},
        "/switches": cloud.stage.switch_routes(),
    }


class Cloud:
    """The routes of the cloud."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def create(self, request: Request) -> Answer | None:
        """`POST /create`"""
        order = _read_order(request)
        if order.key is None and not self.stage.state.switches(CLOUD).keyless:
            raise refusal("header Idempotency-Key is missing: the key of the call, the same whenever it is sent again")
        return self.stage.play(order.key or "", lambda arrival: self._create(order, arrival))

    def show_created(self, _: Request) -> Answer:
        """`GET /created`"""
        resources = self.stage.state.resources()
        by_kind = Counter(resource.kind for resource in resources)
        # After `forget` a key may stand for several; the newest is the one that the cloud would remember.
        by_key = {made.key: _resource_id(Kind(made.kind), made.number) for made in resources if made.key is not None}
        return Answer(HTTPStatus.OK, {"total": len(resources), "by_kind": by_kind, "by_key": by_key})

    def show_calls(self, _: Request) -> Answer:
        """`GET /calls`"""
        counts = self.stage.state.calls(CLOUD)
        by_key = {key: asdict(count) for key, count in counts.items() if key}
        return Answer(HTTPStatus.OK, {"total": sum(count.requests for count in counts.values()), "by_key": by_key})

    def _create(self, order: Order, arrival: Arrival) -> Answer:
        # A key may be missing though the cloud wants keys again, if `keyless` was switched off meanwhile.
        honours_key = order.key is not None and not (arrival.switches.forget or arrival.switches.keyless)
        creation = self.stage.state.create(CLOUD, order.key, order.kind, order.args, honours_key=honours_key)
        return _answer(order, creation)


def _answer(order: Order, creation: Creation) -> Answer:
    resource_id = _resource_id(Kind(creation.kind), creation.number)
    match creation.outcome:
        case Outcome.CREATED | Outcome.ALREADY_DONE:
            body = {"id": resource_id, "remote": str(creation.outcome), "kind": creation.kind}
            return Answer(HTTPStatus.OK, body)
        case Outcome.CONFLICT:
            message = (
                f"key {order.key} already created {creation.kind} {resource_id} with other arguments; "
                "nothing was done: use a new key for a new call"
            )
            return Answer(HTTPStatus.CONFLICT, {"error": "conflict", "key": order.key, "message": message})
        case _:
            assert_never(creation.outcome)


def _resource_id(kind: Kind, number: int) -> str:
    return f"{PREFIXES[kind]}-{number:07d}"


def _read_order(request: Request) -> Order:
    fields = request.fields()
    return Order(key=_read_key(request.key), kind=_read_kind(fields.get("kind")), args=_read_args(fields.get("args")))


def _read_key(key: str | None) -> str | None:
    if key is not None and not 1 <= len(key) <= LONGEST_KEY:
        raise refusal(f"header Idempotency-Key must have 1 to {LONGEST_KEY} characters, not {len(key)}")
    return key


def _read_kind(kind: object) -> Kind:
    if not (isinstance(kind, str) and kind in PREFIXES):
        raise refusal(f'field "kind" must be one of {", ".join(PREFIXES)}, not {shown(kind)}')
    return Kind(kind)


def _read_args(args: object) -> str:
    if not isinstance(args, dict):
        raise refusal(f'field "args" must be an object of arguments, not {shown(args)}')
    return json.dumps(args, sort_keys=True, separators=(",", ":"))
