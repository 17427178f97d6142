"""How a call in doubt is settled: what a probe or a person may say of it, and when "it did not happen" is to be believed.

Rules of this file:

* A settlement names the call and the attempt that it is about, who says so and why. It is a sealed record.
* *Done* is believed at once: the remote knows. *Rerun* is a permission, and is somebody's to give.
* *It did not happen* is believed only when that attempt can no longer take effect: it is over, and what it may have sent
  has had the time that its tool declares, counted from when it is known to be over: it may have sent at its very end. A
  worker that is frozen may still send. Who was asked before that saw what may still change, and has to be asked again.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.errors import CheckpointStoreCorrupt, InvalidSetting, Unrecordable
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus, StoredRecord, StoredRow
from agent_runtime.journal.replay import CallLife, Settled
from agent_runtime.journal.states import Settlement
from agent_runtime.lease import ProcessMark, is_dead, own_mark, read_mark


class Outcome(NamedTuple):
    """What became of a call. Made by `Outcome.done(result)`, `Outcome.not_done()` or `Outcome.unknown()`."""

    how: Settlement | None
    result: object = None

    @staticmethod
    def done(result: object = None) -> "Outcome":
        """It happened, and this is what it gave: plain data, as the tool would have returned it."""
        return Outcome(Settlement.DONE, result)

    @staticmethod
    def not_done() -> "Outcome":
        """It did not happen, and will not any more."""
        return Outcome(Settlement.NOT_DONE)

    @staticmethod
    def unknown() -> "Outcome":
        """Nobody can say."""
        return Outcome(None)


class Rerun(NamedTuple):
    """A person's permission to run a call in doubt again under its key, whatever became of it."""


Settling: TypeAlias = "Outcome | Rerun"

OUTCOMES = (Settlement.DONE, Settlement.NOT_DONE)
"""What an outcome that is known may be."""


class Said(NamedTuple):
    """Somebody's settlement of one attempt at a call."""

    call: str
    attempt: int
    how: Settlement
    by: str
    why: str
    ending: bytes = b""
    """The `done` body that it gives the call, where it was done."""


def say(call: str, attempt: int, settling: object, *, by: object, why: object, most: int = codec.MAX_BYTES) -> Said:
    """The settlement, checked: from somebody, with a reason, and of something. `InvalidSetting`, `Unrecordable`."""
    by, why = require_text("by", by), require_text("why", why)
    if isinstance(settling, Rerun):
        return Said(call, attempt, Settlement.RERUN, by, why)
    if not isinstance(settling, Outcome) or settling.how not in OUTCOMES:
        raise InvalidSetting(f"a call is settled by Outcome.done(…), Outcome.not_done() or Rerun(), found {settling!r}")
    ending = _as_result(codec.encode(settling.result, most)) if settling.how is Settlement.DONE else b""
    return Said(call, attempt, settling.how, by, why, ending)


def require_text(name: str, text: object) -> str:
    """Who says something, and why: text that says something itself."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidSetting(f"what is decided of a run is somebody's, for a reason: pass {name}='…'; found {text!r}")
    return text


def settled_body(said: Said) -> bytes:
    """The body of a `settled` record."""
    plain = {"how": said.how.value, "by": said.by, "why": said.why}
    ending = b',"ending":' + said.ending if said.ending else b""
    return codec.encode(plain)[:-1] + ending + b"}"


def read_settled(body: bytes) -> Settled:
    """What a `settled` record says; `CheckpointStoreCorrupt` where that cannot be read."""
    try:
        plain = codec.decode(body)
        how, ending = Settlement(plain["how"]), read_ending_form(plain.get("ending"))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointStoreCorrupt(f"a settlement cannot be read: {error!r}") from error
    if (ending is not None) is not (how is Settlement.DONE):
        raise CheckpointStoreCorrupt("a settlement cannot be read: what was done has an ending, and nothing else has one")
    return Settled(how, ending or b"")


def read_ending_form(plain: object) -> bytes | None:
    """The body of a `done` record that plain data stands for: one result, or one error; None where it is neither."""
    if not isinstance(plain, dict) or len(plain) != 1:
        return None
    if "result" in plain:
        return _as_result(codec.encode(plain["result"]))
    error = plain.get("error")
    if not isinstance(error, dict) or not all(type(error.get(name)) is str for name in ("type", "message")):
        return None
    return codec.encode({"error": {"type": error["type"], "message": error["message"]}})


def stated_body(shape: codec.Shape, value: object, most: int = codec.MAX_BYTES) -> bytes:
    """The `done` body of a result that somebody else than the tool gives: of its declared type, or plain data that fits it.

    `Unrecordable` where it is neither.
    """
    try:
        data = shape.encode(value, most)
    except Unrecordable:
        if shape.is_plain:
            raise
        data = shape.encode(_as_declared(shape, codec.encode(value, most)), most)
    return _as_result(data)


def _as_result(data: bytes) -> bytes:
    """The `done` body of a result that is encoded already."""
    return b'{"result":' + data + b"}"


def _as_declared(shape: codec.Shape, data: bytes) -> object:
    try:
        return shape.decode(data)
    except Exception as error:  # of a type's own validators, too
        raise Unrecordable("$", f"plain data that is none of its declared type ({error})") from error


def said_to_plain(said: Said, *, drained: bool = False) -> dict[str, object]:
    """A settlement as a message holds it.

    `drained`: whoever posts it knows, by `drain_of`, that the attempt can no longer take effect. Without that nobody
    believes that it did not happen, however long the message lies there: what it tells was seen too soon.
    """
    plain: dict[str, object] = {
        "call": said.call,
        "attempt": said.attempt,
        "how": said.how.value,
        "by": said.by,
        "why": said.why,
    }
    if drained:
        plain["drained"] = True
    return {**plain, "ending": codec.decode(said.ending)} if said.ending else plain


def said_from_plain(plain: dict[str, Any]) -> Said | None:
    """The settlement that a message holds, if it holds one."""
    texts = [plain.get(name) for name in ("call", "by", "why")]
    try:
        how, ending = Settlement(plain.get("how")), read_ending_form(plain.get("ending"))
    except (ValueError, Unrecordable):
        return None
    attempt = plain.get("attempt")
    if type(attempt) is not int or not all(type(text) is str for text in texts):
        return None
    if (ending is not None) is not (how is Settlement.DONE):
        return None
    if how is Settlement.NOT_DONE and plain.get("drained") is not True:
        return None
    call, by, why = map(str, texts)
    return Said(call, attempt, how, by, why, ending or b"")


# The drain.


class Asked(NamedTuple):
    """What a `started` record of a tool call says."""

    tool: str
    args: dict[str, object]
    at_ms: int
    """When, in milliseconds UTC of its worker."""
    settles_ms: int = 0
    """How long what was sent may still take effect, once the attempt is over."""


def read_asked(body: bytes) -> Asked:
    """What the body of a `started` record says."""
    plain = codec.decode(body)
    return Asked(plain["tool"], plain["args"], plain["at"], plain.get("settles", 0))


class Over(NamedTuple):
    """What a claim says of workers before it: the attempts of these epochs are over, and were so by then."""

    epochs: Sequence[int]
    at_ms: int
    """The store's time once they were seen to be over: from then on what they sent has the time that it may take."""

    def to_plain(self) -> dict[str, object]:
        return {"over": list(self.epochs), "over_at": self.at_ms}


class Drain(NamedTuple):
    """Whether a call can no longer take effect: `why` says what stands against it, `until_ms` for how long at most."""

    why: str = ""
    until_ms: int | None = None
    news: tuple[int, ...] = ()
    """Epochs whose attempts are over, which no claim says yet: a time counts from the claim that says so."""

    @property
    def is_over(self) -> bool:
        return not self.why


def drain_of(life: CallLife, row: StoredRow, records: Sequence[StoredRecord], now_ms: int) -> Drain:
    """Whether all attempts at a call that may have gone out are over and drained. `now_ms` is the store's time.

    No worker's clock counts, and nothing that is not sealed: the time is that of the claim which says that they are over.
    A run that has ended is claimed no more, and nothing of it runs again: there the store's own word of its end counts.
    """
    until_ms, news = 0, list[int]()
    for attempt in _open_attempts(life.call, records):
        if not _is_said_over(attempt.epoch, records) and not _is_seen_over(attempt.epoch, row, records):
            return Drain("its worker is not known to be gone, and may still send; a frozen one would")
        settles_ms = read_asked(attempt.body).settles_ms
        if not settles_ms:
            continue
        over_ms = hint_ms(row) if RunStatus(row.status).is_final else _over_since(attempt.epoch, records)
        if over_ms is None:
            news.append(attempt.epoch)
        until_ms = max(until_ms, settles_ms + (now_ms if over_ms is None else over_ms))
    if now_ms >= until_ms:
        return Drain()
    return Drain(f"what it sent may still take effect for {ceil((until_ms - now_ms) / 1000)} s", until_ms, tuple(news))


def hint_ms(row: StoredRow) -> int:
    """When the run was last written, by the store's clock; 0 where the row, which is not sealed there, says nothing of use."""
    return row.updated_at if type(row.updated_at) is int else 0


def _open_attempts(call: str, records: Sequence[StoredRecord]) -> Sequence[StoredRecord]:
    """The starts of a call of which nobody has said that nothing went out, or that it did not happen."""
    found: list[StoredRecord] = []
    for record in records:
        if record.call != call:
            continue
        if record.kind == RecordKind.STARTED:
            found.append(record)
        elif record.kind == RecordKind.UNSENT:
            found.pop()
        elif record.kind == RecordKind.SETTLED and read_settled(record.body).how is Settlement.NOT_DONE:
            found.clear()
    return found


def _is_said_over(epoch: int, records: Sequence[StoredRecord]) -> bool:
    """Whether a record says that an epoch's worker has stopped: its own, or that of one that found it gone."""
    for record in records:
        if record.epoch == epoch and record.kind in _LEFT and not codec.decode(record.body).get("threads"):
            return True
        if record.epoch > epoch and record.kind == RecordKind.CLAIMED:
            claimed = codec.decode(record.body)
            if epoch in claimed.get("over", ()) or (record.epoch == epoch + 1 and claimed.get("gone")):
                return True
    return False


def _over_since(epoch: int, records: Sequence[StoredRecord]) -> int | None:
    """From when on a claim says that an epoch's attempts are over."""
    claims = (codec.decode(record.body) for record in records if record.kind == RecordKind.CLAIMED and record.epoch > epoch)
    return next((claim["over_at"] for claim in claims if epoch in claim.get("over", ())), None)


def _is_seen_over(epoch: int, row: StoredRow, records: Sequence[StoredRecord]) -> bool:
    """Whether the process of an epoch's worker is gone, as this one can see."""
    claimed = next((record for record in records if record.epoch == epoch and record.kind == RecordKind.CLAIMED), None)
    mark = None if claimed is None else read_mark(claimed.body)
    if mark is None:
        return False
    return is_dead(mark, row.owner) if row.epoch == epoch and row.owner != NO_OWNER else _is_gone(mark)


_LEFT = frozenset({int(RecordKind.RELEASED), int(RecordKind.QUARANTINED), int(RecordKind.ENDED)})
"""What a worker writes when it lets a run go: it has stopped then, but for what it says still runs on a thread."""


def _is_gone(mark: ProcessMark) -> bool:
    """Whether the process is gone. Of this very one nobody can say which of its owners is meant."""
    return mark != own_mark() and is_dead(mark, NO_OWNER)
