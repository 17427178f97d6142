"""How long the first page of the viewer's list takes where very many runs are kept; asked without a wire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from statistics import median
from time import perf_counter
from typing import Any

from agent_runtime import Message, Reply, Runs, ToolRegistry, ToolSpec, run_tool_loop
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.viewer import make_app
from agent_runtime.viewer.pages import RUNS_A_PAGE

KEY = bytes(range(32))
TOKEN = "a-token-that-guards-nothing"
TIMES = 9
PATHS = ("/", "/?status=done", "/?status=paused", "/?q=shown-")


async def time_pages(store: CheckpointStore) -> Mapping[str, float]:
    """The median of some looks at each page, in milliseconds. Runs of our own, the newest of all, are what it shows."""
    await _add_runs(store)
    app = make_app(Runs(store, checkpoint_key=KEY), token=TOKEN)
    return {path: median([await _time(app, path) for _ in range(TIMES)]) for path in PATHS}


async def _add_runs(store: CheckpointStore) -> None:
    """As many as a page holds, done; the others of the store have no seal that holds."""

    async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        return Reply("done")

    ids = [f"shown-{at}" for at in range(RUNS_A_PAGE + 1)]
    terms: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    await asyncio.gather(*(run_tool_loop(model, ToolRegistry(), "go", run_id=run_id, **terms) for run_id in ids))


async def _time(app: Any, path: str) -> float:
    """A page, from the request to its last byte."""
    where, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": where,
        "raw_path": where.encode(), "root_path": "", "query_string": query.encode(), "server": ("127.0.0.1", 80),
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode())],
    }  # fmt: skip
    said: list[Mapping[str, Any]] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        said.append(message)

    began = perf_counter()
    await app(scope, receive, send)
    took = perf_counter() - began
    assert said[0]["status"] == HTTPStatus.OK, f"expected the page {path}, found {said}"
    return took * 1000
