"""Crash a run at every moment that leaves something different behind, recover it, and hold it to the rules.

Pass one works a run without faults and counts its moments: each durable write, before and after it is durable; each act,
after the remote acted and before that is recorded; each answer of the model. Then a worker dies at each of them, one run
a moment, and the next one recovers: that is the first round. In the second the recovering worker dies as well, at each of
its own moments; and so on for as many deaths as `depth` says. Where recovery names a call in doubt, a person permits its
rerun, and the run goes on from there. Where a run is paused, a person answers each request once, as the scenario says.

Effects are counted at the remote, and what is durable is read past the workers, at the moment at which they act.

    report = await sweep(Scenario("mine", replies, tools), make_store)
    assert report.holds, str(report)

`python -m agent_runtime.testing.crash_sweep` sweeps our own scenarios on every store.
"""

from __future__ import annotations

from agent_runtime.testing.crash_sweep.people import Answers
from agent_runtime.testing.crash_sweep.report import Row, SweepReport, Violation
from agent_runtime.testing.crash_sweep.rules import Rule
from agent_runtime.testing.crash_sweep.scenario import (
    FLOWS,
    FLOWS_WITH_PEOPLE,
    PEOPLE,
    SCENARIOS,
    SHORT_SCENARIOS,
    Client,
    FlowScenario,
    Scenario,
)
from agent_runtime.testing.crash_sweep.sweep import sweep

__all__ = [
    "FLOWS", "FLOWS_WITH_PEOPLE", "PEOPLE", "SCENARIOS", "SHORT_SCENARIOS", "Answers", "Client", "FlowScenario", "Row", "Rule",
    "Scenario", "SweepReport", "Violation", "sweep",
]  # fmt: skip
