"""The rules that hold in every cell of a sweep, by name, and what a journal must look like for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from agent_runtime import codec
from agent_runtime.approvals import read_verdict
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.journal.replay import CallLife, History
from agent_runtime.journal.states import Settlement
from agent_runtime.messages import Reply, decode_reply
from agent_runtime.timeline import Timeline


class Rule(Enum):
    """What must be true wherever a worker dies."""

    CLAIM_FIRST = "nothing acts under an epoch before its claim is durable"
    INTENT_FIRST = "nothing acts before its own intent is durable"
    REPLY_FIRST = "nothing acts on a reply that is not durable"
    SAVED_FIRST = "nothing of a superstep is called before those before it are saved"
    AS_DECIDED = "what is asked of a tool is what the recorded reply decided"
    RESULT_FIRST = "a result reaches the model only once it is durable"
    END_FIRST = "the run's result is given out only once its end is durable"
    ENDED_ONCE = "a call that has ended is not made again"
    DECIDED_ONCE = "a decision that is recorded is not asked for again"
    ONE_EFFECT = "one key, one effect, one set of arguments"
    AS_PERMITTED = "a call with no repeat rule runs once, and once more for each recorded permission"
    VERDICT_FIRST = "a call that needs a person acts only after its verdict is durable, with what was agreed to"
    SPENT_ONCE = "one request has one verdict, and each attempt that it lets out names it"
    DENIED = "a call that was denied never acts"
    NAMED_REQUESTS = "a paused run names exactly the requests that are open, and asks nobody who has answered"
    PROBED_FIRST = "what the remote knows to be done is not done again"
    DRAINED = "that it did not happen is believed only of an attempt that can no longer take effect"
    OWN_RESULT = "a call that is settled as done has what the remote gave to that very attempt"
    NAMED_DOUBTS = "recovery names exactly the calls in doubt, and nothing acts before they are decided"
    GROWS = "the journal only grows, and ends once"
    EPOCHS = "each claim is one epoch further, and records are of the epoch that claimed them"
    SPEND = "the spend recorded is no less than the requests made"
    VALID_REQUEST = "each model request holds each call once, with its one result"
    VERIFIES = "the journal verifies"
    SAME_STATE = "the end is that of a run without faults"
    REACHES_END = "the run ends, or names what must be decided"
    TOLD = "what the timeline tells is what the remotes counted"
    DIES = "a worker dies where it is told to"


class Broken(NamedTuple):
    """A rule that did not hold, and how."""

    rule: Rule
    found: str


def check_told(
    told: Timeline, requests: Mapping[str, int], model_requests: int, *, lost: int, is_whole: bool
) -> Sequence[Broken]:
    """Hold what the timeline says against what was counted: the requests for each call, and those to the model.

    An attempt that was written down and never made is one of a worker that died: there are no more of these than `lost`.
    `is_whole`: every attempt on record was made in this world.
    """
    counted = {call: len([each for each in life.tries if each.ended != "unsent"]) for call, life in told.calls.items()}
    tools = {call: tries for call, tries in counted.items() if not told.calls[call].is_decision}
    broken = []
    for call in {**tools, **requests}:
        made, said = requests.get(call, 0), tools.get(call, 0)
        if made > said or (is_whole and said > made + lost):
            broken.append(f"call {call} was made {made} times, and {said} are told")
    if is_whole:
        results = [call for call in tools if "result" in told.calls[call].outcome]
        broken += [f"call {call} is told as done, and was never made" for call in results if not requests.get(call, 0)]
        if told.decisions and not model_requests <= told.model_requests <= model_requests + lost:
            broken.append(f"the model was asked {model_requests} times, and {told.model_requests} are told")
    return [Broken(Rule.TOLD, found) for found in broken]


def has_ended(records: Sequence[StoredRecord], call: str) -> bool:
    """Whether the call has its recorded ending: its own, or one that it was settled with."""
    of_call = [record for record in records if record.call == call]
    return any(each.kind == RecordKind.DONE for each in of_call) or _settled(of_call, Settlement.DONE) > 0


def starts(records: Sequence[StoredRecord], call: str, epoch: int) -> int:
    """How often the call was written down before it was made, under that epoch."""
    return sum(r.call == call and r.kind == RecordKind.STARTED and r.epoch == epoch for r in records)


def permissions(records: Sequence[StoredRecord], call: str) -> int:
    """How often it was recorded that the call may run again."""
    return _settled([record for record in records if record.call == call], Settlement.RERUN)


def _settled(of_call: Sequence[StoredRecord], how: Settlement) -> int:
    """How often a call was settled so."""
    settled = (record for record in of_call if record.kind == RecordKind.SETTLED)
    return sum(codec.decode(record.body)["how"] == how.value for record in settled)


def open_requests(records: Sequence[StoredRecord]) -> set[str]:
    """The calls that were asked about, and have neither verdict nor ending."""
    kinds = ((record.call, record.kind) for record in records)
    closed = {call for call, kind in kinds if kind in (RecordKind.VERDICT, RecordKind.DONE)}
    return {record.call for record in records if record.kind == RecordKind.PENDING} - closed


def recorded_reply(records: Sequence[StoredRecord], seq: int) -> Reply | None:
    """The reply of a decision as it is recorded."""
    for record in records:
        if record.call == f"{seq}/model" and record.kind == RecordKind.DONE:
            return decode_reply(record.body)
    return None


def check_growth(before: Sequence[StoredRecord], after: Sequence[StoredRecord]) -> list[Broken]:
    """The records of a moment against those of a later one."""
    found = []
    if list(after[: len(before)]) != list(before):
        found.append(Broken(Rule.GROWS, f"{len(before)} records were there, and they are not the first of {len(after)}"))
    ends = [record.number for record in after if record.kind == RecordKind.ENDED]
    if ends and ends != [len(after)]:
        found.append(Broken(Rule.GROWS, f"the run ended at {ends}, and its journal goes to {len(after)}"))
    return found


def check_epochs(records: Sequence[StoredRecord]) -> list[Broken]:
    """Each claim one further, and nothing of an epoch that did not claim."""
    claims = [record.epoch for record in records if record.kind == RecordKind.CLAIMED]
    found = []
    if claims != list(range(1, len(claims) + 1)):
        found.append(Broken(Rule.EPOCHS, f"epochs were claimed as {claims}"))
    if not {record.epoch for record in records} <= set(claims):
        found.append(Broken(Rule.EPOCHS, f"records are of epochs {sorted({r.epoch for r in records})}, claimed: {claims}"))
    return found


def check_decided(history: History) -> list[Broken]:
    """What was asked of each tool against the reply that decided it."""
    found = []
    for call, life in history.lives.items():
        if call.endswith("/model") or not life.asked:
            continue
        place, _, index = call.partition(".")
        reply = history.lives.get(f"{place}/model")
        decided = decode_reply(reply.ended).tool_calls[int(index or 0)] if reply is not None and reply.ended else None
        asked = codec.decode(life.asked)
        agreed = _sent_instead(life) if "verdict" in asked else None  # a port is asked about what was decided
        if decided is None or (decided.name, agreed or dict(decided.args)) != (asked["tool"], asked["args"]):
            found.append(Broken(Rule.AS_DECIDED, f"call {call} was asked as {asked}, decided was {decided}"))
    return found


def _sent_instead(life: CallLife) -> Mapping[str, object] | None:
    """The arguments that an approver made of those that were decided."""
    return read_verdict(life.verdict).args if life.verdict else None
