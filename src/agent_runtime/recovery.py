"""Reopen an unfinished run: load, verify, decide every doubt, claim; or say why not.

Rules of this file:

* Verify, then claim: what was verified is what is claimed, since the claim lands only on the row that was read.
* Every doubt is decided before anything acts. One that cannot be decided blocks the run, in the claim's own write.
* Nothing is claimed, and nothing changes, where there is nothing to do or anything is wrong.
* A run that kills its workers is set aside: past `max_attempts` without progress the claim itself quarantines it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, read_pending, read_verdict, request_of
from agent_runtime.asking import told_verdict
from agent_runtime.doubts import Case, Decisions
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    Fenced,
    IdentityMismatch,
    RecoveryNeedsDecision,
    RunQuarantined,
)
from agent_runtime.ids import RunId, build_key
from agent_runtime.inbox import Message, read_inbox
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Journal, claim_row, guard_of
from agent_runtime.journal.loads import load_run
from agent_runtime.journal.records import NO_OWNER, NO_SEAL, RecordKind, RunStatus, StoredRecord, StoredRun
from agent_runtime.journal.replay import CallLife, History, live_on, read_history
from agent_runtime.journal.seal import Sealer, read_run, sealer_for
from agent_runtime.journal.states import CallState
from agent_runtime.journal.store import Guard
from agent_runtime.lease import ProcessMark, claimed_body, is_dead, last_trace, own_mark, seconds_held
from agent_runtime.run import Backing, Run, RunContext, check_identity, prefix_of, trace_of
from agent_runtime.settlements import Over, hint_ms, read_settled

CLAIM_TRIES = 5
LONGEST_SHOWN_SECONDS = 3_155_760_000.0
"""A hundred years: a lease is no sealed column, and no calendar holds what somebody may write there."""


Decide = Callable[[Case], Awaitable[Decisions]]
"""From a verified run and its messages to what is decided about them."""


class Found(NamedTuple):
    """A stored run that was verified: its rows, what happened in it, and what it was opened with."""

    stored: StoredRun
    history: History
    opened: Mapping[str, Any]
    mark: ProcessMark
    sealed: StoredRun
    """The same rows as they are stored, which verify again: where a key encrypts, `stored` has other bodies."""
    sealer: Sealer
    """Of the key that its row is under, which may be another than the ring's active one."""

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.stored.row.status)

    @property
    def context(self) -> RunContext:
        """Who the run is for."""
        return RunContext.from_plain(self.opened["context"])

    @property
    def pending(self) -> Sequence[ApprovalRequest]:
        """The requests that wait for a verdict, unless the run has ended."""
        if self.status.is_final:
            return ()
        prefix = prefix_of(self.stored.row.run_id, self.opened)
        return [
            request_of(self.stored.row.run_id, life, build_key(prefix, life.call)) for life in self.history.waiting()
        ]  # fmt: skip

    async def case(self, backing: Backing) -> Case:
        """The run with the messages to it, to be decided about."""
        row = self.stored.row
        messages: Sequence[Message] = ()
        if row.posted:
            messages = await read_inbox(backing.store, backing.ring, tenant=backing.tenant, run_id=row.run_id)
        return Case(row, self.stored.records, self.history, self.opened, messages)


Admit = Callable[[Found], dict[str, CallLife]]
"""The calls that a program goes on with; raises where it cannot go on with a run as it was found."""


def _admit_all(found: Found) -> dict[str, CallLife]:
    return found.history.lives


def admit_resume(context: RunContext, found: Found) -> dict[str, CallLife]:
    """For whoever asks from outside: the run's own identity is needed, and a run that has ended is a conflict."""
    run_id = found.stored.row.run_id
    if found.context != context:
        raise IdentityMismatch(f"run {run_id!r} belongs to another user, thread or principal; pass its own ctx=")
    if found.status.is_final:
        raise CheckpointConflict(f"run {run_id!r} has ended; recover it to have its result")
    return found.history.lives


def in_use(run_id: RunId) -> CheckpointConflict:
    """Why a run cannot be started: there is one of its id, or was. How it stands is not for whoever asks."""
    return CheckpointConflict(
        f"run {run_id!r} exists already, or did before it was deleted: recover it, or choose another id. Where it is paused "
        "and waits for a verdict, decide first: resume it with verdicts=[…], or cancel it"
    )


async def find(backing: Backing, run_id: RunId, *, kind: str, context: RunContext | None, name: str | None = None) -> Found:
    """The run, if this program and this identity may have it; `name`: the only one that it may have. Claims nothing."""
    found = await read_verified(backing, run_id)
    check_identity(found.context, context, run_id)
    row = found.stored.row
    if row.kind != kind or name not in (None, row.name):
        raise CheckpointConflict(f"run {run_id!r} is worked by another program than this {kind}")
    return found


async def read_verified(backing: Backing, run_id: RunId) -> Found:
    """The run as it is stored, whoever's it is: every seal checked before anything is decoded."""
    stored = await load_run(backing.store, run_id)
    if stored is None:
        raise CheckpointNotFound(f"nothing is stored for run {run_id!r}; check the id and the store, or start it")
    return open_stored(backing, stored)


def open_stored(backing: Backing, stored: StoredRun) -> Found:
    """A run that was loaded with all its records, verified."""
    run_id = stored.row.run_id
    if stored.row.status == RunStatus.DELETED and not (stored.row.number or stored.records):
        raise CheckpointConflict(f"run {run_id!r} was deleted, and its id is not used again; choose another id")
    shown, sealer = read_run(backing.ring, stored, tenant=backing.tenant)
    history = read_history(run_id, shown.records, read_settled)
    opened, mark = _read_own(run_id, history)
    return Found(shown, history, opened, mark, stored, sealer)


async def reopen(
    backing: Backing,
    run_id: RunId,
    *,
    kind: str,
    context: RunContext | None,
    decide: Decide,
    take_over: bool = False,
    name: str | None = None,
    admit: Admit = _admit_all,
    when_held: Callable[[Case], Awaitable[None]] | None = None,
) -> Run | Found:
    """The run, claimed by this worker; or, where it has ended or still waits for a person, the run as found.

    `when_held`: what is done where somebody else works it, and then the run is given back as found.

    `admit` reads what was found before anything is claimed, and raises where the program cannot go on with it.

    Raises `CheckpointNotFound`, `CheckpointConflict` (who holds it, until when), `CheckpointStoreCorrupt`,
    `IdentityMismatch`, `RecoveryNeedsDecision` once the run is blocked, and `RunQuarantined` once it is set aside.
    """
    for _ in range(CLAIM_TRIES):
        found = await find(backing, run_id, kind=kind, context=context, name=name)
        lives, status = admit(found), found.status
        if status.is_final:
            return found
        if status is RunStatus.QUARANTINED:
            raise RunQuarantined(run_id, read_reason(found.stored.records[-1]))
        held = seconds_held(found.stored.row, found.mark)
        if held is not None and not take_over:
            if when_held is None:
                raise await _held(backing, found, held)
            await when_held(await found.case(backing))
            return found
        decisions = await decide(await found.case(backing))
        if status is RunStatus.PAUSED and not decisions.has_news:
            await _put_back(backing, found, _next_expiry(decisions.waiting))
            return found
        if status is RunStatus.BLOCKED and found.stored.row.owner == NO_OWNER and decisions.changes_nothing:
            await _put_back(backing, found, decisions.wake_at)
            raise RecoveryNeedsDecision(run_id, decisions.undecided)
        try:
            run = await _claim(backing, found, decisions, lives, take_over=take_over)
        except Fenced:
            continue  # the run moved since it was read: look again
        if run is not None:
            return run
    raise CheckpointConflict(f"run {run_id!r} was claimed by another worker each time this one tried; try again later")


async def _put_back(backing: Backing, found: Found, wake_at: int | None) -> None:
    """Nothing in the inbox was of use: let nobody look at the run again before its own time."""
    row = found.stored.row
    if row.owner == NO_OWNER and row.wake_at != wake_at:
        guard = Guard(row.epoch, row.owner, row.number, row.head)
        await backing.store.renew(row.run_id, guard=guard, seen=row.posted, wake_at=wake_at)


def _next_expiry(waiting: Sequence[CallLife]) -> int | None:
    times = [expires for life in waiting if (expires := read_pending(life.pending).expires_ms) is not None]
    return min(times, default=None)


def claiming(
    backing: Backing,
    found: Found,
    why: str,
    *,
    take_over: bool,
    over: Over | None = None,
    rekeyed: bytes = b"",
    trace: str = "",
) -> Journal:
    """A journal whose first append claims the run as it was found; `why` is recorded, and whose attempts are over.

    `rekeyed`: what is said where the claim moves the run to another key.
    """
    row = found.stored.row
    is_active = found.sealer.key_id == backing.ring.active
    sealer = found.sealer if is_active else sealer_for(backing.ring, tenant=backing.tenant, run_id=row.run_id)
    journal = Journal(
        group_commit(backing.store, backing.clock),
        sealer,
        clock=backing.clock,
        row=claim_row(row, owner=backing.draw_owner(), lease_ms=backing.lease_ms),
        guard=guard_of(row, even_if_alive=take_over),
        mode=backing.mode,
    )
    if sealer.key_id != row.key_id:
        journal.note(RecordKind.REKEYED, row.key_id, body=rekeyed)
    is_owner_gone = row.owner != NO_OWNER and is_dead(found.mark, row.owner)
    journal.opened_seal = found.stored.records[0].seal
    body = claimed_body(own_mark().pid, why, is_owner_gone=is_owner_gone, trace=trace)
    more = {"heard": hint_ms(row), **({} if over is None else over.to_plain()), "at": backing.clock.now_ms()}
    journal.note(RecordKind.CLAIMED, body=body[:-1] + b"," + codec.encode(more)[1:])
    return journal


async def _claim(
    backing: Backing, found: Found, decisions: Decisions, lives: dict[str, CallLife], *, take_over: bool
) -> Run | None:
    """The run, claimed and written with what was decided; None where that ended it."""
    why = "take over" if take_over else "recovery"
    row = found.stored.row
    trace = trace_of(backing, row._replace(epoch=row.epoch + 1)) if backing.sinks else ""
    journal = claiming(backing, found, why, take_over=take_over, over=decisions.over, trace=trace)
    attempts = journal.attempts
    for kind, call, attempt, body in decisions.records:
        journal.note(RecordKind(kind), call, attempt, body)
        record = StoredRecord(journal.number, journal.epoch, kind, call, attempt, body, NO_SEAL)
        live_on(journal.run_id, found.history.lives, record, read_settled)
    if not decisions.is_progress:
        journal.attempts = attempts
    run = Run(backing, journal, opened=found.opened, lives=lives, recovering=True)
    try:
        if decisions.cancel is not None:
            await run.cancel(decisions.cancel.by, decisions.cancel.why)
            run.let_go()
            return None
        await _land(run, found, decisions)
    except BaseException as error:
        run.let_go(error)
        raise
    return run


async def _land(run: Run, found: Found, decisions: Decisions) -> None:
    """Write the claim. A run with an undecided doubt is blocked, one past its attempts is set aside, in the same write."""
    if decisions.undecided:
        await run.give_back(RunStatus.BLOCKED, "in doubt", counts=False, wake_at=decisions.wake_at)
    elif run.journal.attempts > run.backing.max_attempts:
        await _quarantine(run, found)
    else:
        await run.barrier()
    if run.has_sinks:
        _announce(run, found, decisions)
    if decisions.undecided:
        raise RecoveryNeedsDecision(run.run_id, decisions.undecided)


async def _quarantine(run: Run, found: Found) -> None:
    attempts = run.journal.attempts - 1  # this claim has set nobody to work
    why = _why_poison(found, attempts)
    await run.set_aside(why, attempts)
    run.announce("run.quarantined", {"kind": run.journal.kind, "step": run.journal.step, "attempts": attempts, "why": why})
    raise RunQuarantined(run.run_id, why)


def _why_poison(found: Found, attempts: int) -> str:
    """What is known of a run that comes to nothing: how often, whose the last claim was, how that ended, and in what call."""
    last = next(
        record for record in reversed(found.stored.records) if record.kind in (RecordKind.CLAIMED, RecordKind.RELEASED)
    )
    left = "was gone without a word"
    if last.kind == RecordKind.RELEASED:
        left = f"gave it back: {codec.decode(last.body).get('why')}"
    inside = ", ".join(f"{life.call} (attempt {life.attempts})" for life in found.history.in_doubt())
    calls = f"; started and not ended: call {inside}" if inside else ""
    host = found.mark.host.split("/")[0]
    times = "once" if attempts == 1 else f"{attempts} times"
    return f"claimed {times} without progress; the last worker, process {found.mark.pid} on {host}, {left}{calls}"


def _announce(run: Run, found: Found, decisions: Decisions) -> None:
    journal = run.journal
    where: dict[str, object] = {"kind": journal.kind, "step": journal.step}
    before = last_trace(found.stored.records)
    traced = {"trace": before} if before else {}
    run.announce("run.claimed", {**run.told(), "epoch": journal.epoch, "why": "recovery", **traced})
    for kind, call, attempt, body in decisions.records:
        _announce_decided(run, found, kind, {**where, "call": call, "key": run.key(call), "attempt": attempt}, body)
    for doubt in decisions.undecided:
        named = {"call": doubt.call, "tool": doubt.tool, "key": doubt.key, "attempt": doubt.attempt, "why": doubt.why}
        run.announce("call.in_doubt", {"step": journal.step, **named})
    if decisions.undecided:
        run.announce("run.blocked", where)
    else:
        replayed = sum(life.state is CallState.DONE for life in found.history.lives.values())
        run.announce("run.recovered", {**where, "replayed": replayed, "rerun": decisions.rerun})


def _announce_decided(run: Run, found: Found, kind: int, where: Mapping[str, object], body: bytes) -> None:
    plain = codec.decode(body)
    match kind:
        case RecordKind.SETTLED:
            told = {name: plain.get(name, "") for name in ("how", "by", "why")}
            run.announce("call.settled", {**where, **told})
        case RecordKind.VERDICT:
            verdict = read_verdict(body)
            run.announce("approval.decided", {**where, **told_verdict(verdict), "digest": verdict.digest})
        case RecordKind.DONE:
            error = plain["error"]
            run.announce("call.done", {**where, "tool": "", "error": f"{error['type']}: {error['message']}"})
        case _:
            return


async def _held(backing: Backing, found: Found, seconds: float) -> CheckpointConflict:
    until = await backing.store.now() + timedelta(seconds=min(seconds, LONGEST_SHOWN_SECONDS))
    return CheckpointConflict(
        f"run {found.stored.row.run_id!r} is held by process {found.mark.pid} on {found.mark.host.split('/')[0]} until "
        f"{until.isoformat(timespec='seconds')}, and longer if it is heard again; wait, or recover it with take_over=True"
    )


def read_reason(record: StoredRecord) -> str:
    """Why a run was set aside, as its last record says."""
    try:
        return str(codec.decode(record.body)["why"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return "for a reason that its last record does not say"


def _read_own(run_id: str, history: History) -> tuple[Mapping[str, Any], ProcessMark]:
    """The bodies that say what the run was opened with, and who holds it."""
    assert history.opened is not None, "reading the history refuses a run that was not opened"
    assert history.claimed is not None, "reading the history refuses a run that was not claimed"
    try:
        plain = codec.decode(history.opened.body)
        opened = {name: plain[name] for name in ("context", "namespace", "input")}
        if "keys_of" in plain:
            opened["keys_of"] = plain["keys_of"]
        RunContext.from_plain(opened["context"])  # whose it is can be read, too
        return opened, ProcessMark.from_plain(codec.decode(history.claimed.body))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointStoreCorrupt(f"run {run_id!r} was opened or claimed with what cannot be read: {error!r}") from error
