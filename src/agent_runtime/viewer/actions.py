"""What a person decides on a page: approve, deny, edit, settle, cancel, release. Each is a POST, by somebody, for a reason.

What cannot be done is said at the field that it is about, and what was typed stays.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointNotFound,
    IdentityMismatch,
    StoreUnavailable,
)
from agent_runtime.runs import Runs
from agent_runtime.settlements import Outcome, Rerun, Settling
from agent_runtime.viewer.asking import BY_COOKIE, read_by, read_form
from agent_runtime.viewer.guard import Secrets
from agent_runtime.viewer.pages import Pages, Problem
from agent_runtime.viewer.rendering import run_path

Form = Mapping[str, str]
Endpoint = Callable[[Request], Awaitable[Response]]
Act = Callable[[Runs, str, Form, str], Awaitable[str]]
"""Does it; gives a word of `rendering.SAID` for what came of it."""


class Refused(Exception):
    """What was typed cannot be meant: at which field, and why."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


class Actions:
    """The POST handlers, by the verb in their address."""

    def __init__(self, pages: Pages, secrets: Secrets, *, read_only: bool) -> None:
        self._pages = pages
        self._secrets = secrets
        self._read_only = read_only
        acts: dict[str, Act] = {
            "approve": _approve, "deny": _deny, "edit": self._edit, "settle": _settle, "cancel": _cancel, "release": _release,
        }  # fmt: skip
        self.endpoints: dict[str, Endpoint] = {verb: self._endpoint(verb, act) for verb, act in acts.items()}

    def _endpoint(self, verb: str, act: Act) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            form = await read_form(request)
            self._check(form)
            run_id = str(request.path_params["run_id"]) or request.query_params.get("id", "")
            runs = self._pages.runs_of(request)
            by = read_by(request, self._pages.identity) if self._pages.identity else form.get("by", "").strip()
            key = f"{verb if verb in ('settle', 'cancel', 'release') else 'answer'}:{run_id}:{form.get('call', '')}"
            try:
                if not by:
                    raise Refused("by", "Say who you are: it is recorded with what you decide.")
                said = await act(runs, run_id, form, by)
            except Refused as refused:
                return await self._again(request, run_id, form, 400, Problem(key, refused.field, str(refused), form))
            except (CheckpointNotFound, IdentityMismatch, StoreUnavailable):
                raise
            except AgentRuntimeError as error:
                problem = Problem(key, "", self._pages.rendering.tell(error), form)
                return await self._again(request, run_id, form, 409, problem)
            return self._done(form, run_id, said, by)

        return endpoint

    def _check(self, form: Form) -> None:
        if self._read_only:
            raise HTTPException(403, "this viewer only shows: it was started with --read-only")
        if not self._secrets.is_form(form.get("form_token", "")):
            raise HTTPException(403, "the form does not hold this viewer's token; load its page again and send it from there")

    async def _again(self, request: Request, run_id: str, form: Form, status: int, problem: Problem) -> Response:
        if form.get("back") == "inbox":
            return await self._pages.show_inbox(request, status=status, problem=problem)
        return await self._pages.show_run(request, run_id, status=status, problem=problem)

    def _done(self, form: Form, run_id: str, said: str, by: str) -> Response:
        path = "/inbox" if form.get("back") == "inbox" else run_path(run_id)
        response = RedirectResponse(f"{path}{'&' if '?' in path else '?'}said={said}", 303)
        if self._pages.identity is None:
            response.set_cookie(BY_COOKIE, quote(by[:200]), httponly=True, samesite="strict")
        return response

    async def _edit(self, runs: Runs, run_id: str, form: Form, by: str) -> str:
        """Only what was really changed is sent: what stood in the field may have been redacted."""
        request = next((each for each in await runs.pending(run_id) if each.id == form.get("call")), None)
        if request is None:
            await runs.approve((run_id, form.get("call", "")), by=by)  # says what is open instead
            return "approved"
        typed, stood = _json_object("args", form.get("args", "")), request.args
        if missing := sorted(stood.keys() - typed.keys()):
            raise Refused("args", f"An edit replaces arguments and removes none; missing: {', '.join(missing)}.")
        changes = {name: value for name, value in typed.items() if name not in stood or stood[name] != value}
        if not changes:
            raise Refused("args", "Nothing is changed. To let it go out as it is, approve it.")
        await runs.edit(request, changes, by=by, note=form.get("note", ""))
        return "edited"


async def _approve(runs: Runs, run_id: str, form: Form, by: str) -> str:
    await runs.approve((run_id, form.get("call", "")), by=by, note=form.get("note", ""))
    return "approved"


async def _deny(runs: Runs, run_id: str, form: Form, by: str) -> str:
    await runs.deny((run_id, form.get("call", "")), by=by, note=form.get("note", ""))
    return "denied"


async def _settle(runs: Runs, run_id: str, form: Form, by: str) -> str:
    why = form.get("why", "").strip()
    settling = _settling(form)
    if not why:
        raise Refused("why", "Say how you know: it is recorded.")
    return "settled" if await runs.settle(run_id, form.get("call", ""), settling, by=by, why=why) else "told"


def _settling(form: Form) -> Settling:
    match form.get("how", ""):
        case "done":
            return Outcome.done(_json("result", form.get("result", "")))
        case "not-done":
            return Outcome.not_done()
        case "rerun":
            return Rerun()
        case _:
            raise Refused("how", "Say what became of it.")


async def _cancel(runs: Runs, run_id: str, form: Form, by: str) -> str:
    why = form.get("why", "").strip()
    if not why:
        raise Refused("why", "Say why: it is recorded.")
    return "cancelled" if await runs.cancel(run_id, by=by, why=why) else "ended"


async def _release(runs: Runs, run_id: str, form: Form, by: str) -> str:
    return "released" if await runs.release(run_id, by=by) else "free"


def _json(field: str, text: str) -> object:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(
            field, f'Expected JSON, found what cannot be read ({error}). Text stands in quotes: "like this".'
        ) from error


def _json_object(field: str, text: str) -> dict[str, object]:
    value = _json(field, text)
    if not isinstance(value, dict):
        raise Refused(field, "Expected a JSON object: the arguments by name.")
    return value
