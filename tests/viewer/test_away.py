"""A store that goes away while a page is open, or is locked: the page says so plainly, and goes on once it is back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from agent_runtime.stores import sqlite
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.tool_loop import run_tool_loop
from agent_runtime.viewer import make_app
from tests.bench import KEY, LONG_SECONDS, Place
from tests.conftest import NOWHERE
from tests.servers import Server, own_origins, start
from tests.viewer import stage
from tests.viewer.browsing import Browsing
from tests.viewer.serving import TOKEN, Viewer, serving, viewing
from tests.viewer.test_pages import operator, text

HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    db.execute(statement)
print("held", flush=True)
sys.stdin.readline()
"""
WRITING = ("BEGIN IMMEDIATE",)
ALL_OF_IT = ("PRAGMA locking_mode = EXCLUSIVE", "BEGIN IMMEDIATE", "UPDATE runs SET step = step")
APPROVAL = {"call": "0", "by": "ana"}


@pytest.fixture
def server() -> Iterator[Server]:
    """One of this test alone: it is stopped."""
    own = start(next(iter(own_origins()), NOWHERE))
    yield own
    own.close()


@pytest.fixture
def viewer(shelf: Place) -> Iterator[Viewer]:
    with serving(make_app(operator(shelf), token=TOKEN)) as viewer:
        yield viewer


@contextmanager
def held(path: Path, *statements: str) -> Iterator[None]:
    """Another process holds the file so, until the block is left."""
    words = [sys.executable, "-c", HOLD, str(path), *statements]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()


async def make_paused(url: str, run_id: str) -> None:
    store = PostgresCheckpointStore(url)
    talk = stage.Talk(("I give the money back.", [stage.refund("B-2", 900)]), ("It is refunded.", []))
    await run_tool_loop(talk, stage.Box().registry, "go", run_id=run_id, checkpoints=store, checkpoint_key=KEY)
    await store.close()


def test_a_server_that_is_stopped_is_told_of_on_each_open_page_which_goes_on_once_it_is_back(
    browser: Browsing, server: Server, tmp_path: Path
) -> None:
    asyncio.run(make_paused(server.url, "refund-12"))

    async def look(page: Page) -> None:
        run, late = await page.context.new_page(), await page.context.new_page()
        await page.goto(served.url)
        await run.goto(f"{served.base}/runs/refund-12")
        await run.get_by_label("Your name").first.fill("ana")
        await run.get_by_label("A word with it").fill("half a word")
        server.stop()
        for each in (page, run):
            await expect(each.locator("#banner")).to_contain_text("The store does not answer; trying again.")
            await expect(each.locator("#banner")).to_contain_text("see that the server runs")
        await expect(page.locator("[data-row]")).to_have_text(["refund-12"])
        await expect(run.locator("h1")).to_have_text("refund-12")  # what was known stays to be read
        await late.goto(f"{served.base}/inbox")
        await expect(late.locator("h1")).to_have_text("The store does not answer")
        await expect(late.locator("main")).to_contain_text("This page tries again every two seconds.")
        server.start()
        for each in (page, run):
            await expect(each.locator("#banner")).to_be_hidden()
        await expect(late.locator("h1")).to_have_text("Inbox")
        await expect(run.get_by_label("A word with it")).to_have_value("half a word")
        await run.get_by_role("button", name="Approve", exact=True).click()
        await expect(run.locator(".left")).to_contain_text("ana answered first: approved")
        await expect(late.locator(".left")).to_contain_text("ana answered first: approved")  # it is live again
        server.stop()
        await run.get_by_text("Cancel the run").click()
        await run.locator("#cancel").get_by_label("Why").fill("no use")
        await run.get_by_role("button", name="Cancel it for good").click()
        await expect(run.locator("h1")).to_have_text("The store does not answer")
        await expect(run.locator("main")).to_contain_text("Nobody knows whether what you decided was recorded.")
        server.start()
        await expect(page.locator("#banner")).to_be_hidden()
        await expect(page.locator(".pill").first).to_have_text("paused")

    with viewing(tmp_path / "runs.db", url=server.url) as served:
        browser.see(look)


def test_while_another_process_writes_pages_are_read_and_what_is_decided_is_recorded_once_it_has(
    viewer: Viewer, shelf: Place
) -> None:
    viewer.log_in()
    viewer.form_token()
    with ThreadPoolExecutor(1) as thread:
        with held(shelf.path, *WRITING):
            decided = thread.submit(viewer.post, "/act/approve/refund-12", APPROVAL)
            for path in ("/", "/inbox", "/runs/refund-12"):
                assert viewer.get(path).status == 200, path
            assert not decided.done()
            assert "answered first" not in viewer.get("/inbox").text
        assert decided.result(LONG_SECONDS).status == 303
    assert "ana answered first: approved" in text(viewer.get("/inbox").text)


def test_a_file_that_another_process_holds_for_too_long_is_named_to_whoever_decides_and_to_whoever_opens_a_page(
    viewer: Viewer, shelf: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_MS", 100)
    monkeypatch.setattr(sqlite, "SETUP_TRIES", 2)
    with held(shelf.path, *ALL_OF_IT):
        first = viewer.log_in()
        assert first.status == 503
        assert f"SQLite file '{shelf.path}' stayed locked" in text(first.text)
        assert "This page tries again every two seconds" in text(first.text)
    assert "refund-12" in viewer.get("/").text
    viewer.form_token()
    with held(shelf.path, *WRITING):
        refused = viewer.post("/act/approve/refund-12", APPROVAL)
        assert refused.status == 503
        assert f"SQLite file '{shelf.path}' was locked by another process" in text(refused.text)
        assert "to send the same again does no harm" in text(refused.text)
        assert 'http-equiv="refresh"' not in refused.text, "what was decided is not sent again behind somebody's back"
    assert viewer.post("/act/approve/refund-12", APPROVAL).status == 303
    assert viewer.post("/act/approve/refund-12", APPROVAL).status == 303, "to say the same twice changes nothing"
