"""Chance: the port that everything asks, and the system's source; no other module draws random bytes."""

from __future__ import annotations

import os
from typing import Protocol


class Entropy(Protocol):
    """Where random bytes come from. Tests and simulations bring their own."""

    def draw(self, size: int) -> bytes:
        """That many bytes which nobody can guess."""


class SystemEntropy:
    """This machine's source."""

    def draw(self, size: int) -> bytes:
        return os.urandom(size)


SYSTEM_ENTROPY: Entropy = SystemEntropy()
