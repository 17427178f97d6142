"""How a call in doubt is settled: what a probe or a person may say of it, and when "it did not happen" is to be believed.

Rules of this file:

* A settlement names the call and the attempt that it is about, who says so and why. It is a sealed record.
* *Done* is believed at once: the remote knows. *Rerun* is a permission, and is somebody's to give.
* *It did not happen* is believed only when that attempt can no longer take effect: it is over, and what it may have sent
  has had the time that its tool declares. A worker that is frozen may still send.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.errors import CheckpointStoreCorrupt, InvalidSetting
from agent_runtime.journal.records import NO_OWNER, RecordKind, StoredRecord, StoredRow
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


class Said(NamedTuple):
    """Somebody's settlement of one attempt at a call."""

    call: str
    attempt: int
    how: Settlement
    by: str
    why: str
    ending: bytes = b""
    """The `done` body that it gives the call, where it was done."""


def say(call: str, attempt: int, settling: object, *, by: object, why: object) -> Said:
    """The settlement, checked: from somebody, with a reason, and of something. `InvalidSetting`, `Unrecordable`."""
    by, why = require_text("by", by), require_text("why", why)
    if isinstance(settling, Rerun):
        return Said(call, attempt, Settlement.RERUN, by, why)
    if not isinstance(settling, Outcome) or settling.how is None:
        raise InvalidSetting(f"a call is settled by Outcome.done(…), Outcome.not_done() or Rerun(), found {settling!r}")
    ending = b'{"result":' + codec.encode(settling.result) + b"}" if settling.how is Settlement.DONE else b""
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
        ending = plain.get("ending")
        return Settled(Settlement(plain["how"]), b"" if ending is None else codec.encode_checked(ending))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointStoreCorrupt(f"a settlement cannot be read: {error!r}") from error


def said_to_plain(said: Said) -> dict[str, object]:
    """A settlement as a message holds it."""
    plain: dict[str, object] = {
        "call": said.call,
        "attempt": said.attempt,
        "how": said.how.value,
        "by": said.by,
        "why": said.why,
    }
    return {**plain, "ending": codec.decode(said.ending)} if said.ending else plain


def said_from_plain(plain: dict[str, Any]) -> Said | None:
    """The settlement that a message holds, if it holds one."""
    try:
        ending = b"" if plain.get("ending") is None else codec.encode(plain["ending"])
        how = Settlement(plain["how"])
        said = Said(str(plain["call"]), int(plain["attempt"]), how, str(plain["by"]), str(plain["why"]), ending)
    except (KeyError, ValueError, TypeError):
        return None
    return said if bool(said.ending) is (how is Settlement.DONE) else None


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


class Drain(NamedTuple):
    """Whether an attempt can no longer take effect: `why` says what stands against it, `until_ms` for how long at most."""

    why: str = ""
    until_ms: int | None = None

    @property
    def is_over(self) -> bool:
        return not self.why


def drain_of(life: CallLife, row: StoredRow, records: Sequence[StoredRecord], now_ms: int) -> Drain:
    """Whether the latest attempt at a call is over and drained. `now_ms` is the store's time.

    Its intent was durable when the row was last written, by the store's clock, and began when its worker says: the later
    of the two counts, so that no clock that goes wrong makes the wait shorter.
    """
    if not is_over(life, row, records):
        return Drain("its worker is not known to be gone, and may still send; a frozen one would")
    asked = read_asked(life.asked)
    if not asked.settles_ms:
        return Drain()
    until = max(asked.at_ms, row.updated_at) + asked.settles_ms
    if now_ms >= until:
        return Drain()
    return Drain(f"what it sent may still take effect for {(until - now_ms) / 1000:.0f} s", until)


def is_over(life: CallLife, row: StoredRow, records: Sequence[StoredRecord]) -> bool:
    """Whether the code of the latest attempt runs no more: its worker said so, or its process is known to be gone."""
    epoch = life.epoch
    of_epoch = [record for record in records if record.epoch == epoch]
    if any(record.kind in _LEFT and not codec.decode(record.body).get("threads") for record in of_epoch):
        return True
    later = next((record for record in records if record.kind == RecordKind.CLAIMED and record.epoch > epoch), None)
    if later is not None and codec.decode(later.body).get("gone"):
        return True
    claimed = next((record for record in of_epoch if record.kind == RecordKind.CLAIMED), None)
    mark = None if claimed is None else read_mark(claimed.body)
    if mark is None:
        return False
    return is_dead(mark, row.owner) if row.epoch == epoch and row.owner != NO_OWNER else _is_gone(mark)


_LEFT = frozenset({int(RecordKind.RELEASED), int(RecordKind.QUARANTINED), int(RecordKind.ENDED)})
"""What a worker writes when it lets a run go: it has stopped then, but for what it says still runs on a thread."""


def _is_gone(mark: ProcessMark) -> bool:
    """Whether the process is gone. Of this very one nobody can say which of its owners is meant."""
    return mark != own_mark() and is_dead(mark, NO_OWNER)
