"""A finished run in one file: whole or not there, over nothing, and with the key alone it is known whether it is as it was."""

from __future__ import annotations

import io
import json
import os
import random
import stat
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import RunContext, Runs, codec
from agent_runtime.archive import MOST_LINE, SUFFIX, archive_name, read_archive, verify_archive, write_archive
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    IdentityMismatch,
    InvalidSetting,
    NewerFormat,
    UnknownKey,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus, StoredRun
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.runs import report_of_archive
from agent_runtime.settlements import Outcome
from tests.bench import KEY, RING, Asked, Bench, Place, Script, Worker, error_of
from tests.journal.genuine import calls_of, with_checkpoint

CALL: list[Asked] = [("charge_i", {"amount": 1})]
CHARGE: list[Asked] = [("charge", {"amount": 1})]
OLD, NEW = b"the key that was used first, long ago", b"the key that is used from now on, here"


def of(place: Place, **options: object) -> Runs:
    return Runs(place.open(), **{"checkpoint_key": KEY, **options})  # type: ignore[arg-type]  # options by name


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """In memory: what a file holds has nothing to do with where the run was."""
    where = Place("memory", tmp_path)
    yield where
    await where.close()


@pytest.fixture
async def file(place: Place, tmp_path: Path) -> Path:
    """A small run that two workers worked, in its archive."""
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CALL, "done"), Bench().registry, "small run")
    await Worker(place).recover(Script(CALL, "done"), Bench().registry, "small run")
    path = tmp_path / "small.jsonl"
    await of(place).archive("small run", path)
    return path


def content(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, *lines: bytes) -> None:
    path.write_bytes(b"".join(lines))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def why_refused(path: Path, key: object = KEY) -> str:
    """Why the file does not verify; nothing in it may have been decoded."""
    with calls_of(codec.decode) as decoded, pytest.raises((CheckpointStoreCorrupt, NewerFormat)) as refused:
        verify_archive(path, checkpoint_key=key)  # type: ignore[arg-type]  # any form of a key
    assert decoded == []
    return str(refused.value)


async def test_an_archive_is_checked_with_the_key_alone_and_holds_what_was_stored(place: Place, file: Path) -> None:
    archived = verify_archive(file, checkpoint_key=KEY)
    [stored] = await place.open().load_many([RunId("small run")])
    assert stored is not None
    assert (archived.run_id, archived.status, archived.records) == ("small run", RunStatus.DONE, stored.row.number)
    assert archived.size == len(content(file))
    run = read_archive(file, checkpoint_key=KEY)
    assert run.records == stored.records
    assert run.row == stored.row._replace(idle_ms=0)
    with calls_of(codec.decode) as decoded:
        verify_archive(file, checkpoint_key=KEY)
    assert decoded == [], "it is known to be whole before anything in it is read"


async def test_an_archived_run_is_shown_as_the_stored_one_is(place: Place, file: Path) -> None:
    shown, stored = report_of_archive(file, checkpoint_key=KEY), await of(place).show("small run")
    assert (shown.info, shown.timeline) == (stored.info, stored.timeline)
    assert [segment.why for segment in shown.timeline.segments] == ["start", "recovery"]


def refuse(changed: bytes) -> None:
    """Refused, and by an error of ours on one line."""
    with pytest.raises(AgentRuntimeError) as refused:
        verify_archive(io.BytesIO(changed), checkpoint_key=KEY)
    assert "\n" not in str(refused.value)


async def test_every_byte_of_an_archive_that_is_changed_or_missing_is_found(place: Place) -> None:
    await Worker(place).run(Script("done"), Bench().registry)
    made = io.BytesIO()
    await of(place).archive("run", made)
    whole, chance = made.getvalue(), random.Random(7)
    for at in range(len(whole)):
        flipped = whole[at] ^ (1 << chance.randrange(8))
        refuse(whole[:at] + bytes([flipped]) + whole[at + 1 :])
        refuse(whole[:at] + whole[at + 1 :])
    verify_archive(io.BytesIO(whole), checkpoint_key=KEY)


def test_an_archive_that_is_cut_off_anywhere_is_found(file: Path) -> None:
    whole = content(file)
    for length in range(0, len(whole), 5):
        refuse(whole[:length])


async def test_what_is_wrong_is_told_with_its_line(place: Place, file: Path, tmp_path: Path) -> None:
    await Worker(place).run(Script(CALL, "other"), Bench().registry, "other")
    await of(place).archive("other", tmp_path / "other.jsonl")
    lines, others = lines_of(file), lines_of(tmp_path / "other.jsonl")

    def why(changed: Sequence[bytes]) -> str:
        write(file, b"".join(changed))
        return why_refused(file)

    assert "line 5: record 3 belongs here, found 4" in why([*lines[:4], lines[5], lines[4], *lines[6:]]), "swapped"
    assert "line 5: the seal of record 3 does not hold" in why([*lines[:4], others[4], *lines[5:]]), "two runs mixed"
    assert "line 2: the row is of another run" in why([lines[0], others[1], *lines[2:]])
    assert "line 6: record 4 belongs here, found 5" in why([*lines[:5], *lines[6:]]), "a record left out"
    assert f"line {len(lines)}: the file ends here" in why(lines[:-1])
    assert f"line {len(lines) - 1}: expected a record here, found 'end'" in why([*lines[:-2], lines[-1], lines[-1]])
    assert f"line {len(lines) + 1}: something follows the last line" in why([*lines, lines[-1]])
    assert "line 1: expected the first line of an archive" in why([b'{"name":"another program"}\n', *lines[1:]])
    assert "line 1: it is no line of an archive" in why([b"\x00\xff garbage \n", *lines])
    assert "line 1: the file ends here" in why([])
    assert "line 3: it is no line of an archive" in why([*lines[:2], lines[2].replace(b":", b": ", 1), *lines[3:]])
    assert "line 1: it is no header of an archive" in why([lines[0].replace(b'"version":1', b'"version":true'), *lines[1:]])
    assert "nothing" not in why(lines[:3])


def test_another_key_an_unknown_one_and_a_newer_form_are_named(file: Path) -> None:
    assert "line 2: the seal of the row does not hold" in why_refused(file, b"another key that is long enough")
    with pytest.raises(UnknownKey, match=r"small\.jsonl.*add that key to the ring"):
        verify_archive(file, checkpoint_key={"2030": NEW})
    write(file, content(file).replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(NewerFormat, match="form 2, and this version knows 1"):
        verify_archive(file, checkpoint_key=KEY)
    with pytest.raises(InvalidSetting, match="cannot be read"):
        verify_archive(file.with_name("nowhere"), checkpoint_key=KEY)


async def test_a_line_without_an_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"archive":"')
        file.truncate(2**30)  # a file with holes takes no room
    tracemalloc.start()
    try:
        refuse(b"[" * 2_000_000)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
        assert "no line of an archive is longer" in why_refused(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_LINE
    finally:
        tracemalloc.stop()


MADE_UP = [
    b"[" * 5000, b'{"archive":' * 5000, b'{"archive":1e999}', b"{}", b"[]", b"7", b'{"archive":' + b"9" * 5000 + b"}",
    b'{"archive":{}}', b'{"archive":NaN}', b"",
]  # fmt: skip


@pytest.mark.parametrize("line", MADE_UP, ids=range(len(MADE_UP)))
def test_no_line_that_somebody_made_up_does_more_than_be_refused(file: Path, line: bytes) -> None:
    lines = lines_of(file)
    for at in range(len(lines)):
        write(file, *lines[:at], line + b"\n", *lines[at + 1 :])
        assert f"line {at + 1}: " in why_refused(file)


def test_columns_of_another_type_are_refused(file: Path) -> None:
    lines = lines_of(file)
    values: list[object] = [None, True, 1.5, -1, 2**70, "x", "\ud800", [], {}]
    for at in range(1, len(lines)):
        [word] = plain = json.loads(lines[at])
        for column in plain[word]:
            for value in values:
                if plain[word][column] == value and type(plain[word][column]) is type(value):
                    continue
                changed = {word: {**plain[word], column: value}}
                line = json.dumps(changed, separators=(",", ":")).encode() + b"\n"
                refuse(b"".join([*lines[:at], line, *lines[at + 1 :]]))


async def test_genuine_parts_that_do_not_belong_together_are_refused(place: Place, file: Path) -> None:
    """Whoever has the key may seal a file of anything; what a reader gets is one run as it ended, or nothing."""
    run = read_archive(file, checkpoint_key=KEY)
    sealer = sealer_for(RING, tenant="", run_id=run.row.run_id)
    last, before = run.records[-1], run.records[-2]
    seal = sealer.record(last.number, last.epoch, last.kind, last.call, last.attempt, before.seal, b"another end")
    with_state = with_checkpoint(run, b"state")
    assert with_state.checkpoint is not None

    def sealed(**changes: Any) -> StoredRun:
        row = run.row._replace(**changes)
        return run._replace(row=row._replace(seal=sealer.row(row)))

    def why(other: StoredRun) -> str:
        made = io.BytesIO()
        write_archive(made, other, [], RING)
        made.seek(0)
        with pytest.raises(CheckpointStoreCorrupt) as refused:
            verify_archive(made, checkpoint_key=KEY)
        return str(refused.value)

    forked = run._replace(records=(*run.records[:-1], last._replace(body=b"another end", seal=seal)))
    assert "is not the one that the row names as the last" in why(forked)
    assert "a checkpoint stands here that no record names" in why(run._replace(checkpoint=with_state.checkpoint))
    assert "the one that is named is missing" in why(with_state._replace(checkpoint=None))
    other_state = with_state.checkpoint._replace(
        body=b"another", seal=sealer.checkpoint(with_state.checkpoint.step, b"another")
    )
    assert "the checkpoint is not the one" in why(with_state._replace(checkpoint=other_state))
    assert "the run has not ended: its status is running" in why(sealed(status=int(RunStatus.RUNNING)))
    assert "the seal of record" in why(sealed(epoch=1)), "no record is of a later epoch than the row"
    assert "expected a record here" in why(sealed(number=run.row.number + 1))
    whole = io.BytesIO()
    write_archive(whole, with_state, [], RING)
    whole.seek(0)
    assert read_archive(whole, checkpoint_key=KEY) == with_state


# Making one.


async def test_an_archive_is_private_and_goes_over_nothing_and_leaves_nothing_else(place: Place, file: Path) -> None:
    assert mode_of(file) == 0o600
    before = content(file)
    with pytest.raises(InvalidSetting, match="goes over nothing"):
        await of(place).archive("small run", file)
    assert content(file) == before
    link = file.with_name("link.jsonl")
    link.symlink_to(file.with_name("not there"))
    with pytest.raises(InvalidSetting, match="goes over nothing"):
        await of(place).archive("small run", link)
    with pytest.raises(InvalidSetting, match="name a file in a folder that is there"):
        await of(place).archive("small run", file.parent / "no folder" / "x.jsonl")
    assert {path.name for path in file.parent.iterdir()} - {"runs.db", "runs.db-wal", "runs.db-shm"} == {file.name, link.name}


async def test_an_archive_goes_to_an_open_file_too(place: Place, file: Path) -> None:
    target = io.BytesIO()
    archived = await of(place).archive("small run", target)
    assert target.getvalue() == content(file)
    assert archived.size == len(target.getvalue())


async def test_only_a_run_that_has_ended_is_archived(place: Place, tmp_path: Path) -> None:
    bench, path = Bench(), tmp_path / "x.jsonl"
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CHARGE, "x"), bench.registry, "dead")
    await error_of(Worker(place).recover(Script(CHARGE, "x"), bench.registry, "dead"))
    with pytest.raises(CheckpointConflict, match="is blocked; only a run that has ended is archived"):
        await of(place).archive("dead", path)
    with pytest.raises(CheckpointNotFound):
        await of(place).archive("nobody", path)
    await of(place).cancel("dead", by="ana", why="enough")
    await of(place).archive("dead", path)
    assert report_of_archive(path, checkpoint_key=KEY).info.why.startswith("cancelled by ana: enough; still in doubt")


async def test_a_run_is_archived_only_for_whom_it_is(place: Place, tmp_path: Path) -> None:
    await Worker(place).run(Script("done"), Bench().registry, "hers", ctx=RunContext(user="eve"))
    with pytest.raises(IdentityMismatch):
        await of(place, ctx=RunContext(user="ana")).archive("hers", tmp_path / "x.jsonl")
    await of(place, ctx=RunContext(user="eve")).archive("hers", tmp_path / "x.jsonl")


async def test_an_archive_carries_the_messages_to_its_run_whose_seals_hold(place: Place, tmp_path: Path) -> None:
    bench = Bench()
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(CHARGE, "x"), bench.registry)
    await error_of(Worker(place).recover(Script(CHARGE, "x"), bench.registry))
    assert await of(place).settle("run", "0", Outcome.done("paid"), by="ana", why="saw it")
    await Worker(place).recover(Script(CHARGE, "x"), bench.registry)
    [message] = await place.open().inbox(RunId("run"))
    await place.open().post(RunId("run"), message._replace(digest=b"d" * 32, kind="settlement", body=b"forged"))
    path = tmp_path / "x.jsonl"
    assert (await of(place).archive("run", path)).messages == 1
    assert verify_archive(path, checkpoint_key=KEY).messages == 1
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:-2], lines[-1]]))
    assert "what the last line says of all lines before it is not so" in why_refused(path)


async def test_a_run_whose_key_changed_is_archived_with_both(place: Place, tmp_path: Path) -> None:
    place.is_tampered = True  # it is of other keys than this place's
    old, both = {"old": OLD}, KeyRing({"old": OLD, "new": NEW}, "new")
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(Script(CALL, "done"), Bench().registry, checkpoint_key=old)
    await Worker(place).recover(Script(CALL, "done"), Bench().registry, checkpoint_key=both)
    path = tmp_path / "x.jsonl"
    await of(place, checkpoint_key=both).archive("run", path)
    verify_archive(path, checkpoint_key=both)
    kinds = [record.kind for record in read_archive(path, checkpoint_key=both).records]
    assert kinds.count(RecordKind.REKEYED) == 1
    with pytest.raises(UnknownKey, match="'old'"):
        verify_archive(path, checkpoint_key={"new": NEW})
    whole = path.read_bytes()
    for header in (
        b'[["new",1]]',
        b'[["old",1],["new",2]]',
        b'[["new",1],["new",%d]]' % (kinds.index(RecordKind.REKEYED) + 1),
    ):
        path.write_bytes(whole.replace(whole[whole.index(b'[["old"') : whole.index(b"]]") + 2], header, 1))
        why_refused(path, both)


async def test_an_archive_of_another_tenant_is_refused_where_one_is_named(place: Place, tmp_path: Path) -> None:
    place.is_tampered = True  # it is of another tenant than this place's
    await Worker(place).run(Script("done"), Bench().registry, tenant="t1")
    path = tmp_path / "x.jsonl"
    await of(place, tenant="t1").archive("run", path)
    assert verify_archive(path, checkpoint_key=KEY).tenant == "t1"
    with pytest.raises(CheckpointStoreCorrupt, match="of tenant 't1', expected 't2'"):
        verify_archive(path, checkpoint_key=KEY, tenant="t2")


async def test_a_run_that_is_not_as_it_was_written_is_not_archived(place: Place, tmp_path: Path) -> None:
    await Worker(place).run(Script(CALL, "done"), Bench().registry)
    place.is_tampered = True
    broken = of(place, checkpoint_key=b"another key that is long enough")
    with pytest.raises(CheckpointStoreCorrupt):
        await broken.archive("run", tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    "run_id", ["a/b", "..", ".", "a" * 512, "é" * 512, "con", "a b", "-x", "a%2Fb", "A", "a\\b", "#x", "*?"]
)
def test_the_file_of_a_run_has_a_name_that_no_other_run_has_and_that_stays_in_its_folder(run_id: str) -> None:
    name = archive_name(run_id)
    assert len(name.encode()) <= 255
    assert os.path.basename(name) == name
    assert not name.startswith(".")
    assert name.endswith(SUFFIX)
    assert name != archive_name(run_id + "x"[: 512 - len(run_id)] if len(run_id) < 512 else run_id[:-1] + "z")


def test_different_ids_have_different_files() -> None:
    ids = ["a/b", "a%2Fb", "a%252Fb", "x" * 511, "x" * 512, "é" * 100, "é" * 101, "#", "%23", "a.b", "a%2Eb"]
    assert len({archive_name(run_id) for run_id in ids}) == len(ids)
