"""`agent-runtime view`: serve the run viewer, and print the address that opens it."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING

from agent_runtime.cli.decide import add_redact
from agent_runtime.cli.operate import check_there
from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.errors import InvalidSetting
from agent_runtime.provision import stored_key
from agent_runtime.redaction import redact_names
from agent_runtime.runs import Runs
from agent_runtime.settings import Settings, read_settings
from agent_runtime.stores import open_store

if TYPE_CHECKING:
    from starlette.applications import Starlette

PORT = 8700
TOKEN_SIZE = 24
STOP_SECONDS = 1


def add_options(view: argparse.ArgumentParser) -> None:
    """What `view` may be told."""
    view.add_argument("--store", metavar="URL", help="the store to look at (default: DATABASE_URL)")
    view.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1, this machine alone)")
    view.add_argument("--port", type=int, default=PORT, help=f"the port; 0 takes a free one (default: {PORT})")
    view.add_argument("--read-only", action="store_true", help="show, and let nobody decide anything")
    add_redact(view)
    view.add_argument("--token", help="the token of its address (default: VIEW_TOKEN, or a fresh one each time)")
    view.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name that it is asked by; may be repeated"
    )
    view.add_argument("--user-header", metavar="NAME", help="behind a proxy: the header that says who is there")
    view.add_argument("--thread-header", metavar="NAME", default="", help="the header that says which thread")
    view.add_argument("--principal-header", metavar="NAME", default="", help="the header that says which principal")


def main(chosen: argparse.Namespace) -> int:
    """Serve until somebody stops it; gives its exit code."""
    settings = read_settings(os.environ)
    return asyncio.run(_view(chosen, settings._replace(database_url=chosen.store or settings.database_url)))


async def _view(chosen: argparse.Namespace, settings: Settings) -> int:
    check_there(settings.database_url)
    key = stored_key(settings)
    token = chosen.token or settings.view_token or SYSTEM_ENTROPY.draw(TOKEN_SIZE).hex()
    listener = _listen(chosen.host, chosen.port)
    store = open_store(settings.database_url)
    try:
        redact = redact_names(*chosen.redact) if chosen.redact else None
        runs = Runs(store, checkpoint_key=key, max_value_bytes=settings.max_value_bytes, redact=redact)
        app = _app(runs, chosen, token)
        port = listener.getsockname()[1]
        print(f"The runs of this store: http://{_shown(chosen.host)}:{port}/?token={token}", flush=True)
        await _serve(app, listener)
    finally:
        listener.close()
        await store.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise InvalidSetting(
            f"cannot listen at {host}:{port}: {error}; choose another --port (0 takes a free one) or --host"
        ) from error
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else {"0.0.0.0": "127.0.0.1", "": "127.0.0.1"}.get(host, host)


def _app(runs: Runs, chosen: argparse.Namespace, token: str) -> Starlette:
    try:
        from agent_runtime.viewer.app import make_app
        from agent_runtime.viewer.asking import Identity
        from agent_runtime.viewer.guard import LOOPBACK
    except ImportError as error:
        raise InvalidSetting(
            f"the viewer needs its extra, and {error.name} is missing: pip install 'durable-agent-runtime[viewer]'"
        ) from error
    identity = None
    if chosen.user_header:
        identity = Identity(chosen.user_header, chosen.thread_header, chosen.principal_header)
    hosts = {*LOOPBACK, chosen.host, *chosen.allow_host}
    return make_app(runs, token=token, read_only=chosen.read_only, identity=identity, hosts=hosts)


async def _serve(app: Starlette, listener: socket.socket) -> None:
    import uvicorn

    # No access log: the first line of it would hold the token. No headers of a proxy are believed but those named above.
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", proxy_headers=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=STOP_SECONDS,
    )  # fmt: skip
    await uvicorn.Server(config).serve(sockets=[listener])
    print("stopped", file=sys.stderr)
