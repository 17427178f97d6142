"""Who may ask the viewer anything: its token, the names it goes by, the origin of a change, and what a page may load.

Rules of this file:

* Whoever asks shows the token: in the address of the first visit, in the cookie which that sets, or as a bearer.
* A request for a name that is not ours is refused: a page of somebody else's may lead its own name to this machine.
* A change is a POST from a page of ours, with the cookie and with the token of its form.
* A page loads nothing but what this server gives, and no script or style stands in it.
* A secret is compared in constant time, and stands in no line of a log.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SAFE_METHODS = ("GET", "HEAD")
SHORTEST_TOKEN = 16

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Not `no-referrer`: under that a browser sends a form's origin as `null`, and a change could not be told from another's.
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


class Secrets:
    """What is made of the token: the cookie's name and value, and the token of forms."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self.cookie = self._made("cookie")
        self.form = self._made("form")
        # Cookies know no ports: two viewers on one machine would take each other's.
        self.name = f"agent_runtime_{self._made('name')[:12]}"

    def _made(self, what: str) -> str:
        return hmac.new(self._token, what.encode(), hashlib.sha256).hexdigest()

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token)

    def is_cookie(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.cookie.encode())

    def is_form(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.form.encode())


class Guard:
    """Stands before the application: lets through who may ask, and puts the headers of `HEADERS` on every answer."""

    def __init__(self, app: ASGIApp, *, secrets: Secrets, hosts: Collection[str]) -> None:
        self._app = app
        self._secrets = secrets
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        shown = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        refusal = self._refusal(scope, headers, shown)
        first = bool(shown) and refusal is None

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answer.setdefault(name, value)
                if first:
                    answer.append("set-cookie", self._cookie(scope))
            await send(message)

        await (refusal or self._app)(scope, receive, hardened)

    def _refusal(self, scope: Scope, headers: Headers, shown: str) -> Response | None:
        if not self._is_ours(headers.getlist("host")):
            return _refused(403, "this viewer does not go by that name; open the address that `agent-runtime view` printed, "
                            "or name it with --allow-host")  # fmt: skip
        if not _is_same_origin(headers, is_change=scope["method"] not in SAFE_METHODS):
            return _refused(403, "the request came from a page that is not this viewer's; open the viewer itself")
        if not self._may_ask(headers, shown):
            return _refused(401, "this viewer wants its token; open the address that `agent-runtime view` printed, whole")
        return None

    def _is_ours(self, hosts: list[str]) -> bool:
        return len(hosts) == 1 and _name(f"//{hosts[0]}") in self._hosts

    def _may_ask(self, headers: Headers, shown: str) -> bool:
        if shown:
            return self._secrets.is_token(shown)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._secrets.is_token(bearer.strip())
        return self._secrets.is_cookie(read_cookies(headers).get(self._secrets.name, ""))

    def _cookie(self, scope: Scope) -> str:
        secure = "; Secure" if scope["scheme"] == "https" else ""
        return f"{self._secrets.name}={self._secrets.cookie}; HttpOnly; SameSite=Strict; Path=/{secure}"


def read_cookies(headers: Headers) -> dict[str, str]:
    """The cookies of a request; none where they cannot be read."""
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}


def _name(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""


def _is_same_origin(headers: Headers, *, is_change: bool) -> bool:
    """Whether a request comes from a page of ours. What changes nothing may come from no page at all."""
    origins = headers.getlist("origin")
    if not origins:
        return headers.get("sec-fetch-site", "") == "same-origin" if is_change else True
    scheme, _, place = origins[0].partition("://")
    return len(origins) == 1 and scheme in ("http", "https") and place.lower() == headers["host"].lower()


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"Refused: {why}.\n", status)
