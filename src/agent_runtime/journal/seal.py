"""Seals over a run's bytes and their place, the key ring, and the opening of a whole stored run.

Rules of this file:

* What is stored is what is sealed: a seal is checked over the stored bytes, and nothing is decoded before that.
* The header holds the place (format, key id, tenant, run, number, epoch, kind, call, attempt, previous seal), each
  part with a fixed size or its length before it, so that no two places share a header.
* Number *and* chain: numbers show a gap, the chain shows a genuine record of another fork, the sealed row shows a cut
  tail, a changed status and rows of mixed age.
* Every run has its own key, derived from the ring's; a first byte tells records, rows, checkpoints and messages apart.
* A ring may hold several keys. A run is sealed under one at a time; a `rekeyed` record, itself under the new key, names
  the key that was used before it.

The MAC is HMAC-SHA-256 (RFC 2104), kept as two hash states that are copied, since the header's constant part and the
padded key need to be hashed only once a run.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

from agent_runtime.errors import CheckpointStoreCorrupt, InvalidKey, NewerFormat, UnknownKey
from agent_runtime.journal.records import (
    FORMAT,
    NO_SEAL,
    OWNER_SIZE,
    SEAL_SIZE,
    LostBody,
    RecordKind,
    RunStatus,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
    new_tuple,
)

Noted: TypeAlias = tuple[int, str, int, bytes]
"""A record that has its place in line and no seal yet: kind, call, attempt, body."""

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

MIN_KEY = 16
MAX_KEY_ID = 64
_BLOCK = 64
_IPAD = bytes(byte ^ 0x36 for byte in range(256))
_OPAD = bytes(byte ^ 0x5C for byte in range(256))
_RECORD = struct.Struct(">cQQBIIQ")
_ROW = struct.Struct(">cBQQQQII")
_CHECKPOINT = struct.Struct(">cQQ")
_MESSAGE = struct.Struct(">cIQ")
_LENGTH = struct.Struct(">I")
_STEP = struct.Struct(">Q")
NO_SUCH_VALUES = (struct.error, TypeError, ValueError, AttributeError)
"""What sealing raises over values that we never write, such as text where a number belongs."""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys a worker knows: `active` seals what is new, every one verifies what is there."""

    keys: Mapping[str, bytes]
    active: str

    def __post_init__(self) -> None:
        if self.active not in self.keys:
            raise InvalidKey(f"the active key {self.active!r} is not on the ring, which has {sorted(self.keys)}")
        for key_id, key in self.keys.items():
            _check_key(key_id, key)

    def __repr__(self) -> str:
        return f"KeyRing(keys={sorted(self.keys)}, active={self.active!r})"

    @staticmethod
    def of(key: object) -> KeyRing:
        """The ring for any form of `checkpoint_key`; `InvalidKey` says what is wrong with it."""
        if isinstance(key, KeyRing):
            return key
        if isinstance(key, bytes | bytearray):
            return _ring_of_one(bytes(key))
        if isinstance(key, Mapping) and key:
            return KeyRing(dict(key), list(key)[-1])
        found = "none" if key is None else type(key).__name__
        raise InvalidKey(
            f"a checkpoint key is bytes of {MIN_KEY} or more, or a ring {{id: key}}, found {found}; "
            "make one with `agent-runtime keygen` and give the same one to every worker"
        )

    def get(self, key_id: str, run_id: str) -> bytes:
        """The key of that id, or `UnknownKey`."""
        try:
            return self.keys[key_id]
        except KeyError:
            raise UnknownKey(
                f"run {run_id!r} is sealed under key {key_id!r}, and this worker has {sorted(self.keys)}; "
                "add that key to the ring"
            ) from None


CheckpointKey: TypeAlias = bytes | Mapping[str, bytes] | KeyRing
"""A key of 16 bytes or more; a mapping {id: key} whose last one is active; or a `KeyRing`."""


@lru_cache(maxsize=16)
def _ring_of_one(key: bytes) -> KeyRing:
    return KeyRing({"key": key}, "key")


def _check_key(key_id: object, key: object) -> None:
    if not isinstance(key_id, str) or not 1 <= len(key_id) <= MAX_KEY_ID or not key_id.isprintable():
        raise InvalidKey(f"a key id is 1 to {MAX_KEY_ID} printable characters, found {key_id!r}")
    if not isinstance(key, bytes):
        raise InvalidKey(f"key {key_id!r} must be bytes, found {type(key).__name__}")
    if len(key) < MIN_KEY:
        raise InvalidKey(
            f"key {key_id!r} must have {MIN_KEY} bytes or more, found {len(key)}; make one with `agent-runtime keygen`"
        )


def parse_key(text: str) -> bytes:
    """The key that a setting holds: base64, or `file:PATH` of a file with base64 in it."""
    if text.startswith("file:"):
        path = text.removeprefix("file:")
        try:
            with open(path, encoding="ascii") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidKey(f"no key could be read from {path!r}: {error}; name a file that holds base64") from error
    try:
        key = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidKey(f"a key is base64, or file:PATH, found text that is neither ({error})") from error
    _check_key("key", key)
    return key


def key_beside(path: str | os.PathLike[str], fresh: bytes) -> bytes:
    """The key in the file at `path`; `fresh` is written there first, mode 0600, if nothing is.

    A key that was given out is still there after a power cut: what it sealed could be opened by nobody else.
    """
    text = base64.b64encode(fresh) + b"\n"
    pending = f"{os.fspath(path)}.{fresh[:6].hex()}"
    descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(pending, path)  # a link appears whole or not at all, so two first starts agree on one key
    finally:
        os.unlink(pending)
    _flush_folder(os.path.dirname(os.path.abspath(path)))
    return parse_key(f"file:{os.fspath(path)}")


def _flush_folder(folder: str) -> None:
    """Have it on the disk which files there are, where a folder can be flushed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Sealer:
    """Makes and checks the seals of one run under one key."""

    __slots__ = ("_inner", "_outer", "key_id", "run_id", "tenant")

    def __init__(self, key: bytes, *, key_id: str, tenant: str, run_id: str) -> None:
        self.key_id = key_id
        self.tenant = tenant
        self.run_id = run_id
        place = _text(tenant) + _text(run_id)
        inner, outer = _hash_states(key)
        block = _mac(inner, outer, b"agent-runtime seal\x01" + place).ljust(_BLOCK, b"\0")
        self._inner = sha256(block.translate(_IPAD) + b"agent-runtime" + bytes([FORMAT]) + _text(key_id) + place)
        self._outer = sha256(block.translate(_OPAD))

    def record(self, number: int, epoch: int, kind: int, call: str, attempt: int, previous: bytes, body: bytes) -> bytes:
        """The seal of a record after the one whose seal is `previous`."""
        [record] = self.chain([(kind, call, attempt, body)], number=number - 1, epoch=epoch, previous=previous)
        return record.seal

    def chain(self, noted: Sequence[Noted], *, number: int, epoch: int, previous: bytes) -> tuple[StoredRecord, ...]:
        """The records that follow number `number`, whose seal is `previous`: each sealed over the one before it."""
        new_inner, new_outer, pack = self._inner.copy, self._outer.copy, _RECORD.pack
        records = []
        for code, call, attempt, body in noted:
            number += 1
            place = call.encode()
            inner, outer = new_inner(), new_outer()
            inner.update(pack(b"J", number, epoch, code, attempt, len(place), len(body)) + place + previous + body)
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
        what, called = kind.encode(), name.encode()
        header = _ROW.pack(b"R", status, step, epoch, number, attempts, len(what), len(called))
        return _mac(self._inner, self._outer, header + what + called + owner + head)

    def checkpoint(self, step: int, body: bytes) -> bytes:
        """The seal of the state at a step."""
        return self._seal(_CHECKPOINT.pack(b"C", step, len(body)) + body)

    def message(self, kind: str, body: bytes) -> bytes:
        """The seal of a message to the run."""
        return self._seal(_MESSAGE.pack(b"M", len(kind.encode()), len(body)) + kind.encode() + body)

    def _seal(self, data: bytes) -> bytes:
        return _mac(self._inner, self._outer, data)


@lru_cache(maxsize=16)
def _hash_states(key: bytes) -> tuple[Hash, Hash]:
    """The two hash states of HMAC under a key of the ring, from which the key of every run is derived."""
    block = (key if len(key) <= _BLOCK else sha256(key).digest()).ljust(_BLOCK, b"\0")
    return sha256(block.translate(_IPAD)), sha256(block.translate(_OPAD))


def _mac(inner: Hash, outer: Hash, data: bytes) -> bytes:
    inner, outer = inner.copy(), outer.copy()
    inner.update(data)
    outer.update(inner.digest())
    return outer.digest()


def _text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def sealer_for(ring: KeyRing, *, tenant: str, run_id: str, key_id: str | None = None) -> Sealer:
    """The sealer of a run under the key named, or under the ring's active one."""
    chosen = ring.active if key_id is None else key_id
    return Sealer(ring.get(chosen, run_id), key_id=chosen, tenant=tenant, run_id=run_id)


def open_row(ring: KeyRing, row: StoredRow, *, tenant: str) -> Sealer:
    """Check the seal of a row; gives the sealer of its run. `CheckpointStoreCorrupt` where it does not hold."""
    if _is_newer(row.format):
        raise NewerFormat(
            f"run {row.run_id!r} was written in format {row.format}, and this version knows {FORMAT}; "
            "work it with the newer version"
        )
    if row.format != FORMAT or row.tenant != tenant:
        raise _corrupt(row.run_id, "its row is of another tenant or of no known format")
    # The id as it is stored: none at all names no key, and never the active one.
    sealer = Sealer(ring.get(row.key_id, row.run_id), key_id=row.key_id, tenant=tenant, run_id=row.run_id)
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
        f"the seal of its row does not hold under this worker's key {row.key_id!r}; another key sealed it, or it was changed",
    )
    return sealer


def open_run(ring: KeyRing, run: StoredRun, *, tenant: str) -> Sealer:
    """Check every seal, number and link of a run read as a whole; gives its sealer. Decodes nothing."""
    row = run.row
    sealer = open_row(ring, row, tenant=tenant)
    _require(
        len(run.records) == row.number,
        row.run_id,
        f"its row counts {row.number} records and {len(run.records)} are there",
    )
    _open_chain(ring, run, sealer)
    _open_checkpoint(run, sealer)
    return sealer


def _open_chain(ring: KeyRing, run: StoredRun, newest: Sealer) -> None:
    """Numbers without a gap, epochs that never fall, each seal over the one before, the last one in the row."""
    run_id = run.row.run_id
    sealers = _sealers_by_record(ring, run.records, newest)
    previous, epoch = NO_SEAL, 0
    for number, (record, sealer) in enumerate(zip(run.records, sealers, strict=True), start=1):
        _require(record.number == number, run_id, f"record {number} is missing or out of its place")
        try:
            in_order = epoch <= record.epoch <= run.row.epoch
            seal = sealer.record(number, record.epoch, record.kind, record.call, record.attempt, previous, record.body)
            holds = in_order and hmac.compare_digest(seal, record.seal)
        except NO_SUCH_VALUES:
            holds = False
        _require(holds, run_id, _why_not(record.body, f"the seal of record {number}"))
        previous, epoch = record.seal, record.epoch
    _require(hmac.compare_digest(previous, run.row.head), run_id, "its last record is not the one its row names")


def _sealers_by_record(ring: KeyRing, records: tuple[StoredRecord, ...], newest: Sealer) -> list[Sealer]:
    """The sealer of each record: read from the end, since a `rekeyed` record names the key used before it."""
    if not any(record.kind == RecordKind.REKEYED for record in records):
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


def _open_checkpoint(run: StoredRun, sealer: Sealer) -> None:
    """The stored state is the one that the last `checkpoint` record names: no older one, and none where none is named."""
    named = next((record.body for record in reversed(run.records) if record.kind == RecordKind.CHECKPOINT), None)
    checkpoint = run.checkpoint
    if checkpoint is None or named is None:
        _require(checkpoint is None and named is None, run.row.run_id, "its checkpoint is not the one its journal names")
        return
    try:
        seal = sealer.checkpoint(checkpoint.step, checkpoint.body)
        is_named = hmac.compare_digest(checkpoint_digest(checkpoint.step, checkpoint.body), named)
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
