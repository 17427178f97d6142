"""What is said of a run whose worker was lost, and of one that waits: the same by the API, by its row, and on the pages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from playwright.async_api import Page, expect

from agent_runtime import Runs, ToolError, ToolRegistry, redact_pattern
from agent_runtime.crash import CrashPoint
from agent_runtime.viewer import make_app
from tests.bench import KEY, LONG_SECONDS, Place, Script, Worker, kill_when
from tests.processes import hired
from tests.processes.worker import Order
from tests.viewer.browsing import Browsing
from tests.viewer.serving import TOKEN, Viewer, serving, viewing
from tests.viewer.test_browser import Stepping, _until
from tests.viewer.test_pages import MARK, listed, operator, text

CHARGE = [("charge", {"amount": 100})]
WAITS = "waiting for approval: charge amount=100"
LEASE = {"lease_seconds": 1.5, "heartbeat_seconds": 0.3}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("sqlite", tmp_path)


@pytest.fixture
def viewer(place: Place) -> Iterator[Viewer]:
    with serving(make_app(operator(place), token=TOKEN)) as viewer:
        viewer.log_in()
        yield viewer


def charging(*, needs_approval: bool = False) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(idempotent=True, needs_approval=needs_approval)
    async def charge(amount: int) -> str:
        return f"charged {amount}"

    return registry


async def told(place: Place, viewer: Viewer, run_id: str) -> set[str]:
    """How the run stands, by everybody who may be asked."""
    runs = operator(place)
    page = re.search(r'class="pill s-([a-z-]+)"', viewer.get(f"/runs/{run_id}").text)
    assert page is not None
    stand = await anext(runs.watch(run_id))
    [by_list] = [info.status for info in await runs.list() if info.run_id == run_id]
    [by_time] = [info.status for info in (await runs.recent()).runs if info.run_id == run_id]
    return {(await runs.show(run_id)).info.status, by_list, by_time, stand.status, listed(viewer)[run_id], page[1]}


async def test_a_run_whose_worker_was_lost_is_interrupted_and_one_that_waits_says_for_what_wherever_one_looks(
    place: Place, viewer: Viewer
) -> None:
    before = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE)
    await before.run_and_die(Script(CHARGE, "done"), charging(), "before-its-first-step", commits="each", **LEASE)
    inside = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await inside.run_and_die(Script(CHARGE, "done"), charging(), "mid-step", **LEASE)
    await Worker(place).run(Script(CHARGE, "done"), charging(needs_approval=True), "waits")
    for run_id in ("before-its-first-step", "mid-step"):
        give_up_at, stands = monotonic() + LONG_SECONDS, await told(place, viewer, run_id)
        while "running" in stands and monotonic() < give_up_at:
            await asyncio.sleep(0.05)
            stands = await told(place, viewer, run_id)
        assert stands == {"interrupted"}, "never one thing here and another there, once the lease is over"
        assert list(listed(viewer, "?status=interrupted")).count(run_id) == 1
    assert await told(place, viewer, "waits") == {"paused"}
    assert (await operator(place).show("waits")).info.why.startswith(WAITS)
    [request] = await operator(place).pending("waits")
    assert (request.tool, request.args) == ("charge", {"amount": 100})
    for path in ("/", "/runs/waits"):
        assert WAITS in text(viewer.get(path).text), path
    inbox = text(viewer.get("/inbox").text)
    assert "charge" in inbox
    assert '{"amount": 100}' in inbox


def test_the_page_follows_a_run_through_the_loss_of_its_worker_and_its_recovery(browser: Browsing, place: Place) -> None:
    async def look(page: Page) -> None:
        tool, model = Stepping(), Script([("step", {"at": "0"})], [("step", {"at": "1"})], "done")
        worker, lost = Worker(place), asyncio.Event()
        work = asyncio.ensure_future(kill_when(worker, worker.run(model, tool.registry, "live", **LEASE), lost))
        await _until(lambda: "0" in tool.entered)
        await page.goto(served.url)
        await page.goto(f"{served.base}/runs/live")
        status = page.locator("#facts .pill").first
        await expect(status).to_have_text("running")
        await expect(page.locator("#facts .mark")).to_have_count(0)
        lost.set()
        await work
        await expect(status).to_have_text("interrupted")
        await expect(page.locator("#segments .how")).to_have_text("never said how it ended")
        again = asyncio.ensure_future(Worker(place).recover(model, tool.registry, "live"))
        await expect(status).to_have_text("running")
        await expect(page.locator("#facts .mark")).to_have_text("recovered")
        await expect(page.locator("#segments .gap")).to_contain_text("nobody, for")
        for at in ("0", "1"):
            await _until(lambda at=at: at in tool.entered)
            tool.go.set()
            await page.wait_for_selector(f"#call-{at} .pill.t-good")
        await again
        await expect(status).to_have_text("done")
        await expect(page.locator("#facts .mark")).to_have_text("recovered")

    with serving(make_app(operator(place), token=TOKEN)) as served:
        browser.see(look)


def test_before_during_and_after_a_crash_the_list_and_the_page_of_a_run_say_what_is_true_of_it(
    browser: Browsing, place: Place, tmp_path: Path
) -> None:
    """Real processes: a worker that is killed, another that goes on, and a viewer that is none of them."""

    async def look(page: Page) -> None:
        run = await page.context.new_page()
        await page.goto(viewer.url)
        await run.goto(f"{viewer.base}/runs/live")
        row, status, mark = page.locator(".pill").first, run.locator("#facts .pill").first, run.locator("#facts .mark")
        await expect(row).to_have_text("running")
        await expect(status).to_have_text("running")
        await expect(run.locator("#facts")).to_contain_text(str(first.pid))
        first.kill()
        await expect(row).to_have_text("interrupted")
        await expect(status).to_have_text("interrupted")
        await expect(mark).to_have_count(0)
        await expect(run.locator("#segments .how")).to_have_text("never said how it ended")
        fresh = await page.context.new_page()  # as one finds it who comes only now
        await fresh.goto(f"{viewer.base}/?status=interrupted")
        await expect(fresh.locator("[data-row]")).to_have_text(["live"])
        assert await told(place, as_program, "live") == {"interrupted"}
        second.order(Order("live", verb="recover", inside="wait"))
        assert await asyncio.to_thread(second.hear) == {"acting": "live", "pid": second.pid}
        await expect(row).to_have_text("running")
        await expect(status).to_have_text("running")
        await expect(mark).to_have_text("recovered")
        await expect(run.locator("#segments .gap")).to_contain_text("nobody, for")
        second.go_on()
        assert (await asyncio.to_thread(second.hear))["ended"] == "done"
        await expect(row).to_have_text("done")
        await expect(status).to_have_text("done")
        await expect(mark).to_have_text("recovered")
        await expect(fresh.locator("[data-row]")).to_have_count(0)
        await fresh.goto(f"{viewer.base}/runs/live")
        await expect(fresh.locator("#facts .mark")).to_have_text("recovered")
        await expect(fresh.locator("#segments")).to_contain_text(f"process {second.pid}")

    with hired.Place(tmp_path).hire(2) as (first, second):
        first.order(Order("live", inside="wait", lease=LEASE["lease_seconds"], heartbeat=LEASE["heartbeat_seconds"]))
        assert first.hear() == {"acting": "live", "pid": first.pid}
        with viewing(place.path) as viewer:
            as_program = Viewer(viewer.url)
            as_program.log_in()
            browser.see(look)


async def test_a_secret_of_a_tool_or_its_error_stands_on_no_page_where_the_hook_knows_it(place: Place) -> None:
    tools, client = ToolRegistry(), {"Authorization": MARK}

    @tools.tool(idempotent=True)
    async def fetch(key: str) -> str:
        raise ToolError(f"401 for {client['Authorization']}")

    model = Script([("fetch", {"key": MARK})], f"the key is {MARK}")
    await Worker(place).run(model, tools, "secret", messages=f"use {MARK}")
    runs = Runs(place.open(), checkpoint_key=KEY, redact=redact_pattern(MARK))
    with serving(make_app(runs, token=TOKEN)) as viewer:
        viewer.log_in()
        values = (f"/value/secret?call={call}" for call in ("0", "0&part=args", "0/model", "1/model"))
        for path in ("/", "/inbox", "/runs/secret", "/parts/secret", *values):
            answer = viewer.get(path)
            assert answer.status == 200, path
            assert MARK not in answer.text, path
        assert "401 for [redacted]" in viewer.get("/runs/secret").text
