"""What is shown and announced holds no secret; a secret type is never stored; what is stored is what a restart needs."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretBytes, SecretStr, field_serializer

from agent_runtime import ToolError
from agent_runtime.codec import Shape
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import InvalidSetting, ToolDefinitionError, Unrecordable
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.redaction import (
    HIDDEN,
    UNREDACTED,
    Part,
    redact_all,
    redact_mapping,
    redact_names,
    redact_pattern,
    redacting,
    shown,
)
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.telemetry import HistorySink, LogSink
from agent_runtime.tools import ToolRegistry
from tests.bench import Bench, Place, Script, Worker, error_of, results_in
from tests.flow import desk
from tests.keys.rings import STILL_OLD
from tests.keys.story import MARKER, At, tell

# The hook.


def test_names_are_hidden_at_any_depth_and_however_they_are_written() -> None:
    redact = redact_names("api_key", "password")
    user = {"password": {"a": 1}, "name": "ana"}
    value = {"apiKey": 1, "API-KEY": [2], "user": user, "list": [{"Password": ""}], "passwords": 3}
    assert redact(value, Part.ARGUMENT) == {
        "apiKey": HIDDEN, "API-KEY": HIDDEN, "user": {"password": HIDDEN, "name": "ana"}, "list": [{"Password": HIDDEN}],
        "passwords": 3,
    }  # fmt: skip
    assert value["apiKey"] == 1, "what was given stays as it is"


def test_a_pattern_is_hidden_in_every_text_and_in_names() -> None:
    redact = redact_all(redact_pattern(r"sk-[\w-]+"), redact_names("pin"))
    assert redact({"a": [f"key {MARKER}!", 5], MARKER: 1, "pin": 9}, Part.RESULT) == {
        "a": [f"key {HIDDEN}!", 5], HIDDEN: 1, "pin": HIDDEN,
    }  # fmt: skip


@pytest.mark.parametrize("make", [redact_names, redact_pattern, lambda: redact_names("_"), lambda: redact_pattern("(")])
def test_a_hook_that_would_hide_nothing_is_refused(make: Any) -> None:
    with pytest.raises(InvalidSetting):
        make()


def test_a_hook_that_fails_shows_nothing() -> None:
    def broken(value: Any, part: Part) -> Any:
        raise ValueError(value)

    assert redact_mapping(broken, {"args": {"a": MARKER}, "step": 3}) == {"args": UNREDACTED, "step": 3}


def test_a_value_of_a_declared_type_comes_to_a_hook_as_plain_data() -> None:
    class Login(BaseModel):
        password: str

    seen = redact_mapping(redact_names("password"), {"result": Login(password=MARKER)})
    assert seen == {"result": {"password": HIDDEN}}
    assert MARKER not in str(shown(redact_names("x"), SecretStr(MARKER), Part.RESULT))


async def test_no_event_and_no_line_of_a_run_shows_what_a_hook_hides() -> None:
    parts: set[Part] = set()

    def redact(value: Any, part: Part) -> Any:
        parts.add(part)
        return redact_pattern(MARKER)(value, part)

    lines, told, clear = io.StringIO(), HistorySink(), HistorySink()
    await tell(MemoryCheckpointStore(), STILL_OLD, sinks=[told, LogSink(lines)], redact=redact)
    await tell(MemoryCheckpointStore(), STILL_OLD, sinks=[clear])
    assert MARKER in str(clear.events), "else there would be nothing to hide"
    assert MARKER not in str([event for event in told.events if event.run_id != "e"]), "whose tool is called so"
    assert MARKER not in "".join(line for line in lines.getvalue().splitlines() if "run=e " not in line)
    assert told.names() == clear.names()
    assert {Part.ARGUMENT, Part.RESULT, Part.ERROR} <= parts
    assert "redacting" in repr(redacting(told, redact))


@pytest.mark.parametrize("rule", [{}, {"idempotent": True}])
async def test_the_text_of_an_error_is_stored_as_it_is_shown_and_arguments_as_they_were(place: Place, rule: Any) -> None:
    tools = ToolRegistry()

    @tools.tool(**rule)
    async def pay(card: str) -> str:
        raise ToolError(f"card {card} is refused")

    model, redact = Script([("pay", {"card": MARKER})], "done"), redact_pattern(MARKER)
    result = await Worker(place).run(model, tools, redact=redact)
    assert results_in(result.messages) == [f"error: ToolError: card {HIDDEN} is refused"]
    again = await Worker(place).recover(model, tools)
    assert results_in(again.messages) == results_in(result.messages), "what a model saw is what was stored"
    run = await place.load("run")
    assert b"".join(record.body for record in run.records).count(MARKER.encode()) == 2, "the decision, and the arguments"


async def test_a_restart_sends_the_very_arguments_though_they_are_hidden_in_events(place: Place) -> None:
    bench, hidden = Bench(), redact_names("amount")
    model = Script([("charge_i", {"amount": 7})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, bench.registry, redact=hidden)
    await Worker(place).recover(model, bench.registry, redact=hidden)
    assert [(effect.tool, effect.args) for effect in bench.remote.effects] == [("charge_i", {"amount": 7})]


# Secrets.


class Holder(BaseModel):
    password: SecretStr | None = None
    keys: list[SecretBytes] = []


class Telling(BaseModel):
    """One that writes its secret where it is asked for JSON."""

    password: SecretStr

    @field_serializer("password", when_used="json")
    def tell(self, value: SecretStr) -> str:
        return value.get_secret_value()


@dataclass
class Kept:
    login: Telling


@pytest.mark.parametrize(
    ("shape", "value", "path"),
    [
        (Holder, Holder(password=SecretStr(MARKER)), "$.password"),
        (Holder, Holder(keys=[SecretBytes(MARKER.encode())]), "$.keys[0]"),
        (Telling, Telling(password=SecretStr(MARKER)), "$.password"),
        (Kept, Kept(Telling(password=SecretStr(MARKER))), "$.login.password"),
        (dict[str, SecretStr], {"a": SecretStr(MARKER)}, "$.a"),
        (SecretStr, SecretStr(MARKER), "$"),
        (object, [{"a": SecretStr(MARKER)}], "$[0].a"),
        (SecretStr, SecretStr("**********"), "$"),
    ],
)
def test_a_secret_is_refused_by_its_path_and_not_shown(shape: object, value: object, path: str) -> None:
    with pytest.raises(Unrecordable) as refused:
        Shape(shape).encode(value)
    assert refused.value.path == path
    assert "Secret" in refused.value.found
    assert MARKER not in str(refused.value)
    assert Shape(Holder).decode(Shape(Holder).encode(Holder())) == Holder()


def test_a_tool_that_takes_a_secret_from_a_model_is_none() -> None:
    async def login(user: str, password: SecretStr) -> str:
        return user

    async def nested(user: str, holders: list[Holder]) -> str:
        return user

    for function, name in ((login, "password"), (nested, "holders")):
        with pytest.raises(ToolDefinitionError, match=f"'{name}'.*secret"):
            ToolRegistry().tool(function)


@pytest.mark.parametrize("state", [Telling, Holder])
async def test_a_secret_is_nowhere_in_the_files_and_the_events_of_a_run(tmp_path: Path, state: type[BaseModel]) -> None:
    """As a dependency, in a state, in a result and in an input it is in no byte; a hook takes it out of an error's text."""
    store, told, tools = SQLiteCheckpointStore(tmp_path / "runs.db"), HistorySink(), ToolRegistry()
    place, client, secret = At(store), {"Authorization": MARKER}, SecretStr(MARKER)

    @tools.tool
    async def fetch(name: str) -> str:
        assert client["Authorization"] == MARKER
        raise ToolError(f"401 for {client['Authorization']}")

    @tools.tool(idempotent=True)
    async def make() -> Holder:
        return Holder(password=secret)

    flow = Flow("logins", state=state).node("n0", Call("fetch", args=lambda _: {"name": "x"})).end("n0")
    options: dict[str, Any] = {"sinks": [told], "redact": redact_pattern(MARKER)}
    refused = await error_of(desk.run(Worker(place), tools, flow, state(password=secret), "a", **options))
    assert isinstance(refused, Unrecordable)
    model = Script([("fetch", {"name": "ana"})], "done")
    assert (await Worker(place).run(model, tools, "b", **options)).status == "done"
    unstored = await error_of(Worker(place).run(Script([("make", {})], "done"), tools, "c", **options))
    assert isinstance(unstored, Unrecordable)
    assert MARKER not in f"{unstored} {told.events}"
    found = await asyncio.to_thread(lambda: b"".join(path.read_bytes() for path in tmp_path.iterdir()))
    assert b"401 for [redacted]" in found
    assert MARKER.encode() not in found
    await store.close()
