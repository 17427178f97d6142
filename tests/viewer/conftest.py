"""What the tests of the viewer share: runs in every state, made once; and one browser."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bench import Place
from tests.viewer.browsing import Browsing
from tests.viewer.stage import fill


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that holds runs in every state; to be copied."""
    folder = tmp_path_factory.mktemp("filled")

    async def make() -> None:
        await (await fill(folder)).close()

    with ThreadPoolExecutor(1) as thread:  # whatever loop this thread may have
        thread.submit(asyncio.run, make()).result()
    return folder


@pytest.fixture
def shelf(filled: Path, tmp_path: Path) -> Place:
    """A copy of it for one test."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return Place("sqlite", tmp_path)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browsing]:
    browsing = Browsing()
    yield browsing
    browsing.close()
