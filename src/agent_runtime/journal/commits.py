"""Group commit: the appends of many runs in one durable write, and the settling of a write whose fate is unknown.

Rules of this file:

* Each run has one appender (a `Member`), and one append in flight. While a batch is in flight the next one collects, over
  all runs of the event loop; then one transaction carries them all. No timer, no added latency. A store may take more
  than one batch at a time (`lanes`): then runs work on while others wait, and the store has always something to do.
* The append of a member is taken at the last moment, so that all that its tasks noted in the same turn of the loop is in.
* An error at commit is not a rollback. `UNKNOWN` is settled by reading the row: my head is there, it landed; the row is as
  my guard says, it did not, and the *identical* append is sent again; the row is another's, I am fenced, even if my
  records are there. `MOVED` in answer to a second send is not believed: the first may have landed late.
* Settling runs on a task of its own: a cancelled caller cannot stop it, and other runs do not wait for it.
* A definite failure of a batch is tried again run by run, so that one bad run hurts no other: while the trust in the lease
  lasts that the member had then, so that a store that is away for a while ends no run. A run that was never written has
  nothing to lose, and says after a few tries that it cannot be begun. What the store refuses is not tried again.
* Past the moment until which a member may trust itself, nothing is sent again and nothing of it may act.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum, auto
from typing import Protocol, TypeAlias, cast

from agent_runtime.clock import Clock
from agent_runtime.errors import Fenced, StoreRefused, StoreUnavailable
from agent_runtime.journal.records import StoredRow
from agent_runtime.journal.store import Answer, AnswerKind, Append, AtOnce, CheckpointStore

_log = logging.getLogger("agent_runtime")

MAX_BATCH = 256
WORTH_SHARING = 16
"""From so many appends on a batch is shared out among the lanes that are free."""
MOST_IN_A_ROW = 8
DEFINITE_TRIES = 4
"""How often a run that was never written is tried to be opened."""
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0


Watcher: TypeAlias = Callable[[float, int], None]
"""Called on the event loop with how long a write of a batch took, in seconds, and how many appends it carried."""


class Member(Protocol):
    """One run's appender."""

    trusted_until: float
    """Until when, on the monotonic clock, the member may believe that the run is its own."""

    def take(self) -> Append:
        """Everything noted so far, as one append; until it has landed the member is not asked again."""

    def landed(self, answer: Answer, sent_at: float) -> None:
        """The append came to a definite answer; it was first sent at `sent_at` on the monotonic clock."""

    def failed(self, error: BaseException) -> None:
        """The append was not written, or its fate can no longer be waited for."""

    def may_settle(self, now: float) -> bool:
        """Whether the member's trust in its lease still allows waiting for an answer."""


class GroupCommit:
    """The commits of all runs that one event loop works on one store."""

    def __init__(self, store: CheckpointStore, clock: Clock) -> None:
        self._store = weakref.ref(store)  # its own group commit must not keep a store that nobody uses any more
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._goes_at_once = goes_at_once(store)
        self._lanes: int = getattr(store, "lanes", 1)
        self._waiting: list[Member] = []
        self._is_due = False
        self._in_a_row = 0
        self.runs = 0
        """How many runs are open here: each one says so when it comes and when it goes."""
        self._carriers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.watchers = _WATCHERS.get(store, ())
        """Who is told of each durable write."""

    def enroll(self, member: Member) -> None:
        """Take the member's append with the next batch: at the end of this turn of the loop, or after the one in flight."""
        self._waiting.append(member)
        if self._carriers < self._lanes and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def carry_now(self, member: Member) -> bool:
        """Carry the append of the only run there is, within this very call; false where it has to wait its turn.

        After a few in a row it has to, so that the loop gets to its other work.
        """
        if self.runs != 1 or self._waiting or self._carriers or not self._goes_at_once:
            return False
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            return False
        return self._go_at_once(member)

    def _flush(self) -> None:
        """The end of the turn: a lone append goes at once if the store can, everything else with a carrier or several."""
        self._is_due = False
        self._in_a_row = 0
        waiting = len(self._waiting)
        if waiting == 1 and self._goes_at_once:
            [member], self._waiting = self._waiting, []
            self._go_at_once(member)
            return
        free = self._lanes - self._carriers
        lanes = min(free, max(1, waiting // WORTH_SHARING))
        share = -(-waiting // lanes)
        for _ in range(lanes):
            self._carriers += 1
            self._spawn(self._carry(share))

    def _go_at_once(self, member: Member) -> bool:
        """Whether the append has its definite answer already; where not, a task sees to it."""
        sent_at = self._clock.monotonic()
        members, appends = _take_all([member])
        if not members:
            return True
        [append] = appends
        try:
            answer = cast(AtOnce, self._used_store()).commit_at_once(append)
            if answer is not None:
                _check_answer(answer)
        except (StoreUnavailable, StoreRefused) as error:
            self._spawn(self._send_one(member, append, error, 1))
            return False
        except Exception:  # as in `_send`: unknown
            answer = Answer(AnswerKind.UNKNOWN)
        except BaseException as signal:
            member.failed(signal)
            raise
        if answer is None:
            self._spawn(self._send([member], [append]))
            return False
        if answer.kind is AnswerKind.UNKNOWN:
            self._spawn(self._settle(member, append, sent_at))
            return False
        if self.watchers:
            self._tell_watchers(sent_at, 1)
        member.landed(answer, sent_at)
        return True

    async def _carry(self, share: int) -> None:
        """Send what waits, batch after batch, until nothing does; the first one at most `share` appends."""
        most = min(share, MAX_BATCH)
        try:
            while self._waiting:
                members, self._waiting = self._waiting[:most], self._waiting[most:]
                most = MAX_BATCH
                await self._send(*_take_all(members))
        finally:
            self._carriers -= 1
            if self._waiting and not self._carriers and not self._loop.is_closed():
                left, self._waiting = self._waiting, []
                for member in left:
                    member.failed(StoreUnavailable("the event loop is ending; nothing more is written"))

    async def _send(self, members: Sequence[Member], appends: Sequence[Append]) -> None:
        sent_at = self._clock.monotonic()
        try:
            answers = await self._commit(appends)
        except (StoreUnavailable, StoreRefused) as error:
            tries = 1 if len(members) == 1 else 0
            for member, append in zip(members, appends, strict=True):  # each by itself: none waits for another
                self._spawn(self._send_one(member, append, error, tries))
            return
        except Exception:  # a store that breaks its promise says nothing about what it wrote: unknown
            answers = [Answer(AnswerKind.UNKNOWN)] * len(members)
        except BaseException as signal:
            for member in members:
                member.failed(signal)
            raise
        if self.watchers and members:
            self._tell_watchers(sent_at, len(members))
        if not _hand_out(members, answers, sent_at):
            unknown = [i for i, answer in enumerate(answers) if answer.kind is AnswerKind.UNKNOWN]
            for i in unknown:
                self._spawn(self._settle(members[i], appends[i], sent_at))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, appends: Sequence[Append]) -> list[Answer]:
        """The store's answers, one for each append; a store that gives anything else breaks its promise."""
        answers = await self._used_store().commit(appends)
        if len(answers) != len(appends):
            raise ValueError(f"the store gave {len(answers)} answers to {len(appends)} appends")
        checked: Answer | None = None
        for answer in answers:
            if answer is not checked:  # a store may well give one and the same for all
                _check_answer(answer)
                checked = answer
        return answers

    async def _send_one(self, member: Member, append: Append, error: Exception, tries: int) -> None:
        """Send one append until it has an answer, or it has failed for certain for too long; a refusal of its own is final."""
        pause = FIRST_PAUSE_SECONDS
        trusted_until = member.trusted_until  # as it is now: a heart that beats would let a hopeless write wait for ever
        while not (tries and isinstance(error, StoreRefused)):
            if tries:
                if not self._is_worth_another(append, tries, pause, trusted_until):
                    break
                await self._pause(member, pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            tries += 1
            sent_at = self._clock.monotonic()
            try:
                [answer] = await self._commit([append])
            except (StoreUnavailable, StoreRefused) as again:
                error = again
                continue
            except Exception:  # as in `_send`: unknown
                answer = Answer(AnswerKind.UNKNOWN)
            except BaseException as signal:
                member.failed(signal)
                raise
            if self.watchers:
                self._tell_watchers(sent_at, 1)
            if answer.kind is AnswerKind.UNKNOWN:
                await self._settle(member, append, sent_at)
            else:
                member.landed(answer, sent_at)
            return
        member.failed(error)

    def _is_worth_another(self, append: Append, tries: int, pause: float, trusted_until: float) -> bool:
        """Whether to try again after that pause what has failed so often."""
        if append.guard is None:
            return tries < DEFINITE_TRIES
        return self._clock.monotonic() + pause < trusted_until

    async def _settle(self, member: Member, append: Append, sent_at: float) -> None:
        """Find out what became of an append whose answer was lost, and send it again where it did not land."""
        pause = 0.0
        trouble: Exception | None = None
        while member.may_settle(self._clock.monotonic()):
            if pause:
                await self._pause(member, pause)
            pause = min(max(2 * pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
            try:
                answer = await self._look_and_send(append)
            except Exception as error:  # the store is still away, or breaks its promise again: look once more
                trouble = error
                continue
            except BaseException as signal:
                member.failed(signal)
                raise
            if answer.kind is not AnswerKind.UNKNOWN:
                member.landed(answer, sent_at)
                return
        member.failed(_gave_up(append, trouble))

    async def _look_and_send(self, append: Append) -> Answer:
        store = self._used_store()
        stored = await store.latest(append.row.run_id)
        match judge(None if stored is None else stored.row, append):
            case Landing.LANDED:
                return Answer(AnswerKind.OK, stored.row.posted if stored is not None else 0)
            case Landing.ANOTHERS:
                return Answer(AnswerKind.FENCED)
            case Landing.FORKED:
                return Answer(AnswerKind.MOVED)
            case Landing.ABSENT:
                [answer] = await self._commit([append])
                late = answer.kind is AnswerKind.MOVED
                return Answer(AnswerKind.UNKNOWN) if late else answer

    def _tell_watchers(self, sent_at: float, size: int) -> None:
        seconds = self._clock.monotonic() - sent_at
        for watcher in self.watchers:
            try:
                watcher(seconds, size)
            except Exception:  # whoever only looks on stops no write
                _log.exception("%r failed on a commit, and is told of no more", watcher)
                self.watchers = tuple(each for each in self.watchers if each is not watcher)

    def _used_store(self) -> CheckpointStore:
        store = self._store()
        assert store is not None, "the runs that wait for a commit hold their store"
        return store

    async def _pause(self, member: Member, seconds: float) -> None:
        try:
            await self._clock.sleep(seconds)
        except BaseException as signal:
            member.failed(signal)
            raise


def goes_at_once(store: CheckpointStore) -> bool:
    """Whether the store may carry a lone append without waiting. A subclass that changes `commit` alone is asked by it."""
    kinds = type(store).__mro__
    depths = [next((depth for depth, kind in enumerate(kinds) if verb in vars(kind)), None) for verb in _VERBS]
    at_once, commit = depths
    return at_once is not None and commit is not None and at_once <= commit


_VERBS = ("commit_at_once", "commit")


def _take_all(members: Sequence[Member]) -> tuple[list[Member], list[Append]]:
    """What each has noted. One whose append cannot be made fails by itself: nobody may wait for it for ever."""
    taken: list[Member] = []
    appends: list[Append] = []
    for member in members:
        try:
            appends.append(member.take())
        except (Exception, Fenced) as error:  # a value that no row or seal can hold, or this is a copy of the process
            member.failed(error)
        else:
            taken.append(member)
    return taken, appends


class Landing(Enum):
    """What a row says about an append whose answer was lost."""

    LANDED = auto()
    ABSENT = auto()
    ANOTHERS = auto()
    FORKED = auto()


def judge(row: StoredRow | None, append: Append) -> Landing:
    """Compare the row that is stored with what the append would write and with what it asked for. Pure."""
    wished, guard = append.row, append.guard
    if row is None:
        return Landing.ABSENT if guard is None else Landing.ANOTHERS
    if (row.epoch, row.number, row.head) == (wished.epoch, wished.number, wished.head):
        return Landing.LANDED
    if guard is None:
        return Landing.ANOTHERS
    if (row.epoch, row.owner, row.number, row.head) == (guard.epoch, guard.owner, guard.number, guard.head):
        same_beat = guard.heartbeat_at is None or guard.heartbeat_at == row.heartbeat_at
        return Landing.ABSENT if same_beat else Landing.ANOTHERS
    mine = (row.epoch, row.owner) == (wished.epoch, wished.owner)
    return Landing.FORKED if mine else Landing.ANOTHERS


def _gave_up(append: Append, trouble: Exception | None) -> StoreUnavailable:
    last = "" if trouble is None else f" It last said {type(trouble).__name__}: {trouble}."
    error = StoreUnavailable(
        f"run {append.row.run_id!r}: the store did not say whether a write landed, until the lease was about to end.{last} "
        "Nothing further was started; recover the run once the store answers."
    )
    error.__cause__ = trouble
    return error


def _check_answer(answer: object) -> None:
    if not isinstance(answer, Answer) or type(answer.posted) is not int:
        raise TypeError(f"the store gave {answer!r} for an answer")


def _hand_out(members: Sequence[Member], answers: Sequence[Answer], sent_at: float) -> bool:
    """Give each member its definite answer; whether all were definite."""
    all_definite = True
    for member, answer in zip(members, answers, strict=True):
        if answer.kind is AnswerKind.UNKNOWN:
            all_definite = False
        else:
            member.landed(answer, sent_at)
    return all_definite


_WATCHERS: weakref.WeakKeyDictionary[CheckpointStore, tuple[Watcher, ...]] = weakref.WeakKeyDictionary()


def watch_commits(store: CheckpointStore, watcher: Watcher) -> None:
    """Tell the watcher of each answer that the store gives to a write, from now on and on every event loop."""
    _WATCHERS[store] = watchers = (*_WATCHERS.get(store, ()), watcher)
    found = _BY_STORE.get(store)
    if found is not None:
        found.watchers = watchers


_BY_STORE: weakref.WeakKeyDictionary[CheckpointStore, GroupCommit] = weakref.WeakKeyDictionary()


def group_commit(store: CheckpointStore, clock: Clock) -> GroupCommit:
    """The one group commit of this store on the running event loop."""
    found = _BY_STORE.get(store)
    if found is None or found._loop is not asyncio.get_running_loop() or found._clock is not clock:
        found = _BY_STORE[store] = GroupCommit(store, clock)
    return found
