"""What strikes when: drawn from a seed before anything starts. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from agent_runtime.crash import CrashPoint

DECISIONS = 3
"""How many decisions of the provisioning agent lead to a call."""


class Kind(Enum):
    """A kind of fault, as the report names it."""

    KILL = "worker killed"
    FREEZE = "worker frozen past its lease"
    STOP = "worker told to stop"
    STOP_ALL = "all workers told to stop"
    KILL_SUPERVISOR = "supervisor killed"
    STOP_SUPERVISOR = "supervisor told to stop"
    FREEZE_SUPERVISOR = "supervisor frozen"
    FREEZE_GROUP = "supervisor and its workers frozen"
    LOSE_REPLY = "reply of a remote lost"
    REFUSE = "request refused by a remote"
    KILL_REMOTES = "remotes killed"
    END_SESSION = "session ended by the server"
    END_SESSIONS = "all sessions ended by the server"
    KILL_SERVER = "server killed"
    RESTART_SERVER = "server restarted"
    LOCK_FILE = "store locked by another program"


OF_POSTGRES = frozenset({Kind.END_SESSION, Kind.END_SESSIONS, Kind.KILL_SERVER, Kind.RESTART_SERVER})
OF_SQLITE = frozenset({Kind.LOCK_FILE})
OF_ANY = frozenset(Kind) - OF_POSTGRES - OF_SQLITE

A_MINUTE: Mapping[Kind, float] = {
    Kind.FREEZE: 12, Kind.STOP: 6, Kind.STOP_ALL: 1, Kind.KILL_SUPERVISOR: 4, Kind.STOP_SUPERVISOR: 1,
    Kind.FREEZE_SUPERVISOR: 1, Kind.FREEZE_GROUP: 1, Kind.LOSE_REPLY: 6, Kind.REFUSE: 4, Kind.KILL_REMOTES: 1,
    Kind.END_SESSION: 8, Kind.END_SESSIONS: 3, Kind.KILL_SERVER: 2, Kind.RESTART_SERVER: 1, Kind.LOCK_FILE: 3,
}  # fmt: skip
"""How often a minute each kind strikes; but at least once. Kills of workers have a rate of their own."""


class Strike(NamedTuple):
    """A fault at a moment, in seconds from the start. `pick`, from 0 to 1, says whom it hits of those that are there then."""

    at: float
    kind: Kind
    pick: float


class Death(NamedTuple):
    """Where the worker that puts a run in dies: a crash point, and the decision."""

    point: CrashPoint
    seq: int


def draw_strikes(seed: int, seconds: float, kinds: Collection[Kind], *, kills_a_second: float) -> Sequence[Strike]:
    """All strikes in the order of their moments: each kind spread evenly over the time, none twice at the same moment."""
    rng = random.Random(f"strikes {seed}")
    strikes: list[Strike] = []
    for kind in Kind:
        if kind in kinds:
            wanted = kills_a_second * seconds if kind is Kind.KILL else A_MINUTE[kind] * seconds / 60
            strikes += _spread(rng, kind, max(1, round(wanted)), seconds)
    return sorted(strikes)


def _spread(rng: random.Random, kind: Kind, count: int, seconds: float) -> list[Strike]:
    slot = seconds / count
    return [Strike((place + rng.random()) * slot, kind, rng.random()) for place in range(count)]


def draw_death(seed: int, number: int) -> Death | None:
    """How the worker of the run of that number dies; None where nobody told it to."""
    rng = random.Random(f"death {seed} {number}")
    return Death(rng.choice(list(CrashPoint)), rng.randrange(DECISIONS)) if rng.random() < 0.5 else None


def pick_one(pick: float, among: Sequence[int]) -> int | None:
    """The one that the pick stands for; None where there is none."""
    return among[min(int(pick * len(among)), len(among) - 1)] if among else None
