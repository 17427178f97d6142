"""What is decided about a stored run before a worker goes on with it: its calls in doubt, its open requests, a cancel.

A call in doubt is settled by a late result, by what somebody posted, by its tool's rule, by its probe or by a permission;
else a person must say what happened. An open request gets its verdict, or has expired. All of it becomes records, in the
very write that claims the run.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.approvals import (
    NOT_AGREED,
    ApprovalRequest,
    Checked,
    Verdict,
    check_approver,
    check_form,
    check_room,
    check_sent,
    check_verdict,
    expiry,
    read_pending,
    request_of,
    verdict_body,
)
from agent_runtime.clock import milliseconds
from agent_runtime.errors import Doubt, InvalidArguments, Unrecordable, VerdictRefused
from agent_runtime.events import emit
from agent_runtime.ids import RunId, build_key, is_reply
from agent_runtime.inbox import Cancel, Message, MessageKind, find_cancel, post_message
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus, StoredRecord, StoredRow
from agent_runtime.journal.replay import CallLife, History
from agent_runtime.journal.seal import Noted, sealer_for
from agent_runtime.journal.states import WAITING, CallState, Settlement
from agent_runtime.run import Backing, RunContext, prefix_of
from agent_runtime.settlements import (
    OUTCOMES,
    Drain,
    Outcome,
    Over,
    Said,
    drain_of,
    hint_ms,
    read_asked,
    read_ending_form,
    said_from_plain,
    settled_body,
    stated_body,
)
from agent_runtime.tools import CALL_KEY, RepeatRule, Tool, ToolRegistry

MOST_UNRECORDABLE = 2
"""After so many results of one call that could not be stored, it is not run again by its rule."""
FORGOTTEN = "the remote knows its key for a time only, and may have forgotten it"
PROBE_SECONDS = 30.0
"""How long a probe may take whose tool has no timeout."""

RerunInDoubt: TypeAlias = "bool | Sequence[Doubt]"
"""True for every call in doubt, or the doubts that an error named."""


class Case(NamedTuple):
    """A stored run that was verified, and the messages to it that hold."""

    row: StoredRow
    records: Sequence[StoredRecord]
    history: History
    opened: Mapping[str, Any]
    messages: Sequence[Message] = ()

    @property
    def run_id(self) -> RunId:
        return self.row.run_id

    def key(self, call: str) -> str:
        """The idempotency key of a call."""
        return build_key(prefix_of(self.run_id, self.opened), call)


class Decisions(NamedTuple):
    """What was decided: the records that say so, the doubts that nobody decided, and what is left to wait for."""

    records: Sequence[Noted] = ()
    undecided: Sequence[Doubt] = ()
    rerun: int = 0
    """How many calls in doubt will run again, by rule or by permission."""
    cancel: Cancel | None = None
    waiting: Sequence[CallLife] = ()
    """The calls that wait for a verdict still."""
    can_ask: bool = False
    """Whether somebody can be asked at once about those that wait."""
    wake_at: int | None = None
    """When what keeps a doubt undecided will have passed by itself."""
    over: Over | None = None
    """Whose attempts were found over, which no claim says yet: a drain counts from the claim that does."""
    is_progress: bool = True
    """Whether anything was decided that ends the count of claims that came to nothing; a rule's own word does not."""

    @property
    def has_news(self) -> bool:
        """Whether a run that waits for a person has reason to go on."""
        return bool(self.records) or self.cancel is not None or not self.waiting or self.can_ask

    @property
    def changes_nothing(self) -> bool:
        """Whether a doubt keeps a blocked run blocked, and nothing is there to be written."""
        return bool(self.undecided) and not self.records and self.cancel is None and self.over is None


class Decider:
    """Decides about one run, by the tools that its worker has."""

    def __init__(
        self,
        backing: Backing,
        run_id: RunId,
        registry: ToolRegistry,
        *,
        rerun: RerunInDoubt = False,
        verdicts: Sequence[Verdict] = (),
        can_ask: bool = False,
        is_live: bool = False,
    ) -> None:
        """`is_live`: it is the run's own worker that looks again, after its tries."""
        self._is_live = is_live
        self._backing = backing
        self._run_id = run_id
        self._registry = registry
        self._rerun = rerun
        self.verdicts = [_checked(verdict, run_id) for verdict in _listed(verdicts)]
        self._can_ask = can_ask

    async def __call__(self, case: Case) -> Decisions:
        """`VerdictRefused` where a verdict that was given does not hold; one of the inbox is passed over."""
        if (cancel := find_cancel(case.messages)) is not None:
            return Decisions(cancel=cancel)
        in_doubt = [life for life in case.history.in_doubt() if not is_reply(life.call)]
        lives = [life for life in in_doubt if not self._is_rules_alone(case, life)]
        waiting = case.history.waiting()
        now_ms = milliseconds(await self._backing.store.now()) if lives or waiting or self.verdicts else 0
        settled = await asyncio.gather(*(self._settle(case, life, now_ms) for life in lives)) if lives else []
        verdicts = self._find_verdicts(case, now_ms)
        answered = [record for life in waiting for record in _answer(case, life, verdicts, now_ms)]
        untimed = [each for each in settled if each.doubt is not None and each.until_ms is None]
        times = [each.until_ms for each in settled if each.until_ms is not None]
        closed = {call for _, call, _, _ in answered}
        return Decisions(
            [*(each.record for each in settled if each.record is not None), *answered],
            [each.doubt for each in settled if each.doubt is not None],
            len(in_doubt) - len(lives) + sum(each.reruns for each in settled),
            waiting=[life for life in waiting if life.call not in closed],
            can_ask=self._can_ask,
            wake_at=min(times) if times and not untimed else None,
            over=await self._seen_over(settled),
            is_progress=bool(answered) or any(each.is_progress for each in settled),
        )

    async def _seen_over(self, settled: Sequence["_Settled"]) -> Over | None:
        epochs = sorted({epoch for each in settled for epoch in each.over})
        return Over(epochs, milliseconds(await self._backing.store.now())) if epochs else None

    async def post(self, case: Case) -> None:
        """Leave the verdicts that were given to whoever works the run, each checked: `VerdictRefused`."""
        if not self.verdicts:
            return
        now_ms = milliseconds(await self._backing.store.now())
        sealer = sealer_for(self._backing.ring, tenant=self._backing.tenant, run_id=self._run_id)
        for checked in self._find_verdicts(case, now_ms).values():
            await post_message(self._backing.store, sealer, MessageKind.VERDICT, checked.verdict.to_plain())

    # Calls in doubt.

    def _is_rules_alone(self, case: Case, life: CallLife) -> bool:
        """Whether the call runs again by its tool's rule whatever the time is: nobody else has said anything, or is to."""
        tool = None if case.messages else self._registry.find(read_asked(life.asked).tool)
        if tool is None or tool.approval is not None or tool.key_seconds is not None:
            return False
        return may_repeat(tool, life, case.records, case.row, 0)

    async def _settle(self, case: Case, life: CallLife, now_ms: int) -> "_Settled":
        asked = read_asked(life.asked)
        tool = self._registry.find(asked.tool)
        said = find_late(case, life) or find_settlement(case, life, now_ms)
        if said is not None:
            return _by(said, is_progress=True)
        is_unasked = tool is not None and _needs_asking(tool, life, asked.args)
        if tool is not None and not is_unasked and may_repeat(tool, life, case.records, case.row, now_ms):
            return _Settled(reruns=1)
        why = _why(case, life, tool)
        if is_unasked and tool is not None and tool.may_repeat:
            why = "it was started when its tool needed nobody's approval, and needs it now: no rule runs it again unasked"
        left, drain = _Unsettled(why), drain_of(life, case.row, case.records, now_ms)
        if tool is not None and tool.probe is not None:
            probed = await self._probe(case, tool, life, drain)
            if isinstance(probed, Said):
                return _by(probed, is_progress=probed.how is Settlement.DONE)
            left = probed
        if tool is not None and is_permitted(self._rerun, self._run_id, life):
            return _by(Said(life.call, life.attempts, Settlement.RERUN, "", "rerun_in_doubt"), is_progress=True)
        age_ms = now_ms - asked.at_ms
        doubt = make_doubt(
            case.run_id, life.call, case.key(life.call), asked.tool, life.attempts, left.why, asked.args, age_ms
        )
        return _Settled(doubt=doubt, until_ms=left.until_ms, over=drain.news)

    async def _probe(self, case: Case, tool: Tool, life: CallLife, drain: Drain) -> "Said | _Unsettled":
        """What the remote says of the call; why that does not settle it, and until when.

        `drain` was looked at before: what the remote says of an attempt that could still act then may not hold any more.
        """
        outcome = await ask_probe(tool, case.key(life.call), read_asked(life.asked).args)
        if isinstance(outcome, str):
            return _Unsettled(f"{_why(case, life, tool)}; {outcome}")
        if outcome.how is Settlement.DONE:
            try:
                ending = stated_body(tool.result, outcome.result, self._backing.most_bytes)
            except Unrecordable as error:
                told = f"its probe says that it happened, and gave what cannot be recorded: {error.named(tool.name)}"
                return _Unsettled(told)
            return _probed(life, Settlement.DONE, "the remote says that it happened", ending)
        if life.state is CallState.UNRECORDABLE:
            return _Unsettled(f"{_why(case, life, tool)}; and yet its probe says that it did not happen")
        if not drain.is_over:
            return _Unsettled(f"its probe says that it did not happen, but {drain.why}", drain.until_ms)
        if self._is_live and life.attempts >= tool.attempts:
            told = f"it was tried {life.attempts} times, and its probe says that it did not happen"
            ending = codec.encode({"error": {"type": "NotDone", "message": told}})
            return _probed(life, Settlement.DONE, told, ending)
        return _probed(life, Settlement.NOT_DONE, "the remote says that it did not happen")

    # Verdicts.

    def _find_verdicts(self, case: Case, now_ms: int) -> dict[str, Checked]:
        """The verdict to store of each request: the first that holds, those of the inbox before those that were given."""
        found: dict[str, Checked] = {}
        for message in case.messages:
            if message.kind is MessageKind.VERDICT:
                try:
                    self._take(case, _checked(verdict_left(message), self._run_id), found, now_ms)
                except VerdictRefused as refused:
                    self._tell_refused(case, message, str(refused))
        for verdict in self.verdicts:
            self._take(case, verdict, found, now_ms)
        return found

    def _tell_refused(self, case: Case, message: Message, why: str) -> None:
        """Say that an answer which somebody posted does not hold, where its request is open still."""
        call = message.body.get("request")
        life = case.history.lives.get(call) if isinstance(call, str) else None
        if life is not None and life.state in WAITING:
            told = {"step": case.row.step, "call": call, "tool": read_pending(life.pending).tool, "why": why}
            emit(self._backing.sinks, "approval.refused", case.run_id, told, tenant=self._backing.tenant)

    def _take(self, case: Case, verdict: Verdict, found: dict[str, Checked], now_ms: int) -> None:
        life = case.history.lives.get(verdict.request)
        request = check_request(case, verdict, life)
        assert life is not None, "a request is a call's"
        first = found[verdict.request].verdict if verdict.request in found else None
        if first is not None and not first.is_same_answer(verdict):
            raise VerdictRefused(
                f"request {verdict.request!r} of run {case.run_id!r} was answered already: {first.decision.value}, by "
                f"{first.by}; the first answer stands"
            )
        principal = RunContext.from_plain(case.opened["context"]).principal
        is_new = check_verdict(verdict, request, life, now_ms=now_ms)
        if not is_new or first is not None:
            return
        tool = self._registry.find(request.tool)
        check_approver(verdict, request, life, tool, principal=principal)
        found[verdict.request] = check_room(check_sent(verdict, request, life, tool), self._backing.most_bytes)


def _needs_asking(tool: Tool, life: CallLife, args: Mapping[str, object]) -> bool:
    """Whether its tool needs a person's approval by now of a call that was started without one."""
    if tool.approval is None or life.pending:
        return False
    try:
        return tool.needs_approval(codec.encode_checked(dict(args)))
    except InvalidArguments:
        return True


class _Unsettled(NamedTuple):
    """Why nothing settles a call, and when that will have passed."""

    why: str
    until_ms: int | None = None


class _Settled(NamedTuple):
    """What came of one call in doubt."""

    record: Noted | None = None
    doubt: Doubt | None = None
    reruns: int = 0
    until_ms: int | None = None
    over: Sequence[int] = ()
    is_progress: bool = False


def _by(said: Said, *, is_progress: bool) -> _Settled:
    record = (int(RecordKind.SETTLED), said.call, said.attempt, settled_body(said))
    return _Settled(record, reruns=int(said.how is Settlement.RERUN), is_progress=is_progress)


def _probed(life: CallLife, how: Settlement, why: str, ending: bytes = b"") -> Said:
    return Said(life.call, life.attempts, how, "its probe", why, ending)


def check_request(case: Case, verdict: Verdict, life: CallLife | None) -> ApprovalRequest:
    """The request that a verdict is for; `VerdictRefused` where there is none that may be answered."""
    if life is None or not life.pending:
        open_ones = [each.call for each in case.history.waiting()] or "none"
        raise VerdictRefused(f"run {case.run_id!r} has no request {verdict.request!r}; open are {open_ones}")
    request = request_of(case.run_id, life, case.key(life.call))
    if life.state is CallState.DONE and not life.verdict:
        raise VerdictRefused(f"request {request.id!r} of run {case.run_id!r} is closed: it expired, or is not asked any more")
    return request


PASSED = "passed"
"""In a verdict's message: how many before it did not hold, as whoever left it was told."""


def verdict_message(verdict: Verdict, passed: Sequence[Message]) -> dict[str, object]:
    """The body of the message that leaves a verdict to a run."""
    return {**verdict.to_plain(), PASSED: len(passed)} if passed else verdict.to_plain()


def verdict_left(message: Message) -> Verdict:
    """The verdict that a message leaves; `VerdictRefused` where it is none."""
    return Verdict.from_plain(_without_passed(message))


def _without_passed(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.body.items() if name != PASSED}


def passed_over(case: Case, now_ms: int) -> Sequence[Message]:
    """The messages that a worker, which has the tools, has read, and took nothing of.

    What is posted to a parked run makes it due, and so it stays until somebody has read all of it; a verdict that is posted
    after that says so. The row says it in a part that is not sealed: no worker asks for this when it looks for the first
    answer that holds. It is for what people are told.
    """
    row = case.row
    is_parked = row.status in (RunStatus.PAUSED, RunStatus.BLOCKED) and row.owner == NO_OWNER
    if is_parked and (row.wake_at is None or row.wake_at > now_ms):
        return case.messages
    said = ((at, message.body.get(PASSED)) for at, message in enumerate(case.messages))
    return case.messages[: max((min(at, most) for at, most in said if type(most) is int), default=0)]


def check_not_passed(verdict: Verdict, passed: Sequence[Message]) -> None:
    """Refuse the very answer that a worker has passed over: to leave it once more would change nothing."""
    if any(message.kind is MessageKind.VERDICT and verdict.to_plain() == _without_passed(message) for message in passed):
        raise VerdictRefused(
            f"this very answer to request {verdict.request!r} of run {verdict.run_id!r} was left before, and did not hold "
            "where the tools are; answer otherwise"
        )


def find_late(case: Case, life: CallLife) -> Said | None:
    """The result that the call's own worker left when it had lost the run: for this very attempt, under its epoch."""
    opened = case.records[0].seal.hex()
    wanted = {"call": life.call, "attempt": life.attempts, "epoch": life.epoch, "opened": opened}
    for message in case.messages:
        body = message.body
        if message.kind is MessageKind.LATE and all(body.get(name) == value for name, value in wanted.items()):
            ending = read_ending_form(body.get("ending"))
            if ending is not None:
                why = "its result came after its worker had lost the run"
                return Said(life.call, life.attempts, Settlement.DONE, "its worker", why, ending)
    return None


def find_settlement(case: Case, life: CallLife, now_ms: int) -> Said | None:
    """The first settlement of this attempt that somebody posted, and that holds."""
    for message in case.messages:
        said = said_from_plain(message.body) if message.kind is MessageKind.SETTLE else None
        if said is None or (said.call, said.attempt) != (life.call, life.attempts):
            continue
        if said.how is not Settlement.NOT_DONE or drain_of(life, case.row, case.records, now_ms).is_over:
            return said
    return None


def _answer(case: Case, life: CallLife, verdicts: Mapping[str, Checked], now_ms: int) -> Sequence[Noted]:
    """The records that close an open request; none where it stays open."""
    checked = verdicts.get(life.call)
    expires_ms = read_pending(life.pending).expires_ms
    if checked is not None:
        record = (int(RecordKind.VERDICT), life.call, 0, verdict_body(checked, now_ms))
    elif expires_ms is not None and now_ms >= expires_ms:
        error = expiry(request_of(case.run_id, life, ""))
        record = (int(RecordKind.DONE), life.call, 0, codec.encode({"error": error}))
    else:
        return ()
    if life.state is not CallState.ASKING:
        return (record,)
    return ((int(RecordKind.UNSENT), life.call, life.attempts, NOT_AGREED), record)


def may_repeat(tool: Tool, life: CallLife, records: Sequence[StoredRecord], row: StoredRow, now_ms: int) -> bool:
    """Whether the tool's rule lets a call in doubt run again: not past the time for which the remote knows its key."""
    if not tool.may_repeat or life.unrecordable >= MOST_UNRECORDABLE:
        return False
    return tool.key_seconds is None or now_ms - _first_sent(life, records, row) < tool.key_seconds * 1000


def _first_sent(life: CallLife, records: Sequence[StoredRecord], row: StoredRow) -> int:
    """When the key may first have reached the remote: as its worker says, yet not later than the store knows of.

    That worker's last write is no earlier than what it had written down; a later claim says when it was.
    """
    first = next(each for each in records if each.call == life.call and each.kind == RecordKind.STARTED)
    later = (each for each in records if each.kind == RecordKind.CLAIMED and each.epoch > first.epoch)
    claimed = next(later, None)
    heard_ms = hint_ms(row) if claimed is None else int(codec.decode(claimed.body).get("heard", 0))
    sent_ms = read_asked(first.body).at_ms
    return min(sent_ms, heard_ms) if heard_ms else sent_ms


async def ask_probe(tool: Tool, key: str, args: dict[str, Any]) -> Outcome | str:
    """What the probe says, or why it says nothing. Whatever it raises settles nothing."""
    seconds = tool.timeout_seconds or PROBE_SECONDS
    asking = asyncio.ensure_future(_probe_under(tool, key, args))
    asking.add_done_callback(_look_at)
    try:
        await asyncio.wait({asking}, timeout=seconds)
    finally:
        asking.cancel()  # one that does not let itself be stopped is left behind
    if not asking.done():
        return f"its probe did not answer within {seconds:g} s"
    if asking.cancelled():
        return "its probe could not say: it was cancelled"
    if (error := asking.exception()) is not None:
        if not isinstance(error, Exception):
            raise error
        return f"its probe could not say: {type(error).__name__}: {error}"
    outcome = asking.result()
    if not isinstance(outcome, Outcome) or outcome.how not in (*OUTCOMES, None):
        return f"its probe gave no Outcome, but {outcome!r:.200}"
    return "its probe does not know either" if outcome.how is None else outcome


async def _probe_under(tool: Tool, key: str, args: dict[str, Any]) -> object:
    assert tool.probe is not None, "a tool with a probe is asked"
    CALL_KEY.set(key)  # in a task of its own, and so in a context of its own
    return await tool.probe(key, dict(args))


def _look_at(asking: asyncio.Future[object]) -> None:
    """What a probe raises settles nothing, also where nobody waits for it any more."""
    if not asking.cancelled():
        asking.exception()


def is_permitted(rerun: RerunInDoubt, run_id: RunId, life: CallLife) -> bool:
    """Whether somebody said that the latest attempt at this call may be made again."""
    if isinstance(rerun, bool):
        return rerun
    return any((doubt.run_id, doubt.call, doubt.attempt) == (run_id, life.call, life.attempts) for doubt in rerun)


def _listed(verdicts: object) -> Sequence[object]:
    if isinstance(verdicts, Sequence) and not isinstance(verdicts, str | bytes | Verdict):
        return verdicts
    raise VerdictRefused(f"verdicts= is a list of Verdicts, found {type(verdicts).__name__}; pass [request.approve(by='…')]")


def _checked(verdict: object, run_id: RunId) -> Verdict:
    checked = check_form(verdict)
    if checked.run_id != run_id:
        raise VerdictRefused(f"the verdict is for run {checked.run_id!r}, this is {run_id!r}")
    return checked


def _why(case: Case, life: CallLife, tool: Tool | None) -> str:
    if tool is None:
        return "it was started and has no ending, and no tool of its name is registered here"
    if life.state is CallState.UNRECORDABLE:
        return "it ran, and what it gave could not be stored"
    if tool.rule is RepeatRule.IDEMPOTENT and tool.key_seconds is not None:
        return f"it was started and has no ending; {FORGOTTEN}, after {tool.key_seconds:g} s"
    if any(record.epoch == life.epoch and record.kind == RecordKind.RELEASED for record in case.records):
        return "it was started and has no ending: its worker gave the run back without one"
    return "it was started and has no ending: its worker stopped before it could write one"


def make_doubt(
    run_id: str, call: str, key: str, tool: str, attempt: int, why: str, args: Mapping[str, object], age_ms: int
) -> Doubt:
    """A call in doubt, with what may be done about it."""
    return Doubt(run_id, call, key, tool, attempt, why, ("done", "not done", "rerun"), args, max(0.0, age_ms / 1000))
