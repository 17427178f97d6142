"""What people write to a run from outside, without its tools: settlements, a cancel, a release, its removal.

Rules of this file:

* While the run's owner may be alive nothing is written to its journal: a message is left to it.
* Else the run is claimed, written and given back in one append, which lands only on what was read and verified. The message
  is left all the same: a worker may wait beside a run that it gave back, and hears of nothing else.
* What somebody else said first stands: whoever says another thing is told so, and by whom.
* A run that has ended takes a settlement and nothing else, and stays as it is. Nothing leads out of quarantine but a release
  or a cancel.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from agent_runtime import codec
from agent_runtime.clock import milliseconds, moment
from agent_runtime.doubts import (
    Case,
    find_late,
    find_settlement,
)
from agent_runtime.errors import (
    CheckpointConflict,
    Fenced,
    NotInDoubt,
    SettlementRefused,
    StoreUnavailable,
    TooLarge,
)
from agent_runtime.ids import RunId, is_reply
from agent_runtime.inbox import Cancel, MessageKind, find_cancel, post_message
from agent_runtime.journal.commits import group_commit
from agent_runtime.journal.journal import Journal
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.seal import Sealer, sealer_for
from agent_runtime.journal.states import IN_DOUBT, CallState, Settlement
from agent_runtime.journal.store import AnswerKind, Guard
from agent_runtime.lease import seconds_held
from agent_runtime.recovery import Found, claiming, read_verified
from agent_runtime.run import Backing
from agent_runtime.settlements import (
    Over,
    Said,
    Settling,
    drain_of,
    require_text,
    said_to_plain,
    say,
    settled_body,
)

_log = logging.getLogger("agent_runtime")
T = TypeVar("T")

TRIES = 8

Admit = Callable[[Found], None]
"""Raises where whoever asks may not have the run."""


async def once_it_stands(
    backing: Backing, run_id: RunId, admit: Admit, write: Callable[[Found], Awaitable[T]], wish: str
) -> T:
    """What is written to the run as it was read and verified; where it moved meanwhile, it is looked at again."""
    for _ in range(TRIES):
        found = await read_verified(backing, run_id)
        admit(found)
        try:
            return await write(found)
        except Fenced:
            continue
    raise CheckpointConflict(f"run {run_id!r} changed each time it was to be {wish}; try again later")


def is_held(found: Found) -> bool:
    """Whether an owner that may be alive holds the run: then it is that owner who writes."""
    return found.status is not RunStatus.QUARANTINED and seconds_held(found.stored.row, found.mark) is not None


async def leave(backing: Backing, run_id: RunId, kind: MessageKind, body: dict[str, object]) -> None:
    """Leave a message to the run; `Fenced` where it has ended since it was read."""
    sealer = sealer_for(backing.ring, tenant=backing.tenant, run_id=run_id)
    try:
        await post_message(backing.store, sealer, kind, body)
    except CheckpointConflict as conflict:
        raise Fenced(str(conflict)) from conflict


async def by_claim(
    backing: Backing,
    found: Found,
    why: str,
    write: Callable[[Journal], None],
    *,
    over: Over | None = None,
    rekeyed: bytes = b"",
) -> None:
    """Claim the run, write to it and give it back, all in one append; `Fenced` where it is not as it was read."""
    journal = claiming(backing, found, why, take_over=False, over=over, rekeyed=rekeyed)
    try:
        write(journal)
        journal.give_back()
        await journal.barrier()
    finally:
        journal.leave()


def _said_once(journal: Journal, said: dict[str, object]) -> bytes:
    """The body of a record that two must not write alike: the row will name no owner, and both would be told that they did."""
    return codec.encode({**said, "claim": journal.owner.hex()})


# Release.


async def release(backing: Backing, run_id: RunId, *, by: str, admit: Admit) -> bool:
    """Let a quarantined run go again: held by nobody, its attempts counted anew. False where it is in no quarantine."""

    backing.check_room(len(codec.encode(by)), f"who releases run {run_id!r}")

    async def write(found: Found) -> bool:
        if found.status is not RunStatus.QUARANTINED:
            return False
        await by_claim(backing, found, "release", note)
        return True

    def note(journal: Journal) -> None:
        journal.note(RecordKind.RELEASED, body=_said_once(journal, {"why": "release", "by": by}))
        journal.attempts = 0

    return await once_it_stands(backing, run_id, admit, write, "released")


# Cancel.


async def cancel(backing: Backing, run_id: RunId, *, by: str, why: str, admit: Admit) -> bool:
    """End a run, or tell its living worker to. False, and no change, where it has ended or was told so already."""
    word = Cancel(require_text("by", by), require_text("why", why))
    backing.check_room(len(codec.encode(word._asdict())), f"the word that ends run {run_id!r}")
    is_left = False

    async def write(found: Found) -> bool:
        nonlocal is_left
        if found.status.is_final:
            return is_left and _ended_by_worker(found, word)
        first = find_cancel((await found.case(backing)).messages)
        if first is None:
            await leave(backing, run_id, MessageKind.CANCEL, word._asdict())  # a worker that waits beside the run hears it
            is_left = True
        if is_held(found):
            return is_left
        await by_claim(backing, found, "cancel", lambda journal: _note_cancel(journal, first or word))
        return True

    return await once_it_stands(backing, run_id, admit, write, "cancelled")


def _ended_by_worker(found: Found, word: Cancel) -> bool:
    """Whether a worker that was told so ended the run, and nobody else from outside."""
    said = {} if found.history.cancelled is None else codec.decode(found.history.cancelled.body)
    return (said.get("by"), said.get("why")) == word and "claim" not in said


def _note_cancel(journal: Journal, word: Cancel) -> None:
    """The end of a run, by somebody's word. What is in doubt stays so, and can be settled afterwards."""
    journal.note(RecordKind.CANCELLED, body=_said_once(journal, word._asdict()))
    journal.note(RecordKind.ENDED, body=codec.encode({"status": "cancelled", **word._asdict()}))
    journal.set_status(RunStatus.CANCELLED)


# Delete.


async def delete(backing: Backing, run_id: RunId, *, by: str, force: bool, undo_id: RunId, admit: Admit) -> None:
    """Remove all of a run, but for a mark that keeps its id from being used again. `undo_id`: the run that takes it back.

    `CheckpointConflict` while its owner may be alive; and, unless forced, while somebody has to decide about it, or it is
    being taken back: who asks for that again asks it of this run.
    """
    require_text("by", by)
    was_sent = False

    async def write(found: Found) -> None:
        nonlocal was_sent
        if is_held(found):
            raise CheckpointConflict(f"run {run_id!r} has a worker that may be alive; cancel the run first, then delete it")
        if not force and (why := why_kept(found)):
            raise CheckpointConflict(f"run {run_id!r} {why}; decide first, or delete it all the same with force")
        if not force and await is_taken_back(backing, found, undo_id):
            raise CheckpointConflict(
                f"run {run_id!r} is being taken back by run {undo_id!r}, which has not ended and cannot go on without it; let "
                "the undo end first, or delete the run all the same with force"
            )
        row = found.stored.row
        was_sent = True
        answer = await backing.store.delete(run_id, guard=Guard(row.epoch, row.owner, row.number, row.head))
        match answer.kind:
            case AnswerKind.OK:
                return
            case AnswerKind.FENCED | AnswerKind.MOVED | AnswerKind.UNKNOWN:
                raise Fenced(f"run {run_id!r} is not as it was read, or the store did not say what became of it")

    try:
        await once_it_stands(backing, run_id, admit, write, "deleted")
    except CheckpointConflict:
        stored = await backing.store.latest(run_id) if was_sent else None
        if stored is None or stored.row.status != RunStatus.DELETED:
            raise
    _log.info("run %r was deleted by %s", run_id, by)


def why_kept(found: Found) -> str:
    """What somebody has still to decide about a run."""
    if doubts := [life.call for life in _doubts(found)]:
        return f"has calls in doubt ({', '.join(doubts)}), and what is known of them would go too"
    match found.status:
        case RunStatus.PAUSED:
            return "is paused and waits for somebody's answer"
        case RunStatus.BLOCKED:
            return "is blocked and waits for somebody's decision"
        case _:
            return ""


async def is_taken_back(backing: Backing, found: Found, undo_id: RunId) -> bool:
    """Whether what the run did is being taken back, and that has not ended."""
    if found.status not in (RunStatus.FAILED, RunStatus.CANCELLED):
        return False
    undo = await backing.store.latest(undo_id)
    return undo is not None and not RunStatus(undo.row.status).is_final


# Settle.


async def settle(backing: Backing, run_id: RunId, call: str, settling: Settling, *, by: str, why: str, admit: Admit) -> bool:
    """Record what became of a call in doubt; false where that is left to the run's living worker.

    `InvalidSetting` and `Unrecordable` where it is said by nobody, for no reason or of nothing, `NotInDoubt`, and
    `SettlementRefused` where it cannot be believed, or another thing is known of the call.
    """
    what = f"what is said of call {call!r} of run {run_id!r}"
    try:
        wished = say(call, 0, settling, by=by, why=why, most=backing.most_bytes)
    except TooLarge as error:
        raise error.about(what) from None
    backing.check_room(len(settled_body(wished)), what)

    async def write(found: Found) -> bool:
        life = _find_doubt(found, call)
        said = wished._replace(attempt=life.attempts)
        now_ms = milliseconds(await backing.store.now())
        try:
            _check_known(await found.case(backing), life, said, now_ms)
        except SettlementRefused:
            await _note_over(backing, found, life, now_ms)
            raise
        if found.status.is_final:
            await _settle_ended(backing, found, said)
        elif is_held(found):
            await leave(backing, run_id, MessageKind.SETTLE, said_to_plain(said, drained=True))
            again = await read_verified(backing, run_id)
            _check_first(await again.case(backing), life, said, now_ms)
            return False
        else:
            await by_claim(backing, found, "settlement", lambda journal: _note_settled(journal, found, said))
            with suppress(Fenced, StoreUnavailable):  # it is recorded; a worker that waits beside the run is to hear of it
                await leave(backing, run_id, MessageKind.SETTLE, said_to_plain(said, drained=True))
        return True

    return await once_it_stands(backing, run_id, admit, write, "settled")


async def _note_over(backing: Backing, found: Found, life: CallLife, now_ms: int) -> None:
    """Where a worker is seen to be gone, say so in the run: from then on the time counts that its tool declares."""
    news = drain_of(life, found.stored.row, found.stored.records, now_ms).news
    if news and not found.status.is_final and not is_held(found):
        over = Over(sorted(news), milliseconds(await backing.store.now()))
        await by_claim(backing, found, "settlement", partial(stay, found, found.status), over=over)


def _doubts(found: Found) -> Sequence[CallLife]:
    """The calls in doubt. The decision of a model is none: one that was lost is made again."""
    return [life for life in found.history.in_doubt() if not is_reply(life.call)]


def _find_doubt(found: Found, call: str) -> CallLife:
    life = found.history.lives.get(call)
    if life is not None and life.state in IN_DOUBT and not is_reply(call):
        return life
    others = [each.call for each in _doubts(found)]
    stands = "there is no such call" if life is None else _how_it_stands(life)
    in_doubt = f"in doubt are {others}" if others else "no call of it is in doubt"
    raise NotInDoubt(
        f"call {call!r} of run {found.stored.row.run_id!r} cannot be settled: {stands}; {in_doubt}. Nothing was written"
    )


def _how_it_stands(life: CallLife) -> str:
    match life.state:
        case CallState.DONE:
            return "it has ended, and its ending stands"
        case CallState.PENDING:
            return "it waits for a verdict, and nothing has gone out"
        case CallState.ASKING:
            return "somebody was being asked whether it may go out, and nothing has"
        case CallState.DECIDED:
            return "it has its verdict, and has not gone out yet"
        case CallState.UNSENT:
            return "nothing of it went out"
        case CallState.REOPENED:
            return "it is settled, and will be run again"
        case CallState.NEW | CallState.STARTED | CallState.UNRECORDABLE:
            return "it is the decision of a model, which is made again where it was lost"


def _check_known(case: Case, life: CallLife, said: Said, now_ms: int) -> None:
    """Refuse what cannot be believed: against what the call's own worker said, before the drain, after somebody else."""
    where = f"call {life.call!r} of run {case.run_id!r}"
    if said.how is not Settlement.DONE and find_late(case, life) is not None:
        raise SettlementRefused(
            f"{where} happened: its worker left the result after it had lost the run. Whoever recovers the run takes it over; "
            "of a run that has ended, settle it as done"
        )
    if not RunStatus(case.row.status).is_final:
        _check_first(case, life, said, now_ms)
    if said.how is not Settlement.NOT_DONE:
        return
    drain = drain_of(life, case.row, case.records, now_ms)
    if not drain.is_over:
        until = None if drain.until_ms is None else moment(drain.until_ms)
        when = "once its worker is known to be gone" if until is None else f"from {until.isoformat(timespec='seconds')} on"
        raise SettlementRefused(
            f"{where} cannot be settled as not done: {drain.why}. Say it again {when}; or permit a rerun, knowing that it may "
            "happen twice",
            until,
        )


def _check_first(case: Case, life: CallLife, said: Said, now_ms: int) -> None:
    """Refuse another word than the one that somebody left before, which whoever picks the run up takes over."""
    now = case.history.lives[life.call]
    first = find_settlement(case, life, now_ms) if now.attempts == life.attempts else None
    if first is not None and (first.how, first.ending) != (said.how, said.ending):
        raise SettlementRefused(
            f"call {life.call!r} of run {case.run_id!r} was settled already: {first.how.value}, by {first.by} ({first.why}); "
            "whoever picks the run up takes that over"
        )


def _note_settled(journal: Journal, found: Found, said: Said) -> None:
    """The settlement, and how the run stands after it: after the last doubt a blocked one goes again, others stay."""
    journal.note(RecordKind.SETTLED, said.call, said.attempt, settled_body(said))
    is_last = found.status is RunStatus.BLOCKED and all(life.call == said.call for life in _doubts(found))
    attempts = journal.attempts
    stay(found, RunStatus.RUNNING if is_last else found.status, journal)
    journal.attempts = attempts


def stay(found: Found, status: RunStatus, journal: Journal) -> None:
    """The run stands so after a claim that set nobody to work."""
    row = found.stored.row
    if status is RunStatus.QUARANTINED:  # why it is there is what the last record of such a run says
        last = next(each for each in reversed(found.stored.records) if each.kind == RecordKind.QUARANTINED)
        journal.note(RecordKind.QUARANTINED, body=last.body)
    journal.attempts = row.attempts
    journal.set_status(status, wake_at=None if status is RunStatus.RUNNING else row.wake_at)


async def _settle_ended(backing: Backing, found: Found, said: Said) -> None:
    """One more record of a run that has ended, under the key that it is under."""
    row = found.stored.row
    sealer = sealer_for(backing.ring, tenant=backing.tenant, run_id=row.run_id, key_id=row.key_id)
    body = codec.timed(settled_body(said), backing.clock.now_ms())
    await append_to_ended(
        backing, found, sealer, lambda journal: journal.note(RecordKind.SETTLED, said.call, said.attempt, body)
    )  # fmt: skip


async def append_to_ended(backing: Backing, found: Found, sealer: Sealer, note: Callable[[Journal], None]) -> None:
    """Add to a run that has ended; its row stays as it is but for what names the record. `Fenced` where it changed."""
    row = found.stored.row
    guard = Guard(row.epoch, row.owner, row.number, row.head)
    as_it_is = row._replace(lease_ms=backing.lease_ms)
    journal = Journal(
        group_commit(backing.store, backing.clock), sealer, clock=backing.clock, row=as_it_is, guard=guard, mode=backing.mode
    )
    try:
        note(journal)
        journal.attempts = row.attempts
        await journal.barrier()
    finally:
        journal.leave()
