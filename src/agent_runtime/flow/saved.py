"""What a run of a flow stores of itself, and how it is read back.

Rules of this file:

* `opened` holds the state that was given and the graph as plain data, so that a changed graph can be refused by name.
* A checkpoint replaces the one before it. It holds the position, the graph's digest and the fields of the state.
* A large field that did not change since the checkpoint before is not stored again: the checkpoint names the record that
  holds it, which is `opened`, or a `field` record noted once. So a field that changes every time is in no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.flow.description import Described, digest_of
from agent_runtime.flow.state import Fields, StateShape
from agent_runtime.flow.superstep import NodeError, Position
from agent_runtime.journal.records import RecordKind
from agent_runtime.recovery import Found
from agent_runtime.run import Run

LARGE_BYTES = 512
"""From this size on a field that did not change is named instead of stored again."""

_OPENED = 1


def given(shape: StateShape[Any], fields: Fields, graph: bytes) -> bytes:
    """What a run is opened with, as it is recorded: `graph` is its description."""
    return b'{"state":%b,"graph":%b}' % (shape.join(fields), graph)


class Saved(NamedTuple):
    """A run of a flow as it was stored."""

    position: Position | None
    """None: it has no checkpoint yet."""
    fields: Fields
    held: Mapping[str, int]
    described: Described
    digest: str


def read_saved(found: Found) -> Saved:
    """What the run's verified records and checkpoint say; `CheckpointStoreCorrupt` where they cannot be read."""
    try:
        return _read(found)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        run_id = found.stored.row.run_id
        raise CheckpointStoreCorrupt(f"run {run_id!r} of a flow holds a state that cannot be read: {error!r}") from error


class Keeper:
    """Stores the state of an open run, superstep by superstep."""

    __slots__ = ("_digest", "_held", "_last", "_run", "_shape")

    def __init__(self, run: Run, shape: StateShape[Any], digest: str, fields: Fields, held: Mapping[str, int]) -> None:
        self._run = run
        self._shape = shape
        self._digest = digest
        self._last = fields
        self._held = dict(held)

    async def keep(self, position: Position, fields: Fields) -> None:
        """Note the checkpoint of a superstep that is over: the run moves one step on with its next barrier.

        `TooLarge`, and nothing of the state is noted, where there is no room for it.
        """
        run = self._run
        if sum(map(len, fields.values())) > run.most_bytes:
            self._check_room(fields)
        for name, data in fields.items():
            if self._last.get(name) != data:
                self._held.pop(name, None)
            elif name not in self._held and len(data) >= LARGE_BYTES:
                run.journal.note(RecordKind.FIELD, body=data)
                self._held[name] = run.journal.number
                await run.barrier_if_each()
        body = _write(self._shape, position, fields, self._held, self._digest)
        run.backing.check_room(len(body), f"the state of flow {run.journal.name!r}")
        self._last = fields
        run.journal.move_to_next_step()
        run.journal.keep_state(body)

    def _check_room(self, fields: Fields) -> None:
        """Refuse a state that cannot be kept, before anything is put together."""
        backing, flow = self._run.backing, self._run.journal.name
        for name, data in fields.items():
            backing.check_room(len(data), f"field {name!r} of the state of flow {flow!r}")
        changing = [data for name, data in fields.items() if self._last.get(name) != data or len(data) < LARGE_BYTES]
        backing.check_room(sum(map(len, changing)), f"what changed of the state of flow {flow!r}")


def first_held(fields: Fields) -> dict[str, int]:
    """Which fields of the state that was given are large enough to be named ever after."""
    return {name: _OPENED for name, data in fields.items() if len(data) >= LARGE_BYTES}


def _write(shape: StateShape[Any], position: Position, fields: Fields, held: Mapping[str, int], digest: str) -> bytes:
    head = codec.encode_checked(
        {
            "superstep": position.superstep, "frontier": list(position.frontier), "visits": dict(position.visits),
            "arrived": {name: list(sources) for name, sources in position.arrived.items()},
            "failure": None if position.failure is None else position.failure._asdict(), "graph": digest,
            "held": {name: held[name] for name in fields if name in held},
        }
    )  # fmt: skip
    inline = shape.join({name: data for name, data in fields.items() if name not in held})
    return head[:-1] + b',"fields":' + inline + b"}"


def _read(found: Found) -> Saved:
    opened = found.opened["input"]
    records, checkpoint = found.stored.records, found.stored.checkpoint
    first: Fields = {name: codec.encode_checked(value) for name, value in opened["state"].items()}
    if checkpoint is None:
        return Saved(None, first, first_held(first), opened["graph"], digest_of(opened["graph"]))
    plain = codec.decode(checkpoint.body)
    held: dict[str, int] = plain["held"]
    fields = {name: codec.encode_checked(value) for name, value in plain["fields"].items()}
    for name, number in held.items():
        fields[name] = first[name] if number == _OPENED else records[number - 1].body
    return Saved(_position(plain), fields, held, _graph_of(found, plain["graph"]), plain["graph"])


def _graph_of(found: Found, digest: str) -> Described:
    """The graph that the state was saved under: a migration that was cut short before it was saved is none."""
    migrated = [codec.decode(each.body)["graph"] for each in found.stored.records if each.kind == RecordKind.MIGRATED]
    [graph, *_] = [each for each in (found.opened["input"]["graph"], *migrated) if digest_of(each) == digest]
    return dict(graph)


def _position(plain: Mapping[str, Any]) -> Position:
    failure = plain["failure"]
    return Position(
        int(plain["superstep"]),
        tuple(plain["frontier"]),
        plain["visits"],
        {name: tuple(sources) for name, sources in plain["arrived"].items()},
        None if failure is None else NodeError(**failure),
    )
