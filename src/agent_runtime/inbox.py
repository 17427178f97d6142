"""The inbox of a run: messages sealed by whoever may write to it, to whoever works it.

Anybody who can reach the store can leave bytes there. What was not sealed under a key of ours, or cannot be read, is
passed over, and so blocks nobody.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.clock import Clock
from agent_runtime.errors import CheckpointConflict, CheckpointStoreCorrupt, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredMessage
from agent_runtime.journal.seal import NO_SUCH_VALUES, KeyRing, Sealer, check_messages, open_message, sealer_for
from agent_runtime.journal.store import AnswerKind, CheckpointStore

_log = logging.getLogger("agent_runtime")


class MessageKind(Enum):
    """What a message is about."""

    VERDICT = "verdict"
    SETTLE = "settle"
    CANCEL = "cancel"
    LATE = "late"


class Message(NamedTuple):
    """A message whose seal holds. `body` is plain data, still to be checked by whoever understands the kind."""

    kind: MessageKind
    body: dict[str, Any]


class Cancel(NamedTuple):
    """Somebody's word that the run is to end."""

    by: str
    why: str


async def read_inbox(store: CheckpointStore, ring: KeyRing, *, tenant: str, run_id: RunId) -> Sequence[Message]:
    """The messages to a run that hold, in the order they came."""
    messages = await store.inbox(run_id)
    check_messages(run_id, messages)
    return open_messages(ring, messages, tenant=tenant, run_id=run_id)


def find_cancel(messages: Sequence[Message]) -> Cancel | None:
    """The first word that the run is to end."""
    for message in messages:
        by, why = message.body.get("by"), message.body.get("why")
        if message.kind is MessageKind.CANCEL and isinstance(by, str) and isinstance(why, str):
            return Cancel(by, why)
    return None


POST_TRIES = 5


async def post_message(store: CheckpointStore, sealer: Sealer, kind: MessageKind, body: dict[str, object]) -> None:
    """Leave a message to the run. `CheckpointConflict` where there is none to leave it to; `StoreUnavailable`."""
    message = write_message(sealer, kind, body)
    for _ in range(POST_TRIES):
        answer = await store.post(RunId(sealer.run_id), message)
        match answer.kind:
            case AnswerKind.OK:
                return
            case AnswerKind.UNKNOWN:
                continue  # the same message lands once
            case AnswerKind.FENCED | AnswerKind.MOVED:
                raise CheckpointConflict(f"run {sealer.run_id!r} has ended or is gone, and takes no messages")
    raise StoreUnavailable(f"run {sealer.run_id!r}: the store did not say whether the message is there; send it again")


LATE_SECONDS = 2.0
"""How long a worker that has lost its run waits at most until its results are posted; it goes on trying after that."""
LATE_TRIES = 20
LONGEST_LATE_PAUSE_SECONDS = 30.0

_POSTING: set[asyncio.Future[None]] = set()


async def leave_late(store: CheckpointStore, clock: Clock, sealer: Sealer, bodies: Iterable[dict[str, object]]) -> None:
    """Leave results that came too late to be written; whoever picks the run up takes them over.

    Returns once the store has them, or after `LATE_SECONDS`: then they are posted again while this process lives.
    """
    messages = [(write_message(sealer, MessageKind.LATE, body), str(body["call"])) for body in bodies]
    run_id = RunId(sealer.run_id)
    first = asyncio.ensure_future(_post_once(store, run_id, messages))
    posting = asyncio.ensure_future(_post_rest(store, clock, run_id, first))
    _POSTING.add(posting)
    posting.add_done_callback(_POSTING.discard)
    await asyncio.wait({first}, timeout=LATE_SECONDS)


_Late: TypeAlias = tuple[StoredMessage, str]
"""A result that came too late, and its call."""


async def _post_once(store: CheckpointStore, run_id: RunId, messages: Sequence[_Late]) -> Sequence[_Late]:
    """Post messages; gives those of which the store has not said that it has them, or never will."""
    left = []
    for message, call in messages:
        try:
            answer = await store.post(run_id, message)
        except Exception:  # whatever a write raises, it may have landed, and lands once: it is sent again
            left.append((message, call))
            continue
        match answer.kind:
            case AnswerKind.OK:
                pass
            case AnswerKind.UNKNOWN:
                left.append((message, call))
            case AnswerKind.FENCED | AnswerKind.MOVED:
                await _tell_late(store, run_id, call)
    return left


async def _tell_late(store: CheckpointStore, run_id: RunId, call: str) -> None:
    """Say so where a run ended without its due: one that is done has nothing in doubt, and needs nothing more."""
    stored = await store.latest(run_id)
    if stored is not None and stored.row.status in (RunStatus.FAILED, RunStatus.CANCELLED):
        _log.warning(
            "run %r has ended, and takes no late results; its call %s happened: where it is in doubt, settle it as done",
            run_id, call,
        )  # fmt: skip


async def _post_rest(store: CheckpointStore, clock: Clock, run_id: RunId, first: Awaitable[Sequence[_Late]]) -> None:
    """Post again what is left, while the store does not answer: later each time, and not for ever."""
    left = await first
    for tried in range(LATE_TRIES):
        if not left:
            return
        await clock.sleep(min(2.0**tried / 4, LONGEST_LATE_PAUSE_SECONDS))
        left = await _post_once(store, run_id, left)
    _log.warning("run %r: results that came too late could not be left to it: the store did not answer", run_id)


def write_message(sealer: Sealer, kind: MessageKind, body: dict[str, object]) -> StoredMessage:
    """The message as it is posted. The same again is the same message, and lands once."""
    return sealer.post(kind.value, codec.encode(body))


def open_messages(ring: KeyRing, messages: Iterable[StoredMessage], *, tenant: str, run_id: str) -> Sequence[Message]:
    """The messages that hold and can be read, in the order they came: under any key of the ring that is not revoked."""
    trusted = [key_id for key_id in ring.keys if key_id not in ring.revoked]
    sealers = [sealer_for(ring, tenant=tenant, run_id=run_id, key_id=key_id) for key_id in trusted]
    return [opened for message in messages if (opened := _open(sealers, message)) is not None]


def _open(sealers: Sequence[Sealer], message: StoredMessage) -> Message | None:
    try:
        sealer = next((each for each in sealers if open_message(each, message)), None)
        if sealer is None:
            return None
        plain = codec.decode(sealer.show_message(message).body)
        return Message(MessageKind(message.kind), plain) if isinstance(plain, dict) else None
    except (*NO_SUCH_VALUES, ValueError, RecursionError, CheckpointStoreCorrupt):
        return None
