"""Templates to pages: every value that stands in one is text, made visible, and redacted where a hook says so."""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from agent_runtime.clock import Clock
from agent_runtime.described import told_sound
from agent_runtime.redaction import Redact, shown_text
from agent_runtime.runs import STATUSES
from agent_runtime.viewer import commands, shown
from agent_runtime.viewer.shown import visible

HERE = Path(__file__).parent

SAID = {
    "approved": "Approved. Whoever works the run, or picks it up, lets the call go out.",
    "denied": "Denied. The model is told so when the run goes on.",
    "edited": "Approved with other arguments. They are what will be sent.",
    "settled": "Settled, and on record.",
    "told": "Left for the run's worker, which may be alive.",
    "cancelled": "Cancelled, or its living worker was told to end it.",
    "ended": "Nothing was changed: it has ended, or was told so already.",
    "released": "Released: the run goes again.",
    "free": "Nothing was changed: it is in no quarantine.",
}
"""What a page says after an action, by the word in its address."""


class Rendering:
    """Makes pages. What runs tell comes here as it may be shown."""

    def __init__(self, *, form_token: str, read_only: bool, redact: Redact | None, clock: Clock) -> None:
        self._redact = redact
        self._clock = clock
        environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_visible,
        )
        environment.filters |= {
            "duration": shown.duration, "size": shown.size, "fold": shown.fold, "line": shown.line, "at": shown.at,
            "editable": shown.editable, "moment": _moment, "clock": shown.clock, "run_path": run_path, "digest": _digest,
        }  # fmt: skip
        environment.globals |= {
            "form_token": form_token, "read_only": read_only, "statuses": STATUSES, "command": commands.command,
            "edit_command": commands.edit, "verify_command": commands.verify, "told_sound": told_sound, "asset": _asset,
            "query": _query, "notices": SAID,
        }  # fmt: skip
        self._environment = environment

    def page(self, template: str, /, *, status: int = 200, **values: Any) -> HTMLResponse:
        """A page, or a part of one."""
        return HTMLResponse(self.text(template, **values), status)

    def text(self, template: str, /, **values: Any) -> str:
        return self._environment.get_template(template).render(values).encode("utf-8", "replace").decode()

    def tell(self, error: Exception) -> str:
        """An error as a page says it."""
        return visible(shown_text(self._redact, str(error)))


def run_path(run_id: str, under: str = "runs") -> str:
    """The path of a run. A browser would resolve dots between slashes: an id that holds them stands in the query."""
    if {".", ".."} & set(run_id.split("/")):
        return f"/{under}/?{urlencode({'id': run_id})}"
    return f"/{under}/{quote(run_id, safe='/')}"


def _visible(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _moment(when: datetime | None) -> Markup | str:
    """A moment for people and programs; the page adds how long ago that is."""
    if when is None:
        return ""
    return Markup('<time datetime="{}">{}</time>').format(shown.machine(when), escape(shown.date(when)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


_ASSETS: dict[str, str] = {}


def _asset(name: str) -> str:
    """The address of a file of ours, which changes with what it holds."""
    if name not in _ASSETS:
        digest = hashlib.sha256((HERE / "static" / name).read_bytes()).hexdigest()[:10]
        _ASSETS[name] = f"/static/{name}?v={digest}"
    return _ASSETS[name]


def _query(**values: object) -> str:
    """The query of an address, without what says nothing."""
    said = {name: value for name, value in values.items() if value not in ("", None)}
    return f"?{urlencode(said)}" if said else ""
