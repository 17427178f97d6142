"""Hides bodies from whoever reads the store: AES-256-GCM (RFC 5116), a random nonce each, bound to the place it stands at.

What is hidden is sealed like any other body: a seal is checked first, and needs nothing of this file.
"""

from __future__ import annotations

from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.errors import InvalidSetting

NONCE_SIZE = 12
TAG_SIZE = 16
HIDDEN_BYTES = NONCE_SIZE + TAG_SIZE
"""How much longer a body is once it is hidden."""


class Cipher:
    """Hides and shows bodies under one key, which is of 32 bytes."""

    __slots__ = ("_aead",)

    def __init__(self, key: bytes) -> None:
        require_cipher()
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)

    def hide(self, place: bytes, body: bytes) -> bytes:
        """The body as it is stored at that place: never the same twice."""
        nonce = SYSTEM_ENTROPY.draw(NONCE_SIZE)  # never one that a number gives: a store put back would use it again
        return nonce + self._aead.encrypt(nonce, body, place)

    def show(self, place: bytes, hidden: bytes) -> bytes:
        """The body that was hidden at that place; `ValueError` where it was not, which tells nothing of it."""
        from cryptography.exceptions import InvalidTag

        if len(hidden) < HIDDEN_BYTES:
            raise ValueError("too short to be anything that was hidden")
        try:
            return self._aead.decrypt(hidden[:NONCE_SIZE], hidden[NONCE_SIZE:], place)
        except InvalidTag:
            raise ValueError("not hidden under this key, at this place") from None


def require_cipher() -> None:
    """`InvalidSetting` where this process cannot encrypt."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401 (it is looked for, and used by the class)
    except ImportError as error:
        raise InvalidSetting(
            "a key that encrypts needs the package cryptography, which is not installed; "
            "pip install 'durable-agent-runtime[encryption]', or leave encrypts= out"
        ) from error
