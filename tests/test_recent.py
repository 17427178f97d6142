"""The list of a face, the run that was last changed first: page by page, by what is true of each, and soon at its end."""

from __future__ import annotations

import pytest

from agent_runtime import InvalidSetting, RunContext, Runs, ToolRegistry
from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredRow
from agent_runtime.runs import STATUSES
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import KEY, Counting, Delegate, Place, Script, Worker


async def fill(place: Place, count: int, clock: ManualClock) -> list[str]:
    """So many runs, each a second after the one before, of two users in turn; their ids, the newest first."""
    for at in range(count):
        clock.advance(1)
        user = RunContext(user=("ana", "bo")[at % 2])
        await Worker(place, clock=clock).run(Script("done"), ToolRegistry(), f"r-{at * 7 % 10}-{at}", ctx=user, clock=clock)
    return [f"r-{at * 7 % 10}-{at}" for at in reversed(range(count))]


async def walk(runs: Runs, **options: object) -> list[list[str]]:
    """The ids of all pages."""
    pages, before = list[list[str]](), None
    while True:
        page = await runs.recent(before=before, **options)  # type: ignore[arg-type]
        pages.append([info.run_id for info in page.runs])
        if page.after is None:
            return pages
        before = page.after


async def test_pages_hold_each_run_once_and_the_newest_first(place: Place) -> None:
    clock = ManualClock()
    ids = await fill(place, 9, clock)
    runs = Runs(place.open(clock), checkpoint_key=KEY)
    assert await walk(runs, limit=4) == [ids[:4], ids[4:8], ids[8:]]
    assert await walk(runs, limit=9) == [ids], "and none after the last"
    assert await walk(runs, limit=2, status="done") == [ids[at : at + 2] for at in range(0, 9, 2)]
    assert await walk(runs.for_context(RunContext(user="ana")), limit=2) == [ids[0:3:2], ids[4:7:2], ids[8:]]
    assert await walk(runs, name="another") == [[]]


@pytest.mark.parametrize("status", ["cancelled", "failed", "paused", "in-doubt", "quarantined"])
async def test_a_status_that_no_run_has_is_answered_by_one_read(place: Place, status: str) -> None:
    await fill(place, 3, ManualClock())
    store = Counting(place.open())
    assert (await Runs(store, checkpoint_key=KEY).recent(status=status, limit=1)).runs == []
    assert store.verbs == {"list_recent": 1}


class Changed(Delegate):
    """A store whose rows of some runs were changed."""

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        rows = await super().list_recent(status=status, before=before, limit=limit)
        return [row._replace(step=99) if row.run_id in ("r-7-1", "r-1-3") else row for row in rows]


async def test_what_is_corrupt_is_listed_as_such_among_the_others_and_can_be_picked(place: Place) -> None:
    ids = await fill(place, 5, ManualClock())
    runs = Runs(Changed(place.open()), checkpoint_key=KEY)
    assert await walk(runs, limit=1, status="corrupt") == [["r-1-3"], ["r-7-1"]]
    assert await walk(runs, limit=1, status="done") == [[ids[0]], [ids[2]], [ids[4]]]
    assert [info.status for info in (await runs.recent()).runs] == ["done", "corrupt", "done", "corrupt", "done"]


@pytest.mark.parametrize("before", ["", "x", "1", "1:", ":a", "-1:a", "9" * 30 + ":a", "²:a"])
async def test_a_place_that_no_page_named_is_refused(place: Place, before: str) -> None:
    with pytest.raises(InvalidSetting, match="before= is what"):
        await Runs(place.open(), checkpoint_key=KEY).recent(before=before)


async def test_a_word_that_no_run_is_shown_as_is_refused(place: Place) -> None:
    runs = Runs(place.open(), checkpoint_key=KEY)
    with pytest.raises(InvalidSetting):
        await runs.recent(status="nonsense")
    for status in STATUSES:
        assert (await runs.recent(status=status)).runs == []
