"""What is stored of a run cannot be changed, moved, left out or forged without being refused before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import codec
from agent_runtime.errors import CheckpointStoreCorrupt, NewerFormat, UnknownKey
from agent_runtime.journal.records import NO_OWNER, NO_SEAL, RunStatus, StoredRecord, StoredRun
from agent_runtime.journal.seal import open_run, sealer_for
from agent_runtime.tool_loop import recover_tool_loop
from tests.bench import KEY, RING, Bench, Place, Worker, error_of
from tests.journal.genuine import (
    RUN,
    SEALED,
    Showing,
    Watching,
    calls_of,
    changes,
    genuine_run,
    of_another_type,
    script,
    with_checkpoint,
    with_column,
)

REFUSED = (CheckpointStoreCorrupt, NewerFormat)


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    return Place("memory", tmp_path)


@pytest.fixture
async def run(place: Place) -> StoredRun:
    return await genuine_run(place)


def open_as_stored(run: StoredRun) -> None:
    open_run(RING, run, tenant="")


def assert_corrupt(run: StoredRun, how: str) -> None:
    try:
        open_as_stored(run)
    except CheckpointStoreCorrupt:
        return
    raise AssertionError(f"it was taken for genuine: {how}")


def test_the_run_that_is_tampered_with_is_genuine(run: StoredRun) -> None:
    open_as_stored(run)
    assert len({record.kind for record in run.records}) >= 4
    assert {record.epoch for record in run.records} == {1, 2}


@pytest.mark.parametrize("column", SEALED)
def test_every_changed_bit_of_every_sealed_column_of_the_row_is_refused(run: StoredRun, column: str) -> None:
    for changed in changes(getattr(run.row, column)):
        row = with_column(run.row, column, changed)
        with pytest.raises(REFUSED):
            open_as_stored(run._replace(row=row))


def test_every_changed_bit_of_every_column_of_every_record_is_refused(run: StoredRun) -> None:
    for at, record in enumerate(run.records):
        for column in StoredRecord._fields:
            for changed in changes(getattr(record, column)):
                with pytest.raises(CheckpointStoreCorrupt):
                    open_as_stored(with_record(run, at, with_column(record, column, changed)))


def test_every_changed_bit_of_a_checkpoint_is_refused(run: StoredRun) -> None:
    assert run.checkpoint is not None
    for column in run.checkpoint._fields:
        for changed in changes(getattr(run.checkpoint, column)):
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(run._replace(checkpoint=with_column(run.checkpoint, column, changed)))


def test_a_value_of_another_type_is_refused_in_every_column(run: StoredRun) -> None:
    assert run.checkpoint is not None
    for column in SEALED[1:]:
        for other in of_another_type(getattr(run.row, column)):
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(run._replace(row=with_column(run.row, column, other)))
    for at, record in enumerate(run.records):
        for column in StoredRecord._fields:
            for other in of_another_type(getattr(record, column)):
                with pytest.raises(CheckpointStoreCorrupt):
                    open_as_stored(with_record(run, at, with_column(record, column, other)))
    for column in run.checkpoint._fields:
        for other in of_another_type(getattr(run.checkpoint, column)):
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(run._replace(checkpoint=with_column(run.checkpoint, column, other)))


async def test_a_key_id_that_nobody_has_is_named_and_a_higher_format_too(run: StoredRun) -> None:
    with pytest.raises(UnknownKey, match="key-of-2030"):
        open_as_stored(run._replace(row=run.row._replace(key_id="key-of-2030")))
    with pytest.raises(NewerFormat, match="format 2"):
        open_as_stored(run._replace(row=run.row._replace(format=2)))
    with pytest.raises(CheckpointStoreCorrupt):
        open_as_stored(run._replace(row=run.row._replace(format=0)))


# Records that are genuine and not where they belong.


def with_record(run: StoredRun, at: int, *records: StoredRecord) -> StoredRun:
    """The run with other records in the place of one."""
    return run._replace(records=run.records[:at] + records + run.records[at + 1 :])


def renumbered(records: tuple[StoredRecord, ...]) -> tuple[StoredRecord, ...]:
    return tuple(record._replace(number=at) for at, record in enumerate(records, start=1))


def moved_records(records: tuple[StoredRecord, ...]) -> Iterator[tuple[str, tuple[StoredRecord, ...]]]:
    """Every swap of two, every one left out, every one twice, every tail cut, all backwards; under old or new numbers."""
    yield "backwards", records[::-1]
    for one, two in combinations(range(len(records)), 2):
        swapped = list(records)
        swapped[one], swapped[two] = swapped[two], swapped[one]
        yield f"swapped {one} {two}", tuple(swapped)
    for at in range(len(records)):
        yield f"without {at}", records[:at] + records[at + 1 :]
        yield f"twice {at}", records[: at + 1] + records[at:]
        yield f"instead of the next {at}", (*records[: at + 1], *records[at : at + 1], *records[at + 2 :])
        yield f"up to {at}", records[:at]


def genuine_records_moved(run: StoredRun) -> Iterator[tuple[str, StoredRun]]:
    """Each of these under the row as it is, and under a row whose unsealed-looking columns were made to fit."""
    for how, records in moved_records(run.records):
        for name, given in ((how, records), (f"{how}, renumbered", renumbered(records))):
            if given == run.records:
                continue
            yield name, run._replace(records=given)
            head = given[-1].seal if given else run.row.head
            row = run.row._replace(number=len(given), head=head)
            yield f"{name}, row made to fit", run._replace(row=row, records=given)


def test_every_swap_deletion_repetition_and_cut_of_records_is_refused(run: StoredRun) -> None:
    cases = list(genuine_records_moved(run))
    assert len(cases) > 400
    for how, moved in cases:
        assert_corrupt(moved, how)


async def test_a_genuine_record_of_another_run_or_tenant_is_refused_in_every_place(place: Place, run: StoredRun) -> None:
    foreign = [await genuine_run(place, "order-8"), await genuine_run(place, RUN + "b", tenant="shop")]
    for other in foreign:
        for at in range(min(len(run.records), len(other.records))):
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(with_record(run, at, other.records[at]))
        with pytest.raises(CheckpointStoreCorrupt):
            open_as_stored(run._replace(records=other.records))
        with pytest.raises(CheckpointStoreCorrupt):
            open_as_stored(run._replace(checkpoint=other.checkpoint))
        with pytest.raises(CheckpointStoreCorrupt):
            open_as_stored(other._replace(row=other.row._replace(run_id=run.row.run_id)))
        with pytest.raises(CheckpointStoreCorrupt):
            open_as_stored(run._replace(row=run.row._replace(seal=other.row.seal)))


async def test_a_whole_run_of_another_tenant_is_refused(tmp_path: Path) -> None:
    other = await genuine_run(Place("memory", tmp_path), tenant="shop")
    open_run(RING, other, tenant="shop")
    for tenant in ("", "shop2", "sho"):
        with pytest.raises(CheckpointStoreCorrupt):
            open_run(RING, other, tenant=tenant)
        with pytest.raises(CheckpointStoreCorrupt):
            open_run(RING, other._replace(row=other.row._replace(tenant=tenant)), tenant=tenant)


async def test_a_seal_of_one_purpose_is_none_for_another(run: StoredRun) -> None:
    assert run.checkpoint is not None
    seals = [run.row.seal, run.checkpoint.seal, run.records[0].seal]
    for seal in seals:
        if seal != run.row.seal:
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(run._replace(row=run.row._replace(seal=seal)))
        if seal != run.checkpoint.seal:
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(run._replace(checkpoint=run.checkpoint._replace(seal=seal)))


# What only a holder of the key could write, by a mistake of ours or on two sides of a fork.


def sealed_again(run: StoredRun, change: Callable[[StoredRecord], StoredRecord]) -> StoredRun:
    """The run as if its writer had noted its records like that."""
    sealer, previous, records = sealer_for(RING, tenant="", run_id=RUN), NO_SEAL, []
    for record in map(change, run.records):
        previous = sealer.record(record.number, record.epoch, record.kind, record.call, record.attempt, previous, record.body)
        records.append(record._replace(seal=previous))
    row = run.row._replace(head=previous)
    return run._replace(row=row._replace(seal=sealer.row(row)), records=tuple(records))


def test_the_records_of_one_side_of_a_fork_are_refused_under_the_row_of_the_other(run: StoredRun) -> None:
    last = run.row.number - 1  # before the record that names the checkpoint
    other = sealed_again(run, lambda record: record._replace(body=b"{}") if record.number == last else record)
    open_as_stored(other)
    assert_corrupt(run._replace(records=other.records), "records of the other side")
    assert_corrupt(run._replace(row=other.row), "row of the other side")


def test_an_epoch_that_falls_or_is_ahead_of_the_row_is_refused_even_when_every_seal_holds(run: StoredRun) -> None:
    open_as_stored(sealed_again(run, lambda record: record))
    last = run.row.number
    assert_corrupt(sealed_again(run, lambda r: r._replace(epoch=1) if r.number == last else r), "an epoch that falls")
    assert_corrupt(sealed_again(run, lambda r: r._replace(epoch=3) if r.number == last else r), "an epoch ahead of the row")
    assert_corrupt(sealed_again(run, lambda r: r._replace(epoch=2) if r.number == 1 else r), "an epoch that rises too early")


@pytest.mark.parametrize("kept", [0, 1, 12])
def test_a_missing_tail_is_counted(run: StoredRun, kept: int) -> None:
    with pytest.raises(CheckpointStoreCorrupt, match=f"counts {run.row.number} records and {kept} are there"):
        open_as_stored(run._replace(records=run.records[:kept]))


# Rows and records of mixed age.


async def states_of_a_run(place: Place) -> list[StoredRun]:
    """A run as it was stored after each commit of its life, the end included."""
    watching = Watching(place.open())
    worker = Worker(place)
    worker.inner = watching
    await worker.run(script(), Bench().registry, RUN, name="orders")
    return watching.states


async def test_an_older_genuine_row_with_newer_records_is_refused_and_so_is_the_reverse(place: Place) -> None:
    states = await states_of_a_run(place)
    assert len(states) >= 6
    for one, two in combinations(states, 2):
        for mixed in (one._replace(records=two.records), two._replace(records=one.records)):
            with pytest.raises(CheckpointStoreCorrupt):
                open_as_stored(mixed)


async def test_a_whole_run_put_back_to_an_older_genuine_state_is_not_seen(place: Place) -> None:
    for older in await states_of_a_run(place):
        open_as_stored(older)


async def test_a_genuine_checkpoint_of_another_moment_is_refused_and_so_is_a_missing_one(run: StoredRun) -> None:
    later = with_checkpoint(run, b'{"cursor":4}')
    open_as_stored(later)
    for other in (run.checkpoint, None):
        with pytest.raises(CheckpointStoreCorrupt):
            open_as_stored(later._replace(checkpoint=other))
    with pytest.raises(CheckpointStoreCorrupt):
        open_as_stored(run._replace(checkpoint=later.checkpoint))


async def test_a_checkpoint_that_the_journal_never_named_is_refused(run: StoredRun, place: Place) -> None:
    [plain] = await place.open().load_many([run.row.run_id])
    assert plain is not None
    open_as_stored(plain)
    with pytest.raises(CheckpointStoreCorrupt):
        open_as_stored(plain._replace(checkpoint=run.checkpoint))


# The whole way: nothing is decoded, claimed or run.


def status_flips(run: StoredRun) -> list[tuple[str, StoredRun]]:
    return [
        (f"status {status.name}", run._replace(row=run.row._replace(status=status)))
        for status in RunStatus
        if status != run.row.status
    ]


def changed_runs(run: StoredRun) -> list[tuple[str, StoredRun]]:
    """One or two changes of each column, and some of every way of moving genuine records."""
    cases = list(genuine_records_moved(run))[::7]  # all of them have been refused above, by the check that stands first
    for column in SEALED[1:]:
        some = list(changes(getattr(run.row, column)))
        cases += [(f"row {column}", run._replace(row=with_column(run.row, column, new))) for new in (some[0], some[-1])]
    for at, record in enumerate(run.records):
        for column in StoredRecord._fields:
            new = next(changes(getattr(record, column)))
            cases.append((f"record {at} {column}", with_record(run, at, with_column(record, column, new))))
        cases.append((f"record {at} unreadable", with_record(run, at, record._replace(body=b"\xff{"))))
    cases += status_flips(run)
    cases.append(("epoch lowered", run._replace(row=run.row._replace(epoch=1))))
    cases.append(("owner taken away", run._replace(row=run.row._replace(owner=NO_OWNER))))
    cases.append(("head cut", run._replace(row=run.row._replace(head=b""))))
    return cases


async def test_a_changed_run_is_refused_before_anything_is_decoded_claimed_or_run(place: Place, run: StoredRun) -> None:
    for how, changed in changed_runs(run._replace(checkpoint=None)):
        shown, model, bench = Showing(place.open(), changed), script(), Bench()
        with calls_of(codec.decode) as decoded:
            error = await error_of(recover_tool_loop(model, bench.registry, RUN, checkpoints=shown, checkpoint_key=KEY))
        assert isinstance(error, REFUSED), (how, error)
        assert decoded == [], how
        assert shown.writes == [], how
        assert (model.asked, bench.entered.total(), bench.effects) == (0, 0, 0), how


async def test_the_unchanged_run_would_have_been_picked_up_by_the_same_call(place: Place, run: StoredRun) -> None:
    model, bench = script(), Bench()
    with calls_of(codec.decode) as decoded:
        result = await recover_tool_loop(model, bench.registry, RUN, checkpoints=place.open(), checkpoint_key=KEY)
    assert decoded != []
    assert result.status == "done"


async def test_permissions_to_rerun_or_take_over_do_not_weaken_the_check(place: Place, run: StoredRun) -> None:
    changed = with_record(run, 3, run.records[3]._replace(body=b"{}"))._replace(checkpoint=None)
    options: list[dict[str, Any]] = [{"take_over": True}, {"rerun_in_doubt": True}, {"commits": "each"}]
    for option in options:
        shown = Showing(place.open(), changed)
        with pytest.raises(CheckpointStoreCorrupt):
            await recover_tool_loop(script(), Bench().registry, RUN, checkpoints=shown, checkpoint_key=KEY, **option)
        assert shown.writes == []


async def test_a_run_sealed_under_another_key_of_the_same_name_is_refused(place: Place, run: StoredRun) -> None:
    shown, model = Showing(place.open(), run), script()
    other = {"key": b"another key, of the same name!!!"}
    with pytest.raises(CheckpointStoreCorrupt):
        await recover_tool_loop(model, Bench().registry, RUN, checkpoints=shown, checkpoint_key=other)
    assert (shown.writes, model.asked) == ([], 0)
