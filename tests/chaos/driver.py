"""The course of a chaos run: set up, strike while runs are put in, come to rest, judge."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from agent_runtime.crash import CrashPoint
from agent_runtime.journal.records import RunStatus
from agent_runtime.stores import open_store
from tests.chaos.actors import Crew, Remotes, Terms
from tests.chaos.facts import read_reports
from tests.chaos.faults import Faults
from tests.chaos.janitor import watched
from tests.chaos.logs import Ears
from tests.chaos.oracle import Facts, Violation, count_set_aside, judge
from tests.chaos.plan import OF_ANY, Death, Kind, draw_death, draw_strikes
from tests.chaos.processes import Found, Role, find
from tests.chaos.report import SHOWN, Result
from tests.chaos.stores import Place, open_place
from tests.chaos.takeovers import find_takeovers
from tests.chaos.watch import Watch

TICK_SECONDS = 0.02
LOOK_EVERY_SECONDS = 0.4
ACT_AGAIN_SECONDS = 3.0
"""How long a person waits before doing the same to a run again."""
POISON = Death(CrashPoint.AFTER_INTENT, 1)
"""Where each worker of a poison run dies; `worker.sh` says the same."""
POISON_EVERY_SECONDS = 60.0
GONE_WITHIN_SECONDS = 20.0
KEY_BYTES = 32

Show = Callable[[float, int, int, int], None]
"""Told now and then: how much of the time is over, runs put in, runs done, faults so far."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a chaos run is to be."""

    store: str
    seed: int
    seconds: float
    workers: int
    supervisors: int
    kills_a_second: float
    latency_ms: int
    max_attempts: int
    rest_within: float
    """How long after the last fault everything may take to get done."""
    only: frozenset[Kind] = frozenset()
    """Kinds of faults; empty for all that the store knows."""


async def drive(options: Options, folder: Path, show: Show) -> Result:
    """Work it from start to end. Whatever was started is gone afterwards, also where this process is killed."""
    with ExitStack() as ends:
        for name in ("logs", "mended", "work"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(base64.b64encode(secrets.token_bytes(KEY_BYTES)))
        (folder / "key").chmod(0o600)
        mark = secrets.token_hex(8)
        (folder / "mark").write_text(mark)
        place = open_place(options.store, folder)
        ends.callback(place.close)
        ends.enter_context(watched(mark))
        terms = Terms(
            folder, mark, place.url, options.supervisors, options.workers, options.latency_ms, options.max_attempts
        )  # fmt: skip
        course = Course(options, terms, place, Remotes(terms), show)
        ends.callback(course.close)
        return await course.work()


@dataclass(slots=True)
class Putting:
    """How a run is put in: where its first worker dies, and how often that was tried again."""

    death: Death | None
    tries: int = 0


class Course:
    """One chaos run while it goes on."""

    def __init__(self, options: Options, terms: Terms, place: Place, remotes: Remotes, show: Show) -> None:
        self._options, self._terms, self._place, self._remotes, self._show = options, terms, place, remotes, show
        self._crew = Crew(terms, remotes)
        self._ears = Ears([*(desk.log for desk in self._crew.desks), self._crew.put_in_log])
        self._faults = Faults(terms.mark, self._ears.heard.at_work, remotes, place)
        self._store = open_store(place.url)
        self._watch = Watch(self._store)
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self._began = monotonic()
        self._put_in: dict[str, Putting] = {}
        self._poison: list[str] = []
        self._done_before: dict[str, int] = {}
        self._done_meanwhile: dict[str, int] = {}
        self._acted_at: dict[str, float] = {}
        self._decided = 0

    async def work(self) -> Result:
        """All of it."""
        await self._watch.look()  # makes the tables, before anybody needs them
        await self._warm_up()
        self._began = monotonic()
        await self._storm()
        calm_at = self._now()
        self._faults.calm()
        await self._come_to_rest(calm_at + self._options.rest_within)
        rested_at = self._now()
        left = await self._wind_up()
        return await self._judge(calm_at, rested_at - calm_at, left)

    def close(self) -> None:
        self._ears.close()

    def _now(self) -> float:
        return monotonic() - self._began

    # While faults strike.

    async def _warm_up(self) -> None:
        """Until somebody is at work: faults that meet nobody show nothing."""
        while not self._ears.heard.at_work and self._now() < self._options.rest_within:
            await self._tick()
            self._feed()

    async def _storm(self) -> None:
        options = self._options
        kinds = options.only or OF_ANY | set(self._place.kinds)
        strikes = list(draw_strikes(options.seed, options.seconds, kinds, kills_a_second=options.kills_a_second))[::-1]
        while self._now() < options.seconds:
            await self._tick()
            self._feed()
            while strikes and strikes[-1].at <= self._now():
                self._faults.strike(strikes.pop(), self._now())

    async def _tick(self) -> None:
        """What goes on all the time."""
        self._crew.keep()
        self._faults.follow(self._now())
        self._ears.listen(self._now())
        self._look_now_and_then()
        self._be_a_person()
        done = len(self._watch.stands) - len(self._watch.unfinished())
        self._show(self._now() / self._options.seconds, len(self._put_in), done, self._faults.struck.counts.total())
        await asyncio.sleep(TICK_SECONDS)

    def _look_now_and_then(self) -> None:
        if self._looking is not None:
            if not self._looking.done():
                return
            with suppress(Exception):  # the store is away: the next look may find it well
                self._looking.result()
            self._looking = None
        if monotonic() - self._looked_at >= LOOK_EVERY_SECONDS:
            self._looked_at = monotonic()
            self._looking = asyncio.create_task(self._watch.look())

    def _feed(self) -> None:
        """Put runs in, so that there is always work for everybody, and again those that never reached the store."""
        self._put_in_again()
        if len(self._poison) <= self._now() / POISON_EVERY_SECONDS:
            run = f"poison-{len(self._poison)}"
            self._poison.append(run)
            self._done_before[run] = len(self._watch.of(RunStatus.DONE))
            self._add(run, POISON)
        ended = sum(stand.is_final for stand in self._watch.stands.values())
        if len(self._put_in) - ended < self._options.workers:
            number = len(self._put_in) - len(self._poison)
            self._add(f"run-{number:05}", draw_death(self._options.seed, number))

    def _add(self, run: str, death: Death | None) -> None:
        self._put_in[run] = Putting(death)
        self._may_act(run)
        self._crew.put_in(run, death)

    def _put_in_again(self) -> None:
        """Nobody said that the run was taken: whoever puts it in asks again, every other time without a crash point."""
        busy = self._crew.busy()
        for run, putting in self._put_in.items():
            if run not in self._watch.stands and run not in busy and self._may_act(run):
                putting.tries += 1
                is_armed = putting.tries % 2 or run in self._poison
                self._crew.put_in(run, putting.death if is_armed else None)

    def _be_a_person(self) -> None:
        """Release what was set aside, a poison run once others got done beside it; pick up what waits for a decision."""
        done = len(self._watch.of(RunStatus.DONE))
        for run in self._watch.of(RunStatus.QUARANTINED):
            others = done - self._done_before.get(run, 0)
            if others and self._may_act(run):
                self._done_meanwhile.setdefault(run, others)
                (self._terms.mended / run).touch()
                self._crew.release(run)
        for run in self._watch.of(RunStatus.BLOCKED):
            if self._may_act(run):
                self._decided += 1
                self._crew.resume(run)

    def _may_act(self, run: str) -> bool:
        if monotonic() - self._acted_at.get(run, float("-inf")) < ACT_AGAIN_SECONDS:
            return False
        self._acted_at[run] = monotonic()
        return True

    # Afterwards.

    async def _come_to_rest(self, until: float) -> None:
        """Until every run that was put in is done, or the time is over."""
        while self._now() < until and set(self._put_in) - set(self._watch.of(RunStatus.DONE)):
            self._put_in_again()
            await self._tick()

    async def _wind_up(self) -> list[str]:
        """Stop everybody; what does not end, and what else is left."""
        self._crew.stop()
        give_up_at = monotonic() + GONE_WITHIN_SECONDS
        while monotonic() < give_up_at and (self._left() or not self._crew.is_gone()):
            self._ears.listen(self._now())
            await asyncio.sleep(TICK_SECONDS)
        self._ears.listen(self._now())
        left = [str(each) for each in self._left()]
        if self._looking is not None:
            with suppress(Exception):
                await self._looking
        await self._watch.look()
        await self._store.close()
        known = {"logs", "mended", "work", "key", "mark", "mock.db", "runs.db"}
        files = [path for path in self._terms.folder.iterdir() if not path.name.endswith(("-wal", "-shm"))]
        left += [f"file {path.name}" for path in files if path.name not in known]
        left += [f"file {path.name} in the working directory" for path in self._terms.work.iterdir()]
        return left + self._strangers(give_up_at)

    def _strangers(self, give_up_at: float) -> list[str]:
        """Who is still connected to the store: a session ends a moment after its client."""
        while (strangers := self._place.strangers()) and monotonic() < give_up_at:
            sleep(TICK_SECONDS)
        return strangers

    def _left(self) -> list[Found]:
        """Processes of ours, but for the remotes, which are asked once more."""
        return [each for each in find(self._terms.mark) if each.role is not Role.REMOTES]

    async def _judge(self, seconds: float, drained_in: float, left: list[str]) -> Result:
        reports, corrupt = await read_reports(self._place.url, f"file:{self._terms.folder / 'key'}", list(self._watch.stands))
        cloud, created = self._remotes.ask("cloud", "/calls"), self._remotes.ask("cloud", "/created")
        facts = Facts(
            put_in=list(self._put_in), poison=self._poison, max_attempts=self._terms.max_attempts, reports=reports,
            corrupt=corrupt, asked=self._remotes.ask("model", "/calls")["by_run"], requests=cloud["by_key"],
            resources=created["by_key"], made=created["total"], started=self._ears.heard.started,
            went_back=self._watch.went_back, done_meanwhile=self._done_meanwhile, left=left,
        )  # fmt: skip
        self._remotes.kill()
        violations = judge(facts)
        struck, heard = self._faults.struck, self._ears.heard
        return Result(
            store=self._options.store, seed=self._options.seed, seconds=seconds, drained_in=drained_in, struck=struck,
            runs=len(self._put_in), claims=sum(len(report.timeline.segments) for report in reports.values()),
            deaths_at_points=heard.deaths, set_aside=count_set_aside(reports), decided=self._decided,
            takeovers=find_takeovers(struck.hits, reports, heard, struck.troubles), violations=violations,
            journal=self._keep_journals(violations),
        )  # fmt: skip

    def _keep_journals(self, violations: Sequence[Violation]) -> str:
        """Write down what `agent-runtime show` says of the runs in question; gives what it says of the first."""
        told = {}
        for run in list(dict.fromkeys(violation.run for violation in violations if violation.run))[:SHOWN]:
            told[run] = self._crew.show(run)
            (self._terms.folder / f"{run}.txt").write_text(told[run])
        return next((f"$ agent-runtime show {run}\n{text}" for run, text in told.items()), "")
