"""What travels between a Redis store and its server: keys, scripts with their values, rows and records as bytes. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha1
from typing import NamedTuple
from zlib import crc32

from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    AFTER_THE_END,
    NO_OWNER,
    NO_SEAL,
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
)
from agent_runtime.journal.store import Append, Guard
from agent_runtime.stores.statements import read_statements

BUCKETS = 64
"""Into how many slots of a cluster the runs of a store are spread. Part of the format: it says where a run's keys are."""

_RUN_KEYS = ("row", "log", "state", "inbox")
_BUCKET_KEYS = ("unfinished", "runs", "used", "ended")
_HEAD = 3 + len(_RUN_KEYS) + len(_BUCKET_KEYS)
"""What stands before the values of a script on a run: the command, its script, how many keys, and these."""
_RECORD = struct.Struct(">QQHQIIH")
_MESSAGE = struct.Struct(">II")
_SIZE = struct.Struct(">I")
_PAIR = struct.Struct(">II")
_STATE = struct.Struct(">QH")
_ROW = struct.Struct(">21I")
_RUNNING = int(RunStatus.RUNNING)

SCRIPTS = {name: text.encode() for name, text in read_statements("redis.lua").items()}
_CALLS = {name: b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % sha1(text).hexdigest().encode() for name, text in SCRIPTS.items()}


class Command(NamedTuple):
    """One command as it is sent. `key` is one of its keys, and says which node of a cluster has it."""

    key: str
    packed: bytes


class Keys:
    """The keys of the stores with one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.mark = f"{prefix}:store"
        self.of_run = lru_cache(maxsize=4096)(self._of_run)

    def in_bucket(self, bucket: int, name: str) -> str:
        """A key of a bucket: its number is the hash tag, and whatever follows cannot change that."""
        begin, end = self.around_bucket(name)
        return f"{begin}{bucket:02}{end}"

    def around_bucket(self, name: str) -> tuple[str, str]:
        """What stands before and behind the number in such a key."""
        return f"{self.prefix}:{{", f"}}:{name}"

    def row(self, run_id: str) -> str:
        return self.in_bucket(bucket_of(run_id), f"row:{run_id}")

    def _of_run(self, run_id: str) -> tuple[str, bytes]:
        """The row's key, and all keys that a script of a run takes, packed."""
        bucket = bucket_of(run_id)
        names = [self.in_bucket(bucket, f"{name}:{run_id}") for name in _RUN_KEYS]
        names += [self.in_bucket(bucket, name) for name in _BUCKET_KEYS]
        return names[0], b"".join([_packed(b"%d" % len(names)), *(_packed(name.encode()) for name in names)])

    # Scripts with their values.

    def append(self, append: Append, ttl_ms: int | None) -> Command:
        """The script that carries one append."""
        row, guard, records, checkpoint, seen = append
        values: list[bytes]
        if guard is not None and checkpoint is None and _runs_on(row, guard):
            values = [
                b"%d" % guard.epoch, guard.owner, b"%d" % guard.number, guard.head, b"%d" % row.step, b"%d" % row.number,
                row.head, b"%d" % row.attempts, row.seal, b"%d" % seen, _optional(row.wake_at),
            ]  # fmt: skip
            name = "append"
        else:
            values = [*_guard(guard), b"1" if all(record.kind in AFTER_THE_END for record in records) else b""]
            values += [
                row.run_id.encode(), b"%d" % row.format, row.key_id.encode(), row.tenant.encode(), row.kind.encode(),
                row.name.encode(), b"%d" % row.status, b"%d" % row.step, b"%d" % row.epoch, row.owner, b"%d" % row.number,
                row.head, b"%d" % row.attempts, row.seal, b"%d" % row.lease_ms, _optional(row.wake_at), b"%d" % seen,
                _optional(ttl_ms),
            ]  # fmt: skip
            values += (b"",) if checkpoint is None else (b"1", _pack_state(checkpoint))
            name = "append_any"
        values += map(_pack_record, records)
        return self.on_run(name, row.run_id, values)

    def renew(self, run_id: str, guard: Guard, seen: int | None, wake_at: int | None) -> Command:
        return self.on_run("renew", run_id, (b"%d" % guard.epoch, guard.owner, _optional(seen), _optional(wake_at)))

    def post(self, run_id: str, message: StoredMessage) -> Command:
        kind = message.kind.encode()
        packed = _PAIR.pack(len(kind), len(message.seal)) + kind + message.seal + message.body
        return self.on_run("post", run_id, (message.digest, kind, packed))

    def bury(self, run_id: str, guard: Guard) -> Command:
        return self.on_run("bury_run", run_id, (*_guard(guard)[:4], run_id.encode(), NO_OWNER, NO_SEAL))

    def select(self, run_id: str, since: int | None) -> Command:
        return self.on_run("select_run", run_id, (_optional(since),))

    def select_messages(self, run_id: str) -> Command:
        return self.on_run("select_messages", run_id, ())

    def mend(self, run_id: str) -> Command:
        return self.on_run("mend_index", run_id, (run_id.encode(),))

    def list_ids(self, bucket: int, index: str, after: str | None, most: int) -> Command:
        key = self.in_bucket(bucket, index)
        start = b"-" if after is None else b"(" + after.encode()
        return script("list_ids", (key,), (start, b"%d" % most))

    def list_ended(self, bucket: int, up_to: int | None, skip: int, most: int) -> Command:
        keys = tuple(self.in_bucket(bucket, index) for index in ("ended", "unfinished", "runs"))
        return script("list_ended", keys, (b"+inf" if up_to is None else b"%d" % up_to, b"%d" % skip, b"%d" % most))

    def on_run(self, name: str, run_id: str, values: Iterable[bytes]) -> Command:
        row_key, keys = self.of_run(run_id)
        parts = [b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
        return Command(row_key, b"".join((b"*%d\r\n" % (_HEAD + len(parts)), _CALLS[name], keys, *parts)))


def script(name: str, keys: tuple[str, ...], values: tuple[bytes, ...] = ()) -> Command:
    """A script on keys of one bucket."""
    parts = [b"%d" % len(keys), *(key.encode() for key in keys), *values]
    head = b"*%d\r\n%b" % (2 + len(parts), _CALLS[name])
    return Command(keys[0], head + b"".join(map(_packed, parts)))


def plain(key: str, *words: str | bytes) -> Command:
    """A command of the server's own."""
    parts = [word if isinstance(word, bytes) else word.encode() for word in words]
    return Command(key, b"*%d\r\n" % len(parts) + b"".join(map(_packed, parts)))


def bucket_of(run_id: str) -> int:
    """Where the keys of a run are: the same for ever."""
    return crc32(run_id.encode()) % BUCKETS


# What comes back.


def unpack_row(packed: bytes, run_id: str) -> StoredRow:
    """The row of a run as `select_run` gives it, with how long its owner has been silent.

    It is that run's, whoever put it there, and what is no number any more is -1: so its seal does not hold, and no other run
    is hurt.
    """
    values = []
    start = _ROW.size
    for size in _ROW.unpack_from(packed):
        values.append(packed[start : start + size])
        start += size
    (
        _, form, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal, lease_ms, wake_at,
        heartbeat_at, posted, created_at, updated_at, now_us,
    ) = values  # fmt: skip
    return StoredRow(
        RunId(run_id), _number(form), _text(key_id), _text(tenant), _text(kind), _text(name), _number(status), _number(step),
        _number(epoch), owner, _number(number), head, _number(attempts), seal, _number(lease_ms),
        _number(wake_at) if wake_at else None, _number(heartbeat_at), max(0, int(now_us) - _number(heartbeat_at)) // 1000,
        _number(posted), _number(created_at), _number(updated_at),
    )  # fmt: skip


def unpack_records(packed: bytes) -> Iterator[StoredRecord]:
    """Records one behind the other."""
    start, header = 0, _RECORD.size
    while start < len(packed):
        number, epoch, kind, attempt, call_size, body_size, seal_size = _RECORD.unpack_from(packed, start)
        call = start + header
        body = call + call_size
        seal = body + body_size
        start = seal + seal_size
        if start > len(packed):
            raise ValueError(f"a record of {start - len(packed):,} bytes more than there are")
        yield StoredRecord(number, epoch, kind, _text(packed[call:body]), attempt, packed[body:seal], packed[seal:start])


def unpack_state(packed: bytes) -> StoredCheckpoint:
    step, seal_size = _STATE.unpack_from(packed)
    body = _STATE.size + seal_size
    return StoredCheckpoint(step, packed[body:], packed[_STATE.size : body])


def unpack_messages(packed: bytes) -> list[StoredMessage]:
    """The messages of a run in the order they came."""
    found: list[tuple[int, StoredMessage]] = []
    start = 0
    while start < len(packed):
        digest_size, size = _MESSAGE.unpack_from(packed, start)
        digest = start + _MESSAGE.size
        value = digest + digest_size
        start = value + size
        place, _, rest = packed[value:start].partition(b":")
        kind_size, seal_size = _PAIR.unpack_from(rest)
        seal = _PAIR.size + kind_size
        body = seal + seal_size
        message = StoredMessage(packed[digest:value], _text(rest[_PAIR.size : seal]), rest[body:], rest[seal:body])
        found.append((int(place), message))
    return [message for _, message in sorted(found, key=lambda placed: placed[0])]


def unpack_ids(packed: bytes) -> list[str]:
    ids = []
    start = 0
    while start < len(packed):
        [size] = _SIZE.unpack_from(packed, start)
        start += _SIZE.size
        ids.append(packed[start : start + size].decode(errors="replace"))  # what is no text is the id of no run
        start += size
    return ids


def _packed(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _optional(number: int | None) -> bytes:
    return b"" if number is None else b"%d" % number


def _guard(guard: Guard | None) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    if guard is None:
        return b"", b"", b"", b"", b""
    return b"%d" % guard.epoch, guard.owner, b"%d" % guard.number, guard.head, _optional(guard.heartbeat_at)


def _runs_on(row: StoredRow, guard: Guard) -> bool:
    """Whether a run shall be running under the owner it has, and nothing but its row and records are written."""
    return row.status == _RUNNING and row.epoch == guard.epoch and row.owner == guard.owner and guard.heartbeat_at is None


def _pack_record(record: StoredRecord) -> bytes:
    number, epoch, kind, call, attempt, body, seal = record
    where = call.encode()
    return b"%b%b%b%b" % (_RECORD.pack(number, epoch, kind, attempt, len(where), len(body), len(seal)), where, body, seal)


def _pack_state(checkpoint: StoredCheckpoint) -> bytes:
    return _STATE.pack(checkpoint.step, len(checkpoint.seal)) + checkpoint.seal + checkpoint.body


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        return -1


def _text(value: bytes) -> str:
    """Text that somebody broke is for the seal of its own run to find."""
    return value.decode("utf-8", "surrogateescape")
