"""What is told of a run that is not as it was written: its records up to the first that does not hold, and nothing past it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from agent_runtime import RunContext
from agent_runtime.cli import main
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointNotFound, CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal import seal
from agent_runtime.journal.keys import KeyRing
from agent_runtime.journal.records import LostBody, RecordKind, StoredRecord, StoredRun
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.runs import RunReport, Runs
from agent_runtime.timeline import Timeline, read_timeline
from tests.bench import KEY, RING, Bench, Delegate, Place, Script, Worker
from tests.keys.rings import HIDING, NEXT, OLD, REVOKING, STILL_OLD

ASKS = [("charge_i", {"amount": 80})]


class Edited(Delegate):
    """A store that gives the runs that it loads as somebody has changed them."""

    def __init__(self, inner: CheckpointStore, edit: Callable[[StoredRun], StoredRun]) -> None:
        super().__init__(inner)
        self._edit = edit

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return [None if run is None else self._edit(run) for run in await super().load_many(run_ids)]


def at(index: int, **change: object) -> Callable[[StoredRun], StoredRun]:
    def edit(run: StoredRun) -> StoredRun:
        records = list(run.records)
        records[index] = records[index]._replace(**change)  # type: ignore[arg-type]
        return run._replace(records=tuple(records))

    return edit


def without(index: int) -> Callable[[StoredRun], StoredRun]:
    return lambda run: run._replace(records=run.records[:index] + run.records[index + 1 :])


async def inspected(place: Place, edit: Callable[[StoredRun], StoredRun], ring: KeyRing = RING) -> RunReport:
    return await Runs(Edited(place.open(), edit), checkpoint_key=ring).inspect("run")


async def recovered(place: Place, first: KeyRing = RING, then: KeyRing = RING) -> StoredRun:
    """A run that one worker left in the middle and another ended; as it is stored."""
    bench = Bench()
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(
        Script(ASKS, "done"), bench.registry, checkpoint_key=first
    )  # fmt: skip
    await Worker(place).recover(Script(ASKS, "done"), bench.registry, checkpoint_key=then)
    [run] = await place.open().load_many([RunId("run")])
    assert run is not None
    return run


def plain(timeline: Timeline) -> dict[str, object]:
    return asdict(timeline)


@pytest.fixture(params=[("memory", RING, RING), ("memory", HIDING, HIDING), ("memory", STILL_OLD, HIDING)])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, KeyRing, KeyRing]:
    kind, first, then = request.param
    return Place(kind, tmp_path), first, then


async def test_of_each_record_that_is_edited_in_turn_those_before_it_are_told_and_none_after(
    kept: tuple[Place, KeyRing, KeyRing],
) -> None:
    place, first, then = kept
    run = await recovered(place, first, then)
    whole = seal.read_run(then, run, tenant="")[0].records
    assert len(whole) > 8
    for index, record in enumerate(run.records):
        edits = {"body": record.body + b" ", "seal": bytes(32), "epoch": record.epoch + 9, "attempt": record.attempt + 1,
                 "call": record.call + "0", "kind": RecordKind.ENDED, "number": 99}  # fmt: skip
        if record.kind == RecordKind.ENDED:
            del edits["kind"]
        for column, value in edits.items():
            report = await inspected(place, at(index, **{column: value}), then)
            assert report.info.status == "corrupt"
            assert (report.sound, report.broken) == (index, index + 1), column
            assert plain(report.timeline) == plain(read_timeline(whole[:index]))
            if column == "body":
                assert f"record {index + 1} does not hold" in report.info.why
        lost = await inspected(place, at(index, body=LostBody.of(b"x", "its file is gone")), then)
        assert lost.sound == index
        assert "its file is gone" in lost.info.why
        gap = await inspected(place, without(index), then)
        assert gap.sound == index
        assert gap.broken == (index + 1 if index + 1 < len(run.records) else None)


async def test_what_does_not_verify_is_neither_decoded_nor_decrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("memory", tmp_path)
    await recovered(place, HIDING, HIDING)
    shown: list[int] = []
    genuine = seal.Sealer.show_record

    def show(self: seal.Sealer, record: StoredRecord) -> StoredRecord:
        shown.append(record.number)
        return genuine(self, record)

    monkeypatch.setattr(seal.Sealer, "show_record", show)
    report = await inspected(place, at(5, body=b"{}"), HIDING)
    assert shown == [1, 2, 3, 4, 5]
    assert sum(len(segment.moments) for segment in report.timeline.segments) == 5


async def test_where_the_row_the_state_or_the_end_is_changed_each_record_that_is_there_is_told(place: Place) -> None:
    run = await recovered(place)
    for edit in (
        lambda it: it._replace(row=it.row._replace(status=6)),
        lambda it: it._replace(row=it.row._replace(seal=bytes(32))),
        lambda it: it._replace(row=it.row._replace(key_id="another")),
        lambda it: it._replace(row=it.row._replace(owner="text", number=None)),
    ):
        report = await inspected(place, edit)
        assert (report.sound, report.broken, report.info.name) == (len(run.records), None, "")
    cut = await inspected(place, lambda it: it._replace(records=it.records[:-2]))
    assert (cut.sound, cut.broken) == (len(run.records) - 2, None)
    assert f"counts {len(run.records)} records and {len(run.records) - 2} are there" in cut.info.why


async def test_what_a_revoked_key_alone_vouches_for_is_not_told(tmp_path: Path) -> None:
    place = Place("memory", tmp_path)
    run = await recovered(place, OLD, NEXT)
    turn = next(record.number for record in run.records if record.kind == RecordKind.REKEYED)
    inside = await inspected(place, at(turn - 2, body=b"{}"), REVOKING)
    assert (inside.sound, inside.broken) == (0, 1)
    past = await inspected(place, at(turn, body=b"{}"), REVOKING)
    assert past.sound == turn, "the key that followed vouches for it"
    stranger = await inspected(place, lambda it: it, RING)
    assert (stranger.sound, stranger.broken) == (0, 1), "another's key reads nothing"


async def test_a_run_as_it_was_written_is_told_like_show_and_whose_a_corrupt_one_is_nobody_else_learns(place: Place) -> None:
    await recovered(place)
    runs = Runs(place.open(), checkpoint_key=KEY)
    assert await runs.inspect("run") == await runs.show("run")
    with pytest.raises(CheckpointNotFound):
        await runs.inspect("nothing")
    with pytest.raises(CheckpointStoreCorrupt, match="record 3"):
        await Runs(Edited(place.open(), at(2, body=b"")), checkpoint_key=KEY, ctx=RunContext()).inspect("run")


def test_the_command_shows_what_holds_of_a_file_that_was_edited_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("sqlite", tmp_path)

    async def make() -> None:
        await recovered(place)
        await place.close()

    asyncio.run(make())
    monkeypatch.setenv("CHECKPOINT_KEY", base64.b64encode(KEY).decode())
    edited = tmp_path / "edited.db"
    shutil.copy(place.path, edited)
    with sqlite3.connect(edited) as connection:
        connection.execute("UPDATE journal SET body = CAST('{}' AS BLOB) WHERE number = 6")
    connection.close()
    assert main(["show", "run", "--store", f"sqlite:///{place.path}"]) == 0
    whole = capsys.readouterr().out
    assert main(["show", "run", "--store", f"sqlite:///{edited}"]) == 1
    out, said = capsys.readouterr()
    assert said.startswith("ERROR CheckpointStoreCorrupt: ")
    assert "record 6 does not hold" in out
    assert "records 1 to 5; from record 6 on none can be believed" in out
    assert "     5 " in out
    assert "     6 " not in out
    assert "     6 " in whole
    assert main(["show", "run", "--json", "--store", f"sqlite:///{edited}"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["sound"], told["broken"]) == ("corrupt", 5, 6)
