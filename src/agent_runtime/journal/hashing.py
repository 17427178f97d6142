"""HMAC-SHA-256 (RFC 2104) by hash states that are copied: a key, and what all messages begin with, are hashed once. Pure."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

States: TypeAlias = "tuple[Hash, Hash]"
"""Of the inner hash, with what it has taken so far, and of the outer one."""

_BLOCK = 64
_IPAD = bytes(byte ^ 0x36 for byte in range(256))
_OPAD = bytes(byte ^ 0x5C for byte in range(256))


def begin_mac(key: bytes, start: bytes = b"") -> States:
    """The states under a key, of messages that begin with `start`."""
    block = (key if len(key) <= _BLOCK else sha256(key).digest()).ljust(_BLOCK, b"\0")
    return sha256(block.translate(_IPAD) + start), sha256(block.translate(_OPAD))


states_of = lru_cache(maxsize=16)(begin_mac)
"""The same for a key of a ring, from which the key of every run is derived."""


def mac(inner: Hash, outer: Hash, data: bytes) -> bytes:
    """The HMAC of what was begun, and of `data` behind it."""
    inner, outer = inner.copy(), outer.copy()
    inner.update(data)
    outer.update(inner.digest())
    return outer.digest()
