"""Does a strike to whoever is there, and remembers what was hit and when."""

from __future__ import annotations

import heapq
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from tests.chaos.actors import LEASE, Remotes
from tests.chaos.plan import Kind, Strike, pick_one
from tests.chaos.processes import Found, Role, find
from tests.chaos.stores import Place

SHORTEST_FREEZE, LONGEST_FREEZE = 1.3 * LEASE, 2.5 * LEASE
LOCK_SECONDS = 1.5 * LEASE
SERVER_AWAY_SECONDS = 0.4
PATIENCE_SECONDS, AGAIN_SECONDS = 2.0, 0.1
"""How long a kill waits for a worker that has its run, and how often it looks."""
SETTLES_SECONDS = 1.5
"""How long after a trouble it may still be felt."""


class Hit(NamedTuple):
    """A worker that was killed or frozen: which run it worked, if it had one, and when."""

    kind: Kind
    run: str
    pid: int
    at: float


@dataclass(slots=True)
class Struck:
    """What the strikes did."""

    counts: Counter[Kind] = field(default_factory=Counter)
    missed: int = 0
    hits: list[Hit] = field(default_factory=list)
    troubles: list[tuple[float, float]] = field(default_factory=list)
    """When something was wrong that touches more than one worker, from and to."""


class Faults:
    """Strikes, and what must follow each a little later."""

    def __init__(self, mark: str, at_work: set[str], remotes: Remotes, place: Place) -> None:
        """`at_work`: the runs whose worker is known to have claimed them; a run that is hit is taken out."""
        self._mark = mark
        self._at_work = at_work
        self._remotes = remotes
        self._place = place
        self._later: list[tuple[float, int, Callable[[float], object]]] = []
        self._order = count()
        self.struck = Struck()

    def strike(self, strike: Strike, now: float, *, since: float | None = None) -> None:
        """Do it now. A kill waits a little for a worker that has its run; one that hits nobody is counted as missed."""
        since = now if since is None else since
        if strike.kind is Kind.KILL and now - since < PATIENCE_SECONDS and self._comes_early(strike):
            self._follow_with(now + AGAIN_SECONDS, lambda later: self.strike(strike, later, since=since))
        elif now < float("inf") and self._do(strike, now):
            self.struck.counts[strike.kind] += 1
        else:
            self.struck.missed += 1

    def follow(self, now: float) -> None:
        """Do what is due: thaw, unlock, start again, strike again."""
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2](now)

    def calm(self) -> None:
        """No more trouble: whatever was to follow later follows now."""
        self.follow(float("inf"))
        for remote in ("cloud", "model"):
            self._remotes.switch(remote, drop=0, refuse=0)

    def _do(self, strike: Strike, now: float) -> bool:
        match strike.kind:
            case Kind.KILL | Kind.FREEZE | Kind.STOP:
                return self._hit_worker(strike, now)
            case Kind.STOP_ALL:
                return sum(each.send(signal.SIGTERM) for each in self._workers()) > 0
            case Kind.KILL_SUPERVISOR | Kind.STOP_SUPERVISOR | Kind.FREEZE_SUPERVISOR | Kind.FREEZE_GROUP:
                return self._hit_supervisor(strike, now)
            case Kind.LOSE_REPLY | Kind.REFUSE:
                remote = "cloud" if strike.pick < 0.5 else "model"
                return self._remotes.switch(remote, **{"drop" if strike.kind is Kind.LOSE_REPLY else "refuse": 1})
            case Kind.KILL_REMOTES:
                self._remotes.kill()
                self._remotes.start()
                self._trouble(now, 0.5)
                return True
            case _:
                return self._hit_store(strike, now)

    def _hit_worker(self, strike: Strike, now: float) -> bool:
        victim = _pick(strike.pick, self._candidates(strike.pick))
        if victim is None:
            return False
        if strike.kind is Kind.STOP:
            return victim.send(signal.SIGTERM)
        is_kill = strike.kind is Kind.KILL
        is_hit = victim.send(signal.SIGKILL) if is_kill else self._freeze([victim], strike.pick, now)
        if is_hit:
            self._at_work.discard(victim.run)
            self.struck.hits.append(Hit(strike.kind, victim.run, victim.pid, now))
        return is_hit

    def _candidates(self, pick: float) -> list[Found]:
        """Workers that have their run, but for one strike in four: that one may hit a worker on its first breath."""
        workers = [each for each in self._workers() if not each.is_frozen]
        at_work = [each for each in workers if each.run in self._at_work]
        return at_work if at_work and _is_for_those_at_work(pick) else workers

    def _comes_early(self, strike: Strike) -> bool:
        """Whether it is meant for a worker that has its run, and there is none."""
        return _is_for_those_at_work(strike.pick) and not any(each.run in self._at_work for each in self._workers())

    def _hit_supervisor(self, strike: Strike, now: float) -> bool:
        victim = _pick(strike.pick, [each for each in find(self._mark) if each.role is Role.SUPERVISOR])
        if victim is None:
            return False
        self._trouble(now, LONGEST_FREEZE)
        match strike.kind:
            case Kind.KILL_SUPERVISOR:
                return victim.send(signal.SIGKILL)
            case Kind.STOP_SUPERVISOR:
                return victim.send(signal.SIGTERM)
            case Kind.FREEZE_GROUP:
                workers = [each for each in self._workers() if each.parent == victim.pid]
                return self._freeze([victim, *workers], strike.pick, now)
            case _:
                return self._freeze([victim], strike.pick, now)

    def _hit_store(self, strike: Strike, now: float) -> bool:
        is_hit, undo = self._place.strike(strike.kind, strike.pick)
        if undo is not None:
            seconds = LOCK_SECONDS if strike.kind is Kind.LOCK_FILE else SERVER_AWAY_SECONDS
            self._trouble(now, seconds)
            self._follow_with(now + seconds, lambda _: undo())
        elif is_hit:
            self._trouble(now, 0.0)
        return is_hit

    def _freeze(self, victims: Sequence[Found], pick: float, now: float) -> bool:
        frozen = [each for each in victims if each.send(signal.SIGSTOP)]
        thaw_at = now + SHORTEST_FREEZE + _another(pick) * (LONGEST_FREEZE - SHORTEST_FREEZE)
        for each in frozen:
            self._follow_with(thaw_at, partial(_thaw, each))
        return bool(frozen)

    def _follow_with(self, at: float, act: Callable[[float], object]) -> None:
        heapq.heappush(self._later, (at, next(self._order), act))

    def _trouble(self, now: float, seconds: float) -> None:
        self.struck.troubles.append((now, now + seconds + SETTLES_SECONDS))

    def _workers(self) -> list[Found]:
        return [each for each in find(self._mark) if each.role is Role.WORKER]


def _thaw(frozen: Found, _: float) -> None:
    frozen.send(signal.SIGCONT)


def _is_for_those_at_work(pick: float) -> bool:
    return _another(pick) < 0.75


def _another(pick: float) -> float:
    """Another draw than the one that picks the victim."""
    return pick * 997 % 1


def _pick(pick: float, among: Sequence[Found]) -> Found | None:
    chosen = pick_one(pick, range(len(among)))
    return None if chosen is None else among[chosen]
