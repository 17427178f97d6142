"""Each page as those meet it who cannot see it, or use no mouse: axe-core finds no serious fault, in light and in dark."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from agent_runtime.viewer import make_app
from tests.bench import Place
from tests.viewer import stage
from tests.viewer.browsing import INSTALL_SECONDS, NARROW, WIDE, Browsing
from tests.viewer.serving import TOKEN, serving
from tests.viewer.test_pages import operator

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "axe.sh"
PATHS = (
    "/", "/?status=failed", "/?q=nothing-like-it", "/inbox", "/runs/order-7", "/runs/refund-12", "/runs/mail-5",
    "/runs/import-1", "/runs/tickets-8", "/runs/search-2", "/runs/order-9", "/runs/order-4", "/runs/nothing", "/nowhere",
)  # fmt: skip
"""Every sort of page: `order-4` is corrupt, `mail-5` in doubt, `import-1` in quarantine."""
MAIN = ("/", "/inbox", "/runs/order-7")
CHECK = """async () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.map(({ id, impact, help, nodes }) => ({
    id, impact, help, nodes: nodes.slice(0, 3).map(({ html }) => html),
  }));
}"""
SERIOUS = ("serious", "critical")
KEYS = "() => document.getElementById('help').showModal()"


def find_axe() -> str:
    """Its script; the first asker downloads it."""
    ended = subprocess.run(["sh", SCRIPT], capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("scheme", "size", "paths"),
    [("light", WIDE, PATHS), ("dark", NARROW, PATHS), ("light", NARROW, MAIN), ("dark", WIDE, MAIN)],
    ids=["light", "dark and narrow", "light and narrow", "dark"],
)
def test_no_page_has_a_serious_fault_for_those_who_cannot_see_it(
    browser: Browsing, shelf: Place, scheme: str, size: tuple[int, int], paths: tuple[str, ...]
) -> None:
    stage.corrupt(shelf, "order-4")
    axe = Path(find_axe()).read_text(encoding="utf-8")

    async def look(page: Page) -> dict[str, list[dict[str, Any]]]:
        await page.add_init_script(axe)
        await page.goto(served.url)
        found = {}
        for path in paths:
            await page.goto(f"{served.base}{path}")
            found[path] = await page.evaluate(CHECK)
        await page.evaluate(KEYS)
        found["the keys"] = await page.evaluate(CHECK)
        return found

    with serving(make_app(operator(shelf), token=TOKEN)) as served:
        found = browser.see(look, scheme=scheme, size=size, bypass_csp=True)
    faults = [(path, fault) for path, faults in found.items() for fault in faults if fault["impact"] in SERIOUS]
    assert faults == []
