"""Every error the runtime raises, drawn as a tree; each branch says who must act.

    AgentRuntimeError
    ├── UsageError               the caller: change the call or the setting, nothing was stored
    │   ├── InvalidRunId · InvalidKey · InvalidSetting
    │   ├── ToolDefinitionError · UnknownTool · InvalidArguments
    │   ├── CheckpointNotFound · IdentityMismatch · NotInDoubt
    ├── CheckpointConflict       the caller: wait, take over, or use another id
    │   └── RunQuarantined       the operator: find out what kills its workers, mend it, release the run
    ├── RecoveryNeedsDecision    a person: say what happened to each call in doubt
    ├── VerdictRefused           the approver: answer the request that is open
    ├── SettlementRefused        whoever settles a call: wait until it can be believed, or permit a rerun
    ├── CheckpointStoreCorrupt   the operator: what is stored is not what was written
    │   ├── UnknownKey           the operator: give this worker the key that sealed it
    │   │   └── RevokedKey       the operator: reseal the run if it is known to be genuine, or delete it
    │   └── KeyConflict          raised by a tool: the remote knows the key with other arguments
    ├── StoreRefused             the operator: this is no store that we may write
    │   ├── ForeignStore · NewerFormat · ReadOnlyStore
    ├── StoreUnavailable         the operator or time: the store gave no answer; nothing further was started
    ├── Unrecordable             the tool's author: return something that can be stored
    │   └── TooLarge             whoever gave it: give less, or a reference to where it is kept
    ├── StepLimitReached         the run's author: the model asked for more replies than allowed
    ├── FlowError                the flow's author: the graph is wrong, or has changed
    ├── CallFailed               the flow's author: a tool answered a node's call with an error; catch it, or lead it on
    ├── ToolError                raised by a tool: this is its answer, and the model sees it
    └── NotSent                  raised by a tool: nothing went out

`Fenced` stands outside the tree: it is a signal to stop at once, and user code must not swallow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime


class AgentRuntimeError(Exception):
    """Any error of this package."""


class UsageError(AgentRuntimeError):
    """The call or a setting is wrong; nothing was stored and nothing acted."""


class InvalidRunId(UsageError, ValueError):
    """The run id is empty, too long, or holds characters that no id may hold."""


class InvalidKey(UsageError, ValueError):
    """The checkpoint key is missing, too short, or no key at all."""


class InvalidSetting(UsageError, ValueError):
    """A setting or an option has a value that it cannot have."""


class ToolDefinitionError(UsageError, TypeError):
    """A function cannot be made a tool as it stands."""


class UnknownTool(UsageError, LookupError):
    """No tool of that name is registered."""


class InvalidArguments(UsageError, ValueError):
    """The arguments do not fit the tool's signature."""


class CheckpointNotFound(UsageError, LookupError):
    """Nothing is stored for the run id."""


class IdentityMismatch(UsageError):
    """The run belongs to another user, thread or principal."""


class NotInDoubt(UsageError):
    """The call that was to be settled is not in doubt: the message says how it stands."""


class CheckpointConflict(AgentRuntimeError):
    """Another worker holds the run, it ended, it exists already, or it is another program's."""


class RunQuarantined(CheckpointConflict):
    """The run was claimed too often without progress, and is set aside until somebody releases it."""

    def __init__(self, run_id: str, why: str) -> None:
        from shlex import quote  # for those few who are told this

        self.run_id = run_id
        self.why = why
        super().__init__(
            f"run {run_id!r} is quarantined: {why}. Find out what stops its workers, mend it, then let it go again with "
            f"`agent-runtime release {quote(run_id)}`"
        )


@dataclass(frozen=True, slots=True)
class Doubt:
    """One call whose outcome nobody knows, and what may be done about it."""

    run_id: str
    call: str
    key: str
    tool: str
    attempt: int
    why: str
    may: tuple[str, ...]
    args: Mapping[str, object] = field(default_factory=dict, repr=False)
    age_seconds: float | None = None


class RecoveryNeedsDecision(AgentRuntimeError):
    """A call may have happened and its tool has no rule to find out; a person must say."""

    def __init__(self, run_id: str, doubts: Sequence[Doubt]) -> None:
        self.run_id = run_id
        self.doubts: tuple[Doubt, ...] = tuple(doubts)
        listed = "; ".join(f"{d.tool} (call {d.call}, key {d.key}, attempt {d.attempt}): {d.why}" for d in self.doubts)
        super().__init__(
            f"run {run_id!r} has {len(self.doubts)} call(s) in doubt: {listed}. "
            "Find out at the remote, by the key, whether each one happened, and say so with `agent-runtime settle` or "
            "Runs.settle; where running it again is right, recover with rerun_in_doubt=True or with the doubts to rerun."
        )

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """(tool, why) of each call in doubt."""
        return tuple((doubt.tool, doubt.why) for doubt in self.doubts)


class VerdictRefused(AgentRuntimeError):
    """The verdict is for another request, other arguments, an old checkpoint, or comes too late."""


class SettlementRefused(AgentRuntimeError):
    """What somebody said of a call in doubt cannot be believed yet, or something else is known of it already."""

    def __init__(self, message: str, until: datetime | None = None) -> None:
        self.until = until
        """From when on it will be believed, where that is known."""
        super().__init__(message)


class CheckpointStoreCorrupt(AgentRuntimeError):
    """What is stored is not what was written: a changed, moved, missing or forged record."""


class UnknownKey(CheckpointStoreCorrupt):
    """The run was sealed with a key that this worker does not have."""


class RevokedKey(UnknownKey):
    """The run is sealed with a key that the ring revokes: whoever has that key may have written it."""


class KeyConflict(CheckpointStoreCorrupt):
    """Raise it in a tool whose remote has seen the idempotency key with other arguments: the run stops as corrupt.

    After a store went back in time this is the only alarm left, so it is never read as an answer.
    """


class StoreRefused(AgentRuntimeError):
    """The place named as a store is not one that this version may write."""


class ForeignStore(StoreRefused):
    """The file or database belongs to another program."""


class NewerFormat(StoreRefused):
    """The store or the run was written by a newer version of this package."""


class ReadOnlyStore(StoreRefused):
    """The store can be read and not be written."""


class StoreUnavailable(AgentRuntimeError):
    """The store did not answer, or could not write; nothing further was started."""


class Unrecordable(AgentRuntimeError):
    """A value cannot be stored: `path` says where in it, `found` what stands there."""

    def __init__(self, path: str, found: str, *, tool: str | None = None) -> None:
        self.path = path
        self.found = found
        self.tool = tool
        whose = f"the result of tool {tool!r}" if tool else "the value"
        super().__init__(
            f"{whose} cannot be recorded at {path}: found {found}; expected None, bool, int, finite float, str, "
            "list or dict with text keys, or a value of the type that is declared. Declare the type, or return plain data."
        )

    def named(self, tool: str) -> Unrecordable:
        """The same, naming the tool."""
        return Unrecordable(self.path, self.found, tool=tool)


class TooLarge(Unrecordable):
    """A value takes more bytes than one record may: `size` as it would be recorded, `limit` what is allowed."""

    def __init__(self, size: int, limit: int, *, what: str = "the value", tool: str | None = None) -> None:
        self.path = "$"
        self.found = f"{size:,} bytes, more than the {limit:,} that are allowed"
        self.tool = tool
        self.size = size
        self.limit = limit
        AgentRuntimeError.__init__(
            self,
            f"{what} takes {size:,} bytes as it is recorded, and {limit:,} are allowed; give less, or a reference to where "
            "it is kept, or raise max_value_bytes= as far as the store goes",
        )

    def named(self, tool: str) -> TooLarge:
        return TooLarge(self.size, self.limit, what=f"the result of tool {tool!r}", tool=tool)

    def about(self, what: str) -> TooLarge:
        """The same, saying what is too large."""
        return TooLarge(self.size, self.limit, what=what, tool=self.tool)


class StepLimitReached(AgentRuntimeError):
    """The model asked for more replies than `max_steps` allows over the whole run."""


class FlowError(AgentRuntimeError):
    """The flow is wrong, or its graph changed since the checkpoint was saved."""


class CallFailed(AgentRuntimeError):
    """A tool answered a call of a node with an error. Node code may catch it; else the node has failed."""

    def __init__(self, tool: str, error_type: str, message: str) -> None:
        self.tool = tool
        self.error_type = error_type
        self.message = message
        super().__init__(f"tool {tool!r} answered with {error_type}: {message}")


class ToolError(AgentRuntimeError):
    """Raise it in a tool: the call is done, this error is its answer, and the model sees it."""


class NotSent(AgentRuntimeError):
    """Raise it in a tool: nothing went out, so the call may be tried again."""


class Fenced(BaseException):
    """Another owner holds the run: stop at once. Not an `Exception`, so that user code lets it pass."""
