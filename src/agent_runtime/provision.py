"""The provisioning agent: it stands up a server, a database and a DNS record, and shows what a crash does to a run."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from agent_runtime.backing import make_backing
from agent_runtime.crash import CrashPlan, plan_from
from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    InvalidKey,
    InvalidSetting,
    KeyConflict,
)
from agent_runtime.events import Sink
from agent_runtime.ids import check_run_id
from agent_runtime.journal.keys import KeyRing, key_beside, parse_key, parse_ring
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.offload import SYSTEM_OFFLOAD
from agent_runtime.recovery import Found, find
from agent_runtime.settings import GOAL, Settings, read_settings
from agent_runtime.stores import file_at, open_store
from agent_runtime.telemetry import LogSink, log_line
from agent_runtime.tool_loop import KIND, LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key
from agent_runtime.worker import PROVISION, work_in_process

NAME = PROVISION
HTTP_SECONDS = 30.0
KEY_SIZE = 32
KEY_FILE = "agent_runtime.key"
"""Where the key is kept when the store is no file: in the working directory."""
ADVICE = "see that it runs (MOCK_LLM_URL, MOCK_CLOUD_URL), then pick the run up again"


def main(environ: Mapping[str, str] | None = None, *, resume: bool = False) -> int:
    """Work the run that the environment names to its end; gives the exit code. Errors go to standard error.

    `resume`: only if the run is stored; and to find it in other hands is no error, since others were sent for it too.
    """
    environ = os.environ if environ is None else environ

    async def work() -> LoopResult:
        return await provision(read_settings(environ), plan_from(environ), resume=resume)

    return work_in_process(work, advice=ADVICE, is_rival=resume)


async def provision(settings: Settings, plan: CrashPlan, *, resume: bool = False) -> LoopResult:
    """Start the run, unless it is only to be resumed; pick it up, or give back what it came to."""
    if settings.planner != "mock":
        raise InvalidSetting(f"PLANNER is 'mock' in this version, found {settings.planner!r}")
    run_id = check_run_id(SYSTEM_ENTROPY.draw(16).hex() if settings.run_id is None else settings.run_id)
    given_key = None if settings.checkpoint_key is None else parse_ring(settings.checkpoint_key)
    store = open_store(settings.database_url)
    try:
        stored = await store.latest(run_id)  # before a key is made: a file that is no store gets none beside it
        ring = KeyRing.of(given_key or _key(settings, run_id, is_stored=stored is not None))
        found = await _look(store, ring, run_id, must_exist=resume)
        await _greet(settings, store, run_id)
        with ExitStack() as started:
            cloud, model = _remotes(settings, started)
            result = await _work(settings, plan, store, ring, run_id, found, cloud, model)
        if found is not None and found.status.is_final:
            print(log_line("done", run_id, {"steps": result.steps, "llm_calls": result.llm_calls}), flush=True)
        print(result.output, flush=True)
        return result
    finally:
        await store.close()


async def _look(store: CheckpointStore, ring: KeyRing, run_id: str, *, must_exist: bool) -> Found | None:
    try:
        return await find(make_backing(store, ring), check_run_id(run_id), kind=KIND, context=None)
    except CheckpointNotFound:
        if must_exist:
            raise
        return None


async def _greet(settings: Settings, store: CheckpointStore, run_id: str) -> None:
    """Without RUN_ID: print the fresh id, and name a run that could be picked up instead."""
    if settings.run_id is not None:
        return
    unfinished = await store.list_unfinished(name=NAME, limit=1)
    print(log_line("new", run_id, {}), flush=True)
    for row in unfinished:
        hint = f"RUN_ID={row.run_id} picks it up"
        print(log_line("unfinished", row.run_id, {"hint": hint}), flush=True)


async def _work(
    settings: Settings,
    plan: CrashPlan,
    store: CheckpointStore,
    ring: KeyRing,
    run_id: str,
    found: Found | None,
    cloud: str,
    model_url: str,
) -> LoopResult:
    goal = _goal(settings, found, run_id)
    registry = cloud_tools(cloud)
    model = MockModel(model_url, run_id=run_id, goal=goal)
    backing: dict[str, Any] = {
        "checkpoints": store,
        "checkpoint_key": ring,
        "sinks": [LogSink(payloads=True, describe=_describe), *_metrics(settings, store)],
        "crash": plan,
        "commits": "each",
        "lease_seconds": settings.lease_seconds,
        "heartbeat_seconds": settings.heartbeat_seconds,
        "max_attempts": settings.max_attempts,
        "max_value_bytes": settings.max_value_bytes,
        "stuck_after": settings.stuck_after,
    }
    if found is not None:
        return await recover_tool_loop(model, registry, run_id, **backing)
    return await run_tool_loop(model, registry, goal, run_id=run_id, name=NAME, **backing)


def _metrics(settings: Settings, store: CheckpointStore) -> list[Sink]:
    """A sink that counts, where METRICS_PORT asks for one; its counts are served as long as this process lives."""
    if settings.metrics_port is None:
        return []
    from agent_runtime.telemetry_prometheus import PrometheusSink, serve_metrics

    serve_metrics(settings.metrics_port)
    sink = PrometheusSink()
    sink.observe(store)
    return [sink]


def _goal(settings: Settings, found: Found | None, run_id: str) -> str:
    """The goal of the run: fixed when it is opened."""
    if found is None:
        return settings.goal or GOAL
    stored: str = found.opened["input"]["messages"][0]["content"]
    if settings.goal is not None and settings.goal != stored:
        raise CheckpointConflict(
            f"run {run_id!r} has the goal {stored!r}, and GOAL is {settings.goal!r}; leave GOAL unset to go on with the run, "
            "or choose another RUN_ID"
        )
    return stored


# The key and the remotes.


def stored_key(settings: Settings) -> KeyRing:
    """The key that sealed what is stored: the one that is set, or the one beside the store. None is made."""
    if settings.checkpoint_key is not None:
        return parse_ring(settings.checkpoint_key)
    path = _key_path(settings)
    if not os.path.exists(path):
        raise InvalidKey(
            f"there is no key file at {path!r}; put it back, or set CHECKPOINT_KEY to the key that sealed the runs"
        )
    return KeyRing.of(parse_key(f"file:{path}"))


def _key_path(settings: Settings) -> str:
    path = file_at(settings.database_url)
    return KEY_FILE if path is None else f"{path}.key"


def _key(settings: Settings, run_id: str, *, is_stored: bool) -> bytes:
    """The key in its file, made with the first use: beside a store that is a file, else in the working directory."""
    if settings.database_url.startswith("memory:"):
        return SYSTEM_ENTROPY.draw(KEY_SIZE)
    path = _key_path(settings)
    if os.path.exists(path):
        return parse_key(f"file:{path}")
    if is_stored:
        raise InvalidKey(
            f"run {run_id!r} is stored and the key file {path!r} is gone; put it back, or set CHECKPOINT_KEY to the key that "
            "sealed the run"
        )
    try:
        return key_beside(path, SYSTEM_ENTROPY.draw(KEY_SIZE))
    except OSError as error:
        raise InvalidKey(
            f"no key file can be made at {path!r}: {error.strerror}; make room for it, or set CHECKPOINT_KEY"
        ) from error


def _remotes(settings: Settings, started: ExitStack) -> tuple[str, str]:
    """The addresses of cloud and model. What is not set is started in this process, its state on disk beside the store."""
    cloud, model = settings.mock_cloud_url, settings.mock_llm_url
    if cloud is not None and model is not None:
        return cloud, model
    from agent_runtime.mock import MockTrouble, start_cloud, start_model

    state = _mock_state(settings)
    try:
        if cloud is None:
            cloud = started.enter_context(start_cloud(state)).url
        if model is None:
            model = started.enter_context(start_model(state)).url
    except MockTrouble as trouble:
        raise InvalidSetting(f"the mocks cannot be started: {trouble}, or set MOCK_CLOUD_URL and MOCK_LLM_URL") from trouble
    return cloud, model


def _mock_state(settings: Settings) -> Path:
    return Path(file_at(settings.database_url) or "agent_runtime.db").with_suffix(".mock.db")


# The agent.


def cloud_tools(url: str) -> ToolRegistry:
    """What the agent may do at the cloud, which knows idempotency keys."""
    registry = ToolRegistry()

    @registry.tool(idempotent=True, timeout=HTTP_SECONDS)
    def create_server(name: str, size: str = "small") -> dict[str, str]:
        """Create a server."""
        return _create(url, "server", {"name": name, "size": size})

    @registry.tool(idempotent=True, timeout=HTTP_SECONDS)
    def create_database(name: str, engine: str = "postgres") -> dict[str, str]:
        """Create a database."""
        return _create(url, "database", {"name": name, "engine": engine})

    @registry.tool(idempotent=True, timeout=HTTP_SECONDS)
    def create_dns_record(name: str, target: str) -> dict[str, str]:
        """Point a name at a server."""
        return _create(url, "dns_record", {"name": name, "target": target})

    return registry


class MockModel:
    """The mock model over HTTP. It names the run with every request, so that the remote counts per run."""

    def __init__(self, url: str, *, run_id: str, goal: str) -> None:
        self._url = url
        self._run_id = run_id
        self._goal = goal

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        history = [{"tool": each.name, "result": _parsed(each.content)} for each in messages if each.role == "tool"]
        question = {"run": self._run_id, "goal": self._goal, "history": history}
        answer = await SYSTEM_OFFLOAD.start(partial(_post, f"{self._url}/decide", question, {})).outcome
        calls = [ToolCall(call["id"], call["name"], call["args"]) for call in answer.get("tool_calls", ())]
        return Reply(answer["text"], calls)


def _create(url: str, kind: str, args: Mapping[str, str]) -> dict[str, str]:
    key = idempotency_key()
    try:
        answer = _post(f"{url}/create", {"kind": kind, "args": dict(args)}, {"Idempotency-Key": key})
    except urllib.error.HTTPError as error:
        if error.code == 409:
            raise KeyConflict(f"the cloud has seen key {key} with other arguments than {dict(args)}") from error
        raise
    return {"id": answer["id"], "remote": answer["remote"]}


def _post(url: str, body: object, headers: Mapping[str, str]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=HTTP_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _parsed(content: str) -> object:
    try:
        parsed: object = json.loads(content)
    except ValueError:
        return content
    return parsed


def _describe(result: object) -> Mapping[str, object]:
    """A resource by its id, and whether the remote made it now."""
    return {"result": result["id"], "remote": result["remote"]} if isinstance(result, Mapping) else {"result": result}
