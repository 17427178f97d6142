"""A finished run in one file, sealed as it was stored: the key alone tells whether the file is whole, without any store.

Rules of this file:

* Lines of JSON: a header, the row, each record, the checkpoint, the messages, and a last line that seals all before it.
* What is written is what was stored. Bodies go in as they are, in base64; nothing here knows what they mean.
* A file appears whole and durable or not at all, with mode 0600, and over nothing that is there.
* It is read a line at a time and each line has a bound, so no file is too long to be checked, nor a line too long to be
  refused. A line says one thing in one way: whatever else it might be read as is refused.
"""

from __future__ import annotations

import binascii
import errno
import hmac
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.errors import CheckpointStoreCorrupt, InvalidSetting, NewerFormat, StoreUnavailable, UnknownKey
from agent_runtime.ids import RunId, digest_id
from agent_runtime.journal.records import (
    NO_SEAL,
    RecordKind,
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
)
from agent_runtime.journal.seal import (
    NO_SUCH_VALUES,
    CheckpointKey,
    KeyRing,
    Sealer,
    checkpoint_digest,
    open_message,
    open_row,
    sealer_for,
)

PROGRAM = "agent-runtime run"
VERSION = 1
"""The form of archives that this version writes. A higher one is refused."""
SUFFIX, UNFINISHED = ".jsonl", ".part"
MOST_LINE = 64 * 2**20
MOST_PARTS = 8192
"""So many commas and brackets a line may have: what a short text can be read as has a bound, too."""
MOST_NAME = 200
FINAL = (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
_BYTES = frozenset({"owner", "head", "seal", "body", "digest"})
_UNREADABLE = (*NO_SUCH_VALUES, KeyError, RecursionError, binascii.Error)
_TRAILER = "archive"

Stored = TypeVar("Stored", StoredRow, StoredRecord, StoredCheckpoint, StoredMessage)


class Archived(NamedTuple):
    """What a file holds that was checked as a whole."""

    run_id: str
    tenant: str
    status: RunStatus
    records: int
    messages: int
    size: int
    """Its length in bytes."""
    head: bytes
    """The seal of the last record: two archives of one state of a run have the same."""
    key_id: str
    """The key that the run is under."""


def archive_name(run_id: str) -> str:
    """The name of the file for a run in a folder of archives: another for each id, and one that every file system takes."""
    name = quote(run_id, safe="").replace(".", "%2E")
    return f"{name if len(name) <= MOST_NAME else name[: MOST_NAME - 65] + digest_id(run_id)}{SUFFIX}"


# Writing.


def write_archive(
    target: str | os.PathLike[str] | IO[bytes], run: StoredRun, messages: Sequence[StoredMessage], ring: KeyRing
) -> Archived:
    """Write a run that was loaded with all its records and verified; blocks until it is durable.

    `InvalidSetting` where there is a file already, or none can be made; `StoreUnavailable` where there is no room.
    """
    if not isinstance(target, str | os.PathLike):
        return _write_lines(target, run, messages, ring)
    path = os.fspath(target)
    folder = os.path.dirname(path) or "."
    pending = os.path.join(folder, f".{SYSTEM_ENTROPY.draw(8).hex()}{UNFINISHED}")
    with _translated(path):
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                archived = _write_lines(file, run, messages, ring)
                file.flush()
                os.fsync(file.fileno())
            os.link(pending, path)  # a rename would go over a file that came meanwhile
        finally:
            os.unlink(pending)
        _sync_folder(folder)
    return archived


def _write_lines(file: IO[bytes], run: StoredRun, messages: Sequence[StoredMessage], ring: KeyRing) -> Archived:
    row = run.row
    sealer = sealer_for(ring, tenant=row.tenant, run_id=row.run_id, key_id=row.key_id)
    genuine = [message for message in messages if open_message(sealer, message)]  # anybody may post
    digest, size, lines = sha256(), 0, 0
    for line in _lines(run, genuine):
        if len(line) > MOST_LINE or _parts(line) > MOST_PARTS:
            raise InvalidSetting(
                f"run {row.run_id!r} holds a part of {len(line):,} bytes as a line, and an archive takes {MOST_LINE:,}; "
                "keep this run in its store"
            )
        digest.update(line)
        size, lines = size + len(line), lines + 1
        file.write(line)
    seal = sealer.message(_TRAILER, digest.digest())
    last = _line({"end": {"lines": lines, "sha256": digest.hexdigest(), "seal": _base64(seal)}})
    file.write(last)
    return Archived(
        row.run_id, row.tenant, RunStatus(row.status), row.number, len(genuine), size + len(last), row.head, row.key_id
    )  # fmt: skip


def _lines(run: StoredRun, messages: Sequence[StoredMessage]) -> Iterator[bytes]:
    row = run.row
    keys = _keys_by_record(run)
    yield _line(
        {"archive": PROGRAM, "version": VERSION, "tenant": row.tenant, "run": row.run_id, "key": row.key_id, "keys": keys}
    )
    yield _packed("row", row._replace(idle_ms=0))
    for record in run.records:
        yield _packed("record", record)
    if run.checkpoint is not None:
        yield _packed("checkpoint", run.checkpoint)
    for message in messages:
        yield _packed("message", message)


def _keys_by_record(run: StoredRun) -> list[list[object]]:
    """Each key that the run was sealed under, and the number of the first record under it: a reader goes forward."""
    changes = [record for record in run.records if record.kind == RecordKind.REKEYED]
    ids = [*(record.call for record in changes), run.row.key_id]
    return [[key_id, first] for key_id, first in zip(ids, [1, *(record.number for record in changes)], strict=True)]


def _packed(word: str, stored: StoredRow | StoredRecord | StoredCheckpoint | StoredMessage) -> bytes:
    plain = {name: _base64(value) if isinstance(value, bytes) else value for name, value in stored._asdict().items()}
    return _line({word: plain})


def _line(plain: Mapping[str, object]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def _base64(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise InvalidSetting(
            f"there is something at {path!r} already, and an archive goes over nothing; name another"
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreUnavailable(f"no archive could be written at {path!r}: {error.strerror}; make room for it") from error
        raise InvalidSetting(
            f"no archive can be made at {path!r}: {error.strerror}; name a file in a folder that is there and can be written"
        ) from error


# Reading.


Source: TypeAlias = "str | os.PathLike[str] | IO[bytes]"
"""A path, or a file that is open for reading bytes."""


def verify_archive(file: Source, *, checkpoint_key: CheckpointKey, tenant: str | None = None) -> Archived:
    """Check every seal in the file, a line at a time; `tenant`: the only one that it may be of.

    `CheckpointStoreCorrupt` says which line is not what was written, and what of it; `UnknownKey`, `NewerFormat`.
    """
    return _check(file, KeyRing.of(checkpoint_key), tenant, None)[0]


def read_archive(file: Source, *, checkpoint_key: CheckpointKey, tenant: str | None = None) -> StoredRun:
    """The run that the file holds, checked as `verify_archive` does it."""
    records: list[StoredRecord] = []
    _, row, checkpoint = _check(file, KeyRing.of(checkpoint_key), tenant, records)
    return StoredRun(row, checkpoint, tuple(records))


class _Wrong(Exception):
    """What is wrong with the line that is being read."""


class _Header(NamedTuple):
    tenant: str
    run_id: RunId
    key_id: str
    keys: Sequence[tuple[str, int]]


class _Reader:
    """The lines of a file, one at a time, none longer than allowed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = sha256()
        self.number = 0
        self.size = 0
        self.before = b""
        """The digest of all lines but the last one that was read."""

    def next(self) -> tuple[str, Any]:
        """What the next line is and what it says."""
        self.number += 1
        line = self._file.readline(MOST_LINE + 1)
        if not line:
            raise _Wrong("the file ends here, and its last lines are missing")
        if len(line) > MOST_LINE or _parts(line) > MOST_PARTS:
            raise _Wrong(f"no line of an archive is longer than {MOST_LINE:,} bytes, or has so many parts")
        self.before = self._digest.digest()
        self._digest.update(line)
        self.size += len(line)
        return self._taken_apart(line)

    def has_more(self) -> bool:
        return bool(self._file.read(1))

    @staticmethod
    def _taken_apart(line: bytes) -> tuple[str, Any]:
        plain: Any = None
        try:
            plain = json.loads(line)
            is_canonical = isinstance(plain, dict) and _line(plain) == line
        except (ValueError, RecursionError):
            is_canonical = False
        if not is_canonical or not plain:
            raise _Wrong("it is no line of an archive" if line.endswith(b"\n") else "it is cut off")
        word = next(iter(plain))
        return word, plain if word == "archive" else plain[word] if len(plain) == 1 else None


class _Chain:
    """The records, each sealed over the one before it, under the key that the run had then."""

    def __init__(self, ring: KeyRing, header: _Header, row: StoredRow) -> None:
        self._sealers = [
            (first, sealer_for(ring, tenant=row.tenant, run_id=row.run_id, key_id=key_id)) for key_id, first in header.keys
        ]
        self._epoch_limit = row.epoch
        self._previous = NO_SEAL
        self._epoch = 0
        self._at = 0
        self.number = 0
        self.named: bytes | None = None
        """What the last `checkpoint` record names."""

    def add(self, record: StoredRecord) -> None:
        self.number += 1
        if record.number != self.number:
            raise _Wrong(f"record {self.number} belongs here, found {record.number!r:.40}")
        self._change_key(record)
        sealer = self._sealers[self._at][1]
        place = (record.number, record.epoch, record.kind, record.call, record.attempt, self._previous, record.body)
        try:
            in_order = self._epoch <= record.epoch <= self._epoch_limit
            holds = in_order and hmac.compare_digest(sealer.record(*place), record.seal)
        except NO_SUCH_VALUES:
            holds = False
        if not holds:
            raise _Wrong(f"the seal of record {record.number} does not hold")
        self._previous, self._epoch = record.seal, record.epoch
        if record.kind == RecordKind.CHECKPOINT:
            self.named = record.body

    def _change_key(self, record: StoredRecord) -> None:
        is_next = self._at + 1 < len(self._sealers) and self._sealers[self._at + 1][0] == record.number
        if is_next is not (record.kind == RecordKind.REKEYED):
            raise _Wrong(f"record {record.number} is not what the header says of the run's keys")
        if is_next:
            if record.call != self._sealers[self._at][1].key_id:
                raise _Wrong(f"record {record.number} names another key than the one that was used before it")
            self._at += 1

    def end(self, row: StoredRow) -> None:
        if not hmac.compare_digest(self._previous, row.head):
            raise _Wrong("the record before it is not the one that the row names as the last")


def _check(
    source: Source, ring: KeyRing, tenant: str | None, records: list[StoredRecord] | None
) -> tuple[Archived, StoredRow, StoredCheckpoint | None]:
    if not isinstance(source, str | os.PathLike):
        return _check_file(source, repr(getattr(source, "name", "in an open file")), ring, tenant, records)
    path = os.fspath(source)
    try:
        with open(path, "rb") as file:
            return _check_file(file, repr(path), ring, tenant, records)
    except OSError as error:
        raise InvalidSetting(f"archive {path!r} cannot be read: {error.strerror}; name a file that is there") from error


def _check_file(
    file: IO[bytes], called: str, ring: KeyRing, tenant: str | None, records: list[StoredRecord] | None
) -> tuple[Archived, StoredRow, StoredCheckpoint | None]:
    reader = _Reader(file)
    try:
        return _check_lines(reader, ring, tenant, records)
    except _Wrong as wrong:
        raise CheckpointStoreCorrupt(
            f"archive {called} is not as it was written, at line {reader.number}: {wrong}. Take it from a copy you trust"
        ) from None
    except NewerFormat as error:
        raise NewerFormat(f"archive {called}: {error}") from None
    except UnknownKey as error:
        raise UnknownKey(f"archive {called}: {error}") from None


def _check_lines(
    reader: _Reader, ring: KeyRing, tenant: str | None, records: list[StoredRecord] | None
) -> tuple[Archived, StoredRow, StoredCheckpoint | None]:
    header = _header(*reader.next())
    if tenant not in (None, header.tenant):
        raise _Wrong(f"it is of tenant {header.tenant!r}, expected {tenant!r}")
    row = _unpacked(StoredRow, *reader.next(), "row")
    sealer = _opened_row(ring, header, row)
    chain = _Chain(ring, header, row)
    while chain.number < row.number:
        record = _unpacked(StoredRecord, *reader.next(), "record")
        chain.add(record)
        if records is not None:
            records.append(record)
    word, plain = reader.next()
    chain.end(row)
    checkpoint = None
    if word == "checkpoint":
        checkpoint = _unpacked(StoredCheckpoint, word, plain, "checkpoint")
    _check_state(sealer, chain, checkpoint)
    if checkpoint is not None:
        word, plain = reader.next()
    messages = 0
    while word == "message":
        if not _holds(sealer, _unpacked(StoredMessage, word, plain, "message")):
            raise _Wrong("the seal of the message does not hold")
        messages += 1
        word, plain = reader.next()
    _check_end(reader, sealer, word, plain)
    archived = Archived(row.run_id, row.tenant, RunStatus(row.status), row.number, messages, reader.size, row.head, row.key_id)
    return archived, row, checkpoint


def _header(word: str, plain: Any) -> _Header:
    if word != "archive" or plain.get("archive") != PROGRAM:
        raise _Wrong(f"expected the first line of an archive of a run, {PROGRAM!r}; found something else")
    version = plain.get("version")
    if type(version) is int and version > VERSION:
        raise NewerFormat(f"it has form {version}, and this version knows {VERSION}; check it with the newer version")
    texts = [plain.get(name) for name in ("tenant", "run", "key")]
    keys = plain.get("keys")
    if (
        type(version) is not int
        or version != VERSION
        or not all(type(text) is str for text in texts)
        or not isinstance(keys, list)
        or len(plain) != 6
    ):
        raise _Wrong("it is no header of an archive")
    tenant, run_id, key_id = texts
    pairs = [(key[0], key[1]) for key in keys if isinstance(key, list) and [*map(type, key)] == [str, int]]
    firsts = [first for _, first in pairs]
    in_order = firsts == sorted(set(firsts)) and firsts[:1] == [1]
    if len(pairs) != len(keys) or not in_order or pairs[-1][0] != key_id:
        raise _Wrong("what it says of the run's keys cannot be")
    return _Header(tenant, RunId(run_id), key_id, pairs)


def _unpacked(kind: type[Stored], word: str, plain: Any, expected: str) -> Stored:
    if word != expected:
        raise _Wrong(f"expected a {expected} here, found {word!r:.40}")
    try:
        if tuple(plain) != kind._fields or any(type(value) not in (int, str, type(None)) for value in plain.values()):
            raise ValueError("other columns")
        return kind._make(
            binascii.a2b_base64(value, strict_mode=True) if name in _BYTES else value for name, value in plain.items()
        )
    except _UNREADABLE:
        raise _Wrong(f"it is no {expected}: a column is missing, or not what it should be") from None


def _opened_row(ring: KeyRing, header: _Header, row: StoredRow) -> Sealer:
    if (row.tenant, row.run_id, row.key_id) != (header.tenant, header.run_id, header.key_id):
        raise _Wrong("the row is of another run, tenant or key than the header says")
    try:
        sealer = open_row(ring, row, tenant=header.tenant)
    except UnknownKey:
        raise
    except CheckpointStoreCorrupt:
        raise _Wrong(
            f"the seal of the row does not hold under the key {row.key_id!r}; another key sealed it, or it was changed"
        ) from None
    except NO_SUCH_VALUES:
        raise _Wrong("it is no row of a run") from None
    if row.status not in FINAL:
        raise _Wrong(f"the run has not ended: its status is {RunStatus(row.status).name.lower()}")
    return sealer


def _check_state(sealer: Sealer, chain: _Chain, checkpoint: StoredCheckpoint | None) -> None:
    named = chain.named
    if checkpoint is None or named is None:
        if checkpoint is not None or named is not None:
            raise _Wrong("a checkpoint stands here that no record names, or the one that is named is missing")
        return
    try:
        is_named = hmac.compare_digest(checkpoint_digest(checkpoint.step, checkpoint.body), named)
        holds = is_named and hmac.compare_digest(sealer.checkpoint(checkpoint.step, checkpoint.body), checkpoint.seal)
    except NO_SUCH_VALUES:
        holds = False
    if not holds:
        raise _Wrong("the checkpoint is not the one that the records name, or its seal does not hold")


def _holds(sealer: Sealer, message: StoredMessage) -> bool:
    try:
        return open_message(sealer, message)
    except NO_SUCH_VALUES:
        return False


def _check_end(reader: _Reader, sealer: Sealer, word: str, plain: Any) -> None:
    if word != "end" or not isinstance(plain, dict):
        raise _Wrong(f"expected a message or the last line here, found {word!r:.40}")
    expected = {
        "lines": reader.number - 1,
        "sha256": reader.before.hex(),
        "seal": _base64(sealer.message(_TRAILER, reader.before)),
    }
    if plain != expected:
        raise _Wrong("what the last line says of all lines before it is not so: one of them was changed, or this one")
    if reader.has_more():
        reader.number += 1
        raise _Wrong("something follows the last line")


def _parts(line: bytes) -> int:
    return line.count(b",") + line.count(b"[") + line.count(b"{")


def archives_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """The archives in a folder, by name; what a process left that was killed while it wrote one is none."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(SUFFIX):
            yield os.path.join(folder, name)
