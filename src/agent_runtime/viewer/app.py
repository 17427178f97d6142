"""The run viewer as an application: its addresses, and what it is made of. `agent-runtime view` serves it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import AgentRuntimeError, InvalidSetting
from agent_runtime.runs import Runs
from agent_runtime.viewer.actions import Actions
from agent_runtime.viewer.asking import Identity
from agent_runtime.viewer.guard import LOOPBACK, SHORTEST_TOKEN, Guard, Secrets
from agent_runtime.viewer.pages import Pages
from agent_runtime.viewer.rendering import Rendering

STATIC = Path(__file__).parent / "static"


def make_app(
    runs: Runs,
    *,
    token: str,
    read_only: bool = False,
    identity: Identity | None = None,
    hosts: Collection[str] = LOOPBACK,
    clock: Clock = SYSTEM_CLOCK,
) -> Starlette:
    """The viewer of these runs, for any ASGI server. Whoever has the token may see them, and decide unless `read_only`.

    `identity`: the headers in which a proxy names who is there; each sees the runs of their own identity alone. What is
    shown of values is for the `redact` of the runs to say. `hosts`: the names it answers to.
    """
    if len(token) < SHORTEST_TOKEN:
        raise InvalidSetting(f"the viewer's token has at least {SHORTEST_TOKEN} characters, found {len(token)}")
    secrets = Secrets(token)
    rendering = Rendering(form_token=secrets.form, read_only=read_only, redact=runs.redact, clock=clock)
    pages = Pages(runs, rendering, identity=identity, clock=clock)
    actions = Actions(pages, secrets, read_only=read_only)
    routes = [
        Route("/", pages.runs_page, methods=["GET"]),
        Route("/inbox", pages.inbox_page, methods=["GET"]),
        Route("/runs/{run_id:path}", pages.run_page, methods=["GET"]),
        Route("/parts/{run_id:path}", pages.run_parts, methods=["GET"]),
        Route("/value/{run_id:path}", pages.value, methods=["GET"]),
        Route("/live", pages.live_list, methods=["GET"]),
        Route("/live/inbox", pages.live_inbox, methods=["GET"]),
        Route("/live/runs/{run_id:path}", pages.live_run, methods=["GET"]),
        *(Route(f"/act/{verb}/{{run_id:path}}", endpoint, methods=["POST"]) for verb, endpoint in actions.endpoints.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, secrets=secrets, hosts=hosts)],
        exception_handlers={AgentRuntimeError: pages.failed, 404: pages.no_such_page, 405: pages.no_such_method},
    )
