"""The HTTP ground under both remotes: reads a request, finds its route, writes a JSON answer, or hangs up.

Everything said here is JSON, errors too: `{"error": a word for programs, "message": what was expected}`.
"""

import json
import os
import socket
import socketserver
import sqlite3
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EADDRINUSE
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NoReturn

from agent_runtime.mock.pauses import Closing
from agent_runtime.mock.troubles import CannotListen

MOST_BODY_BYTES = 32 * 1024 * 1024
STOP_POLL_SECONDS = 0.02
FAREWELL_SECONDS = 1.0

# As the inherited signatures have them; the tuple is for datagrams, which do not occur here.
Connection = socket.socket | tuple[bytes, socket.socket]
Peer = tuple[str | bytes | bytearray, int]


@dataclass(frozen=True, slots=True)
class Request:
    """What a route gets to see."""

    body: bytes
    key: str | None

    def fields(self) -> dict[str, object]:
        """The body as a JSON object; anything else is refused."""
        try:
            value: object = json.loads(self.body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise refusal(f"the body must be a JSON object; it is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise refusal(f"the body must be a JSON object, not {type(value).__name__}")
        return value


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a JSON body."""

    status: int
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """A request that makes no sense; carries the answer that says so."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body)
        self.answer = answer


# A route gives None to hang up without an answer.
Route = Callable[[Request], Answer | None]
Routes = Mapping[str, Mapping[str, Route]]  # by path, then by method


def refusal(message: str, *, status: int = HTTPStatus.BAD_REQUEST, headers: Mapping[str, str] | None = None) -> Refusal:
    """A refusal that says what was expected."""
    word = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return Refusal(Answer(status, {"error": word, "message": message}, headers or {}))


def shown(value: object) -> str:
    """A value as JSON for a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


class Listener(ThreadingHTTPServer):
    """Listens from the moment that it is made; serves from `start` to `stop`. A thread for each connection."""

    # On Windows this option would let two programs share a port, in silence.
    allow_reuse_address = os.name == "posix"
    request_queue_size = 128

    def __init__(self, routes: Routes, *, host: str, port: int) -> None:
        self.routes = routes
        self._lock = threading.Lock()
        self._conversations: dict[threading.Thread, Connection] = {}
        self._accepting: threading.Thread | None = None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Conversation)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotListen(host, port, in_use=error.errno == EADDRINUSE, reason=reason) from error

    @property
    def url(self) -> str:
        """Where to reach it."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"

    def start(self) -> None:
        """Serves in a daemon thread."""
        self._accepting = threading.Thread(
            target=self.serve_forever, args=(STOP_POLL_SECONDS,), name=f"mock {self.url}", daemon=True
        )
        self._accepting.start()

    def stop(self) -> None:
        """Takes no more requests, and lets the answers under way out; may be called again."""
        if self._accepting is not None:
            self.shutdown()
            self._accepting.join()
            self._accepting = None
        self.server_close()
        self._end_conversations()

    def server_bind(self) -> None:
        # The inherited one looks up the host's name in the DNS, which can take seconds and is not needed.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Connection, client_address: Peer) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        with self._lock:
            self._conversations[thread] = request
        thread.start()

    def process_request_thread(self, request: Connection, client_address: Peer) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._conversations[threading.current_thread()]

    def handle_error(self, request: Connection, client_address: Peer) -> None:
        # A client that was killed, or lost patience, is everyday business here; the rest is our own mistake.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def _end_conversations(self) -> None:
        with self._lock:
            conversations = dict(self._conversations)
        for connection in conversations.values():
            # Only the reading half: who waits for the next request wakes up, who writes an answer finishes it.
            if isinstance(connection, socket.socket):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
        for thread in conversations:
            thread.join(FAREWELL_SECONDS)


class _Conversation(BaseHTTPRequestHandler):
    """One connection, request after request."""

    server: Listener
    protocol_version = "HTTP/1.1"
    server_version = "agent-runtime-mock"
    sys_version = ""
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        try:
            answer = self._answer()
        except Refusal as refused:
            answer = refused.answer
        except sqlite3.Error as error:
            answer = Answer(500, {"error": "state", "message": f"the state file failed: {error}"})
        except Closing:
            answer = None
        if answer is None:
            self.close_connection = True
        else:
            self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _serve

    def _answer(self) -> Answer | None:
        # The body is read whatever comes of it, or else it would be taken for the next request.
        request = Request(body=self._read_body(), key=self.headers.get("Idempotency-Key"))
        return _find(self.server.routes, self.command, self.path)(request)

    def _read_body(self) -> bytes:
        if "Transfer-Encoding" in self.headers:
            self._refuse_unread("send the body with Content-Length, not chunked", HTTPStatus.LENGTH_REQUIRED)
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()):
            self._refuse_unread(f"Content-Length must be a number, not {length!r}", HTTPStatus.BAD_REQUEST)
        if int(length) > MOST_BODY_BYTES:
            self._refuse_unread(f"the body may have {MOST_BODY_BYTES} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError("the client left in the middle of its request")
        return body

    def _refuse_unread(self, message: str, status: HTTPStatus) -> NoReturn:
        self.close_connection = True
        raise refusal(message, status=status)

    def _send(self, answer: Answer) -> None:
        content = json.dumps(answer.body).encode() + b"\n"
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the inherited parser has to object, in JSON as everything else."""
        self.close_connection = True
        self._send(refusal(message or HTTPStatus(code).phrase, status=code).answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the counters are the log."""


def _find(routes: Routes, method: str, target: str) -> Route:
    path = target.partition("?")[0]
    if path not in routes:
        raise refusal(f"no such path {path}; there are {_listed(routes)}", status=HTTPStatus.NOT_FOUND)
    methods = routes[path]
    if method not in methods:
        allowed = ", ".join(sorted(methods))
        raise refusal(
            f"{path} takes {allowed}, not {method}", status=HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": allowed}
        )
    return methods[method]


def _listed(routes: Routes) -> str:
    return ", ".join(f"{method} {path}" for path, methods in routes.items() for method in methods)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
