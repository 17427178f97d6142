"""What a chaos run came to, as a table and as plain data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.chaos.faults import Struck
from tests.chaos.oracle import Violation
from tests.chaos.plan import Kind
from tests.chaos.takeovers import Takeover, times_of

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Result:
    """A chaos run that has ended."""

    store: str
    seed: int
    seconds: float
    drained_in: float
    struck: Struck
    runs: int
    claims: int
    deaths_at_points: int
    set_aside: int
    decided: int
    takeovers: Sequence[Takeover]
    violations: Sequence[Violation]
    journal: str = ""
    """What `agent-runtime show` says of the run of the first violation."""
    folder: str = ""
    """Where everything is kept of a run in which a rule did not hold."""
    again: str = ""
    """The command that does the same again."""

    @property
    def holds(self) -> bool:
        return not self.violations

    def to_plain(self) -> dict[str, object]:
        """For programs."""
        return {
            "store": self.store, "seed": self.seed, "seconds": round(self.seconds, 1),
            "drained_in": round(self.drained_in, 1), "runs": self.runs, "claims": self.claims,
            "faults": {kind.name.lower(): count for kind, count in self.struck.counts.items()},
            "missed": self.struck.missed, "deaths_at_points": self.deaths_at_points, "set_aside": self.set_aside,
            "decided": self.decided, "takeovers": {name: asdict(times_of(self.takeovers, kind, undisturbed=quiet))
                                                   for name, kind, quiet in TAKEOVERS},
            "violations": [
                {"rule": each.rule.name, "sentence": each.rule.value, "run": each.run, "found": each.found}
                for each in self.violations
            ],
            "folder": self.folder, "again": self.again,
        }  # fmt: skip

    def __str__(self) -> str:
        counts = [(kind.value, f"{self.struck.counts[kind]:,}") for kind in Kind if kind in self.struck.counts]
        rows = [
            ("runs put in", f"{self.runs:,}"),
            ("claims", f"{self.claims:,}"),
            ("workers that died at a crash point", f"{self.deaths_at_points:,}"),
            *counts,
            ("faults that found nobody", f"{self.struck.missed:,}"),
            ("runs set aside and released", f"{self.set_aside:,}"),
            ("runs that a person picked up", f"{self.decided:,}"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name.ljust(width)}  {value:>7}" for name, value in rows]
        lines += ["", *map(self._times, TAKEOVERS), "", self._verdict()]
        return "\n".join([*lines, *map(str, self.violations[:SHOWN]), *self._next()])

    def _times(self, which: tuple[str, Kind, bool]) -> str:
        name, kind, quiet = which
        times = times_of(self.takeovers, kind, undisturbed=quiet)
        told = name.replace("_", " ")
        return f"takeovers, {told}: {times.count:,}, median {times.median:.2f} s, worst {times.worst:.2f} s"

    def _verdict(self) -> str:
        what = f"{self.store}, seed {self.seed}: {self.seconds:.0f} s of faults, at rest {self.drained_in:.1f} s later"
        if self.holds:
            return f"{what}: 0 duplicates, 0 lost, 0 stuck; every rule holds"
        return f"{what}: {len(self.violations)} violations"

    def _next(self) -> list[str]:
        if self.holds:
            return []
        shown = ["", self.journal.rstrip()] if self.journal else []
        kept = f"Kept in {self.folder}: the journal of each run named (RUN.txt), the logs, the remotes' state"
        if self.store == "sqlite":
            look = f"DATABASE_URL=sqlite:///{self.folder}/runs.db CHECKPOINT_KEY=file:{self.folder}/key"
            kept += f", the store; to look at it: {look} agent-runtime show RUN"
        return [*shown, "", kept, f"The same faults again: {self.again}"]


TAKEOVERS = (
    ("after_a_kill", Kind.KILL, False),
    ("after_a_kill_with_nothing_else_wrong", Kind.KILL, True),
    ("after_a_freeze", Kind.FREEZE, False),
)
