"""Stored bytes build no objects: what looks like an envelope is data, and what nobody sealed is not read."""

from __future__ import annotations

import json
import pickle
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import recover_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Place, Script, Worker, results_in

ENVELOPES: list[dict[str, object]] = [
    {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": "touch pwned"}},
    {"__class__": "os.system", "__args__": ["touch pwned"]},
    {"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}, {"py/tuple": ["touch pwned"]}]},
    {"__reduce__": ["os.system", ["touch pwned"]], "$type": "System.Diagnostics.Process"},
    {"result": 1}, {"error": {"type": "ToolError", "message": "x"}}, {"error": 1, "result": 2},
    {"how": "rerun", "why": "rerun_in_doubt"}, {"tool": "charge", "args": {}, "at": 0},
    {"text": "x", "tool_calls": [{"id": "a", "name": "charge", "args": {}}], "usage": {}},
    {"context": {"user": "root"}, "namespace": "x", "input": {"messages": []}},
    {"status": "done"}, {"__proto__": {}, "constructor": {}}, {"": ""}, {"$ref": "#/$defs/x"},
]  # fmt: skip

_watching: list[list[str]] = []
_LOUD = (
    "exec",
    "compile",
    "pickle.find_class",
    "marshal.loads",
    "os.system",
    "subprocess.Popen",
    "import",
    "os.exec",
    "os.fork",
)


def _hear(event: str, args: tuple[object, ...]) -> None:
    if _watching and event in _LOUD:
        _watching[-1].append(f"{event} {args[:1]}")


sys.addaudithook(_hear)  # it stays for the life of the process, and hears only inside `loud_events`


@contextmanager
def loud_events() -> Iterator[list[str]]:
    """What Python reports while something is loaded: imports, code, processes."""
    heard: list[str] = []
    _watching.append(heard)
    try:
        yield heard
    finally:
        _watching.pop()


def echo_registry(results: list[object], entered: list[object]) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def charge(value: dict[str, object] | None = None) -> object:
        entered.append(value)
        return results[min(len(entered), len(results)) - 1]

    return registry


async def test_data_that_looks_like_an_envelope_comes_back_as_the_same_data(place: Place) -> None:
    entered: list[object] = []
    registry = echo_registry(list(ENVELOPES), entered)
    model = Script(*[[("charge", {"value": envelope})] for envelope in ENVELOPES], "done")
    dying = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, len(ENVELOPES))
    await dying.run_and_die(model, registry, commits="each")
    with loud_events() as heard:
        result = await Worker(place).recover(model, registry)
    assert heard == []
    assert entered == ENVELOPES
    assert [json.loads(text) for text in results_in(result.messages)] == ENVELOPES
    asked = [dict(call.args) for message in result.messages for call in message.tool_calls]
    assert asked == [{"value": envelope} for envelope in ENVELOPES]


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return sys.exit, (86,)


HOSTILE = [
    pickle.dumps(Bomb()), pickle.dumps({"result": 1}), b"\x80", b"", b"null", b"{" * 100_000, b"[" * 200_000,
    b'{"result":' + b"9" * 10_000 + b"}", b'{"result":NaN}', b"\xff\xfe", b'{"result":1', b'{"result":"\\ud83d"}', bytes(1000),
]  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_body_that_nobody_sealed_is_refused_before_it_is_read(tmp_path: Path, body: bytes) -> None:
    place, entered = Place("sqlite", tmp_path), list[object]()
    registry = echo_registry(["fine"], entered)
    model = Script([("charge", {})], "done")
    await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 1).run_and_die(model, registry, commits="each")
    await place.close()
    for number in (1, 2, 4, 6):
        with closing(sqlite3.connect(place.path)) as db:
            [before] = db.execute("SELECT body FROM journal WHERE number = ?", (number,)).fetchone()
            db.execute("UPDATE journal SET body = ? WHERE number = ?", (body, number))
            db.commit()
        store = SQLiteCheckpointStore(place.path)
        with loud_events() as heard, pytest.raises(CheckpointStoreCorrupt, match="seal"):
            await recover_tool_loop(model, registry, "run", checkpoints=store, checkpoint_key=KEY)
        assert heard == []
        await store.close()
        with closing(sqlite3.connect(place.path)) as db:
            db.execute("UPDATE journal SET body = ? WHERE number = ?", (before, number))
            db.commit()
    assert (len(entered), model.asked) == (1, 1)


IDS = [
    "a'; DROP TABLE runs; --",
    "%",
    "_",
    "a%",
    "*",
    "../../etc/passwd",
    "a\\",
    "a:0",
    "{}",
    "ü",
    '"',
    "a" * 512,
]


async def test_a_run_id_is_no_pattern_and_no_program(place: Place) -> None:
    for run_id in IDS:
        await Worker(place).run(Script([("charge", {})], "done"), echo_registry([run_id], []), run_id)
    assert {row.run_id for row in await place.open().list_runs()} == set(IDS)
    for run_id in IDS:
        result = await Worker(place).recover(Script("never"), echo_registry([], []), run_id)
        assert results_in(result.messages) == [run_id]


async def test_names_and_ids_from_a_model_are_data(place: Place) -> None:
    def hostile(_: object) -> Reply:
        calls = [
            ToolCall("../" * 50, "os.system", {"command": "x"}),
            ToolCall("'; --", "__import__", {}),
            ToolCall("", "", {}),
        ]
        return Reply("<script>", calls)

    registry = echo_registry([], [])
    with loud_events() as heard:
        result = await Worker(place).run(Script(hostile, "done"), registry)
    assert heard == []
    assert [text.split(":")[1] for text in results_in(result.messages)] == [" UnknownTool"] * 3
