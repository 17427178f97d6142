"""Who asks, and what a form says: identity from a proxy's headers, the fields of a POST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request

from agent_runtime.run import RunContext
from agent_runtime.viewer.guard import read_cookies

BY_COOKIE = "agent_runtime_by"
"""Remembers who somebody said they are. It proves nothing, and is believed as what they typed would be."""
LARGEST_FORM = 1_000_000


@dataclass(frozen=True, slots=True)
class Identity:
    """The headers in which a proxy names who is there. Only behind a proxy that sets them itself, whatever a client sent."""

    user: str
    thread: str = ""
    principal: str = ""

    def read(self, request: Request) -> RunContext:
        """Who asks; refuses where the proxy does not say."""
        named = {
            part: request.headers.get(header) for part, header in
            (("user", self.user), ("thread", self.thread), ("principal", self.principal)) if header
        }  # fmt: skip
        if not named["user"]:
            raise HTTPException(403, f"the proxy did not say who is there: expected the header {self.user!r}")
        return RunContext(**{part: value for part, value in named.items() if value})


def read_by(request: Request, identity: Identity | None) -> str:
    """Who is there, as far as that is known."""
    if identity is not None:
        return identity.read(request).user or ""
    return unquote(read_cookies(request.headers).get(BY_COOKIE, ""))


async def read_form(request: Request) -> Mapping[str, str]:
    """The fields of a form, the last of each name."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise HTTPException(413, f"a form holds up to {LARGEST_FORM} bytes")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True))
    except ValueError as error:
        raise HTTPException(400, f"the form cannot be read: {error}") from error
