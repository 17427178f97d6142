"""A key that encrypts: what is stored tells nothing, what comes back is the same, and each body stays in its place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime import codec
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, open_messages, write_message
from agent_runtime.journal.cipher import HIDDEN_BYTES, Cipher
from agent_runtime.journal.keys import KeyRing
from agent_runtime.journal.records import NO_SEAL, RecordKind, StoredRun
from agent_runtime.journal.seal import IN_CLEAR, Sealer, derive_key, open_run, read_run, sealer_for
from agent_runtime.runs import Runs
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tools import ToolRegistry
from tests.bench import Bench, Place, Script, Worker, expect_death, results_in, transcript
from tests.keys.rings import ALL_HIDING, BACK, HIDING, KEYS, STILL_OLD, keys_of, runs_of
from tests.keys.story import MARKER, At, said_under_a_wrong_key, stored_bodies, tell
from tests.standing import bring_to

OPENERS: list[Callable[[Path], Any]] = [
    SQLiteCheckpointStore,
    lambda path: SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{path}"),
]


@pytest.mark.parametrize("opens", OPENERS, ids=["sqlite", "sqlalchemy"])
async def test_a_secret_is_nowhere_in_the_files_of_a_store_while_it_is_open_and_after(
    tmp_path: Path, opens: Callable[[Path], Any]
) -> None:
    plain, hidden = opens(tmp_path / "plain.db"), opens(tmp_path / "hidden.db")
    told = await tell(plain, STILL_OLD)
    assert await tell(hidden, ALL_HIDING) == told, "encrypted runs come to what others come to"
    assert MARKER in str(told)
    assert MARKER.encode() in _bytes_of(tmp_path, "plain.db"), "else nobody would find it anywhere"
    assert MARKER.encode() in _bytes_of(tmp_path, "plain.db-wal"), "which is looked at as well"
    assert MARKER.encode() not in _bytes_of(tmp_path, "hidden.db")
    assert MARKER not in await said_under_a_wrong_key(hidden)
    await plain.close()
    await hidden.close()
    assert MARKER.encode() not in _bytes_of(tmp_path, "hidden.db")


def _bytes_of(folder: Path, name: str) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob(f"{name}*"))


async def test_only_who_holds_a_run_and_digests_of_what_is_hidden_can_be_read() -> None:
    store = MemoryCheckpointStore()
    await tell(store, ALL_HIDING)
    for row in await store.list_runs():
        for record in await store.calls(row.run_id):
            if record.kind in IN_CLEAR:
                assert MARKER.encode() not in record.body
            else:
                with pytest.raises(ValueError, match=r"utf-8|JSON|bytes"):
                    codec.decode(record.body)
        for body in await stored_bodies(store, row.run_id):
            assert MARKER.encode() not in body
    assert {RecordKind.CLAIMED, RecordKind.CHECKPOINT} == IN_CLEAR


async def test_nothing_is_hidden_twice_alike() -> None:
    store = MemoryCheckpointStore()
    await tell(store, ALL_HIDING)
    seen: list[bytes] = []
    for row in await store.list_runs():
        hidden = [record.body for record in await store.calls(row.run_id) if record.kind not in IN_CLEAR]
        seen += [body[:12] for body in hidden]
    assert len(seen) == len(set(seen)) > 40


texts = st.text(max_size=30).filter(lambda text: max(text, default=" ") < "\ud800" or max(text) > "\udfff")
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=10)
@given(given_values=st.lists(values, min_size=2, max_size=2), point=st.sampled_from(list(CrashPoint)), seq=st.integers(0, 1))
async def test_an_encrypted_run_is_picked_up_like_any_other(given_values: list[object], point: CrashPoint, seq: int) -> None:
    came = []
    for ring in (STILL_OLD, ALL_HIDING):
        place, tools, results = At(MemoryCheckpointStore()), ToolRegistry(), list(given_values)

        @tools.tool(idempotent=True)
        async def give(at: int, _: object = None, results: object = results) -> object:
            assert isinstance(results, list)
            return results[at]

        script = Script([("give", {"at": 0})], [("give", {"at": 1})], "done")
        await expect_death(Worker(place).killed_at(point, seq).run(script, tools, checkpoint_key=ring))
        if not await place.open().list_runs():  # it died before anything was stored
            return
        result = await Worker(place).recover(script, tools, checkpoint_key=ring)
        came.append((result.output, results_in(result.messages), [result.run_id, result.status]))
    assert came[0] == came[1]


# What is hidden is bound to its place.


async def _hidden_run() -> StoredRun:
    store = MemoryCheckpointStore()
    await tell(store, ALL_HIDING)
    [run] = await store.load_many([RunId("d")])
    assert run is not None
    return run


async def test_a_hidden_body_that_stands_elsewhere_does_not_show_even_where_its_seal_is_made_to_hold() -> None:
    run = await _hidden_run()
    sealer = sealer_for(ALL_HIDING, tenant="", run_id="d")
    shown = [record for record in run.records if record.kind not in IN_CLEAR]
    for one, other in pairwise(shown):
        with pytest.raises(CheckpointStoreCorrupt, match="does not decrypt"):
            sealer.show_record(one._replace(body=other.body))
        for change in ({"number": one.number + 1}, {"epoch": 9}, {"call": f"{one.call}x"}, {"attempt": 7}, {"body": b""}):
            with pytest.raises(CheckpointStoreCorrupt, match="does not decrypt"):
                sealer.show_record(one._replace(**change))
    assert run.checkpoint is not None
    with pytest.raises(CheckpointStoreCorrupt, match="does not decrypt"):
        sealer.show_state(run.checkpoint._replace(step=run.checkpoint.step + 1))
    elsewhere = sealer_for(ALL_HIDING, tenant="", run_id="e")
    with pytest.raises(CheckpointStoreCorrupt, match="does not decrypt"):
        elsewhere.show_record(shown[0])


async def test_a_hidden_body_is_sealed_as_it_is_stored_so_that_it_verifies_unread() -> None:
    run = await _hidden_run()
    open_run(ALL_HIDING, run, tenant="")
    record = run.records[2]
    changed = record._replace(body=record.body[:-1] + bytes([record.body[-1] ^ 1]))
    with pytest.raises(CheckpointStoreCorrupt, match="seal of record 3"):
        read_run(ALL_HIDING, run._replace(records=(*run.records[:2], changed, *run.records[3:])), tenant="")


@pytest.mark.parametrize("rings", [(STILL_OLD, ALL_HIDING), (ALL_HIDING, STILL_OLD)], ids=["plain", "hidden"])
async def test_a_ring_that_is_wrong_about_what_a_key_does_finds_that_no_seal_holds(rings: tuple[KeyRing, KeyRing]) -> None:
    store = MemoryCheckpointStore()
    await tell(store, rings[0])
    with pytest.raises(CheckpointStoreCorrupt, match="encrypts on one ring and not on another"):
        await Runs(store, checkpoint_key=rings[1]).show("a")


async def test_a_run_goes_on_to_a_key_that_encrypts_and_back_and_hides_what_is_written_meanwhile(place: Place) -> None:
    place.is_tampered = True
    bench, script = Bench(), Script(*[[("charge_i", {"amount": amount})] for amount in (1111, 2222, 3333)], "done")
    dying = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 1)
    await dying.run_and_die(script, bench.registry, checkpoint_key=BACK, commits="each")
    dying = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 2)
    await dying.recover_and_die(script, bench.registry, checkpoint_key=HIDING, commits="each")
    result = await Worker(place).recover(script, bench.registry, checkpoint_key=BACK)
    [run] = await place.open().load_many([RunId("run")])
    assert run is not None
    assert keys_of(run) == ["old", "new", "old"]
    bodies = b"".join(await stored_bodies(place.open(), "run"))
    assert [amount in bodies for amount in (b"1111", b"2222", b"3333")] == [True, False, True]
    again = await Worker(place).recover(script, bench.registry, checkpoint_key=STILL_HIDING)
    assert transcript(again) == transcript(result)


STILL_HIDING = KeyRing(KEYS, "new", encrypts={"new"})


@pytest.mark.parametrize("state", ["dead", "paused", "blocked", "quarantined", "cancelled in doubt"])
async def test_whatever_state_a_run_is_in_it_says_why_once_it_is_encrypted(place: Place, state: str) -> None:
    from tests.bench import KEY

    place.is_tampered = True
    await bring_to(place, state)
    hiding = KeyRing({"key": KEY, "new": KEYS["new"]}, "new", encrypts={"new"})
    before = await Runs(place.open(), checkpoint_key=KEY).show("run")
    [resealed] = await runs_of(place, hiding).reseal("run", by="ana")
    assert (resealed.was, resealed.now, resealed.moved) == ("key", "new", True)
    after = await runs_of(place, hiding).show("run")
    assert (after.info.status, after.info.why) == (before.info.status, before.info.why)
    assert [info.why for info in await runs_of(place, hiding).list()] == [after.info.why]


# Messages.


def test_a_hidden_message_lands_once_and_its_digest_tells_nothing_to_who_guesses_it() -> None:
    body: dict[str, object] = {"by": "ana", "why": "yes"}
    hiding, plain = sealer_for(ALL_HIDING, tenant="", run_id="run"), sealer_for(STILL_OLD, tenant="", run_id="run")
    one, again = write_message(hiding, MessageKind.CANCEL, body), write_message(hiding, MessageKind.CANCEL, body)
    assert one.digest == again.digest
    assert one.body != again.body
    assert one.digest != write_message(plain, MessageKind.CANCEL, body).digest
    other = sealer_for(ALL_HIDING, tenant="", run_id="other")
    assert one.digest != write_message(other, MessageKind.CANCEL, body).digest
    [opened] = open_messages(ALL_HIDING, [one], tenant="", run_id="run")
    assert opened.body == body


def test_a_body_in_clear_is_no_message_under_a_key_that_encrypts() -> None:
    hiding = sealer_for(ALL_HIDING, tenant="", run_id="run")
    genuine = write_message(hiding, MessageKind.CANCEL, {"by": "ana", "why": "yes"})
    clear = codec.encode({"by": "eve", "why": "no"})
    sealed = genuine._replace(body=clear, seal=hiding.message("cancel", clear))
    assert len(open_messages(ALL_HIDING, [sealed, genuine], tenant="", run_id="run")) == 1


# Keys.


places = st.tuples(st.text(max_size=8), st.text(max_size=8), st.sampled_from(["seal", "seal of what is encrypted", "encrypt"]))


@settings(max_examples=100)
@given(places, places)
def test_no_two_of_tenant_run_and_purpose_share_a_key_or_a_seal(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    def own(tenant: str, run_id: str, purpose: str) -> bytes:
        return derive_key(KEYS["old"], purpose, tenant=tenant, run_id=run_id)

    assert (own(*one) == own(*two)) is (one == two)
    seals = [
        Sealer(KEYS["old"], key_id="k", tenant=tenant, run_id=run_id, encrypts=purpose != "seal").record(
            1, 1, RecordKind.DONE, "0", 1, NO_SEAL, b""
        )
        for tenant, run_id, purpose in (one, two)
    ]
    assert (seals[0] == seals[1]) is ((*one[:2], one[2] != "seal") == (*two[:2], two[2] != "seal"))


def test_what_hides_a_body_is_what_shows_it_and_nothing_else_does() -> None:
    cipher = Cipher(KEYS["old"])
    hidden = cipher.hide(b"place", b"body")
    assert len(hidden) == len(b"body") + HIDDEN_BYTES
    assert cipher.show(b"place", hidden) == b"body"
    for place, body in ((b"another", hidden), (b"place", hidden[:-1]), (b"place", hidden[:5]), (b"place", b"")):
        with pytest.raises(ValueError, match=r"hidden"):
            cipher.show(place, body)
    with pytest.raises(ValueError, match="hidden"):
        Cipher(KEYS["new"]).show(b"place", hidden)


WITHOUT = """
import sys
sys.modules["cryptography"] = None
from agent_runtime import KeyRing
from agent_runtime.errors import InvalidSetting
KeyRing({"k": bytes(32)}, "k")
try:
    KeyRing({"k": bytes(32)}, "k", encrypts={"k"})
except InvalidSetting as error:
    print(error)
"""


def test_without_the_extra_a_key_that_encrypts_says_what_to_install() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'durable-agent-runtime[encryption]'" in said.stdout


def test_a_ring_that_encrypts_nothing_needs_no_other_package() -> None:
    said = "import sys; from agent_runtime import KeyRing; KeyRing.of(bytes(32)); print('cryptography' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", said], text=True, timeout=60).strip() == "False"
