"""What the tests of the remotes speak with: requests over HTTP, and processes that serve."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

SOURCE = Path(__file__).parents[2] / "src"
SMALL = {"name": "srv-1", "size": "small"}
ANSWER_SECONDS = 20.0
NEVER_MS = 600_000
Reply = tuple[int, dict[str, object]]


def ask(url: str, method: str, path: str, body: object = None) -> Reply:
    return ask_raw(url, method, path, b"" if body is None else json.dumps(body).encode())


def ask_raw(
    url: str, method: str, path: str, body: bytes, *, key: str | None = None, patience_seconds: float = ANSWER_SECONDS
) -> Reply:
    connection = HTTPConnection(*address(url), timeout=patience_seconds)
    try:
        connection.request(method, path, body, {} if key is None else {"Idempotency-Key": key})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def create(
    url: str,
    key: str | None,
    kind: str = "server",
    args: object = SMALL,
    *,
    patience_seconds: float = ANSWER_SECONDS,
) -> Reply:
    body = json.dumps({"kind": kind, "args": args}).encode()
    return ask_raw(url, "POST", "/create", body, key=key, patience_seconds=patience_seconds)


def created(url: str) -> dict[str, object]:
    return ask(url, "GET", "/created")[1]


def decide(url: str, run: str, history: list[object]) -> dict[str, object]:
    status, body = ask(url, "POST", "/decide", {"run": run, "goal": "a web service", "history": history})
    assert status == 200
    return body


def step(count: int, tool: str, **args: str) -> dict[str, object]:
    return {"text": "", "tool_calls": [{"id": f"call_{count}", "name": tool, "args": args}], "count": count}


def change(url: str, switches: dict[str, object]) -> None:
    assert ask(url, "POST", "/switches", switches)[0] == 200


def key_counts(url: str, key: str) -> dict[str, int]:
    by_key = ask(url, "GET", "/calls")[1]["by_key"]
    assert isinstance(by_key, dict)
    found: dict[str, int] = by_key[key]
    return found


def counts(*, requests: int, created: int = 0, already_done: int = 0, conflict: int = 0) -> dict[str, int]:
    return {"requests": requests, "created": created, "already_done": already_done, "conflict": conflict}


def assert_refused(reply: Reply, status: int, said: str) -> None:
    assert reply[0] == status
    assert said in str(reply[1]["message"])


def until(happened: Callable[[], bool]) -> None:
    deadline = monotonic() + ANSWER_SECONDS
    while not happened():
        assert monotonic() < deadline


@dataclass(frozen=True, slots=True)
class Ready:
    cloud_url: str
    model_url: str


@dataclass(frozen=True, slots=True)
class Launched:
    process: subprocess.Popen[str]

    def wait_until_ready(self) -> Ready:
        assert self.process.stdout is not None
        cloud, model = (self.process.stdout.readline().split() for _ in range(2))
        assert (cloud[0], model[0]) == ("cloud", "model")
        return Ready(cloud_url=cloud[1], model_url=model[1])

    def error_output(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def launched(state: Path, *options: str) -> Iterator[Launched]:
    with subprocess.Popen(
        words(state, *options), env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield Launched(process)
        finally:
            process.kill()


def command(state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(state, *options), env=environment(), text=True, capture_output=True, timeout=ANSWER_SECONDS, check=False
    )


def words(state: Path, *options: str) -> list[str]:
    ports = ["--cloud-port", "0", "--model-port", "0"]
    return [sys.executable, "-m", "agent_runtime.mock", "--state", str(state), *ports, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}
