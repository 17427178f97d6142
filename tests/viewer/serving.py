"""A viewer that really serves: `agent-runtime view` as a process, or an application of one's own on a thread."""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlencode, urlsplit

import uvicorn
from starlette.applications import Starlette

from tests.bench import KEY

TOKEN = "a-token-for-tests-that-guards-nothing"
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a viewer said."""

    status: int
    headers: http.client.HTTPMessage
    text: str


@dataclass(slots=True)
class Viewer:
    """Where one serves. `get` and `post` speak to it as a browser with its cookie would, but for what they are told."""

    url: str
    pid: int = 0
    cookie: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    token_of_forms: str = ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_in(self) -> Answer:
        """Open the printed address, and keep the cookie."""
        answer = self.ask("GET", f"{urlsplit(self.url).path}?{urlsplit(self.url).query}", cookie="")
        self.cookie = answer.headers["set-cookie"].partition(";")[0] if answer.headers["set-cookie"] else ""
        return answer

    def get(self, path: str, **options: Any) -> Answer:
        return self.ask("GET", path, **options)

    def post(self, path: str, form: Mapping[str, str], **options: Any) -> Answer:
        """Send a form as its page would: with the token of forms, from this origin."""
        token = {"form_token": self.form_token()} if "form_token" not in form else {}
        headers = {"Origin": self.base, "Content-Type": "application/x-www-form-urlencoded", **options.pop("headers", {})}
        return self.ask("POST", path, body=urlencode({**token, **form}), headers=headers, **options)

    def form_token(self) -> str:
        if not self.token_of_forms:
            found = re.search(r'name="form_token" value="([0-9a-f]+)"', self.get("/runs/order-9").text)
            assert found is not None, "the page of a run that has not ended holds a form"
            self.token_of_forms = found[1]
        return self.token_of_forms

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
        cookie: str | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        sent = {"Cookie": self.cookie if cookie is None else cookie, **self.headers, **(headers or {})}
        try:
            connection.request(method, path, body, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()


@contextmanager
def viewing(store: Path, *options: str, url: str = "") -> Iterator[Viewer]:
    """`agent-runtime view` on a free port. What it says after its address is in `view.log` beside the store.

    `url`: a store that is no file; the log is where its file would be.
    """
    words = [sys.executable, "-m", "agent_runtime", "view", "--port", "0", "--store", url or f"sqlite:///{store}", *options]
    environment = {**os.environ, "CHECKPOINT_KEY": base64.b64encode(KEY).decode()}
    with (
        open(store.with_name("view.log"), "w") as log,
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, f"expected its address, found {store.with_name('view.log').read_text()}"
            yield Viewer(found[0], process.pid)
        finally:
            process.terminate()
            log.write(process.stdout.read())
            process.wait(PATIENCE_SECONDS)


@contextmanager
def serving(app: Starlette) -> Iterator[Viewer]:
    """An application of one's own, on a thread."""
    config = uvicorn.Config(
        app, port=0, log_level="warning", access_log=False, proxy_headers=False, lifespan="off", timeout_graceful_shutdown=1
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    give_up_at = monotonic() + PATIENCE_SECONDS
    while not server.started:
        assert monotonic() < give_up_at, "the viewer did not start"
        sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Viewer(f"http://127.0.0.1:{port}/?token={TOKEN}")
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
