"""A supervisor has old runs purged by a process of its own: now and then, one at a time, and never in the way of its work."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.errors import InvalidSetting
from agent_runtime.housekeeping import EVERY_SECONDS, Housekeeper, Purge
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.supervisor import Program, Supervisor, Terms, main
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import KEY, Bench, Place, Script, Worker
from tests.processes.job import until as until_then

TERMS = Terms(12.0, 3.0, 3.0, 5, 2)
NOTHING = Program("ours", (sys.executable, "-c", "pass"))
DAY = 86_400.0


class Desk:
    """A housekeeper whose purges write down how they were started, and end when they are let go."""

    def __init__(self, folder: Path, *, script: str = 'echo "$@" >> log; while [ ! -e go ]; do sleep 0.01; done') -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.told: list[tuple[str, Mapping[str, object]]] = []
        command = ("sh", "-c", f"cd '{folder}'; {script}", "purge")
        purge = Purge.of(30 * DAY, ("done", "failed"), command)
        self.keeper = Housekeeper(
            purge, name="ours", environ=os.environ, clock=self.clock, tell=lambda *told: self.told.append(told)
        )

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.told]

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def let_go(self) -> None:
        (self.folder / "go").touch()
        until_then(self._has_ended, "the purge has ended")

    def _has_ended(self) -> bool:
        if self.keeper.is_busy:
            self.keeper.look()
        return not self.keeper.is_busy


def test_a_purge_begins_with_the_first_look_and_again_only_after_its_time(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.keeper.look()
    until_then(lambda: len(desk.log()) == 1, "it was started")
    assert desk.log() == ["--older-than 2592000s --status done --status failed --name=ours --by supervisor"]
    desk.clock.advance(10 * EVERY_SECONDS)
    desk.keeper.look()
    assert desk.verbs == ["purging"], "one that takes its time is waited for by nobody, and is the only one"
    desk.let_go()
    assert desk.told[-1] == ("purged", {"code": 0})
    desk.keeper.look()
    until_then(lambda: len(desk.log()) == 2, "the next was started")
    desk.let_go()
    desk.clock.advance(EVERY_SECONDS - 1)
    desk.keeper.look()
    assert desk.verbs == ["purging", "purged"] * 2
    desk.clock.advance(1)
    desk.keeper.look()
    assert desk.verbs[4:] == ["purging"]
    desk.let_go()


def test_a_purge_that_fails_or_cannot_be_started_is_told_of_and_tried_again_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path, script="exit 3")
    desk.keeper.look()
    desk.let_go()
    assert desk.told[-1] == ("purged", {"code": 3})
    nowhere = Purge.of(DAY, "done", ("no-such-program-anywhere",))
    keeper = Housekeeper(nowhere, name="x", environ=os.environ, clock=desk.clock, tell=lambda *told: desk.told.append(told))
    keeper.look()
    keeper.look()
    assert desk.verbs == ["purging", "purged", "cannot-purge"]
    desk.clock.advance(EVERY_SECONDS)
    keeper.look()
    assert desk.verbs[-2:] == ["cannot-purge", "cannot-purge"]


def test_a_purge_that_is_on_its_way_is_ended_with_its_supervisor(tmp_path: Path) -> None:
    desk = Desk(tmp_path, script="echo $$ >> log; exec sleep 60")
    desk.keeper.look()
    until_then(lambda: len(desk.log()) == 1, "it was started")
    desk.keeper.stop()
    assert not Path(f"/proc/{desk.log()[0]}").exists()
    assert not desk.keeper.is_busy


def test_without_an_age_nothing_is_purged(tmp_path: Path) -> None:
    assert Purge.of(None, "done") is None
    keeper = Housekeeper(None, name="x", environ={}, clock=ManualClock(), tell=lambda *told: pytest.fail(str(told)))
    keeper.look()
    assert not keeper.is_busy


@pytest.mark.parametrize(
    ("after", "statuses"),
    [
        (0, "done"), (0.5, "done"), (-1, "done"), (float("nan"), "done"), (DAY, "paused"), (DAY, ()),
        (DAY, ("done", "running")),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_supervisor_may_purge_is_refused(after: float, statuses: str | tuple[str, ...]) -> None:
    with pytest.raises(InvalidSetting):
        Supervisor(
            MemoryCheckpointStore(), NOTHING, TERMS, environ={}, purge_after=after, purge_status=statuses
        )  # fmt: skip


def test_the_age_on_the_command_line_has_a_unit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "sqlite:///nowhere.db")
    assert main(["--purge-after", "30"]) == 1
    assert "as in 30d or 12h; found '30'" in capsys.readouterr().err


async def test_a_supervisor_has_the_old_runs_of_its_program_removed_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, bench = Place("sqlite", tmp_path), Bench()
    long_ago = ManualClock(datetime(2020, 1, 1, tzinfo=UTC))
    for run_id, name, options in (
        ("old", "ours", {"clock": long_ago}),
        ("other", "theirs", {"clock": long_ago}),
        ("new", "ours", {}),
    ):
        given: dict[str, Any] = options
        await Worker(place, **given).run(Script("done"), bench.registry, run_id, name=name, **given)
    environ = {**os.environ, "DATABASE_URL": f"sqlite:///{place.path}", "CHECKPOINT_KEY": base64.b64encode(KEY).decode()}
    supervisor = Supervisor(
        place.open(), NOTHING, TERMS, environ=environ, until_idle=True, as_json=True, purge_after=timedelta(days=30)
    )
    await supervisor.supervise()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in told] == ["supervisor", "purging", "purged"]
    assert told[-1]["code"] == 0
    assert [row.run_id for row in await place.open().list_runs()] == ["new", "other"]
    await place.close()
