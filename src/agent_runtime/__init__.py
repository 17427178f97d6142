"""An LLM agent's run that survives its worker: every model and tool call is written down before it is made and after.

journal/     the kernel: records, states, replay, seals, the store port, group commit
stores/      where runs are kept: memory, SQLite
tools        what the model may call, and what a crash in the middle of a call leads to
tool_loop    model, tools, model, until done; recover_tool_loop goes on after a crash
flow/        a graph of nodes; its every superstep is a checkpoint and its every call replays
recovery     verify, decide every doubt, claim
approvals    what a person is asked before a call goes out, and what they answer
settlements  how a call in doubt is settled
executor     one tool call: check, intent, act, confirm
testing/     the store contract, the crash sweep, faulty stores, a scripted model, a clock to move
runs         operating runs: list, show, answer, settle, cancel, release, delete, verify
supervisor   starts a worker on every run whose worker died; `python -m agent_runtime.supervisor`
mock/        the two remotes of the provisioning agent
provision    `python -m agent_runtime`: the agent that shows it all
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_runtime.approvals import ApprovalRequest, Verdict
    from agent_runtime.errors import (
        AgentRuntimeError,
        CallFailed,
        CheckpointConflict,
        CheckpointNotFound,
        CheckpointStoreCorrupt,
        Doubt,
        FlowError,
        IdentityMismatch,
        InvalidArguments,
        InvalidKey,
        InvalidRunId,
        InvalidSetting,
        KeyConflict,
        NotInDoubt,
        NotSent,
        RecoveryNeedsDecision,
        RevokedKey,
        SettlementRefused,
        StepLimitReached,
        StoreRefused,
        StoreUnavailable,
        TooLarge,
        ToolDefinitionError,
        ToolError,
        UnknownKey,
        UnknownTool,
        Unrecordable,
        VerdictRefused,
    )
    from agent_runtime.events import Event, Sink
    from agent_runtime.executor import Executor
    from agent_runtime.flow.calls import NodeRun
    from agent_runtime.flow.graph import Flow
    from agent_runtime.flow.nodes import Call
    from agent_runtime.flow.runner import FlowResult, FlowRunner
    from agent_runtime.flow.state import append, extend
    from agent_runtime.flow.superstep import NodeError
    from agent_runtime.journal.keys import KeyRing
    from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
    from agent_runtime.model import Model
    from agent_runtime.redaction import Part, redact_all, redact_names, redact_pattern
    from agent_runtime.run import RunContext
    from agent_runtime.runs import Runs
    from agent_runtime.settlements import Outcome, Rerun
    from agent_runtime.telemetry import HistorySink, JsonLinesSink, LoggingSink, LogSink
    from agent_runtime.telemetry_otel import OpenTelemetrySink
    from agent_runtime.telemetry_prometheus import PrometheusSink
    from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
    from agent_runtime.tools import ToolRegistry, idempotency_key

__version__ = "0.1.0"

_HOMES = {
    "approvals": ("ApprovalRequest", "Verdict"),
    "errors": (
        "AgentRuntimeError", "CallFailed", "CheckpointConflict", "CheckpointNotFound", "CheckpointStoreCorrupt", "Doubt",
        "FlowError", "IdentityMismatch", "InvalidArguments", "InvalidKey", "InvalidRunId", "InvalidSetting", "KeyConflict",
        "NotInDoubt", "NotSent", "RecoveryNeedsDecision", "RevokedKey", "RunQuarantined", "SettlementRefused",
        "StepLimitReached", "StoreRefused", "StoreUnavailable", "TooLarge", "ToolDefinitionError",
        "ToolError", "UnknownKey", "UnknownTool", "Unrecordable", "VerdictRefused",
    ),
    "events": ("Event", "Sink"),
    "executor": ("Executor",),
    "flow.calls": ("NodeRun",),
    "flow.graph": ("Flow",),
    "flow.nodes": ("Call",),
    "flow.runner": ("FlowResult", "FlowRunner"),
    "flow.state": ("append", "extend"),
    "flow.superstep": ("NodeError",),
    "journal.keys": ("KeyRing",),
    "messages": ("Message", "Reply", "ToolCall", "ToolSpec"),
    "model": ("Model",),
    "redaction": ("Part", "redact_all", "redact_names", "redact_pattern"),
    "run": ("RunContext",),
    "runs": ("Runs",),
    "settlements": ("Outcome", "Rerun"),
    "telemetry": ("HistorySink", "JsonLinesSink", "LogSink", "LoggingSink"),
    "telemetry_otel": ("OpenTelemetrySink",),
    "telemetry_prometheus": ("PrometheusSink",),
    "tool_loop": ("LoopResult", "recover_tool_loop", "run_tool_loop"),
    "tools": ("ToolRegistry", "idempotency_key"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AgentRuntimeError", "ApprovalRequest", "Call", "CallFailed", "CheckpointConflict", "CheckpointNotFound",
    "CheckpointStoreCorrupt", "Doubt", "Event", "Executor", "Flow", "FlowError", "FlowResult", "FlowRunner",
    "HistorySink", "IdentityMismatch", "InvalidArguments", "InvalidKey", "InvalidRunId", "InvalidSetting",
    "JsonLinesSink", "KeyConflict", "KeyRing", "LogSink", "LoggingSink", "LoopResult", "Message", "Model", "NodeError",
    "NodeRun", "NotInDoubt", "NotSent", "OpenTelemetrySink", "Outcome", "Part", "PrometheusSink", "RecoveryNeedsDecision",
    "Reply", "Rerun", "RevokedKey", "RunContext", "RunQuarantined", "Runs", "SettlementRefused", "Sink",
    "StepLimitReached", "StoreRefused", "StoreUnavailable", "TooLarge", "ToolCall", "ToolDefinitionError", "ToolError",
    "ToolRegistry", "ToolSpec", "UnknownKey", "UnknownTool", "Unrecordable", "Verdict", "VerdictRefused", "__version__",
    "append", "extend", "idempotency_key", "recover_tool_loop", "redact_all", "redact_names", "redact_pattern",
    "run_tool_loop",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The front door's names, each imported with its first use."""
    from importlib import import_module

    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
