"""What somebody stored is text on every page: it runs nothing, loads nothing, and is there to be read.

The browser is told to heed no policy of the pages, so that escaping alone has to hold; the policy is tested beside it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.async_api import Page
from pydantic import BaseModel

from agent_runtime import (
    Call,
    Executor,
    Flow,
    FlowRunner,
    Message,
    Reply,
    Runs,
    ToolCall,
    ToolError,
    ToolRegistry,
    ToolSpec,
    lease,
)
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import InvalidRunId
from agent_runtime.ids import check_run_id
from agent_runtime.viewer import live, make_app
from agent_runtime.viewer.shown import visible
from tests.bench import KEY, Place, Script, Worker, error_of
from tests.viewer.browsing import Browsing
from tests.viewer.payloads import HUGE, PAYLOADS, SURROGATES
from tests.viewer.serving import TOKEN, Viewer, serving

LONGEST_PART = 400
EVIL = "<img src=x onerror=ran()>'\"{{7*1111111}}\x1b[31m\u202e</script><script>ran()</script>"
"""A little of everything, for places that take one text."""

WATCH = """
window.runs = 0;
window.ran = () => { window.runs += 1; };
for (const name of ["alert", "confirm", "prompt", "open"]) window[name] = () => { window.runs += 1; };
"""
STRANGE = """() => {
  const ours = new Set(["hx-get", "hx-trigger", "hx-swap", "hx-swap-oob", "hx-include", "hx-select", "hx-vals"]);
  const odd = new Set(["IFRAME", "OBJECT", "EMBED", "BASE", "STYLE", "TEMPLATE", "VIDEO", "AUDIO", "IMG", "MATH", "FRAMESET",
    "MARQUEE", "ANIMATE", "SET", "FOREIGNOBJECT", "SELECT", "PORTAL", "X", "CUSTOM-THING"]);
  const found = [];
  for (const each of document.querySelectorAll("*")) {
    if (odd.has(each.tagName.toUpperCase())) found.push(each.outerHTML);
    if (each.tagName === "SCRIPT" && !each.src.startsWith(`${location.origin}/static/`)) found.push(each.outerHTML);
    for (const { name, value } of each.attributes) {
      if (/^(data-)?hx-/.test(name) && !ours.has(name)) found.push(`${name}=${value.slice(0, 200)}`);
      if (/^on/.test(name) || name === "style" || name === "srcdoc") found.push(`${name}=${value.slice(0, 200)}`);
      if (["src", "href", "action", "formaction", "xlink:href", "poster", "hx-get", "data-live"].includes(name)
        && !["http:", "data:"].includes(new URL(value, location.href).protocol)) found.push(`${name}=${value.slice(0, 200)}`);
      if (["src", "href", "action", "formaction", "hx-get", "data-live"].includes(name)
        && !value.startsWith("data:image/") && new URL(value, location.href).origin !== location.origin)
        found.push(`${name}=${value.slice(0, 200)}`);
    }
  }
  return found;
}"""
TOUCH = """() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  for (const each of document.querySelectorAll("main *")) each.dispatchEvent(new Event("mouseover"));
}"""
SWAP = """() => new Promise((done) => {
  addEventListener("htmx:afterSettle", done, { once: true });
  for (const each of document.querySelectorAll("[data-digest]")) each.dataset.digest = "";
  htmx.trigger("#run", "changed");
})"""
"""What comes live is put in the place of what is there."""
READ = """() => document.body.textContent
  + [...document.querySelectorAll("textarea, input")].map((each) => each.value).join("\\n")"""


class State(BaseModel):
    """What a flow works on."""

    text: str = ""
    parts: dict[str, object] = {}


class Evil:
    """A model that asks for a call with each payload, and tools that give them back as results and as errors."""

    def __init__(self) -> None:
        self.registry = ToolRegistry()

        @self.registry.tool(pure=True)
        async def echo(text: str) -> object:
            return {text[:LONGEST_PART]: text}

        @self.registry.tool(pure=True)
        async def fail(text: str) -> str:
            raise ToolError(text[:LONGEST_PART])

        @self.registry.tool(needs_approval=True)
        async def ask(text: str, more: dict[str, object]) -> str:
            return text

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if any(message.role == "assistant" for message in messages):
            return Reply(EVIL, [], {EVIL: 1})
        kinds = ("echo", "fail", "no such tool")
        calls = [ToolCall(f"{at} {text[:40]}", kinds[at % 3] if at % 3 < 2 else text[:60], {"text": text})
                 for at, text in enumerate((*PAYLOADS, *SURROGATES))]  # fmt: skip
        return Reply("\n".join(PAYLOADS[:20]), calls, {})


async def store_all(place: Place) -> list[str]:
    """Runs that hold every payload; the ids that are payloads."""
    evil = Evil()
    said = [Message("system" if at == 0 else "user", text) for at, text in enumerate(PAYLOADS)]
    said.append(Message("user", EVIL, name=EVIL))
    await Worker(place).run(evil, evil.registry, "all", messages=said, name=EVIL)
    some = PAYLOADS[:: len(PAYLOADS) // 30]
    asks = [("ask", {"text": text, "more": {text: [text]}}) for text in some]
    for run_id in ("asks", "ends"):
        await Worker(place).run(Script(asks), evil.registry, run_id, messages=EVIL)
    runs = Runs(place.open(), checkpoint_key=KEY)
    for at, text in enumerate(some[:20]):
        if text.strip():
            await runs.deny(("asks", f"0.{at}"), by=text[:400], note=text[:5000])
    await runs.cancel("ends", by=EVIL, why=EVIL)
    doubtful = ToolRegistry()
    doubtful.tool(_send)
    mailing = Script([("_send", {"text": EVIL})])
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(mailing, doubtful, "doubt")
    await error_of(Worker(place).recover(mailing, doubtful, "doubt"))
    flow = Flow("hostile", state=State).node("n", Call("echo", args=lambda state: {"text": state.text}, into="parts"))
    runner = FlowRunner(Executor(evil.registry), checkpoints=Worker(place), checkpoint_key=KEY)
    await runner.run(flow.end("n"), State(text=EVIL), run_id="flow")
    ids = [text for text in PAYLOADS if _is_id(text)][:40]
    for run_id in ids:
        await Worker(place).run(Script("x"), ToolRegistry(), run_id)
    return ids


async def _send(text: str) -> str:
    return text


def _is_id(text: str) -> bool:
    try:
        check_run_id(text)
    except InvalidRunId:
        return False
    return "/" not in text[:1]


def test_two_hundred_hostile_texts_are_text_on_every_page(
    browser: Browsing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({*PAYLOADS, *SURROGATES}) >= 200
    monkeypatch.setattr(socket, "gethostname", lambda: "<img src=x onerror=ran()>")
    lease._mark_of.cache_clear()
    place = Place("sqlite", tmp_path)
    ids = asyncio.run(store_all(place))
    lease._mark_of.cache_clear()
    asked, dialogs = list[str](), list[str]()

    async def look(page: Page) -> dict[str, str]:
        await page.add_init_script(WATCH)
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        told = {}
        runs = (f"/runs/{quote(name)}" for name in ("asks", "ends", "doubt", "flow", EVIL, *ids[::10]))
        paths = ["/", "/inbox", "/runs/all?calls=1000&talk=1000", *runs, f"/?q={quote(EVIL)}", f"/?status={quote(EVIL)}"]
        await page.goto(served.url)
        for path in paths:
            await page.goto(f"{served.base}{path}")
            await page.evaluate(TOUCH)
            if path.startswith(("/runs/all", "/runs/flow")):  # what comes live is put in the place of what is there
                await page.evaluate(SWAP)
            assert await page.evaluate(STRANGE) == [], path
            assert await page.evaluate("window.runs") == 0, path
            assert (await page.title()).endswith("agent-runtime")
            told[path] = await page.evaluate(READ)
        return told

    with serving(make_app(Runs(place.open(), checkpoint_key=KEY), token=TOKEN)) as served:
        told = browser.see(look, bypass_csp=True)
        assert [url for url in asked if not url.startswith(served.base)] == []
        value = _get(served, "/value/all?call=0.0")
    assert value == ("text/plain; charset=utf-8", True)
    assert dialogs == []
    whole = " ".join(told["/runs/all?calls=1000&talk=1000"].split())
    for text in PAYLOADS:
        shown = visible(text if text != HUGE else text[:1000])
        assert " ".join(shown.split()) in whole, repr(text[:100])
    listed = " ".join(told["/"].split())
    assert all(" ".join(visible(run_id).split()) in listed for run_id in ids)
    assert [path for path, text in told.items() if "7777777" in text] == [], "no template of theirs is filled in"
    as_json = visible(json.dumps(EVIL, ensure_ascii=False))
    for path, name, shown in (
        ("/runs/ends", "cancelled by", visible(EVIL)),
        ("/runs/doubt", "Nobody knows", as_json),
        ("/inbox", "answered first", as_json),
        ("/runs/flow", "The flow", as_json),
    ):
        assert name in told[path]
        assert shown in told[path]
    assert "<img src=x onerror=ran()>" in told["/runs/all?calls=1000&talk=1000"], "the host"


def _get(served: Viewer, path: str) -> tuple[str | None, bool]:
    served.log_in()
    answer = served.get(path)
    return answer.headers["content-type"], answer.headers["x-content-type-options"] == "nosniff"


def test_no_text_makes_two_events_of_one() -> None:
    for text in (*PAYLOADS, *SURROGATES):
        sent = live.event("away", visible(text))
        assert sent.startswith(b"event: away\ndata: "), text
        assert sent.endswith(b"\n\n"), text
        assert sent.count(b"\n") == 3, text
        assert b"\r" not in sent, text
