"""What stands in a store for a body that lies in a blob folder: a stub, which no other body can be taken for. Pure.

A stub begins with a mark, and names the content by its hash and size. A body that begins with the mark by itself is
kept with an escape behind it: so each stored form stands for one body, and each body has one stored form.
"""

from hashlib import sha256
from typing import NamedTuple

MARK = b"\xff\xfeblob\x00"
"""Begins no body that the runtime writes: JSON begins otherwise, and so does the number of a step."""
_HELD, _OUTSIDE = b"=", b"#"
_HASH_SIZE, _LENGTH_SIZE = 32, 8


class Stub(NamedTuple):
    """The content that a stub stands for."""

    digest: bytes
    size: int

    @property
    def name(self) -> str:
        """The name of the content's file."""
        return self.digest.hex()

    def pack(self) -> bytes:
        return b"%b%b%b%b" % (MARK, _OUTSIDE, self.digest, self.size.to_bytes(_LENGTH_SIZE, "big"))

    def fits(self, body: bytes) -> bool:
        """Whether a content is the one that was stored."""
        return len(body) == self.size and sha256(body).digest() == self.digest


def stub_of(body: bytes) -> Stub:
    return Stub(sha256(body).digest(), len(body))


def pack_held(body: bytes) -> bytes:
    """How the store itself keeps a body."""
    return b"%b%b%b" % (MARK, _HELD, body) if body.startswith(MARK) else body


def unpack(stored: bytes) -> "bytes | Stub":
    """The body that is kept so, or the stub of one that lies outside; `ValueError` where it is neither."""
    if not stored.startswith(MARK):
        return stored
    form, rest = stored[len(MARK) : len(MARK) + 1], stored[len(MARK) + 1 :]
    if form == _HELD and rest.startswith(MARK):
        return rest
    if form == _OUTSIDE and len(rest) == _HASH_SIZE + _LENGTH_SIZE:
        return Stub(rest[:_HASH_SIZE], int.from_bytes(rest[_HASH_SIZE:], "big"))
    raise ValueError("it begins like the stub of a blob, and is none")
