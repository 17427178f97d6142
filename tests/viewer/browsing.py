"""A real Chromium, driven from a thread of its own: the loops of other tests and its loop must not meet in one thread."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from playwright.async_api import Browser, ConsoleMessage, Page, Playwright, async_playwright

T = TypeVar("T")
SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "chromium.sh"
INSTALL_SECONDS = 300
PATIENCE_SECONDS = 60.0
SOON_MS = 10_000
WIDE = (1280, 860)
NARROW = (400, 860)


def find_chromium() -> str:
    """The program; the first asker installs it."""
    with open(SCRIPT) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(["sh", SCRIPT], capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    if ended.returncode:
        raise RuntimeError(f"no Chromium for the tests: {ended.stderr}")
    return ended.stdout.strip().splitlines()[-1]


class Browsing:
    """One Chromium for many tests; each gets a profile of its own. Whatever a page complains of fails its test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browsing", daemon=True)
        self._thread.start()
        self._playwright, self._browser = self._do(_launch())

    def see(
        self, look: Callable[[Page], Awaitable[T]], *, size: tuple[int, int] = WIDE, scheme: Any = "light", **options: Any
    ) -> T:
        """What `look` gives, which gets a fresh page."""
        return self._do(self._see(look, size, scheme, options))

    async def _see(
        self, look: Callable[[Page], Awaitable[T]], size: tuple[int, int], scheme: Any, options: dict[str, Any]
    ) -> T:  # fmt: skip
        context = await self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce", **options
        )
        try:
            page, complaints = await context.new_page(), list[str]()
            page.set_default_timeout(SOON_MS)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda message: complaints.extend(_complaint(message)))
            result = await look(page)
            assert complaints == []
            return result
        finally:
            await context.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    async def _end(self) -> None:
        await self._browser.close()
        await self._playwright.stop()


async def _launch() -> tuple[Playwright, Browser]:
    playwright = await async_playwright().start()
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which Chromium does not have as root
    browser = await playwright.chromium.launch(
        executable_path=find_chromium(), args=[*sandbox, "--disable-gpu", "--disable-dev-shm-usage"]
    )
    return playwright, browser


def _complaint(message: ConsoleMessage) -> list[str]:
    """What a page says on its console that is wrong; an answer of ours that refuses something is not."""
    is_wrong = message.type in ("error", "warning") and "Failed to load resource" not in message.text
    return [message.text] if is_wrong else []
