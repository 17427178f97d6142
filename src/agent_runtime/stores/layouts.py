"""Layouts, the forms of a store's tables and keys: what is told of one, and what a store says that has another than ours."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple, Protocol

from agent_runtime.errors import NewerFormat, StoreUnavailable

_log = logging.getLogger("agent_runtime")


class Layout(NamedTuple):
    """Which layout a store has, None where there is none yet, and which one this version makes."""

    found: int | None
    newest: int

    @property
    def is_old(self) -> bool:
        """Whether there is something to migrate."""
        return self.found is not None and self.found < self.newest


class Migratable(Protocol):
    """What a store offers besides that keeps its runs in a layout of ours."""

    async def read_layout(self) -> Layout:
        """Which layout it has. Makes and changes nothing; refuses what is not ours, and what is newer."""

    async def migrate(self) -> Layout:
        """Bring it to the newest layout, once among many; gives what it had before. What is sealed stays as it is."""


def newer(place: str, found: int, newest: int) -> NewerFormat:
    """What is said of a layout that this version does not know."""
    return NewerFormat(
        f"{place} has layout {found}, and this version knows {newest}; use the newer version of durable-agent-runtime that "
        "made it"
    )


def say_old(place: str, layout: Layout) -> None:
    """Say once that a store has an older layout, which serves."""
    if layout.is_old:
        _say_once(
            f"{place} has layout {layout.found}, and this version makes {layout.newest}: it serves, and lists by time are "
            "slow; once no older version works on it, run `agent-runtime migrate`"
        )


@cache
def _say_once(text: str) -> None:
    _log.info(text)


def nobody_knows(place: str) -> StoreUnavailable:
    """What is said where the answer to a migration was lost."""
    return StoreUnavailable(
        f"{place}: the connection was lost while it was migrated; either all of it landed or nothing. Run it again"
    )
