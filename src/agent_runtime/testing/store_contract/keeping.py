"""Keeping: bytes, text and numbers come back as they were handed in, and no two ids are taken for one."""

from __future__ import annotations

from collections.abc import Iterable

from agent_runtime.ids import MAX_RUN_ID, check_run_id
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.draft import RING, TENANT, Draft, Entry
from agent_runtime.testing.store_contract.witness import land, opened, read, read_as, read_row, sealed_part

EVERY_BYTE = bytes(range(256))
BODIES = {
    "empty": b"",
    "every byte": EVERY_BYTE,
    "zeros": b"\0" * 64,
    "a zero inside": b"before\0after",
    "no UTF-8": b"\xff\xfe\xc3\x28\xed\xa0\x80",
    "JSON with odd spacing": b'{ "b":1.0,  "a" : 10000000000000000000000, "a": null }\n',
    "number-like": b"0012.50",
    "line ends": b"a\r\nb\rc\nd\x1a",
    "spaces around": b"  \t x \n ",
    "quotes": b"'\"`\\$1 %s ?1 :name {} --",
    "base64-like": b"aGVsbG8=",
    "hex-like": b"\\x414243",
}
MEBIBYTE = EVERY_BYTE * 4096

ODD_IDS = (
    "it's",
    'say "run"',
    "`tick`",
    "100%",
    "a_b",
    "*",
    "run-?",
    "run[0-9]",
    "^run$",
    "back\\slash",
    "semi;colon",
    "'; DROP TABLE runs; --",
    "' OR '1'='1",
    "$1 :id @id ?1 %s {0}",
    "redis.call('FLUSHALL')",
    ']] return redis.call("DEL", KEYS[1]) --[[',
    "{tag}:run",
    "a:b:c",
    "a/b/../c",
    "-1",
    "0",
    "1e3",
    "null",
    "None",
    "true",
    "NaN",
    "ünïcødé",
    "日本語",
    "☃🚀",
    "שלום",
    "ﬁ",
    "İ",
    "ẞ",
)
TWINS = (
    ("run", "Run"),
    ("run", "run "),
    ("run", " run"),
    ("a  b", "a b"),
    ("\u00e9", "e\u0301"),
    ("ß", "ss"),
    ("I", "\u0131"),
    ("1", "01"),
    ("1", "1.0"),
    ("a_c", "abc"),
    ("a%", "abc"),
    ("a", "a\u0301"),
    ("ﬁ", "fi"),
    ("\uff10", "0"),
)


class Keeping:
    """Cases of fidelity."""

    async def test_the_bytes_of_a_record_come_back_as_they_were(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.add(*BODIES.values()))
        found = {name: record.body for name, record in zip(BODIES, await store.calls(draft.run_id, since=1), strict=True)}
        assert found == BODIES
        await read_as(store, draft)

    async def test_the_bytes_of_a_checkpoint_come_back_as_they_were(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for body in BODIES.values():
            append = draft.step_on(b"one", checkpoint=body)
            draft = await land(store, draft, append)
            assert (await read_as(store, draft)).checkpoint == append.checkpoint

    async def test_the_bytes_of_a_message_come_back_as_they_were(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        messages = [draft.message(body) for body in BODIES.values()]
        messages += [message._replace(digest=body) for message, body in zip(messages, BODIES.values(), strict=True)]
        for message in messages:
            await store.post(draft.run_id, message)
        assert await store.inbox(draft.run_id) == messages

    async def test_a_record_may_hold_a_mebibyte(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.add(MEBIBYTE))
        assert (await read_as(store, draft)).records[-1].body == MEBIBYTE

    async def test_a_checkpoint_and_a_message_may_hold_a_mebibyte(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.step_on(b"one", checkpoint=MEBIBYTE)
        draft = await land(store, draft, append)
        await store.post(draft.run_id, draft.message(MEBIBYTE))
        assert (await read_as(store, draft)).checkpoint == append.checkpoint
        assert await store.inbox(draft.run_id) == [draft.message(MEBIBYTE)]

    async def test_the_texts_of_a_row_come_back_as_they_were(self, store: CheckpointStore) -> None:
        for i, text in enumerate(("", " two  spaces ", "it's 100% «odd» ☃; --", "line\nend\ttab", "e\u0301", "0x10")):
            draft = Draft.of(f"run-{i}", name=text, kind=text)
            draft = await land(store, draft, draft.open())
            row = (await read_as(store, draft)).row
            assert (row.name, row.kind) == (text, text)

    async def test_the_place_of_a_call_comes_back_as_it_was(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        places = ("", "0", "3.1", "0/model", "2/plan[7]/undo~1", "it's/100%", "ünï/☃", "a" * 1000, " ", "3.10")
        entries = [Entry(RecordKind.DONE, b"x", place, 1) for place in places]
        draft = await land(store, draft, draft.append(draft.row, *entries))
        assert [record.call for record in (await read_as(store, draft)).records[1:]] == list(places)

    async def test_every_kind_of_record_comes_back_as_it_was(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        entries = [Entry(kind, kind.name.encode(), "0", kind.value) for kind in RecordKind]
        append = draft.append(draft.row, *entries)
        await land(store, draft, append)
        assert await store.calls(draft.run_id, since=1) == list(append.records)

    async def test_large_numbers_come_back_as_they_were(self, store: CheckpointStore) -> None:
        draft = Draft.of(epoch=2**31 - 1, attempts=2**31 - 1, lease_ms=2**31 - 1)
        draft = await land(store, draft, draft.open())
        draft = await land(store, draft, draft.append(draft.row, Entry(RecordKind.STARTED, b"x", "0", 2**31 - 1)))
        parked = draft.park(wake_at=2**44)
        draft = await land(store, draft, parked)
        run = await read_as(store, draft)
        assert (run.row.wake_at, run.row.lease_ms) == (2**44, 2**31 - 1)
        assert run.records[1].attempt == 2**31 - 1

    async def test_values_come_back_in_their_types(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.step_on(b"one", checkpoint=b"state")
        draft = await land(store, draft, append)
        await store.post(draft.run_id, draft.message())
        run = await read(store, draft.run_id)
        latest = await store.latest(draft.run_id)
        assert latest is not None
        assert append.checkpoint is not None
        for row in (run.row, latest.row, *await store.list_unfinished(), *await store.list_runs()):
            _same_types(sealed_part(row), sealed_part(append.row))
            _same_types((row.posted, row.idle_ms, row.heartbeat_at, row.created_at, row.updated_at), (0,) * 5)
        for records in (run.records[1:], await store.calls(draft.run_id, since=1)):
            _same_types(records[0], append.records[0])
        for checkpoint in (run.checkpoint, latest.checkpoint):
            assert checkpoint is not None
            _same_types(checkpoint, append.checkpoint)
        _same_types((await store.inbox(draft.run_id))[0], draft.message())
        assert isinstance(run.records, tuple), "a run's records are a tuple"

    async def test_odd_ids_are_ids_like_any_other(self, store: CheckpointStore) -> None:
        drafts = []
        for run_id in ODD_IDS:
            draft = await opened(store, check_run_id(run_id))
            draft = await land(store, draft, draft.step_on(run_id.encode(), checkpoint=run_id.encode()))
            await store.post(draft.run_id, draft.message(run_id.encode()))
            assert (await store.renew(draft.run_id, guard=draft.guard)).posted == 1
            drafts.append(draft)
        for draft in drafts:
            run = await read_as(store, draft)
            assert run.records[-1].body == draft.run_id.encode()
            assert await store.inbox(draft.run_id) == [draft.message(draft.run_id.encode())]
        assert [row.run_id for row in await store.list_unfinished()] == sorted(ODD_IDS)

    async def test_an_id_may_have_512_characters(self, store: CheckpointStore) -> None:
        for character in ("x", "é", "☃", "\U0001d54f"):
            run_id = character * MAX_RUN_ID
            draft = await opened(store, check_run_id(run_id))
            await store.post(draft.run_id, draft.message())
            draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
            assert (await read_as(store, draft)).row.run_id == run_id
            longer = await opened(store, run_id[:-1])
            assert len((await read_as(store, longer)).records) == 1

    async def test_ids_that_look_alike_are_two(self, store: CheckpointStore) -> None:
        for one, other in TWINS:
            await _are_two(store, one + "!", other + "!")
            await _are_two(store, one, other)

    async def test_a_row_keeps_its_tenant_and_the_name_of_its_key(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        row = await read_row(store, draft.run_id)
        assert (row.tenant, row.key_id, row.format) == (TENANT, RING.active, draft.row.format)


async def _are_two(store: CheckpointStore, one: str, other: str) -> None:
    for run_id in (one, other):
        if await store.latest(Draft.of(run_id).run_id) is None:
            await opened(store, run_id)
    for run_id in (one, other):
        row = await read_row(store, Draft.of(run_id).run_id)
        assert row.run_id == run_id, f"asked for {run_id!r}, found {row.run_id!r}"
    listed = {row.run_id for row in await store.list_unfinished(limit=1000)}
    assert {one, other} <= listed, f"{one!r} and {other!r} are two runs"


def _same_types(found: Iterable[object], written: Iterable[object]) -> None:
    for value, like in zip(found, written, strict=True):
        expected = next(plain for plain in (int, str, bytes) if isinstance(like, plain))
        assert isinstance(value, expected), f"{value!r} must be {expected.__name__}, found {type(value).__name__}"
        assert not isinstance(value, bool), f"{value!r} must be a number, found a truth value"
