"""For tests of yours and of ours."""

from __future__ import annotations

from agent_runtime.testing.faults import FaultyStore, SimulatedCrash
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.script_model import ScriptModel

__all__ = ["FaultyStore", "ManualClock", "Remote", "ScriptModel", "SimulatedCrash"]
