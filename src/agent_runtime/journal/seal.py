"""Seals over a run's bytes and their place, and the opening of a whole stored run.

Rules of this file:

* What is stored is what is sealed: a seal is checked over the stored bytes, and nothing is decoded before that.
* The header holds the place (format, key id, tenant, run, number, epoch, kind, call, attempt, previous seal), each
  part with a fixed size or its length before it, so that no two places share a header.
* Number *and* chain: numbers show a gap, the chain shows a genuine record of another fork, the sealed row shows a cut
  tail, a changed status and rows of mixed age.
* Every run has its own key, derived from the ring's; a first byte tells records, rows, checkpoints and messages apart.
* A ring may hold several keys. A run is sealed under one at a time; a `rekeyed` record, itself under the new key, names
  the key that was used before it. It is chained over what came before, so a key that is no longer trusted forges none of it.
* A key of the ring may encrypt: then bodies are hidden first, and sealed as they are hidden. Whether a body is hidden is
  the key's property, which its seals tell: a ring that says otherwise finds that they do not hold.

The MAC is HMAC-SHA-256; the header's constant part and the key are hashed only once a run.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, TypeAlias

from agent_runtime.errors import CheckpointStoreCorrupt, NewerFormat, RevokedKey
from agent_runtime.journal.cipher import Cipher
from agent_runtime.journal.hashing import begin_mac, mac, states_of
from agent_runtime.journal.keys import CheckpointKey, KeyRing, parse_key
from agent_runtime.journal.records import (
    FORMAT,
    NO_SEAL,
    OWNER_SIZE,
    SEAL_SIZE,
    LostBody,
    RecordKind,
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
    new_tuple,
)

__all__ = [
    "IN_CLEAR", "NO_SUCH_VALUES", "CheckpointKey", "KeyRing", "Noted", "Sealer", "Sound", "checkpoint_digest",
    "derive_key", "open_message", "open_row", "open_run", "parse_key", "read_run", "read_sound", "sealer_for",
]  # fmt: skip

Noted: TypeAlias = tuple[int, str, int, bytes]
"""A record that has its place in line and no seal yet: kind, call, attempt, body."""

_RECORD = struct.Struct(">cQQBIIQ")
_ROW = struct.Struct(">cBQQQQ")
_CHECKPOINT = struct.Struct(">cQQ")
_MESSAGE = struct.Struct(">cIQ")
_LENGTH = struct.Struct(">I")
_STEP = struct.Struct(">Q")
_HIDDEN_RECORD = struct.Struct(">cQQBI")
IN_CLEAR = frozenset({RecordKind.CLAIMED, RecordKind.CHECKPOINT})
"""The kinds whose bodies no key hides: which process holds a run, that whoever has no key may see it die; and a digest."""
_REKEYED, _CHECKPOINT_KIND = int(RecordKind.REKEYED), int(RecordKind.CHECKPOINT)
NO_SUCH_VALUES = (struct.error, TypeError, ValueError, AttributeError)
"""What sealing raises over values that we never write, such as text where a number belongs."""


def derive_key(key: bytes, purpose: str, *, tenant: str, run_id: str) -> bytes:
    """The key of one run for one purpose: 32 bytes that tell nothing of the ring's key, nor of any other run's."""
    return mac(*states_of(key), _label(purpose, tenant, run_id))


def _label(purpose: str, tenant: str, run_id: str) -> bytes:
    """What a key is derived from: no two of (purpose, tenant, run) share it, as no purpose holds the byte that ends it."""
    return b"agent-runtime " + purpose.encode() + b"\x01" + _text(tenant) + _text(run_id)


SEAL, SEAL_HIDDEN, ENCRYPT = "seal", "seal of what is encrypted", "encrypt"
"""The purposes of a run's keys. Seals over hidden bodies have their own: a body is never taken for the other sort."""


class Sealer:
    """Makes and checks the seals of one run under one key, and hides its bodies where that key encrypts."""

    __slots__ = ("_cipher", "_inner", "_outer", "key_id", "run_id", "tenant")

    def __init__(self, key: bytes, *, key_id: str, tenant: str, run_id: str, encrypts: bool = False) -> None:
        self.key_id = key_id
        self.tenant = tenant
        self.run_id = run_id
        own = derive_key(key, SEAL_HIDDEN if encrypts else SEAL, tenant=tenant, run_id=run_id)
        header = b"agent-runtime" + bytes([FORMAT]) + _text(key_id) + _text(tenant) + _text(run_id)
        self._inner, self._outer = begin_mac(own, header)
        self._cipher = Cipher(derive_key(key, ENCRYPT, tenant=tenant, run_id=run_id)) if encrypts else None

    @property
    def encrypts(self) -> bool:
        """Whether bodies are hidden before they are sealed."""
        return self._cipher is not None

    def record(self, number: int, epoch: int, kind: int, call: str, attempt: int, previous: bytes, body: bytes) -> bytes:
        """The seal of a record, of a body as it is stored, after the one whose seal is `previous`."""
        place = call.encode()
        return self._seal(_RECORD.pack(b"J", number, epoch, kind, attempt, len(place), len(body)) + place + previous + body)

    def chain(self, noted: Sequence[Noted], *, number: int, epoch: int, previous: bytes) -> tuple[StoredRecord, ...]:
        """The records that follow number `number`, whose seal is `previous`: each sealed over the one before it."""
        if self._cipher is not None:
            noted = self._hide_all(self._cipher, noted, number, epoch)
        new_inner, new_outer, pack = self._inner.copy, self._outer.copy, _RECORD.pack
        records = []
        for code, call, attempt, body in noted:
            number += 1
            place = call.encode()
            inner, outer = new_inner(), new_outer()
            header = pack(b"J", number, epoch, code, attempt, len(place), len(body))
            inner.update(b"".join((header, place, previous, body)))
            outer.update(inner.digest())
            previous = outer.digest()
            records.append(new_tuple(StoredRecord, (number, epoch, code, call, attempt, body, previous)))
        return tuple(records)

    def row(self, row: StoredRow) -> bytes:
        """The seal of a row, over all its sealed columns."""
        return self.row_of(row.kind, row.name, row.status, row.step, row.epoch, row.owner, row.number, row.head, row.attempts)

    def row_of(
        self, kind: str, name: str, status: int, step: int, epoch: int, owner: bytes, number: int, head: bytes, attempts: int
    ) -> bytes:
        """The seal of a row of these columns; format, key id, tenant and run are the sealer's own."""
        header = _ROW.pack(b"R", status, step, epoch, number, attempts)
        return mac(self._inner, self._outer, b"".join((header, _named(kind, name), owner, head)))

    def checkpoint(self, step: int, body: bytes) -> bytes:
        """The seal of the state at a step, of a body as it is stored."""
        return self._seal(_CHECKPOINT.pack(b"C", step, len(body)) + body)

    def message(self, kind: str, body: bytes) -> bytes:
        """The seal of a message to the run, of a body as it is stored."""
        return self._seal(_MESSAGE.pack(b"M", len(kind.encode()), len(body)) + kind.encode() + body)

    def keep(self, step: int, body: bytes) -> StoredCheckpoint:
        """The state at a step as it is stored: hidden where this key encrypts, and sealed."""
        if self._cipher is not None:
            body = self._cipher.hide(_place_of_state(step), body)
        return StoredCheckpoint(step, body, self.checkpoint(step, body))

    def post(self, kind: str, body: bytes) -> StoredMessage:
        """A message as it is stored. The same again has the same digest, and lands once."""
        named = kind.encode() + b"\0" + body
        if self._cipher is None:
            return StoredMessage(sha256(named).digest(), kind, body, self.message(kind, body))
        digest = self._seal(b"D" + named)  # a digest that anybody could make would tell what was said to whoever guesses it
        hidden = self._cipher.hide(b"M" + kind.encode(), body)
        return StoredMessage(digest, kind, hidden, self.message(kind, hidden))

    def _seal(self, data: bytes) -> bytes:
        return mac(self._inner, self._outer, data)

    # Hidden bodies. Whoever shows one has checked its seal.

    def show_record(self, record: StoredRecord) -> StoredRecord:
        """The record with its body as it was noted."""
        if self._cipher is None or record.kind in IN_CLEAR:
            return record
        number, epoch, kind, call, attempt, body, seal = record
        shown = self._show(f"record {number}", _place_of_record(number, epoch, kind, call, attempt), body)
        return StoredRecord(number, epoch, kind, call, attempt, shown, seal)

    def show_state(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        """The checkpoint with its body as it was kept."""
        if self._cipher is None:
            return checkpoint
        return checkpoint._replace(body=self._show("its checkpoint", _place_of_state(checkpoint.step), checkpoint.body))

    def show_message(self, message: StoredMessage) -> StoredMessage:
        """The message with its body as it was written."""
        if self._cipher is None:
            return message
        return message._replace(body=self._show("a message", b"M" + message.kind.encode(), message.body))

    def _show(self, what: str, place: bytes, body: bytes) -> bytes:
        assert self._cipher is not None, "what is shown was hidden"
        try:
            return self._cipher.show(place, body)
        except ValueError as error:
            raise _corrupt(self.run_id, f"{what} does not decrypt: it is {error}") from None

    @staticmethod
    def _hide_all(cipher: Cipher, noted: Sequence[Noted], number: int, epoch: int) -> Sequence[Noted]:
        hidden = []
        for at, (kind, call, attempt, body) in enumerate(noted, start=number + 1):
            if kind not in IN_CLEAR:
                body = cipher.hide(_place_of_record(at, epoch, kind, call, attempt), body)  # noqa: PLW2901
            hidden.append((kind, call, attempt, body))
        return hidden


def _place_of_record(number: int, epoch: int, kind: int, call: str, attempt: int) -> bytes:
    return _HIDDEN_RECORD.pack(b"J", number, epoch, kind, attempt) + call.encode()


def _place_of_state(step: int) -> bytes:
    return b"C" + _STEP.pack(step)


@lru_cache(maxsize=256)
def _named(kind: str, name: str) -> bytes:
    what, called = kind.encode(), name.encode()
    return _LENGTH.pack(len(what)) + _LENGTH.pack(len(called)) + what + called


def _text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def sealer_for(ring: KeyRing, *, tenant: str, run_id: str, key_id: str | None = None) -> Sealer:
    """The sealer of a run under the key named, or under the ring's active one."""
    return _sealer(ring, ring.active if key_id is None else key_id, tenant, run_id)


def _sealer(ring: KeyRing, key_id: str, tenant: str, run_id: str) -> Sealer:
    return Sealer(ring.get(key_id, run_id), key_id=key_id, tenant=tenant, run_id=run_id, encrypts=key_id in ring.encrypts)


def open_row(ring: KeyRing, row: StoredRow, *, tenant: str) -> Sealer:
    """Check the seal of a row; gives the sealer of its run.

    `CheckpointStoreCorrupt` where it does not hold, `UnknownKey`, and `RevokedKey`.
    """
    if _is_newer(row.format):
        raise NewerFormat(
            f"run {row.run_id!r} was written in format {row.format}, and this version knows {FORMAT}; "
            "work it with the newer version"
        )
    if row.format != FORMAT or row.tenant != tenant:
        raise _corrupt(row.run_id, "its row is of another tenant or of no known format")
    if row.key_id in ring.revoked:
        raise RevokedKey(
            f"run {row.run_id!r} is sealed under key {row.key_id!r}, which is revoked: whoever has that key may have written "
            "it. Nothing was run. Where you know the run to be genuine, move it to the active key with "
            "`agent-runtime reseal RUN --even-revoked`; else delete it"
        )
    # The id as it is stored: none at all names no key, and never the active one.
    sealer = _sealer(ring, row.key_id, tenant, row.run_id)
    try:
        holds = (
            len(row.owner) == OWNER_SIZE
            and len(row.head) == SEAL_SIZE
            and _is_status(row.status)
            and _has_hints(row)
            and hmac.compare_digest(sealer.row(row), row.seal)
        )
    except NO_SUCH_VALUES:
        holds = False
    _require(
        holds,
        row.run_id,
        f"the seal of its row does not hold under this worker's key {row.key_id!r}; another key sealed it, it was changed, or "
        "that key encrypts on one ring and not on another",
    )
    return sealer


def open_run(ring: KeyRing, run: StoredRun, *, tenant: str) -> Sealer:
    """Check every seal, number and link of a run read as a whole; gives its sealer. Decodes and decrypts nothing."""
    return _verify(ring, run, tenant)[0]


def read_run(ring: KeyRing, run: StoredRun, *, tenant: str) -> tuple[StoredRun, Sealer]:
    """The run with its bodies as they were noted, once every seal, number and link was checked; and its sealer."""
    newest, sealers = _verify(ring, run, tenant)
    if not any(sealer.encrypts for sealer in set(sealers)):
        return run, newest
    records = tuple(sealer.show_record(record) for sealer, record in zip(sealers, run.records, strict=True))
    checkpoint = run.checkpoint
    if checkpoint is not None:
        checkpoint = sealers[_last_checkpoint(run.records)].show_state(checkpoint)
    return StoredRun(run.row, checkpoint, records), newest


class Sound(NamedTuple):
    """What still holds of a run that is not as it was written."""

    records: tuple[StoredRecord, ...]
    """Those from the first on whose seals hold, with their bodies as they were noted."""
    checkpoint: StoredCheckpoint | None
    """The stored state, where the last of these records that names one names this."""
    broken: int | None
    """The number of the first record that does not hold; None where each one that is there does."""


def read_sound(ring: KeyRing, run: StoredRun, *, tenant: str) -> Sound:
    """What of a corrupt run can be believed: each seal is checked over the one before, and nothing past the first that does
    not hold is decoded or decrypted. The row is not asked: it may be what was changed.

    What a revoked key alone vouches for is not believed: it ends with the last record that stands under another.
    """
    sealers = _sealers_forward(ring, run.records, tenant=tenant, run_id=run.row.run_id)
    while sealers and sealers[-1].key_id in ring.revoked:
        sealers.pop()
    shown: list[StoredRecord] = []
    for sealer, record in zip(sealers, run.records, strict=False):
        try:
            shown.append(sealer.show_record(record))
        except CheckpointStoreCorrupt:  # sealed, and yet not what this key hid
            break
    broken = len(shown) + 1 if len(shown) < len(run.records) else None
    return Sound(tuple(shown), _sound_checkpoint(run, sealers[: len(shown)]), broken)


def _sealers_forward(ring: KeyRing, records: Sequence[StoredRecord], *, tenant: str, run_id: str) -> list[Sealer]:
    """The sealers of the records that hold, from the first on: any key of the ring may be the first, and a `rekeyed` record
    stands under a key of the ring that follows the one it names."""
    every = [sealer_for(ring, tenant=tenant, run_id=run_id, key_id=key_id) for key_id in ring.keys]
    found: list[Sealer] = []
    previous, epoch = NO_SEAL, 0
    for number, record in enumerate(records, start=1):
        is_turn = not found or (record.kind == RecordKind.REKEYED and record.call == found[-1].key_id)
        able = (sealer for sealer in (every if is_turn else found[-1:]) if _follows(sealer, record, number, epoch, previous))
        if (sealer := next(able, None)) is None:
            break
        found.append(sealer)
        previous, epoch = record.seal, record.epoch
    return found


def _follows(sealer: Sealer, record: StoredRecord, number: int, epoch: int, previous: bytes) -> bool:
    """Whether a record stands in its place, after the one whose seal is `previous`."""
    try:
        seal = sealer.record(number, record.epoch, record.kind, record.call, record.attempt, previous, record.body)
        return record.number == number and epoch <= record.epoch and hmac.compare_digest(seal, record.seal)
    except NO_SUCH_VALUES:
        return False


def _sound_checkpoint(run: StoredRun, sealers: Sequence[Sealer]) -> StoredCheckpoint | None:
    sound = run._replace(records=run.records[: len(sealers)])
    try:
        _open_checkpoint(sound, sealers)
        return run.checkpoint and sealers[_last_checkpoint(sound.records)].show_state(run.checkpoint)
    except CheckpointStoreCorrupt:
        return None


def _verify(ring: KeyRing, run: StoredRun, tenant: str) -> tuple[Sealer, Sequence[Sealer]]:
    """The run's sealer, and that of each of its records."""
    row = run.row
    newest = open_row(ring, row, tenant=tenant)
    _require(
        len(run.records) == row.number,
        row.run_id,
        f"its row counts {row.number} records and {len(run.records)} are there",
    )
    sealers = _sealers_by_record(ring, run.records, newest)
    _open_chain(run, sealers)
    _open_checkpoint(run, sealers)
    return newest, sealers


def _open_chain(run: StoredRun, sealers: Sequence[Sealer]) -> None:
    """Numbers without a gap, epochs that never fall, each seal over the one before, the last one in the row."""
    row, records = run.row, run.records
    sound = _count_sound(records, sealers, row.epoch)
    if sound < len(records):
        first, number = records[sound], sound + 1
        _require(first.number == number, row.run_id, f"record {number} is missing or out of its place")
        raise _corrupt(row.run_id, _why_not(first.body, f"the seal of record {number}"))
    last = records[-1].seal if records else NO_SEAL
    _require(hmac.compare_digest(last, row.head), row.run_id, "its last record is not the one its row names")


def _count_sound(records: Sequence[StoredRecord], sealers: Sequence[Sealer], latest: int) -> int:
    """How many records, from the first on, stand in their places. `Sealer.record` written out, as each run is read so."""
    pack, same = _RECORD.pack, hmac.compare_digest
    previous, epoch_before = NO_SEAL, 0
    for at, (sealer, (number, epoch, kind, call, attempt, body, seal)) in enumerate(zip(sealers, records, strict=True)):
        try:
            if number != at + 1 or not epoch_before <= epoch <= latest:
                return at
            place = call.encode()
            inner, outer = sealer._inner.copy(), sealer._outer.copy()
            header = pack(b"J", number, epoch, kind, attempt, len(place), len(body))
            inner.update(b"".join((header, place, previous, body)))
            outer.update(inner.digest())
            if not same(outer.digest(), seal):
                return at
        except NO_SUCH_VALUES:
            return at
        previous, epoch_before = seal, epoch
    return len(records)


def _sealers_by_record(ring: KeyRing, records: tuple[StoredRecord, ...], newest: Sealer) -> list[Sealer]:
    """The sealer of each record: read from the end, since a `rekeyed` record names the key used before it."""
    if _REKEYED not in [record.kind for record in records]:
        return [newest] * len(records)
    sealer, found = newest, []
    for record in reversed(records):
        found.append(sealer)
        if record.kind == RecordKind.REKEYED:
            sealer = sealer_for(ring, tenant=newest.tenant, run_id=newest.run_id, key_id=record.call)
    return found[::-1]


def checkpoint_digest(step: int, body: bytes) -> bytes:
    """The body of the `checkpoint` record that binds a stored state to its place in the journal."""
    return _STEP.pack(step) + sha256(body).digest()


def _last_checkpoint(records: Sequence[StoredRecord]) -> int:
    """Where among the records the last one stands that names a stored state; -1 where none does."""
    kinds = [record.kind for record in reversed(records)]
    return len(kinds) - 1 - kinds.index(_CHECKPOINT_KIND) if _CHECKPOINT_KIND in kinds else -1


def _open_checkpoint(run: StoredRun, sealers: Sequence[Sealer]) -> None:
    """The stored state is the one that the last `checkpoint` record names: no older one, and none where none is named.

    It is under the key of that record: a run that goes on to another key does not write its state again.
    """
    at, checkpoint = _last_checkpoint(run.records), run.checkpoint
    if checkpoint is None or at < 0:
        _require(checkpoint is None and at < 0, run.row.run_id, "its checkpoint is not the one its journal names")
        return
    try:
        seal = sealers[at].checkpoint(checkpoint.step, checkpoint.body)
        is_named = hmac.compare_digest(checkpoint_digest(checkpoint.step, checkpoint.body), run.records[at].body)
        holds = is_named and hmac.compare_digest(seal, checkpoint.seal)
    except NO_SUCH_VALUES:
        holds = False
    why = "its checkpoint is not the one its journal names, or its seal does not hold"
    _require(holds, run.row.run_id, checkpoint.body.why if isinstance(checkpoint.body, LostBody) else why)


def check_messages(run_id: str, messages: Sequence[StoredMessage]) -> None:
    """Refuse a run whose store cannot give back what somebody posted: `CheckpointStoreCorrupt` says what is missing."""
    for message in messages:
        if isinstance(message.body, LostBody):
            raise _corrupt(run_id, message.body.why)


def _why_not(body: bytes, seal: str) -> str:
    return body.why if isinstance(body, LostBody) else f"{seal} does not hold"


def open_message(sealer: Sealer, message: StoredMessage) -> bool:
    """Whether the seal of a message holds. One that does not is ignored: anybody may post."""
    return hmac.compare_digest(sealer.message(message.kind, message.body), message.seal)


def _is_newer(stored: object) -> bool:
    return isinstance(stored, int) and stored > FORMAT


def _has_hints(row: StoredRow) -> bool:
    """Whether the columns that are not sealed are numbers at least: what is worked with them must not fail midway."""
    hints = (row.lease_ms, row.heartbeat_at, row.idle_ms, row.posted)
    return all(type(hint) is int for hint in hints) and type(row.wake_at) in (int, type(None))


def _is_status(value: int) -> bool:
    return value in RunStatus._value2member_map_


def _require(holds: bool, run_id: str, otherwise: str) -> None:
    if not holds:
        raise _corrupt(run_id, otherwise)


def _corrupt(run_id: str, what: str) -> CheckpointStoreCorrupt:
    return CheckpointStoreCorrupt(
        f"run {run_id!r} is not as it was written: {what}. Nothing was run. Restore the store from a copy you trust, "
        "and find out who can write to it."
    )
