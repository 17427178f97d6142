"""The suite that every store passes. Its cases are the store's specification, and their names are its sentences.

With pytest, give the cases a store, fresh for each of them:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self) -> AsyncIterator[CheckpointStore]:
            store = MyStore(...)
            yield store
            await store.close()

A store that has connections says how they are ended from outside, by overriding `cut_off`: two cases strike so.

To see the values that an assertion compared, put `pytest.register_assert_rewrite("agent_runtime.testing.store_contract")`
into your `conftest.py`.

Without pytest, `run_contract(make_store)` runs them all and reports. There is no way to excuse a store from a case.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.claims import Claiming, Renewing
from agent_runtime.testing.store_contract.crowds import Crowding
from agent_runtime.testing.store_contract.draft import Draft, Entry
from agent_runtime.testing.store_contract.ends import Deleting, Ending
from agent_runtime.testing.store_contract.keeping import Keeping
from agent_runtime.testing.store_contract.messages import Noticing, Posting
from agent_runtime.testing.store_contract.reads import Listing, Reading, Standing
from agent_runtime.testing.store_contract.recent import Recency
from agent_runtime.testing.store_contract.rings import Listening
from agent_runtime.testing.store_contract.strikes import Striking
from agent_runtime.testing.store_contract.writes import Batching, Writing

__all__ = ["Draft", "Entry", "Report", "StoreContract", "cases", "run_contract"]

Case: TypeAlias = "Callable[[StoreContract, CheckpointStore], Awaitable[None]]"


class StoreContract(
    Writing,
    Batching,
    Claiming,
    Renewing,
    Ending,
    Deleting,
    Posting,
    Noticing,
    Listening,
    Reading,
    Listing,
    Recency,
    Standing,
    Keeping,
    Crowding,
    Striking,
):
    """All cases. Each takes a store that nothing was written to."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a store did with the contract: the names of the cases it passed, and what was found in those it failed."""

    passed: tuple[str, ...]
    failed: Mapping[str, str]

    @property
    def holds(self) -> bool:
        """Whether the store passed every case."""
        return not self.failed

    def __str__(self) -> str:
        lines = [f"{len(self.passed)} passed, {len(self.failed)} failed"]
        return "\n".join(lines + [f"  {name}: {found}" for name, found in self.failed.items()])


def cases() -> dict[str, Case]:
    """Every case by its sentence, in the order of the specification."""
    found: dict[str, Case] = {}
    for theme in StoreContract.__mro__:
        for name, case in vars(theme).items():
            if name.startswith("test_"):
                found[name.removeprefix("test_").replace("_", " ")] = case
    return found


async def run_contract(make_store: Callable[[], Awaitable[CheckpointStore]], *, timeout_seconds: float = 60.0) -> Report:
    """Run every case on a store of its own, which `make_store` makes, empty, and which is closed afterwards."""
    if not __debug__:
        raise RuntimeError("the contract speaks in assertions, and `python -O` takes them away; run it without -O")
    passed: list[str] = []
    failed: dict[str, str] = {}
    for name, case in cases().items():
        try:
            async with asyncio.timeout(timeout_seconds):
                await _run_case(case, make_store)
        except Exception as error:  # whatever a store does wrong is a finding, and the other cases go on
            failed[name] = _finding(error)
        else:
            passed.append(name)
    return Report(tuple(passed), failed)


async def _run_case(case: Case, make_store: Callable[[], Awaitable[CheckpointStore]]) -> None:
    store = await make_store()
    try:
        await case(StoreContract(), store)
    finally:
        await store.close()


def _finding(error: Exception) -> str:
    """What went wrong, and where: an assertion that says nothing is quoted."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = str(error) or str(place.line)
    return f"{type(error).__name__} in {place.name}, line {place.lineno} of {place.filename}: {what}"
