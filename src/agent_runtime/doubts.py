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
    Decision,
    Verdict,
    check_approver,
    check_edit,
    check_form,
    check_verdict,
    expiry,
    read_pending,
    request_of,
    verdict_body,
)
from agent_runtime.clock import milliseconds
from agent_runtime.errors import Doubt, UnknownTool, Unrecordable, VerdictRefused
from agent_runtime.ids import RunId, build_key, is_reply
from agent_runtime.inbox import Cancel, Message, MessageKind, find_cancel, post_message
from agent_runtime.journal.records import RecordKind, StoredRecord, StoredRow
from agent_runtime.journal.replay import CallLife, History
from agent_runtime.journal.seal import Noted, sealer_for
from agent_runtime.journal.states import CallState, Settlement
from agent_runtime.run import Backing, RunContext, prefix_of
from agent_runtime.settlements import Outcome, Said, drain_of, read_asked, said_from_plain, settled_body
from agent_runtime.tools import CALL_KEY, RepeatRule, Tool, ToolRegistry

MOST_UNRECORDABLE = 2
"""After so many results of one call that could not be stored, it is not run again by its rule."""
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

    @property
    def has_news(self) -> bool:
        """Whether a run that waits for a person has reason to go on."""
        return bool(self.records) or self.cancel is not None or not self.waiting or self.can_ask


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
    ) -> None:
        self._backing = backing
        self._run_id = run_id
        self._registry = registry
        self._rerun = rerun
        self.verdicts = [_checked(verdict, run_id) for verdict in _listed(verdicts)]
        self._can_ask = can_ask
        self.refused: list[tuple[Message, str]] = []
        """Verdicts of the inbox that did not hold, and why."""

    async def __call__(self, case: Case) -> Decisions:
        """`VerdictRefused` where a verdict that was given does not hold; one of the inbox is passed over."""
        if (cancel := find_cancel(case.messages)) is not None:
            return Decisions(cancel=cancel)
        lives = [life for life in case.history.in_doubt() if not is_reply(life.call)]
        now_ms = milliseconds(await self._backing.store.now()) if lives or case.history.waiting() or self.verdicts else 0
        settled = await asyncio.gather(*(self._settle(case, life, now_ms) for life in lives))
        verdicts = self._find_verdicts(case, now_ms)
        answered = [record for life in case.history.waiting() for record in _answer(case, life, verdicts, now_ms)]
        untimed = [each for each in settled if each.doubt is not None and each.until_ms is None]
        times = [each.until_ms for each in settled if each.until_ms is not None]
        closed = {call for _, call, _, _ in answered}
        return Decisions(
            [*(each.record for each in settled if each.record is not None), *answered],
            [each.doubt for each in settled if each.doubt is not None],
            sum(each.reruns for each in settled),
            waiting=[life for life in case.history.waiting() if life.call not in closed],
            can_ask=self._can_ask,
            wake_at=min(times) if times and not untimed else None,
        )

    async def post(self, case: Case) -> None:
        """Leave the verdicts that were given to whoever works the run, each checked: `VerdictRefused`."""
        if not self.verdicts:
            return
        now_ms = milliseconds(await self._backing.store.now())
        sealer = sealer_for(self._backing.ring, tenant=self._backing.tenant, run_id=self._run_id)
        for verdict in self._find_verdicts(case, now_ms).values():
            await post_message(self._backing.store, sealer, MessageKind.VERDICT, verdict.to_plain())

    # Calls in doubt.

    async def _settle(self, case: Case, life: CallLife, now_ms: int) -> "_Settled":
        asked = read_asked(life.asked)
        tool = self._registry.find(asked.tool)
        said = find_late(case, life) or find_settlement(case, life, now_ms)
        if said is not None:
            return _by(said)
        if tool is not None and may_repeat(tool, life, case.records, case.row, now_ms):
            return _Settled(reruns=1)
        why, until_ms = _why(life, tool), None
        if tool is not None and tool.probe is not None:
            probed = await self._probe(case, tool, life, now_ms)
            if isinstance(probed, Said):
                return _by(probed)
            why, until_ms = probed
        if tool is not None and is_permitted(self._rerun, self._run_id, life.call):
            return _by(Said(life.call, life.attempts, Settlement.RERUN, "", "rerun_in_doubt"))
        age_ms = now_ms - asked.at_ms
        doubt = make_doubt(case.run_id, life.call, case.key(life.call), asked.tool, life.attempts, why, asked.args, age_ms)
        return _Settled(doubt=doubt, until_ms=until_ms)

    async def _probe(self, case: Case, tool: Tool, life: CallLife, now_ms: int) -> "Said | _Unsettled":
        """What the remote says of the call; why that does not settle it, and until when."""
        outcome = await ask_probe(tool, case.key(life.call), read_asked(life.asked).args)
        if isinstance(outcome, str):
            return _Unsettled(f"{_why(life, tool)}; {outcome}")
        if outcome.how is Settlement.NOT_DONE:
            drain = drain_of(life, case.row, case.records, now_ms)
            if not drain.is_over:
                return _Unsettled(f"its probe says that it did not happen, but {drain.why}", drain.until_ms)
            return Said(life.call, life.attempts, Settlement.NOT_DONE, "its probe", "the remote says that it did not happen")
        try:
            ending = b'{"result":' + tool.result.encode(outcome.result) + b"}"
        except Unrecordable as error:
            return _Unsettled(f"its probe says that it happened, and gave what cannot be recorded: {error}")
        return Said(life.call, life.attempts, Settlement.DONE, "its probe", "the remote says that it happened", ending)

    # Verdicts.

    def _find_verdicts(self, case: Case, now_ms: int) -> dict[str, Verdict]:
        """The verdict to store of each request: the first that holds, those of the inbox before those that were given."""
        found: dict[str, Verdict] = {}
        self.refused.clear()
        for message in case.messages:
            if message.kind is MessageKind.VERDICT:
                try:
                    self._take(case, _checked(Verdict.from_plain(message.body), self._run_id), found, now_ms)
                except (VerdictRefused, UnknownTool) as refused:
                    self.refused.append((message, str(refused)))
        for verdict in self.verdicts:
            self._take(case, verdict, found, now_ms)
        return found

    def _take(self, case: Case, verdict: Verdict, found: dict[str, Verdict], now_ms: int) -> None:
        life = case.history.lives.get(verdict.request)
        request = check_request(case, verdict, life)
        assert life is not None, "a request is a call's"
        first = found.get(verdict.request)
        if first is not None and not first.is_same_answer(verdict):
            raise VerdictRefused(
                f"request {verdict.request!r} of run {case.run_id!r} was answered already: {first.decision.value}, by "
                f"{first.by}; the first answer stands"
            )
        principal = RunContext.from_plain(case.opened["context"]).principal
        is_new = check_verdict(verdict, request, life, now_ms=now_ms, principal=principal)
        if not is_new or first is not None:
            return
        tool = self._registry.get(request.tool)
        check_approver(verdict, request, None if tool.approval is None else tool.approval.may_approve)
        if verdict.decision is Decision.EDIT:
            check_edit(verdict, tool)
        found[verdict.request] = verdict


class _Unsettled(NamedTuple):
    """Why a probe settled nothing, and when that will have passed."""

    why: str
    until_ms: int | None = None


class _Settled(NamedTuple):
    """What came of one call in doubt."""

    record: Noted | None = None
    doubt: Doubt | None = None
    reruns: int = 0
    until_ms: int | None = None


def _by(said: Said) -> _Settled:
    record = (int(RecordKind.SETTLED), said.call, said.attempt, settled_body(said))
    return _Settled(record, reruns=int(said.how is Settlement.RERUN))


def check_request(case: Case, verdict: Verdict, life: CallLife | None) -> ApprovalRequest:
    """The request that a verdict is for; `VerdictRefused` where there is none that may be answered."""
    if life is None or not life.pending:
        open_ones = [each.call for each in case.history.waiting()] or "none"
        raise VerdictRefused(f"run {case.run_id!r} has no request {verdict.request!r}; open are {open_ones}")
    request = request_of(case.run_id, life, case.key(life.call))
    if life.state is CallState.DONE and not life.verdict:
        raise VerdictRefused(f"request {request.id!r} of run {case.run_id!r} is closed: it expired, or is not asked any more")
    return request


def find_late(case: Case, life: CallLife) -> Said | None:
    """The result that the call's own worker left when it had lost the run: for this very attempt, under its epoch."""
    opened = case.records[0].seal.hex()
    wanted = {"call": life.call, "attempt": life.attempts, "epoch": life.epoch, "opened": opened}
    for message in case.messages:
        body = message.body
        if message.kind is MessageKind.LATE and all(body.get(name) == value for name, value in wanted.items()):
            ending = body.get("ending")
            if isinstance(ending, dict) and ending.keys() & {"result", "error"}:
                why = "its result came after its worker had lost the run"
                return Said(life.call, life.attempts, Settlement.DONE, "its worker", why, codec.encode(ending))
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


def _answer(case: Case, life: CallLife, verdicts: Mapping[str, Verdict], now_ms: int) -> Sequence[Noted]:
    """The records that close an open request; none where it stays open."""
    verdict = verdicts.get(life.call)
    expires_ms = read_pending(life.pending).expires_ms
    if verdict is not None:
        record = (int(RecordKind.VERDICT), life.call, 0, verdict_body(verdict, now_ms))
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
    if not tool.rule.may_repeat or life.unrecordable >= MOST_UNRECORDABLE:
        return False
    return tool.key_seconds is None or now_ms - _first_sent(life, records, row) < tool.key_seconds * 1000


def _first_sent(life: CallLife, records: Sequence[StoredRecord], row: StoredRow) -> int:
    """When the key may first have reached the remote: never later than the store's own last word of the run."""
    first = next(each for each in records if each.call == life.call and each.kind == RecordKind.STARTED)
    sent_ms = read_asked(first.body).at_ms
    return min(sent_ms, row.updated_at) if row.updated_at else sent_ms


async def ask_probe(tool: Tool, key: str, args: dict[str, Any]) -> Outcome | str:
    """What the probe says, or why it says nothing. Whatever it raises settles nothing."""
    assert tool.probe is not None, "a tool with a probe is asked"
    token = CALL_KEY.set(key)
    try:
        async with asyncio.timeout(tool.timeout_seconds or PROBE_SECONDS):
            outcome = await tool.probe(key, dict(args))
    except Exception as error:
        return f"its probe could not say: {type(error).__name__}: {error}"
    finally:
        CALL_KEY.reset(token)
    if not isinstance(outcome, Outcome):
        return f"its probe gave no Outcome, but {type(outcome).__name__}"
    return "its probe does not know either" if outcome.how is None else outcome


def is_permitted(rerun: RerunInDoubt, run_id: RunId, call: str) -> bool:
    """Whether somebody said that this call in doubt may run again."""
    if isinstance(rerun, bool):
        return rerun
    return any((doubt.run_id, doubt.call) == (run_id, call) for doubt in rerun)


def _listed(verdicts: object) -> Sequence[object]:
    if isinstance(verdicts, Sequence) and not isinstance(verdicts, str | bytes | Verdict):
        return verdicts
    raise VerdictRefused(f"verdicts= is a list of Verdicts, found {type(verdicts).__name__}; pass [request.approve(by='…')]")


def _checked(verdict: object, run_id: RunId) -> Verdict:
    checked = check_form(verdict)
    if checked.run_id != run_id:
        raise VerdictRefused(f"the verdict is for run {checked.run_id!r}, this is {run_id!r}")
    return checked


def _why(life: CallLife, tool: Tool | None) -> str:
    if tool is None:
        return "it was started and has no ending, and no tool of its name is registered here"
    if life.state is CallState.UNRECORDABLE:
        return "it ran, and what it gave could not be stored"
    if tool.rule is RepeatRule.IDEMPOTENT and tool.key_seconds is not None:
        known = f"{tool.key_seconds:g} s"
        return f"it was started and has no ending, and the remote knows its key for {known} only: it may have forgotten it"
    return "it was started and has no ending: its worker stopped before it could write one"


def make_doubt(
    run_id: str, call: str, key: str, tool: str, attempt: int, why: str, args: Mapping[str, object], age_ms: int
) -> Doubt:
    """A call in doubt, with what may be done about it."""
    return Doubt(run_id, call, key, tool, attempt, why, ("done", "not done", "rerun"), args, max(0.0, age_ms / 1000))
