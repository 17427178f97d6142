"""One open run: what it is worked on, who it belongs to, its journal, and how it is given back."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from agent_runtime import codec, events
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.crash import UNARMED, CrashPlan, CrashPoint
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import (
    AgentRuntimeError,
    Fenced,
    IdentityMismatch,
    InvalidSetting,
    StoreUnavailable,
    TooLarge,
)
from agent_runtime.ids import RunId, build_key, is_reply, key_prefix
from agent_runtime.inbox import Cancel, find_cancel, leave_late, read_inbox
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Commits, Journal, new_row
from agent_runtime.journal.records import OWNER_SIZE, RecordKind, RunStatus, StoredRow
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.lease import LIVE_OWNERS, claimed_body, heartbeat, own_mark
from agent_runtime.offload import SYSTEM_OFFLOAD, Job, Offload
from agent_runtime.redaction import Redact
from agent_runtime.settings import MAX_VALUE_BYTES

_log = logging.getLogger("agent_runtime")
T = TypeVar("T")

LEASE_SECONDS = 12.0
HEARTBEAT_SECONDS = 3.0
MAX_ATTEMPTS = 5
FIRST_WAKE_SECONDS = 1.0
LONGEST_WAKE_SECONDS = 300.0
LEAST_VALUE_BYTES = 64 * 1024
"""An error, as it is recorded, must always have room: its words are cut to less than this."""
AROUND_BYTES = 4096
"""What may stand around a value in its record."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """Who a run is for. `principal` is who it acts as: a run that had one needs it back to go on."""

    user: str | None = None
    thread: str | None = None
    principal: str | None = None

    def __post_init__(self) -> None:
        given: dict[str, object] = dict(self.to_plain())
        for name, value in given.items():
            if not isinstance(value, str):
                found = type(value).__name__
                raise InvalidSetting(f"the {name} of a run is text, found {found}; pass ctx=RunContext({name}='…')")

    @staticmethod
    def from_plain(plain: Mapping[str, str]) -> "RunContext":
        """The context that `to_plain` was asked of."""
        return RunContext(**plain) if plain else NOBODY

    def to_plain(self) -> dict[str, str]:
        named = {"user": self.user, "thread": self.thread, "principal": self.principal}
        return {name: value for name, value in named.items() if value is not None}


NOBODY = RunContext()
"""The context of a run that is for nobody in particular."""


class Backing(NamedTuple):
    """What runs are worked on: the store, the keys, the terms of a lease, and where time and chance come from."""

    store: CheckpointStore
    ring: KeyRing
    tenant: str = ""
    namespace: str = ""
    commits: Commits = Commits.GROUPED
    lease_seconds: float = LEASE_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    sinks: Sequence[events.Sink] = ()
    plan: CrashPlan = UNARMED
    clock: Clock = SYSTEM_CLOCK
    entropy: Entropy = SYSTEM_ENTROPY
    offload: Offload = SYSTEM_OFFLOAD
    max_attempts: int = MAX_ATTEMPTS
    stuck_after: float | None = None
    accept_lost_writes: bool = False
    """Whether tools without a repeat rule run although the store may lose what it acknowledged."""
    max_value_bytes: int = MAX_VALUE_BYTES
    redact: Redact | None = None
    """What is shown of the text of errors, and stored of it."""

    @property
    def most_bytes(self) -> int:
        """How many bytes a value may take as it is recorded: by the setting, and by what the store takes."""
        most: int | None = getattr(self.store, "max_body_bytes", None)
        return self.max_value_bytes if most is None else min(self.max_value_bytes, most - AROUND_BYTES)

    def check_room(self, size: int, what: str) -> None:
        """Refuse a value that takes more than may be recorded: `TooLarge`."""
        if size > self.most_bytes:
            raise TooLarge(size, self.most_bytes, what=what)

    @property
    def lease_ms(self) -> int:
        return int(self.lease_seconds * 1000)

    @property
    def mode(self) -> Commits:
        """How records are committed: one by one where a crash point is armed, so that each point is a state of its own."""
        return Commits.EACH if self.plan.is_armed else self.commits

    def draw_owner(self) -> bytes:
        """A fresh owner for a claim."""
        return self.entropy.draw(OWNER_SIZE)


def check_terms(backing: Backing) -> None:
    """Refuse terms that no run can be worked on, such as a lease that one late heartbeat would lose."""
    if not 0 < backing.heartbeat_seconds <= backing.lease_seconds / 2 < float("inf"):
        raise InvalidSetting(
            f"a heartbeat comes at least twice a lease, found heartbeat {backing.heartbeat_seconds} s and lease "
            f"{backing.lease_seconds} s; lower the one or raise the other"
        )
    if type(backing.max_attempts) is not int or backing.max_attempts < 1:
        raise InvalidSetting(f"max_attempts= is a whole number from 1, found {backing.max_attempts!r}")
    if backing.stuck_after is not None and not 0 < backing.stuck_after < float("inf"):
        raise InvalidSetting(f"stuck_after= is a number of seconds above 0, or None, found {backing.stuck_after!r}")
    if type(backing.max_value_bytes) is not int or not LEAST_VALUE_BYTES <= backing.max_value_bytes <= codec.MAX_BYTES:
        raise InvalidSetting(
            f"max_value_bytes= is a whole number from {LEAST_VALUE_BYTES} to {codec.MAX_BYTES}, found "
            f"{backing.max_value_bytes!r}; what is larger belongs elsewhere, and a reference to it into the run"
        )
    if backing.most_bytes < LEAST_VALUE_BYTES:
        raise InvalidSetting(
            f"{backing.store!r} takes bodies of {backing.most_bytes + AROUND_BYTES} bytes, and a run needs "
            f"{LEAST_VALUE_BYTES + AROUND_BYTES}; let it take more"
        )


class Run:
    """An open run that this worker owns. Made by `start` or by `recovery.reopen`.

    `has_sinks` says whether anybody hears events: where not, none need be made.
    """

    __slots__ = (
        "_cancel",
        "_heartbeat",
        "_jobs",
        "_key_prefix",
        "_most_bytes",
        "_pending_events",
        "_reading",
        "_task",
        "backing",
        "context",
        "has_sinks",
        "input",
        "is_armed",
        "is_recovering",
        "journal",
        "lives",
        "model_requests",
    )

    def __init__(
        self,
        backing: Backing,
        journal: Journal,
        *,
        opened: Mapping[str, Any],
        lives: dict[str, CallLife],
        recovering: bool,
    ) -> None:
        self.backing = backing
        self.journal = journal
        self.has_sinks = bool(backing.sinks)
        self.is_armed = backing.plan is not UNARMED  # a plan of another kind has points of its own
        self.context = RunContext.from_plain(opened["context"])
        self.input = opened["input"]
        self.lives = lives
        self.is_recovering = recovering
        self._most_bytes: int | None = None
        self.model_requests = 0
        self._key_prefix = prefix_of(journal.run_id, opened)
        self._pending_events: tuple[tuple[int, str, Mapping[str, object]], ...] = ()
        self._jobs: Sequence[Job[Any]] = ()
        self._task: asyncio.Task[Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._cancel: Cancel | None = None
        self._heartbeat = heartbeat(backing.store, backing.clock, backing.offload)
        LIVE_OWNERS.add(journal.owner)
        self._heartbeat.watch(journal, backing.heartbeat_seconds, stuck_after=backing.stuck_after)

    @property
    def run_id(self) -> RunId:
        return self.journal.run_id

    @property
    def most_bytes(self) -> int:
        """How many bytes a value of the run may take as it is recorded."""
        most = self._most_bytes
        if most is None:
            most = self.backing.most_bytes
            if self.journal.is_claimed:  # a store may learn with its first write what its server takes
                self._most_bytes = most
        return most

    @property
    def may_lose_writes(self) -> bool:
        """Whether the store, as it was found when it was opened, may forget what it acknowledged; and nobody accepts that."""
        return not self.backing.accept_lost_writes and bool(getattr(self.backing.store, "may_lose_writes", False))

    def now_ms(self) -> int:
        """This worker's wall clock, in milliseconds UTC: for display, never for safety."""
        return self.backing.clock.now_ms()

    def key(self, call: str) -> str:
        """The idempotency key of a call."""
        return build_key(self._key_prefix, call)

    def life(self, call: str) -> CallLife | None:
        """What the journal held of a call when the run was opened. Asked once: it is forgotten then."""
        return self.lives.pop(call, None)

    async def barrier(self) -> None:
        """Everything noted so far is committed when this returns."""
        await self.journal.barrier()
        if self._pending_events:
            self._announce_pending()

    async def barrier_if_each(self) -> None:
        """A barrier where every record is committed by itself, else nothing."""
        if self.journal.is_each:
            await self.barrier()

    async def ready_to_act(self, *, is_alone: bool) -> None:
        """Everything noted is committed, and this worker may still believe that the run is its own: the door to every act."""
        waiter = self.journal.stand(is_alone=is_alone)
        if waiter is not None:
            await waiter
        if self._pending_events:
            self._announce_pending()
        if self.backing.clock.monotonic() >= self.journal.trusted_until:
            await self._ask_whether_still_owner()

    async def reach(self, point: CrashPoint, seq: int) -> None:
        """A crash point: dies or stalls here if it is armed. Asked only where `is_armed`, since it stands on every path."""
        await self.backing.plan.reach(point, seq, recovering=self.is_recovering, clock=self.backing.clock)

    def announce(self, name: str, data: Mapping[str, object]) -> None:
        """Tell the sinks now."""
        journal, backing = self.journal, self.backing
        events.emit(backing.sinks, name, journal.run_id, data, tenant=backing.tenant, epoch=journal.epoch)

    def told(self) -> dict[str, object]:
        """What events say of the run as a whole."""
        journal, thread = self.journal, self.context.thread
        known = {"kind": journal.kind, "step": journal.step, "name": journal.name}
        return known if thread is None else {**known, "thread": thread}

    def announce_when_committed(self, name: str, data: Mapping[str, object]) -> None:
        """Tell the sinks once everything noted so far is committed."""
        self._pending_events += ((self.journal.number, name, data),)

    def keep_alive_for(self, job: Job[Any]) -> None:
        """A call of this run is on a thread: until it leaves, this process counts as the run's living owner."""
        self._jobs = [*(each for each in self._jobs if each.running), job]

    @property
    def has_running_thread(self) -> bool:
        """Whether a call of this run is still on a thread."""
        return any(job.running for job in self._jobs)

    async def end(self, status: RunStatus, body: bytes) -> None:
        """The run's last record. It is final when this returns."""
        self.journal.note(RecordKind.ENDED, body=codec.timed(body, self.now_ms()))
        self.journal.move_to_next_step()
        self.journal.set_status(status)
        self.journal.give_back()
        await self.barrier()

    async def give_back(self, status: RunStatus, why: str, *, counts: bool, wake_at: int | None = None) -> None:
        """Let the run go as it stands; a thread that still works for it keeps it this process's own.

        `counts`: whether this claim is one that came to nothing.
        """
        if not counts and self.journal.attempts > 0:
            self.journal.attempts -= 1
        self.journal.note(RecordKind.RELEASED, body=codec.encode({"why": why, **self._threads(), "at": self.now_ms()}))
        self.journal.set_status(status, wake_at=wake_at)
        if not self.has_running_thread:
            self.journal.give_back()
        await self.barrier()

    async def cancel(self, by: str, why: str) -> None:
        """End the run by somebody's word. What is in doubt stays so, and can be settled afterwards."""
        said = {"by": by, "why": why}
        self.journal.note(RecordKind.CANCELLED, body=codec.encode({**said, "at": self.now_ms()}))
        await self.barrier_if_each()
        await self.end(RunStatus.CANCELLED, codec.encode({"status": "cancelled", **said, **self._threads()}))
        self.announce("run.cancelled", {"kind": self.journal.kind, "step": self.journal.step, **said})

    def _threads(self) -> dict[str, object]:
        """Said of a run that is let go while a thread still works for it: that attempt is not over."""
        return {"threads": True} if self.has_running_thread else {}

    # Messages to a run that is worked.

    @property
    def has_unread_messages(self) -> bool:
        """Whether somebody has posted since the inbox was read."""
        return self.journal.posted > self.journal.seen

    def listen(self, task: asyncio.Task[Any] | None) -> None:
        """From now on a message that ends the run stops the task."""
        self._task = task
        self.journal.listener = self

    def hear_no_more(self) -> Cancel | None:
        """The word that ended the program, if one did. Nothing stops it from now on."""
        self.journal.listener = None
        if self._reading is not None:
            self._reading.cancel()
        return self._cancel

    def hear(self) -> None:
        """Somebody has posted: see what it is."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_inbox())

    async def _read_inbox(self) -> None:
        """Look for a cancel; verdicts and settlements are looked at when the run is parked, or picked up."""
        backing, posted = self.backing, -1
        while posted != self.journal.posted and self._cancel is None:
            posted = self.journal.posted
            try:
                messages = await read_inbox(backing.store, backing.ring, tenant=backing.tenant, run_id=self.run_id)
            except AgentRuntimeError:
                return  # the store is away: whoever picks the run up reads them
            self._cancel = find_cancel(messages)
        if self._cancel is not None and self._task is not None:
            self._task.cancel()

    # Results that came too late.

    async def leave_late_results(self) -> None:
        """Post what is known and could not be written: whoever picks the run up takes it over."""
        journal = self.journal
        if not journal.is_claimed:
            return
        place = {"epoch": journal.epoch, "opened": journal.opened_seal.hex()}
        late = [
            {**place, "call": call, "attempt": attempt, "ending": codec.decode(codec.untimed(body))}
            for kind, call, attempt, body in journal.lost()
            if kind == RecordKind.DONE and attempt and not is_reply(call)
        ]
        if late:
            await leave_late(self.backing.store, self.backing.clock, journal.sealer, late)

    async def set_aside(self, why: str, attempts: int) -> None:
        """Quarantine the run after so many claims that came to nothing: no worker touches it until it is released."""
        self.journal.note(RecordKind.QUARANTINED, body=codec.encode({"why": why, "attempts": attempts, "at": self.now_ms()}))
        self.journal.set_status(RunStatus.QUARANTINED)
        self.journal.give_back()
        await self.barrier()

    def let_go(self, error: BaseException | None = None) -> None:
        """Nothing more is written: stop the heartbeat, and be no living owner once no thread works for the run.

        `error`: what stopped this worker, if anything did.
        """
        self.journal.leave()
        if self.has_sinks:
            self._announce_left(error)
        running = [job for job in self._jobs if job.running]
        if not running:
            self._forget_owner()
        for job in running:
            job.when_ended(self._forget_if_last)

    def _announce_left(self, error: BaseException | None) -> None:
        journal = self.journal
        left = {"kind": journal.kind, "step": journal.step, "status": journal.status.name.lower()}
        self.announce("run.left", left if error is None else {**left, "error": type(error).__name__})

    def _forget_if_last(self) -> None:
        if not self.has_running_thread:
            self._forget_owner()

    def _forget_owner(self) -> None:
        self._heartbeat.unwatch(self.journal)
        LIVE_OWNERS.discard(self.journal.owner)

    async def _ask_whether_still_owner(self) -> None:
        """The lease may be over, by a slow commit or a blocked loop: act only if the store still says that the run is mine."""
        guard = self.journal.guard
        assert guard is not None, "something is committed before anything acts"
        sent_at = self.backing.clock.monotonic()
        answer = await self.backing.store.renew(self.run_id, guard=guard)
        match answer.kind:
            case AnswerKind.OK:
                self.journal.heard(sent_at, answer.posted)
            case AnswerKind.FENCED | AnswerKind.MOVED:
                self.journal.fail(Fenced(f"run {self.run_id!r} is held by another owner, or has ended"))
                await self.journal.barrier()
            case AnswerKind.UNKNOWN:
                raise StoreUnavailable(f"run {self.run_id!r}: the store did not say who holds the run; nothing was started")

    def _announce_pending(self) -> None:
        guard = self.journal.guard
        committed = 0 if guard is None else guard.number
        ready = [event for event in self._pending_events if event[0] <= committed]
        self._pending_events = tuple(event for event in self._pending_events if event[0] > committed)
        for _, name, data in ready:
            self.announce(name, data)


def prefix_of(run_id: RunId, opened: Mapping[str, Any]) -> str:
    """What the idempotency keys of a run begin with: its own id, but for one that takes back another's calls."""
    return key_prefix(opened.get("keys_of", run_id), opened["namespace"])


def trace_of(backing: Backing, row: StoredRow) -> str:
    """Where in a trace the work under this row's epoch stands, as a sink says."""
    return events.find_trace(
        backing.sinks, row.run_id, tenant=backing.tenant, epoch=row.epoch, kind=row.kind, name=row.name
    )  # fmt: skip


def start(
    backing: Backing,
    run_id: RunId,
    *,
    kind: str,
    name: str,
    context: RunContext | None,
    given: Mapping[str, object] | bytes,
    keys_of: RunId | None = None,
) -> Run:
    """A new run, opened and claimed with its first barrier; `Fenced` there says that the id is or was in use.

    `given` is plain data that has been checked, or how such is recorded; then the run does not keep it. `keys_of`: the run
    whose calls it takes back, under their keys.
    """
    about = {
        "context": {} if context is None else context.to_plain(),
        "namespace": backing.namespace,
        **({} if keys_of is None else {"keys_of": keys_of}),
    }
    body = _opened_body(backing, run_id, about, given)
    sealer = sealer_for(backing.ring, tenant=backing.tenant, run_id=run_id)
    row = new_row(sealer, run_id=run_id, kind=kind, name=name, owner=backing.draw_owner(), lease_ms=backing.lease_ms)
    commits = group_commit(backing.store, backing.clock)
    journal = Journal(commits, sealer, clock=backing.clock, row=row, guard=None, mode=backing.mode)
    journal.note(RecordKind.OPENED, body=body)
    trace = trace_of(backing, row) if backing.sinks else ""
    claimed = claimed_body(own_mark().pid, "start", trace=trace)
    journal.note(RecordKind.CLAIMED, body=codec.timed(claimed, backing.clock.now_ms()))
    kept = None if isinstance(given, bytes) else given
    run = Run(backing, journal, opened={**about, "input": kept}, lives={}, recovering=False)
    if run.has_sinks:
        run.announce_when_committed("run.started", run.told())
    return run


def _opened_body(backing: Backing, run_id: RunId, about: Mapping[str, object], given: Mapping[str, object] | bytes) -> bytes:
    what = f"the input of run {run_id!r}"
    if isinstance(given, bytes):
        body = b'%b,"input":%b}' % (codec.encode_checked(about)[:-1], given)
        backing.check_room(len(body), what)
        return body
    opened = {**about, "input": given}
    try:
        codec.check_size(opened, backing.most_bytes)
        return codec.encode_checked(opened, backing.most_bytes)
    except TooLarge as error:
        raise error.about(what) from None


def check_identity(stored: RunContext, given: RunContext | None, run_id: str) -> RunContext:
    """The run's own context, if whoever asks may have it; what it is, is never told."""
    if given is None:
        if stored.principal is not None:
            raise IdentityMismatch(f"run {run_id!r} acts for a principal; pass ctx= with that principal to go on")
        return stored
    if given != stored:
        raise IdentityMismatch(f"run {run_id!r} belongs to another user, thread or principal; pass its own ctx=")
    return stored
