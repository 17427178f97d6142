"""The keys of a worker: a ring of them, how one is written in a setting and in a file, and which of them may do what."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from agent_runtime.errors import InvalidKey, InvalidSetting, UnknownKey
from agent_runtime.journal.cipher import require_cipher

MIN_KEY = 16
MAX_KEY_ID = 64
THE_ONE = "key"
"""The id of a key that was given without one."""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys a worker knows: `active` seals what is new, every one verifies what is there.

    `encrypts` names the keys under which bodies are encrypted as well: a property of a key for all its life. `revoked`
    names those that are not trusted any more: no run under one is worked, and no message under one is heard. What a run
    holds from before it went on to another key still verifies, so a revoked key stays on the ring.
    """

    keys: Mapping[str, bytes]
    active: str
    encrypts: Collection[str] = frozenset()
    revoked: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("encrypts", "revoked"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.active not in self.keys:
            raise InvalidKey(f"the active key {self.active!r} is not on the ring, which has {sorted(self.keys)}")
        if self.active in self.revoked:
            raise InvalidKey(f"the active key {self.active!r} is revoked; make another one active")
        for key_id, key in self.keys.items():
            _check_key(key_id, key)
        if strangers := sorted(set(self.encrypts) - set(self.keys)):
            raise InvalidKey(f"encrypts= names {strangers}, and the ring has {sorted(self.keys)}")
        if self.encrypts:
            require_cipher()

    def __repr__(self) -> str:
        more = "".join(f", {name}={sorted(ids)}" for name in ("encrypts", "revoked") if (ids := getattr(self, name)))
        return f"KeyRing(keys={sorted(self.keys)}, active={self.active!r}{more})"

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

    def trusting_revoked(self) -> KeyRing:
        """The same ring, with no key revoked: for an operator who moves runs off a key."""
        return replace(self, revoked=frozenset()) if self.revoked else self


CheckpointKey: TypeAlias = bytes | Mapping[str, bytes] | KeyRing
"""A key of 16 bytes or more; a mapping {id: key} whose last one is active; or a `KeyRing`."""


@lru_cache(maxsize=16)
def _ring_of_one(key: bytes) -> KeyRing:
    return KeyRing({"key": key}, "key")


def check_key_id(key_id: object) -> None:
    """Refuse what is no id of a key."""
    if not isinstance(key_id, str) or not 1 <= len(key_id) <= MAX_KEY_ID or not key_id.isprintable():
        raise InvalidKey(f"a key id is 1 to {MAX_KEY_ID} printable characters, found {key_id!r}")


def _check_key(key_id: object, key: object) -> None:
    check_key_id(key_id)
    if not isinstance(key, bytes):
        raise InvalidKey(f"key {key_id!r} must be bytes, found {type(key).__name__}")
    if len(key) < MIN_KEY:
        raise InvalidKey(
            f"key {key_id!r} must have {MIN_KEY} bytes or more, found {len(key)}; make one with `agent-runtime keygen`"
        )


def _ids(name: str, ids: object) -> frozenset[str]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Collection) or not all(isinstance(each, str) for each in ids):
        raise InvalidKey(f"{name}= is a set of key ids, found {ids!r}")
    return frozenset(ids)


# Keys in settings and files.


def parse_ring(text: str) -> KeyRing:
    """The ring that a setting holds: one key as `parse_key` reads it, or several, `ID=KEY,ID=KEY`, whose last is active.

    `encrypts=ID` and `revoked=ID` among them say so of the key of that id; each may stand more than once.
    """
    if not _names_ids(text):
        return KeyRing.of(parse_key(text))
    keys: dict[str, bytes] = {}
    said: dict[str, set[str]] = {"encrypts": set(), "revoked": set()}
    for entry in text.split(","):
        name, is_pair, value = (part.strip() for part in entry.partition("="))
        if not (name and is_pair and value):
            raise InvalidKey("a ring is written ID=KEY,ID=KEY, with encrypts=ID and revoked=ID; found a part of another form")
        if name in said:
            said[name].add(value)
        elif name in keys:
            raise InvalidKey(f"the ring names key {name!r} twice; give each key an id of its own")
        else:
            keys[name] = parse_key(value)
    if not keys:
        raise InvalidKey("a ring holds a key at least, as ID=KEY; found none")
    return KeyRing(keys, list(keys)[-1], **said)


def _names_ids(text: str) -> bool:
    """Whether it is a ring: base64 has its equals signs at its end alone."""
    return not text.startswith("file:") and "=" in text.rstrip("= \n")


def parse_key(text: str) -> bytes:
    """The key that a setting holds: base64, or `file:PATH` of a file with base64 in it."""
    if text.startswith("file:"):
        path = text.removeprefix("file:")
        try:
            with open(path, encoding="ascii") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            told = type(error).__name__ if isinstance(error, ValueError) else str(error)
            raise InvalidKey(f"no key could be read from {path!r}: {told}; name a file that holds base64") from error
    try:
        key = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidKey(f"a key is base64, or file:PATH, found text that is neither ({error})") from error
    _check_key(THE_ONE, key)
    return key


def key_beside(path: str | os.PathLike[str], fresh: bytes) -> bytes:
    """The key in the file at `path`; `fresh` is written there first, mode 0600, if nothing is.

    A key that was given out is still there after a power cut: what it sealed could be opened by nobody else.
    """
    with suppress(FileExistsError):
        _link_whole(path, fresh)  # a link appears whole or not at all, so two first starts agree on one key
    _flush_folder(os.path.dirname(os.path.abspath(path)))
    return parse_key(f"file:{os.fspath(path)}")


def write_key(path: str | os.PathLike[str], fresh: bytes) -> None:
    """Write a fresh key to a file of its own, mode 0600. `InvalidSetting` where something is there, which stays."""
    try:
        _link_whole(path, fresh)
    except FileExistsError:
        raise InvalidSetting(
            f"there is a file at {os.fspath(path)!r} already, and it may hold the only copy of a key; nothing was written: "
            "choose another path"
        ) from None
    except OSError as error:
        raise InvalidSetting(f"no key could be written to {os.fspath(path)!r}: {error}; choose another path") from error
    _flush_folder(os.path.dirname(os.path.abspath(path)))


def _link_whole(path: str | os.PathLike[str], fresh: bytes) -> None:
    text = base64.b64encode(fresh) + b"\n"
    pending = f"{os.fspath(path)}.{fresh[:6].hex()}"
    descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(pending, path)
    finally:
        os.unlink(pending)


def _flush_folder(folder: str) -> None:
    """Have it on the disk which files there are, where a folder can be flushed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
