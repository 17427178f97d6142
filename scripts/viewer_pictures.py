"""Make the pictures of the run viewer for the pages: docs/pictures/viewer-*.png. Needs a Chromium (scripts/chromium.sh)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.async_api import Page

from agent_runtime import Runs
from agent_runtime.viewer import make_app
from tests.bench import KEY
from tests.viewer.browsing import NARROW, WIDE, Browsing
from tests.viewer.serving import TOKEN, Viewer, serving
from tests.viewer.stage import fill

TOP = Path(__file__).resolve().parent.parent
PAGES = {"list": "/", "run": "/runs/order-7", "inbox": "/inbox"}
LOOKS = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "narrow": (NARROW, "light")}
TALLEST = {"list": 760, "run": 1500, "inbox": 1300}
"""No picture is higher: a page quotes it, and nobody scrolls through a picture."""


def main() -> int:
    folder = TOP / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    browser = Browsing()
    try:
        with TemporaryDirectory() as store:
            place = asyncio.run(fill(Path(store)))
            with serving(make_app(Runs(place.open(), checkpoint_key=KEY), token=TOKEN)) as viewer:
                for look, (size, scheme) in LOOKS.items():
                    for name, path in PAGES.items():
                        file = folder / f"viewer-{name}-{look}.png"
                        browser.see(_picture(viewer, path, file, TALLEST[name]), size=size, scheme=scheme)
                        print(file.relative_to(TOP))
            asyncio.run(place.close())
    finally:
        browser.close()
    return 0


def _picture(viewer: Viewer, path: str, file: Path, tallest: int) -> Callable[[Page], Awaitable[None]]:
    """Opens a page and leaves a picture of it in the file."""

    async def look(page: Page) -> None:
        await page.goto(viewer.url)
        await page.goto(f"{viewer.base}{path}")
        await page.wait_for_function("document.querySelector('time').textContent.includes('ago')")
        width, height = await page.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        await page.set_viewport_size({"width": width, "height": min(height, tallest)})
        await page.screenshot(path=file)

    return look


if __name__ == "__main__":
    sys.exit(main())
