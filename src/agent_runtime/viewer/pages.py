"""What the viewer shows: the list of runs, one run, the inbox of what waits for somebody, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from agent_runtime.clock import Clock
from agent_runtime.described import CORRUPT
from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    IdentityMismatch,
    InvalidRunId,
    InvalidSetting,
    StoreRefused,
    StoreUnavailable,
)
from agent_runtime.picture import draw
from agent_runtime.runs import Page, RunReport, Runs
from agent_runtime.viewer import calls, live, shown
from agent_runtime.viewer.asking import Identity, read_by
from agent_runtime.viewer.conversation import read_conversation, read_input
from agent_runtime.viewer.graph import draw_graph
from agent_runtime.viewer.rendering import Rendering

RUNS_A_PAGE = 50
MOST_WAITING = 50
INBOX_SECONDS = 0.3
"""For so long the inbox looks for what waits: parked runs come first, and are found at once."""
FIRST_SHOWN = 40
MORE = 5
"""Each look at more shows so many times as much."""
EVENT_STREAM = "text/event-stream"


class Problem(NamedTuple):
    """Why an action was not done: at which form and field, and what was typed into it."""

    form: str
    field: str
    message: str
    typed: Mapping[str, str]


NO_PROBLEM = Problem("", "", "", {})


class Asked(NamedTuple):
    """What a list was asked for."""

    status: str
    q: str
    name: str
    after: str


class Pages:
    """The handlers. `runs_of` gives the runs that whoever asks may see."""

    def __init__(self, runs: Runs, rendering: Rendering, *, identity: Identity | None, clock: Clock) -> None:
        self._runs = runs
        self._clock = clock
        self.rendering = rendering
        self.identity = identity

    def runs_of(self, request: Request) -> Runs:
        """All runs, or those of the identity that the proxy names."""
        return self._runs if self.identity is None else self._runs.for_context(self.identity.read(request))

    # The list.

    async def runs_page(self, request: Request) -> Response:
        asked = _asked(request)
        found, asked = await self._find(self.runs_of(request), asked)
        return self.rendering.page(
            "runs.html", **self._base(request, "runs"), asked=asked, page=found,
            stamp=live.digest(found),
        )  # fmt: skip

    async def _find(self, runs: Runs, asked: Asked) -> tuple[Page, Asked]:
        """Runs whose ids begin as was asked; where none does, those of the program of that name."""
        found = await self._page(runs, asked)
        if found.runs or found.after or not asked.q or asked.after:
            return found, asked
        named = asked._replace(q="", name=asked.q)
        by_name = await self._page(runs, named)
        return (by_name, named) if by_name.runs or by_name.after else (found, asked)

    async def _page(self, runs: Runs, asked: Asked) -> Page:
        """The newest first; those whose ids begin so by their ids."""
        status, name, after = asked.status or None, asked.name or None, asked.after or None
        if asked.q:
            return await runs.page(status=status, name=name, prefix=asked.q, after=after, limit=RUNS_A_PAGE)
        return await runs.recent(status=status, name=name, before=after, limit=RUNS_A_PAGE)

    async def live_list(self, request: Request) -> Response:
        runs, asked = self.runs_of(request), _asked(request)
        read = lambda: self._page(runs, asked)  # noqa: E731
        return _stream(live.follow_list(read, clock=self._clock, tell=self.rendering.tell))

    # One run.

    async def run_page(self, request: Request) -> Response:
        return await self.show_run(request, _run_id(request))

    async def show_run(self, request: Request, run_id: str, *, status: int = 200, problem: Problem = NO_PROBLEM) -> Response:
        """The page of one run, with what stands against an action of it."""
        try:
            report = await self.runs_of(request).inspect(run_id)
        except CheckpointStoreCorrupt as error:
            told = self.rendering.tell(error)
            return self.rendering.page("corrupt.html", **self._base(request, "runs"), run_id=run_id, why=told, report=None)
        if report.info.status == CORRUPT:
            of_run = self._of_run(request, report, problem)
            return self.rendering.page("corrupt.html", **of_run, run_id=run_id, why=report.info.why, report=report)
        return self.rendering.page("run.html", status=status, **self._of_run(request, report, problem))

    async def run_parts(self, request: Request) -> Response:
        """The parts of that page, to be put in the place of those that are not as they were."""
        report = await self.runs_of(request).inspect(_run_id(request))
        return self.rendering.page("parts.html", **self._of_run(request, report, NO_PROBLEM))

    def _of_run(self, request: Request, report: RunReport, problem: Problem) -> dict[str, Any]:
        timeline = report.timeline
        said, rows = read_conversation(timeline), calls.rows(report)
        drawn = draw(timeline, now_ms=self._clock.now_ms(), is_running=report.info.status == "running")
        began = shown.at(None if drawn is None else drawn.began_ms)
        shown_talk, shown_calls = _count(request, "talk"), _count(request, "calls")
        return {
            **self._base(request, "runs"),
            "info": report.info, "timeline": timeline, "pending": report.pending,
            "doubts": calls.doubts(report), "keys": calls.keys(report),
            "left": {each.call: each for each in report.left}, "problem": problem, "rows": rows[-shown_calls:],
            "calls_in_all": len(rows), "talk": said[-shown_talk:], "talk_in_all": len(said),
            "input": read_input(timeline),
            "shown_talk": shown_talk, "shown_calls": shown_calls, "more": MORE, "segments": calls.segments(timeline),
            "stamp": "" if report.stand is None else live.stamp(report.stand),
            "drawn": drawn, "colours": {} if drawn is None else {band.epoch: band.colour % 6 for band in drawn.bands},
            "started": "" if began is None else shown.clock(began)[:8],
            "graph": draw_graph(timeline.graph, timeline.visits, timeline.frontier),
        }  # fmt: skip

    async def value(self, request: Request) -> Response:
        """The arguments or the result of a call, whole, as text."""
        report = await self.runs_of(request).inspect(_run_id(request))
        call = report.timeline.calls.get(request.query_params.get("call", ""))
        part = request.query_params.get("part", "result")
        if call is None:
            raise HTTPException(404, "that run has no such call")
        value = call.args if part == "args" else call.outcome.get("result", call.outcome)
        return PlainTextResponse(shown.visible(shown.pretty(value)).encode("utf-8", "replace"))

    async def live_run(self, request: Request) -> Response:
        runs, run_id = self.runs_of(request), _run_id(request)
        return _stream(live.follow_run(runs, run_id, clock=self._clock, tell=self.rendering.tell))

    # The inbox.

    async def inbox_page(self, request: Request) -> Response:
        return await self.show_inbox(request)

    async def show_inbox(self, request: Request, *, status: int = 200, problem: Problem = NO_PROBLEM) -> Response:
        """What waits for somebody, with what stands against an action."""
        waiting = await self._waiting(self.runs_of(request))
        return self.rendering.page(
            "inbox.html", status=status, **self._base(request, "inbox"), problem=problem, stamp=live.digest(_outline(waiting)),
            waiting=[(it, calls.doubts(it), {left.call: left for left in it.left}, calls.keys(it)) for it in waiting],
            is_all=len(waiting) < MOST_WAITING,
        )  # fmt: skip

    async def _waiting(self, runs: Runs) -> Sequence[RunReport]:
        found: list[RunReport] = []
        async for report in runs.waiting_each(within_seconds=INBOX_SECONDS):
            found.append(report)
            if len(found) >= MOST_WAITING:
                break
        return found

    async def live_inbox(self, request: Request) -> Response:
        runs = self.runs_of(request)

        async def read() -> object:
            return _outline(await self._waiting(runs))

        return _stream(live.follow_list(read, clock=self._clock, tell=self.rendering.tell))

    # What went wrong.

    def failed(self, request: Request, error: Exception) -> Response:
        """An error of ours, as a page: what it is, and whether to wait."""
        status, title = _title(error, is_somebody=self.identity is not None)
        told = self.rendering.tell(error)
        if self.identity is not None and isinstance(error, CheckpointNotFound | IdentityMismatch):
            told = "Nothing is stored under that id, or it is somebody else's."
        return self._error(request, status, title, told, is_away=status == 503)

    def no_such_page(self, request: Request, error: Exception) -> Response:
        told = (
            error.detail if isinstance(error, HTTPException) and error.detail != "Not Found" else "Nothing has this address."
        )
        return self._error(request, 404, "No such page", told)

    def no_such_method(self, request: Request, error: Exception) -> Response:
        return self._error(request, 405, "Not like this", "A change is made by the form of its page, never by an address.")

    def _error(self, request: Request, status: int, title: str, told: str, *, is_away: bool = False) -> Response:
        base = {"here": "", "by": "", "is_somebody": False, "said": ""}
        is_change = request.method != "GET"
        return self.rendering.page(
            "error.html", status=status, **base, title=title, told=told, is_retried=is_away and not is_change,
            is_unsure=is_away and is_change,
        )  # fmt: skip

    def _base(self, request: Request, here: str) -> dict[str, Any]:
        """What every page holds."""
        return {
            "here": here,
            "by": read_by(request, self.identity),
            "is_somebody": self.identity is not None,
            "said": request.query_params.get("said", ""),
        }


def _asked(request: Request) -> Asked:
    given = request.query_params
    return Asked(*(given.get(name, "").strip() for name in ("status", "q", "name", "after")))


def _run_id(request: Request) -> str:
    """The run of an address; one that no path can hold stands in its query."""
    return str(request.path_params["run_id"]) or request.query_params.get("id", "")


def _count(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 8 and int(text) else FIRST_SHOWN


def _outline(waiting: Sequence[RunReport]) -> object:
    """What of the inbox can change."""
    return [(each.info.run_id, each.info.status, each.stand, each.left) for each in waiting]


def _stream(events: Any) -> Response:
    return StreamingResponse(events, media_type=EVENT_STREAM, headers={"x-accel-buffering": "no"})


def _title(error: Exception, *, is_somebody: bool) -> tuple[int, str]:
    match error:
        case IdentityMismatch() if not is_somebody:
            return 403, "Not yours"
        case CheckpointNotFound() | IdentityMismatch():
            return 404, "No such run"
        case CheckpointConflict():
            return 410, "That run is gone"
        case CheckpointStoreCorrupt():
            return 500, "What is stored is not what was written"
        case StoreUnavailable() | StoreRefused():
            return 503, "The store does not answer"
        case InvalidRunId() | InvalidSetting():
            return 400, "That cannot be asked"
        case AgentRuntimeError():
            return 409, "That was refused"
        case _:
            return 500, "Something went wrong"
