"""The world of one cell: a run, the workers it has one after another, the remote and the model that outlive them.

Rules are checked where they could be broken: what is durable is read, past the worker and its store, at the very moment
at which the worker acts, asks or answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.backing import make_backing
from agent_runtime.errors import CheckpointNotFound, RecoveryNeedsDecision
from agent_runtime.ids import RunId, is_reply, key_prefix, seq_of
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus, StoredRecord
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.journal.states import Settlement
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import LIVE_OWNERS
from agent_runtime.messages import Message, Reply, ToolSpec
from agent_runtime.offload import SYSTEM_OFFLOAD, Job, Serial
from agent_runtime.recovery import Found, find
from agent_runtime.settlements import Outcome, read_settled
from agent_runtime.testing.crash_sweep.people import Answers, Person, strays
from agent_runtime.testing.crash_sweep.programs import KEY, Result, Terms, program_of
from agent_runtime.testing.crash_sweep.rules import (
    Broken,
    Rule,
    check_epochs,
    check_growth,
    check_told,
    has_ended,
    open_requests,
    permissions,
    recorded_reply,
    starts,
)
from agent_runtime.testing.crash_sweep.scenario import AnyScenario
from agent_runtime.testing.faults import FaultyStore, Life, SimulatedCrash, Where
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.script_model import check_request
from agent_runtime.timeline import read_timeline
from agent_runtime.tool_loop import LoopResult
from agent_runtime.tools import RepeatRule, Tool, ToolRegistry, idempotency_key

T = TypeVar("T")


OpenStore: TypeAlias = Callable[[CheckpointStore, Life], CheckpointStore]
"""How a worker gets to the store, through connections that end with its life."""


def open_faulty(store: CheckpointStore, life: Life) -> CheckpointStore:
    """The usual way: a worker that is to die at a write dies just before it is given to the store, or just after."""
    return FaultyStore(store.reopen(), life=life)


class Died:
    """The worker died where it was told to."""


@dataclass(frozen=True, slots=True)
class Done:
    """The worker brought the run to its end."""

    result: Result


@dataclass(frozen=True, slots=True)
class Paused:
    """The worker left the run to whoever must answer."""

    pending: Sequence[ApprovalRequest]


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The worker stopped, and named what must be decided."""

    calls: frozenset[str]


Ended: TypeAlias = "Died | Done | Paused | InDoubt"
"""How a worker ended."""


class World:
    """One run, and all that happens to it."""

    def __init__(
        self,
        scenario: AnyScenario,
        registry: ToolRegistry,
        store: CheckpointStore,
        run_id: str,
        commits: str,
        *,
        open_store: OpenStore,
    ) -> None:
        self.scenario = scenario
        self.program = program_of(scenario)
        self.registry = registry
        self.store = store
        self.run_id = RunId(run_id)
        self.commits = commits
        self.remote = Remote()
        self.model = self.program.make_model()
        self.lives: list[Life] = []
        self.broken: list[Broken] = []
        self.decisions = 0
        self.person = Person(scenario.person)
        self._given: Sequence[Verdict] = ()
        self._posted: set[str] = set()
        self._gave: dict[tuple[str, int], str] = {}
        """What the remote gave to each attempt at a call."""
        self._frozen: dict[int, bytes] = {}
        """The epochs whose workers stand still, with their owners."""
        self.backing = make_backing(store, KeyRing.of(KEY), commits=commits, offload=_NoHeartbeat())
        self._prefix = key_prefix(self.run_id)
        self._found: Found | None = None
        self._seen: Sequence[StoredRecord] = ()
        self._open_store = open_store
        self._stores: list[CheckpointStore] = []

    # Workers.

    async def send_worker(self, life: Life, *, rerun: bool) -> Ended:
        """Let a worker start or recover the run, and check what it leaves behind."""
        self.lives.append(life)
        before = self._found
        doubts = frozenset() if rerun or before is None else self.doubts(before)
        done_before = (self.model.calls, len(self.remote.requests))
        try:
            result = await self._work(life, rerun=rerun, is_new=before is None)
            ended: Ended = Paused(result.pending) if result.status == "paused" else Done(result)
        except SimulatedCrash:
            ended = Died()
            await self._stores[-1].close()
        except RecoveryNeedsDecision as error:
            ended = InDoubt(frozenset(doubt.call for doubt in error.doubts))
        after = self._found = await self.look()
        if doubts and done_before != (self.model.calls, len(self.remote.requests)):
            self.fail(Rule.NAMED_DOUBTS, f"{sorted(doubts)} were in doubt, and something was asked for before a decision")
        match ended:
            case Done(result):
                self._given = ()
                self._check_done(result, after, doubts)
            case InDoubt(calls):
                self._check_in_doubt(calls, after, doubts)
            case Paused(pending):
                self._check_paused(pending, after, doubts)
                await self._answer(pending)
            case Died():
                await self._bury(after)
        return ended

    async def _answer(self, pending: Sequence[ApprovalRequest]) -> None:
        """A person looks at what is open."""
        if self.scenario.answers is not Answers.INBOX:
            self._given = [self.person.answer(request) for request in reversed(pending)]
            return
        request = pending[-1]
        self._posted.add(request.id)
        for verdict in (*strays(request), self.person.answer(request)):
            await self._post(MessageKind.VERDICT, verdict.to_plain())

    async def _bury(self, found: Found | None) -> None:
        """What is left of a worker that died: its lease where it only stands still, and what its acts gave, too late."""
        if found is None or found.status.is_final:
            self._given = ()
            return
        row = found.stored.row
        if self.scenario.are_frozen and row.owner != NO_OWNER:
            LIVE_OWNERS.add(row.owner)
            self._frozen[row.epoch] = row.owner
        if self.scenario.leave_late:
            opened = found.stored.records[0].seal.hex()
            for life in found.history.in_doubt():
                place = {"call": life.call, "attempt": life.attempts, "epoch": life.epoch, "opened": opened}
                for wrong in ({"attempt": life.attempts + 1}, {"epoch": life.epoch + 1}, {"opened": "00"}):
                    await self._post(MessageKind.LATE, {**place, **wrong, "ending": {"result": "of another attempt"}})
                gave = self._gave.get((life.call, life.attempts))
                if gave is not None:
                    await self._post(MessageKind.LATE, {**place, "ending": {"result": gave}})

    async def _post(self, kind: MessageKind, body: dict[str, object]) -> None:
        await post_message(self.store, sealer_for(KeyRing.of(KEY), tenant="", run_id=self.run_id), kind, body)

    async def _work(self, life: Life, *, rerun: bool, is_new: bool) -> Result:
        worker = _Worker(self, life, claims=_claims(self._seen))
        store = self._open_store(self.store, life)
        self._stores.append(store)
        _WORKER.set(worker)
        is_port = self.scenario.answers is Answers.PORT
        terms = Terms(
            self.run_id, store, self.commits, _NoHeartbeat(), take_over=bool(self._frozen), verdicts=self._given,
            approvals=worker.answer if is_port else None,
        )  # fmt: skip
        return await self.program.work(worker.ask, self.registry, terms, is_new=is_new, rerun=rerun)

    async def close(self) -> None:
        """Let go of what the workers held, as the system does once their processes are gone."""
        LIVE_OWNERS.difference_update(self._frozen.values())
        for store in self._stores:
            await store.close()

    # Looking.

    def fail(self, rule: Rule, found: str) -> None:
        """Write down that a rule was broken."""
        self.broken.append(Broken(rule, found))

    async def look(self) -> Found | None:
        """The run as it is stored now, verified, and held against what was seen of it before."""
        try:
            found = await find(self.backing, self.run_id, kind=self.program.kind, context=None)
        except CheckpointNotFound:
            if self._seen or self.remote.requests or self.model.calls:
                self.fail(Rule.GROWS, "nothing is stored, though something was, or was done")
            return None
        except Exception as error:  # whatever keeps a run from being read is a finding, and the sweep goes on
            self.fail(Rule.VERIFIES, f"{type(error).__name__}: {error}")
            raise
        records = found.stored.records
        self.broken += check_growth(self._seen, records)
        self.broken += check_epochs(records)
        self.broken += self.program.check_history(found.history)
        self._check_settled(records)
        self._seen = records
        return found

    async def find(self) -> None:
        """Take over the run as it is stored: what was written by others than this world's workers."""
        self._found = await self.look()

    async def durable(self) -> Sequence[StoredRecord]:
        """The records that a power cut would leave now."""
        return await self.store.calls(self.run_id)

    def doubts(self, found: Found) -> frozenset[str]:
        """The calls of which nobody could know whether they happened."""
        rules = self.rules()
        in_doubt = [life for life in found.history.in_doubt() if not is_reply(life.call)]
        return frozenset(life.call for life in in_doubt if not self._is_known(life, rules[life.call]))

    def _is_known(self, life: CallLife, rule: RepeatRule) -> bool:
        """Whether somebody who may be asked, or the tool's rule, says how to go on with a call in doubt."""
        if rule in (RepeatRule.IDEMPOTENT, RepeatRule.PURE):
            return True
        if self.scenario.leave_late and (life.call, life.attempts) in self._gave:
            return True
        if rule is RepeatRule.NONE:
            return False
        has_happened = self.remote.result(f"{self._prefix}{life.call}") is not None
        return has_happened or self._is_drained(life.epoch, self._tool(life.call, self._seen))

    def _is_drained(self, epoch: int, tool: Tool) -> bool:
        """Whether an attempt under that epoch can no longer take effect; what still settles does so beyond any cell."""
        return epoch not in self._frozen and not tool.settles_seconds

    def _tool(self, call: str, records: Sequence[StoredRecord]) -> Tool:
        started = next(each for each in records if (each.call, each.kind) == (call, RecordKind.STARTED))
        return self.registry.get(self.program.tool_of(records, started))

    def rules(self) -> dict[str, RepeatRule]:
        """The repeat rule of every tool call that the journal knows."""
        rules = {}
        for record in self._seen:
            if record.kind == RecordKind.STARTED and not record.call.endswith("/model"):
                rules[record.call] = self._tool(record.call, self._seen).rule
        return rules

    def gave(self, call: str, attempt: int, result: str) -> None:
        """The remote gave this to an attempt at a call."""
        self._gave[call, attempt] = result

    def check_agreed(self, records: Sequence[StoredRecord], call: str, key: str, args: Mapping[str, object]) -> None:
        """Whether a call that is about to act may: whoever had to agree did, and the remote does not know it as done."""
        if not any((each.call, each.kind) == (call, RecordKind.STARTED) for each in records):
            return
        tool = self._tool(call, records)
        self.broken += self.person.check_agreed(records, call, tool, args)
        if tool.rule is RepeatRule.PROBE and self.remote.result(key) is not None:
            self.fail(Rule.PROBED_FIRST, f"call {call} was done, and is made again")

    def place(self, key: str) -> str:
        """The place of the call that has the key."""
        return key.removeprefix(self._prefix)

    # Judging how a worker ended.

    def _check_done(self, result: Result, after: Found | None, doubts: frozenset[str]) -> None:
        if doubts:
            self.fail(Rule.NAMED_DOUBTS, f"{sorted(doubts)} were in doubt, and the run went on without a decision")
        row = None if after is None else after.stored.row
        if row is None or row.status not in (RunStatus.DONE, RunStatus.FAILED) or row.owner != NO_OWNER:
            self.fail(Rule.END_FIRST, f"the result was given out, and the run's row says {row and RunStatus(row.status).name}")
        if isinstance(result, LoopResult) and result.llm_calls < self.model.calls:
            self.fail(Rule.SPEND, f"{self.model.calls} requests were made, and {result.llm_calls} are recorded")

    def _check_paused(self, pending: Sequence[ApprovalRequest], after: Found | None, doubts: frozenset[str]) -> None:
        named, waiting = {request.id for request in pending}, open_requests(self._seen)
        answered = {verdict.request for verdict in self._given} | self._posted
        if named != waiting or not named or named & answered:
            self.fail(Rule.NAMED_REQUESTS, f"open are {sorted(waiting)}, named {sorted(named)}, answered {sorted(answered)}")
        if doubts or after is None or after.status is not RunStatus.PAUSED or after.stored.row.owner != NO_OWNER:
            self.fail(Rule.NAMED_REQUESTS, f"the run is not left paused and free: {after and after.status.name}, {doubts}")

    def _check_settled(self, records: Sequence[StoredRecord]) -> None:
        """Every settlement against what this world knows of the attempt."""
        for record in records:
            if record.kind != RecordKind.SETTLED:
                continue
            settled, by = read_settled(record.body), codec.decode(record.body)["by"]
            started = [each for each in records if (each.call, each.kind) == (record.call, RecordKind.STARTED)]
            epoch = next(each.epoch for each in started if each.attempt == record.attempt)
            if settled.how is Settlement.NOT_DONE and not self._is_drained(epoch, self._tool(record.call, records)):
                self.fail(Rule.DRAINED, f"call {record.call}, attempt {record.attempt} of epoch {epoch}, may still happen")
            if settled.how is Settlement.DONE:
                known = self._gave.get((record.call, record.attempt))
                if by == "its probe":
                    known = self.remote.result(f"{self._prefix}{record.call}")
                if codec.decode(settled.ending) != {"result": known}:
                    self.fail(Rule.OWN_RESULT, f"call {record.call} was settled with {settled.ending!r}, it gave {known!r}")

    def _check_in_doubt(self, calls: frozenset[str], after: Found | None, doubts: frozenset[str]) -> None:
        self.decisions += 1
        if calls != doubts:
            self.fail(Rule.NAMED_DOUBTS, f"named were {sorted(calls)}, in doubt {sorted(doubts)}")
        if after is None or after.status is not RunStatus.BLOCKED or after.stored.row.owner != NO_OWNER:
            self.fail(Rule.NAMED_DOUBTS, f"the run is not left blocked and free: {after and after.status.name}")

    def check_effects(self, expected: Mapping[str, int]) -> None:
        """Hold what happened at the remote against what happens there without faults, by the place of the call."""
        rules, happened = self.rules(), self.effects()
        for call in {*expected, *happened}:
            times, once = happened[call], expected.get(call, 0)
            if rules.get(call) not in (RepeatRule.NONE, RepeatRule.PROBE):
                if times != once:
                    self.fail(Rule.ONE_EFFECT, f"call {call} had {times} effects, expected {once}")
            elif not once <= times <= once * (1 + permissions(self._seen, call)):
                self.fail(Rule.AS_PERMITTED, f"call {call} had {times} effects, {permissions(self._seen, call)} permissions")
        for key in {effect.key for effect in self.remote.effects}:
            if len({effect.args for effect in self.remote.requests if effect.key == key}) > 1:
                self.fail(Rule.ONE_EFFECT, f"key {key} was used with more than one set of arguments")

    def check_told(self, *, is_whole: bool) -> None:
        """Hold what every face shows of the run against what was counted here."""
        requests = Counter(self.place(request.key) for request in self.remote.requests)
        lost = sum(life.is_over for life in self.lives)
        self.broken += check_told(read_timeline(self._seen), requests, self.model.calls, lost=lost, is_whole=is_whole)

    def effects(self) -> Counter[str]:
        """How often each call happened, by its place: counted at the remote."""
        return Counter(self.place(effect.key) for effect in self.remote.effects)

    def state(self, result: Result) -> str:
        """What a run came to, as text in which nothing tells how often something was asked for, nor in which run."""
        return self.program.state(result).replace(self.run_id, "RUN")


class _Worker:
    """What one worker can reach: the remote and the model, until it is dead. Watches that it only does what it may."""

    def __init__(self, world: World, life: Life, *, claims: int) -> None:
        self._world = world
        self._life = life
        self._claims_before = claims
        self._made: Counter[tuple[str, str]] = Counter()

    async def act(self, tool: str, args: Mapping[str, object], *, idempotent: bool = False) -> str:
        call, attempt = await self._check_call(tool, args)
        receipt = await self._world.remote.act(tool, args, idempotent=idempotent)
        self._world.gave(call, attempt, receipt.result)
        self._life.reach(Where.AFTER_ACT)
        return receipt.result

    async def read(self, tool: str, args: Mapping[str, object]) -> str:
        call, attempt = await self._check_call(tool, args)
        result = await self._world.remote.read(tool, args)
        self._world.gave(call, attempt, result)
        self._life.reach(Where.AFTER_ACT)
        return result

    async def probe(self, key: str) -> Outcome:
        self._life.check()
        result = self._world.remote.result(key)
        self._life.reach(Where.AFTER_ANSWER)
        return Outcome.not_done() if result is None else Outcome.done(result)

    async def answer(self, request: ApprovalRequest) -> Verdict:
        """The port: a person who is asked while the worker waits."""
        self._life.check()
        records = await self._world.durable()
        self._world.broken += self._world.person.check_asked(request.id, records, self._claims_before + 1)
        verdict = self._world.person.answer(request)
        self._life.reach(Where.AFTER_ANSWER)
        return verdict

    async def ask(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        """The model."""
        self._life.check()
        records = await self._world.durable()
        call = self._world.place(idempotency_key())
        self._check_intent(records, call, "model", Rule.SPEND)
        if has_ended(records, call):
            self._world.fail(Rule.DECIDED_ONCE, f"{call} is recorded, and was asked for again")
        self._check_request(records, seq_of(call), messages)
        reply = await self._world.model.reply(messages, tools)
        self._life.reach(Where.AFTER_ANSWER)
        return reply

    async def _check_call(self, tool: str, args: Mapping[str, object]) -> tuple[str, int]:
        """What must be true when a call is made: its place, and the number of the attempt."""
        self._life.check()
        records = await self._world.durable()
        key = idempotency_key()
        call = self._world.place(key)
        self._check_intent(records, call, tool, Rule.INTENT_FIRST)
        if has_ended(records, call):
            self._world.fail(Rule.ENDED_ONCE, f"call {call} has ended, and was made again")
        self._world.broken += self._world.program.check_call(records, call)
        self._world.check_agreed(records, call, key, args)
        return call, sum((each.call, each.kind) == (call, RecordKind.STARTED) for each in records)

    def _check_intent(self, records: Sequence[StoredRecord], call: str, tool: str, rule: Rule) -> None:
        made = self._made[call, tool] = self._made[call, tool] + 1
        epoch = _claims(records)
        if epoch != self._claims_before + 1:
            self._world.fail(Rule.CLAIM_FIRST, f"{call} was made under claim {self._claims_before + 1}, durable are {epoch}")
        if starts(records, call, self._claims_before + 1) < made:
            self._world.fail(rule, f"{call} was made {made} times by this worker, more than was written down")

    def _check_request(self, records: Sequence[StoredRecord], seq: int, messages: Sequence[Message]) -> None:
        try:
            check_request(messages)
        except AssertionError as error:
            self._world.fail(Rule.VALID_REQUEST, str(error))
        for earlier in range(seq):
            reply = recorded_reply(records, earlier)
            count = 0 if reply is None else len(reply.tool_calls)
            places = [f"{earlier}" if count == 1 else f"{earlier}.{at}" for at in range(count)]
            if reply is None or not all(has_ended(records, place) for place in places):
                self._world.fail(Rule.RESULT_FIRST, f"{seq} was decided before the results of {earlier} were durable")


_WORKER: ContextVar[_Worker] = ContextVar("agent_runtime_swept_worker")
"""Whose tools are called: a task that outlives its worker still is that worker's."""


class CurrentWorker:
    """The client of the worker that calls: so one registry serves all workers of a sweep."""

    async def act(self, tool: str, args: Mapping[str, object], *, idempotent: bool = False) -> str:
        return await _WORKER.get().act(tool, args, idempotent=idempotent)

    async def read(self, tool: str, args: Mapping[str, object]) -> str:
        return await _WORKER.get().read(tool, args)

    async def probe(self, key: str) -> Outcome:
        return await _WORKER.get().probe(key)


class _NoHeartbeat:
    """The system's threads, but none for a heartbeat: a cell is over long before a lease."""

    def start(self, work: Callable[[], T]) -> Job[T]:
        return SYSTEM_OFFLOAD.start(work)

    def serial(self, name: str) -> Serial:
        return SYSTEM_OFFLOAD.serial(name)

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        return None


def _claims(records: Sequence[StoredRecord]) -> int:
    return sum(record.kind == RecordKind.CLAIMED for record in records)
