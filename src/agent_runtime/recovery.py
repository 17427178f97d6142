"""Reopen an unfinished run: load, verify, decide every doubt, claim; or say why not.

Rules of this file:

* Verify, then claim: what was verified is what is claimed, since the claim lands only on the row that was read.
* Every doubt is decided before anything acts. One that cannot be decided blocks the run, in the claim's own write.
* Nothing is claimed, and nothing changes, where there is nothing to do or anything is wrong.
* A run that kills its workers is set aside: past `max_attempts` without progress the claim itself quarantines it.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.doubts import Decisions
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    Fenced,
    RecoveryNeedsDecision,
    RunQuarantined,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Journal, claim_row, guard_of
from agent_runtime.journal.records import RecordKind, RunStatus, StoredRecord, StoredRun
from agent_runtime.journal.replay import CallLife, History, read_history
from agent_runtime.journal.seal import open_run, sealer_for
from agent_runtime.journal.states import CallState, Settlement
from agent_runtime.lease import ProcessMark, claimed_body, own_mark, seconds_held
from agent_runtime.run import Backing, Run, RunContext, check_identity

CLAIM_TRIES = 5
LONGEST_SHOWN_SECONDS = 3_155_760_000.0
"""A hundred years: a lease is no sealed column, and no calendar holds what somebody may write there."""


Decide = Callable[[Sequence[CallLife], Mapping[str, Any]], Decisions]
"""From the calls in doubt and the run's `opened` body to what is decided about them."""


class Found(NamedTuple):
    """A stored run that was verified: its rows, what happened in it, and what it was opened with."""

    stored: StoredRun
    history: History
    opened: Mapping[str, Any]
    mark: ProcessMark

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.stored.row.status)


Admit = Callable[[Found], None]
"""Raises where a program cannot go on with a run as it was found."""


def _admit_all(found: Found) -> None:
    return None


async def find(backing: Backing, run_id: RunId, *, kind: str, context: RunContext | None, name: str | None = None) -> Found:
    """The run, if this program and this identity may have it; `name`: the only one that it may have. Claims nothing."""
    found = await read_verified(backing, run_id)
    check_identity(RunContext(**found.opened["context"]), context, run_id)
    row = found.stored.row
    if row.kind != kind or name not in (None, row.name):
        raise CheckpointConflict(f"run {run_id!r} is worked by another program than this {kind}")
    return found


async def read_verified(backing: Backing, run_id: RunId) -> Found:
    """The run as it is stored, whoever's it is: every seal checked before anything is decoded."""
    [stored] = await backing.store.load_many([run_id])
    if stored is None:
        raise CheckpointNotFound(f"nothing is stored for run {run_id!r}; check the id and the store, or start it")
    if stored.row.status == RunStatus.DELETED and not (stored.row.number or stored.records):
        raise CheckpointConflict(f"run {run_id!r} was deleted, and its id is not used again; choose another id")
    open_run(backing.ring, stored, tenant=backing.tenant)
    history = read_history(run_id, stored.records, _settlement)
    opened, mark = _read_own(run_id, history)
    return Found(stored, history, opened, mark)


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
) -> Run | Found:
    """The run, claimed by this worker; or, where it has ended or is paused, the run as found.

    `admit` reads what was found before anything is claimed, and raises where the program cannot go on with it.

    Raises `CheckpointNotFound`, `CheckpointConflict` (who holds it, until when), `CheckpointStoreCorrupt`,
    `IdentityMismatch`, `RecoveryNeedsDecision` once the run is blocked, and `RunQuarantined` once it is set aside.
    """
    for _ in range(CLAIM_TRIES):
        found = await find(backing, run_id, kind=kind, context=context, name=name)
        admit(found)
        if found.status.is_final or found.status is RunStatus.PAUSED:
            return found
        await _require_free(backing, found, take_over=take_over)
        decisions = decide(found.history.in_doubt(), found.opened)
        if found.status is RunStatus.BLOCKED and decisions.undecided:
            raise RecoveryNeedsDecision(run_id, decisions.undecided)
        try:
            return await _claim(backing, found, decisions, take_over=take_over)
        except Fenced:
            continue  # the run moved since it was read: look again
    raise CheckpointConflict(f"run {run_id!r} was claimed by another worker each time this one tried; try again later")


async def release(backing: Backing, run_id: RunId, *, by: str) -> bool:
    """Let a quarantined run go again: running, held by nobody, its attempts counted anew. False where it is in no quarantine.

    Raises `CheckpointNotFound` and `CheckpointStoreCorrupt`.
    """
    for _ in range(CLAIM_TRIES):
        found = await read_verified(backing, run_id)
        if found.status is not RunStatus.QUARANTINED:
            return False
        journal = _claiming(backing, found, "release", take_over=False)
        told_apart = journal.owner.hex()  # the row will name no owner, and two who write the very same would both be right
        journal.note(RecordKind.RELEASED, body=codec.encode({"why": "release", "by": by, "claim": told_apart}))
        journal.attempts = 0
        journal.give_back()
        try:
            await journal.barrier()
            return True
        except Fenced:
            continue  # the run moved since it was read: look again
        finally:
            journal.leave()
    raise CheckpointConflict(f"run {run_id!r} changed each time it was to be released; try again later")


def _claiming(backing: Backing, found: Found, why: str, *, take_over: bool) -> Journal:
    """A journal whose first append claims the run as it was found."""
    row = found.stored.row
    sealer = sealer_for(backing.ring, tenant=backing.tenant, run_id=row.run_id)
    journal = Journal(
        group_commit(backing.store, backing.clock),
        sealer,
        clock=backing.clock,
        row=claim_row(row, owner=backing.draw_owner(), lease_ms=backing.lease_ms),
        guard=guard_of(row, even_if_alive=take_over),
        mode=backing.mode,
    )
    if sealer.key_id != row.key_id:
        journal.note(RecordKind.REKEYED, row.key_id)
        if found.stored.checkpoint is not None:
            journal.reseal(found.stored.checkpoint)
    journal.note(RecordKind.CLAIMED, body=claimed_body(own_mark().pid, why))
    return journal


async def _claim(backing: Backing, found: Found, decisions: Decisions, *, take_over: bool) -> Run:
    journal = _claiming(backing, found, "take over" if take_over else "recovery", take_over=take_over)
    lives = found.history.lives
    for life in decisions.permitted:
        body = codec.encode({"how": Settlement.RERUN.value, "why": "rerun_in_doubt"})
        journal.note(RecordKind.SETTLED, life.call, life.attempts, body)
        life.state = CallState.REOPENED
    run = Run(backing, journal, opened=found.opened, lives=lives, recovering=True)
    try:
        await _land(run, found, decisions)
    except BaseException:
        run.let_go()
        raise
    return run


async def _land(run: Run, found: Found, decisions: Decisions) -> None:
    """Write the claim. A run with an undecided doubt is blocked, one past its attempts is set aside, in the same write."""
    if decisions.undecided:
        await run.give_back(RunStatus.BLOCKED, "in doubt", counts=False)
    elif run.journal.attempts > run.backing.max_attempts:
        await _quarantine(run, found)
    else:
        await run.barrier()
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
    run.announce("run.claimed", {**where, "epoch": journal.epoch, "why": "recovery"})
    for life in decisions.permitted:
        run.announce("call.settled", {**where, "call": life.call, "key": run.key(life.call), "attempt": life.attempts})
    for doubt in decisions.undecided:
        named = {"call": doubt.call, "tool": doubt.tool, "key": doubt.key, "attempt": doubt.attempt, "why": doubt.why}
        run.announce("call.in_doubt", {"step": journal.step, **named})
    if decisions.undecided:
        run.announce("run.blocked", where)
    else:
        replayed = sum(life.state is CallState.DONE for life in found.history.lives.values())
        run.announce("run.recovered", {**where, "replayed": replayed, "rerun": decisions.rerun})


async def _require_free(backing: Backing, found: Found, *, take_over: bool) -> None:
    """Refuse a run whose owner may be alive, unless it is to be taken over; fencing makes either safe."""
    row = found.stored.row
    if found.status is RunStatus.QUARANTINED:
        raise RunQuarantined(row.run_id, read_reason(found.stored.records[-1]))
    held = None if take_over else seconds_held(row, found.mark)
    if held is None:
        return
    until = await backing.store.now() + timedelta(seconds=min(held, LONGEST_SHOWN_SECONDS))
    raise CheckpointConflict(
        f"run {row.run_id!r} is held by process {found.mark.pid} on {found.mark.host.split('/')[0]} until "
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
        RunContext.from_plain(opened["context"])  # whose it is can be read, too
        return opened, ProcessMark.from_plain(codec.decode(history.claimed.body))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointStoreCorrupt(f"run {run_id!r} was opened or claimed with what cannot be read: {error!r}") from error


def _settlement(body: bytes) -> Settlement:
    try:
        return Settlement(codec.decode(body)["how"])
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointStoreCorrupt(f"a settlement cannot be read: {error!r}") from error
