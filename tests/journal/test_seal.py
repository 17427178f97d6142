"""Seals: the bytes they cover, keys and rings, key files, and a run that goes from one key to the next."""

from __future__ import annotations

import base64
import hmac
import stat
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.errors import CheckpointStoreCorrupt, InvalidKey, UnknownKey
from agent_runtime.ids import RunId
from agent_runtime.journal.keys import key_beside, parse_key
from agent_runtime.journal.records import FORMAT, NO_SEAL, RecordKind, RunStatus, StoredMessage, StoredRow
from agent_runtime.journal.seal import KeyRing, Sealer, open_message, open_run, sealer_for
from tests.bench import KEY, Bench, Place, Script, Worker, transcript
from tests.journal.genuine import RUN, work_until_killed
from tests.journal.genuine import script as genuine_script

OLD, NEW = b"the old key, of thirty-two bytes", b"the new key, of thirty-two bytes"
texts = st.text(max_size=20).filter(lambda text: text.isprintable())


def sized(text: str) -> bytes:
    return struct.pack(">I", len(text.encode())) + text.encode()


def by_hand(key: bytes, tenant: str, run_id: str, key_id: str, data: bytes) -> bytes:
    """A seal as the page of the protocol has it, by the standard library's own HMAC."""
    place = sized(tenant) + sized(run_id)
    own = hmac.digest(key, b"agent-runtime seal\x01" + place, "sha256")
    return hmac.digest(own, b"agent-runtime" + bytes([FORMAT]) + sized(key_id) + place + data, "sha256")


@given(key=st.binary(min_size=16, max_size=100), tenant=texts, run_id=texts, call=texts, body=st.binary(max_size=200),
       number=st.integers(1, 2**63 - 1), epoch=st.integers(1, 2**63 - 1), attempt=st.integers(0, 2**32 - 1),
       previous=st.binary(min_size=32, max_size=32))  # fmt: skip
def test_a_records_seal_is_the_hmac_over_its_place_its_predecessor_and_its_body(
    key: bytes, tenant: str, run_id: str, call: str, body: bytes, number: int, epoch: int, attempt: int, previous: bytes
) -> None:
    sealer = Sealer(key, key_id="k1", tenant=tenant, run_id=run_id)
    header = struct.pack(">cQQBIIQ", b"J", number, epoch, RecordKind.DONE, attempt, len(call.encode()), len(body))
    expected = by_hand(key, tenant, run_id, "k1", header + call.encode() + previous + body)
    assert sealer.record(number, epoch, RecordKind.DONE, call, attempt, previous, body) == expected


def test_the_seals_of_rows_checkpoints_and_messages_are_the_hmac_over_theirs() -> None:
    sealer = Sealer(KEY, key_id="k1", tenant="shop", run_id="run")
    owner, head = bytes(range(16)), b"h" * 32
    row = StoredRow(RunId("run"), FORMAT, "k1", "shop", "loop", "orders", RunStatus.PAUSED, 3, 2, owner, 9, head, 1, NO_SEAL)
    header = struct.pack(">cBQQQQII", b"R", RunStatus.PAUSED, 3, 2, 9, 1, 4, 6)
    assert sealer.row(row) == by_hand(KEY, "shop", "run", "k1", header + b"looporders" + owner + head)
    state = struct.pack(">cQQ", b"C", 3, 2) + b"{}"
    assert sealer.checkpoint(3, b"{}") == by_hand(KEY, "shop", "run", "k1", state)
    message = struct.pack(">cIQ", b"M", 7, 2) + b"verdict" + b"{}"
    assert sealer.message("verdict", b"{}") == by_hand(KEY, "shop", "run", "k1", message)


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_no_two_places_share_a_seal(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    def seal(tenant: str, run_id: str, call: str) -> bytes:
        sealer = Sealer(KEY, key_id="k", tenant=tenant, run_id=run_id)
        return sealer.record(1, 1, RecordKind.DONE, call, 0, NO_SEAL, b"")

    assert (seal(*one) == seal(*two)) is (one == two)


def test_what_stands_beside_each_other_is_told_apart() -> None:
    sealer = Sealer(KEY, key_id="k", tenant="", run_id="run")
    assert sealer.record(1, 1, 4, "ab", 0, NO_SEAL, b"c") != sealer.record(1, 1, 4, "a", 0, NO_SEAL, b"bc")
    assert sealer.message("ab", b"c") != sealer.message("a", b"bc")
    row = StoredRow(RunId("run"), FORMAT, "k", "", "ab", "c", 1, 0, 1, bytes(16), 1, NO_SEAL, 0, NO_SEAL)
    assert sealer.row(row) != sealer.row(row._replace(kind="a", name="bc"))


def test_a_message_that_somebody_else_sealed_is_told() -> None:
    mine, other = Sealer(KEY, key_id="k", tenant="", run_id="run"), Sealer(OLD, key_id="k", tenant="", run_id="run")
    message = StoredMessage(b"digest", "verdict", b"yes", mine.message("verdict", b"yes"))
    assert open_message(mine, message)
    for wrong in (
        message._replace(body=b"no"),
        message._replace(kind="cancel"),
        message._replace(seal=other.message("verdict", b"yes")),
        message._replace(seal=b""),
    ):
        assert not open_message(mine, wrong)


# Keys and rings.


def test_a_ring_is_made_of_a_key_of_a_mapping_or_of_itself() -> None:
    assert KeyRing.of(OLD) == KeyRing({"key": OLD}, "key")
    assert KeyRing.of(bytearray(OLD)) == KeyRing({"key": OLD}, "key")
    assert KeyRing.of({"2029": OLD, "2030": NEW}) == KeyRing({"2029": OLD, "2030": NEW}, "2030")
    ring = KeyRing({"a": OLD}, "a")
    assert KeyRing.of(ring) is ring


@pytest.mark.parametrize(
    "key",
    [None, "a string of many characters", 5, b"", b"short", b"fifteen bytes!!", {}, {"k": b"short"},
     {"k": "a text that is long"}, {"": OLD}, {"k" * 65: OLD}, {"a\n": OLD}, {1: OLD}, [OLD], memoryview(OLD)],
)  # fmt: skip
def test_what_is_no_key_is_refused_by_name_and_never_shown(key: object) -> None:
    with pytest.raises(InvalidKey) as refused:
        KeyRing.of(key)
    assert "old key" not in str(refused.value)
    assert "short'" not in str(refused.value)


def test_sixteen_bytes_are_enough_and_the_active_key_must_be_on_the_ring() -> None:
    assert KeyRing.of(bytes(16)).get("key", "run") == bytes(16)
    with pytest.raises(InvalidKey, match="'b'"):
        KeyRing({"a": OLD}, "b")


def test_a_ring_shows_its_ids_and_not_its_keys() -> None:
    ring = KeyRing({"b": OLD, "a": NEW}, "b")
    assert repr(ring) == "KeyRing(keys=['a', 'b'], active='b')"
    with pytest.raises(UnknownKey, match="'c'") as unknown:
        ring.get("c", "run")
    assert "old key" not in str(unknown.value)


def test_a_key_is_read_from_base64_and_from_a_file(tmp_path: Path) -> None:
    text = base64.b64encode(OLD).decode()
    path = tmp_path / "key"
    path.write_text(text[:10] + "\n" + text[10:] + "\n")
    assert parse_key(text) == parse_key(f"file:{path}") == OLD


@pytest.mark.parametrize("text", ["", "no base64!", "c2hvcnQ=", "ünicode", "file:", "file:/no/such/file", "YWJj" * 5 + "="])
def test_text_that_holds_no_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidKey):
        parse_key(text)


def test_a_key_file_that_holds_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe\x00" * 20)
    with pytest.raises(InvalidKey, match="key"):
        parse_key(f"file:{path}")


def test_a_key_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.db.key"
    assert key_beside(path, OLD) == OLD
    assert key_beside(path, NEW) == OLD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["runs.db.key"]


def test_a_key_file_that_cannot_be_made_or_read_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "runs.db.key"
    path.write_text("not a key")
    with pytest.raises(InvalidKey):
        key_beside(path, OLD)
    assert path.read_text() == "not a key"
    assert [file.name for file in tmp_path.iterdir()] == ["runs.db.key"]


# A run that goes from one key to the next.


async def run_under(place: Place, key: object) -> None:
    worker, model = Worker(place), Script([("charge_i", {"amount": 1})], "done")
    bench = Bench()
    bench.after = lambda *_: worker.die()  # type: ignore[assignment]  # it never returns, so it gives nothing to await
    await worker.run_and_die(model, bench.registry, RUN, checkpoint_key=key)


async def test_a_run_is_sealed_anew_under_the_active_key_when_it_is_picked_up(place: Place) -> None:
    place.is_tampered = True  # it is under keys of its own
    await run_under(place, {"2029": OLD})
    bench, model = Bench(), Script("never", "done")
    both = {"2029": OLD, "2030": NEW}
    result = await Worker(place).recover(model, bench.registry, RUN, checkpoint_key=both)
    [run] = await place.open().load_many([RunId(RUN)])
    assert run is not None
    assert (result.status, run.row.key_id) == ("done", "2030")
    [rekeyed] = [record for record in run.records if record.kind == RecordKind.REKEYED]
    assert (rekeyed.call, rekeyed.epoch) == ("2029", 2)
    open_run(KeyRing.of(both), run, tenant="")
    again = await Worker(place).recover(model, bench.registry, RUN, checkpoint_key={"2030": NEW, "2029": OLD})
    assert transcript(again) == transcript(result)
    for missing in ({"2030": NEW}, {"2029": OLD}):
        with pytest.raises(UnknownKey):
            await Worker(place).recover(model, bench.registry, RUN, checkpoint_key=missing)
    for one in range(len(run.records)):
        record = run.records[one]
        for change in ({"call": "2030"}, {"call": ""}, {"seal": NO_SEAL}, {"body": b"x"}):
            changed = run._replace(records=(*run.records[:one], record._replace(**change), *run.records[one + 1 :]))
            if changed != run:
                with pytest.raises(CheckpointStoreCorrupt):
                    open_run(KeyRing.of(both), changed, tenant="")


async def test_a_run_goes_through_three_keys(place: Place) -> None:
    place.is_tampered = True
    await run_under(place, {"a": OLD})
    bench = Bench()
    second = Worker(place)
    bench.after = lambda *_: second.die()  # type: ignore[assignment]  # it never returns
    await second.recover_and_die(genuine_script(), bench.registry, RUN, checkpoint_key={"a": OLD, "b": NEW})
    third = {"a": OLD, "b": NEW, "c": KEY}
    bench.after = Bench().after
    result = await Worker(place).recover(Script("never", "done"), bench.registry, RUN, checkpoint_key=third)
    [run] = await place.open().load_many([RunId(RUN)])
    assert run is not None
    assert result.status == "done"
    assert [r.call for r in run.records if r.kind == RecordKind.REKEYED] == ["a", "b"]
    open_run(KeyRing.of(third), run, tenant="")


async def test_a_worker_without_the_runs_key_is_told_which_and_changes_nothing(place: Place) -> None:
    await work_until_killed(place, Bench())
    before = await place.load(RUN)
    with pytest.raises(UnknownKey, match="'key'"):
        await Worker(place).recover(genuine_script(), Bench().registry, RUN, checkpoint_key={"other": NEW})
    after = await place.load(RUN)
    assert after._replace(row=before.row) == before


def test_the_sealer_of_a_run_is_the_active_keys_unless_another_is_named() -> None:
    ring = KeyRing({"a": OLD, "b": NEW}, "b")
    assert sealer_for(ring, tenant="", run_id="run").key_id == "b"
    assert sealer_for(ring, tenant="", run_id="run", key_id="a").key_id == "a"
