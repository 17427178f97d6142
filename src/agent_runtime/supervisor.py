"""Finds runs whose worker died and starts a fresh one on each: `python -m agent_runtime.supervisor`.

Rules of this file:

* It holds no truth. What it remembers saves it work and may be lost at any moment: the next one looks again.
* It never works a run, never claims one, and opens no seal: it starts workers. Claims arbitrate between several
  supervisors; a worker that finds its run taken leaves quietly.
* A living owner is left alone, and so is a run that waits for a person. A time that lies ahead is waited for.
* Nothing that one run, one worker or the store does ends it or makes it spin: each run that comes to nothing has a pause
  of its own, which grows.
* It ends no process but those that it started itself, and of those only one that no longer holds its run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from agent_runtime.abandoned import Lookout, Seen
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import AgentRuntimeError, InvalidSetting, StoreUnavailable
from agent_runtime.housekeeping import COMMAND, Housekeeper, Purge
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRow
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import ProcessMark, mark_of_child
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.retention import FINISHED, Age, parse_duration
from agent_runtime.settings import Settings, read_settings
from agent_runtime.stores import open_store
from agent_runtime.telemetry import plain_line
from agent_runtime.tool_loop import KIND
from agent_runtime.worker import PROVISION, Exit

LOOK_SECONDS = 1.0
"""How often the owners of this host are looked at, where POLL is longer."""
JITTER_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
LEAVE_SECONDS = 5.0
"""How long a worker whose run is another's may take to notice it, at least."""
STANDARD_ERROR = 2


Watcher: TypeAlias = Callable[[str, Mapping[str, object], int], None]
"""Is told each line's verb and fields, and how many workers there are."""


class Program(NamedTuple):
    """Whose runs are supervised: the name and kind on their rows, and the command that works the run named by RUN_ID."""

    name: str
    command: Sequence[str]
    kind: str = KIND


THIS_PROGRAM = Program(PROVISION, (sys.executable, "-m", "agent_runtime", "provision", "--resume"))


@dataclass(frozen=True, slots=True)
class Terms:
    """The supervisor's times and bounds."""

    lease_seconds: float
    poll_seconds: float
    heartbeat_seconds: float
    max_attempts: int
    max_workers: int

    def __post_init__(self) -> None:
        if self.max_workers < 1:
            raise InvalidSetting(f"--max-workers is a whole number from 1, found {self.max_workers}")

    @staticmethod
    def of(settings: Settings, max_workers: int) -> Terms:
        times = (settings.lease_seconds, settings.poll_seconds, settings.heartbeat_seconds)
        return Terms(*times, settings.max_attempts, max_workers)


@dataclass(slots=True, eq=False)
class Child:
    """A worker that was started for a run, and the run's epoch then."""

    process: subprocess.Popen[bytes]
    mark: ProcessMark
    epoch: int
    useless_since: float | None = None

    def is_owner(self, mark: ProcessMark) -> bool:
        """Whether that process is the worker, or one that the worker's command has started."""
        if mark == self.mark:
            return True
        if mark._replace(pid=self.mark.pid, born=self.mark.born) != self.mark:
            return False  # of another host or namespace
        try:
            return os.getpgid(mark.pid) == self.mark.pid
        except OSError:
            return False


@dataclass(slots=True)
class Trouble:
    """How often in a row workers of one run came to nothing, and when the next one may try."""

    exits: int = 0
    not_before: float = 0.0


class Supervisor:
    """Starts workers of a program until it is told to stop, or, with `until_idle`, until no run is left to start."""

    def __init__(
        self,
        store: CheckpointStore,
        program: Program,
        terms: Terms,
        *,
        environ: Mapping[str, str],
        until_idle: bool = False,
        as_json: bool = False,
        purge_after: Age | None = None,
        purge_status: Collection[str] = FINISHED,
        purge_command: Sequence[str] = COMMAND,
        watcher: Watcher | None = None,
        clock: Clock = SYSTEM_CLOCK,
        entropy: Entropy = SYSTEM_ENTROPY,
        offload: Offload = SYSTEM_OFFLOAD,
    ) -> None:
        """`purge_after`: also have the program's runs of `purge_status` removed that were last written so long ago."""
        self._store = store
        self._program = program
        self._terms = terms
        # Each run has its own goal, and there is one process to a port.
        self._environ = {name: value for name, value in environ.items() if name not in ("GOAL", "METRICS_PORT")}
        self._until_idle = until_idle
        self._as_json = as_json
        self._watcher = watcher
        self._clock = clock
        self._entropy = entropy
        self._offload = offload
        self._lookout = Lookout(store, name=program.name, kind=program.kind, poll_seconds=terms.poll_seconds, clock=clock)
        purge = Purge.of(purge_after, purge_status, purge_command)
        self._housekeeper = Housekeeper(purge, name=program.name, environ=self._environ, clock=clock, tell=self._tell)
        self._stopped = asyncio.Event()
        self._woken = asyncio.Event()
        self._trust_from = float("-inf")
        self._has_trusted = False
        self._away_since: float | None = None
        self._away_looks = 0
        self._has_looked = False
        self._working: dict[RunId, asyncio.Task[None]] = {}
        self._children: dict[RunId, Child] = {}
        self._troubles: dict[RunId, Trouble] = {}

    def stop(self) -> None:
        """Start nothing more, and let the workers give their runs back."""
        self._stopped.set()
        self._woken.set()

    async def supervise(self) -> None:
        """Look, start, rest, until told to stop; then wait for the workers."""
        terms = self._terms
        times = {"lease": terms.lease_seconds, "poll": terms.poll_seconds, "heartbeat": terms.heartbeat_seconds}
        self._tell("supervisor", times)
        while not self._stopped.is_set():
            await self._look_and_start()
            if self._away_since is None:
                self._housekeeper.look()
            if self._until_idle and self._is_idle:
                return
            await self._rest()
        self._housekeeper.stop()
        await self._drain()

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is left to start. What ended since the look began is for the next look to see."""
        is_quiet = not (self._away_since is not None or self._working or self._woken.is_set() or self._housekeeper.is_busy)
        return is_quiet and all(map(self._is_given_up, self._lookout.last.free))

    # Looking.

    async def _look_and_start(self) -> None:
        trust_leases = self._clock.monotonic() >= self._trust_from
        looking = asyncio.ensure_future(self._lookout.look(self._may_start, trust_leases=trust_leases))
        if not await self._unless_stopped(looking):
            return
        try:
            look = looking.result()
        except Exception as error:  # whatever a store raises, the next look may find it well
            self._is_away(error)
            return
        if self._is_back():
            return
        self._has_trusted |= trust_leases
        self._troubles = {run_id: t for run_id, t in self._troubles.items() if run_id in look.free or run_id in look.held}
        for run_id, child in self._children.items():
            self._part_from(child, look.held.get(run_id), trust_leases=trust_leases)
        for seen in self._in_any_order(look.due):
            if len(self._working) >= self._terms.max_workers:
                return
            self._start(seen, trust_leases=trust_leases)
            look.forget(seen)

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> bool:
        """Wait for the work, unless it is time to stop: a store that never answers is not to hold that up."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        either: set[asyncio.Future[Any]] = {work, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        is_done = work.done()
        for each in either:
            each.cancel()
        return is_done

    def _may_start(self, run_id: RunId) -> bool:
        trouble = self._troubles.get(run_id)
        return run_id not in self._working and (trouble is None or self._clock.monotonic() >= trouble.not_before)

    def _is_given_up(self, run_id: RunId) -> bool:
        """Whether workers of the run come to nothing more often than a claim would let them."""
        trouble = self._troubles.get(run_id)
        return trouble is not None and trouble.exits > self._terms.max_attempts + 1

    def _is_away(self, error: Exception) -> None:
        """Said once; then patience. Before the first look, what an operator must mend ends the supervisor."""
        if not self._has_looked and isinstance(error, AgentRuntimeError) and not isinstance(error, StoreUnavailable):
            raise error
        if self._away_since is None:
            self._away_since, self._away_looks = self._clock.monotonic(), 0
            self._tell("store-away", {"error": type(error).__name__, "why": str(error)})
        self._away_looks += 1

    def _is_back(self) -> bool:
        """Whether the store was away and is there again: what was found of leases then counts for nothing."""
        self._has_looked = True
        if self._away_since is None:
            return False
        self._tell("store-back", {"after": round(self._clock.monotonic() - self._away_since, 1)})
        self._away_since = None
        self._let_owners_be_heard()
        return True

    def _let_owners_be_heard(self) -> None:
        """Nobody could renew a lease, or this process was not there to see it: living owners get the time to."""
        self._trust_from = self._clock.monotonic() + 2 * self._terms.heartbeat_seconds
        self._has_trusted = False

    async def _rest(self) -> None:
        """Until the next look, or until something happens that is worth one."""
        seconds = min(self._terms.poll_seconds, LOOK_SECONDS)
        if self._away_since is not None:
            seconds = min(seconds * 2.0 ** min(self._away_looks - 1, 10), max(self._terms.poll_seconds, LOOK_SECONDS))
        began = self._clock.monotonic()
        pause = asyncio.ensure_future(self._clock.sleep(seconds))
        woken = asyncio.ensure_future(self._woken.wait())
        await asyncio.wait({pause, woken}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (pause, woken):
            waiting.cancel()
        self._woken.clear()
        # The host slept, or this process was frozen. On a host that is always late this counts every other time.
        overslept = self._clock.monotonic() - began > seconds + self._terms.heartbeat_seconds
        if overslept and self._has_trusted:
            self._let_owners_be_heard()

    # Workers.

    def _in_any_order(self, due: Sequence[Seen]) -> list[Seen]:
        """Each supervisor has its own order, so that several do not go for the same runs at once."""
        drawn = self._entropy.draw(8)
        return sorted(due, key=lambda seen: hash((drawn, seen.row.run_id)))

    def _start(self, seen: Seen, *, trust_leases: bool) -> None:
        run_id = seen.row.run_id
        if not self._may_start(run_id):
            return
        task = self._working[run_id] = asyncio.create_task(self._work(seen, trust_leases=trust_leases))
        task.add_done_callback(lambda _: self._forget(run_id))

    def _forget(self, run_id: RunId) -> None:
        del self._working[run_id]
        self._woken.set()

    async def _work(self, seen: Seen, *, trust_leases: bool) -> None:
        """One worker on a run, from its start to its end; nothing where somebody was quicker."""
        await self._clock.sleep(JITTER_SECONDS * int.from_bytes(self._entropy.draw(2)) / 2**16)
        row = seen.row
        try:
            if not await self._lookout.look_again(seen, trust_leases=trust_leases) or self._stopped.is_set():
                return
            child = self._spawn(row)
        except Exception as error:  # the row cannot be read; or no process, no memory
            self._tell("cannot-start", {"run": row.run_id, "why": f"{type(error).__name__}: {error}"})
            await self._note_end(row)
            return
        self._children[row.run_id] = child
        self._tell("resuming", {"run": row.run_id, "pid": child.process.pid})
        code = await self._wait(child.process)
        del self._children[row.run_id]
        self._tell("worker-exited", {"run": row.run_id, "code": code})
        await self._note_end(row, code)

    def _spawn(self, row: StoredRow) -> Child:
        """A worker in a process group of its own: a Ctrl-C at the terminal is for the supervisor to pass on."""
        process = subprocess.Popen(
            list(self._program.command),
            env={**self._environ, "RUN_ID": row.run_id},
            stdin=subprocess.DEVNULL,
            stdout=STANDARD_ERROR if self._as_json else None,
            process_group=0,
        )
        return Child(process, mark_of_child(process.pid), row.epoch)

    async def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """The worker's exit code. It stays a zombie until this loop has noticed: no signal of ours reaches another process."""
        ended = self._offload.start(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))
        with suppress(ChildProcessError):  # who started us ignores its children, and so do we: there is no code to read
            await ended.outcome
        return process.wait()

    async def _note_end(self, before: StoredRow, code: int | None = None) -> None:
        """A worker that left its run no further than it found it makes the next one wait: each time longer.

        One that found its run taken says nothing of the run: whoever was quicker may be killed in turn.
        """
        run_id, after = before.run_id, None
        with suppress(Exception):  # not known: taken for no progress
            stored = await self._store.latest(run_id)
            after = None if stored is None else stored.row
        if after is not None and after.number > before.number and after.attempts == 0:
            self._troubles.pop(run_id, None)
            return
        if code == Exit.NOT_MINE and after is not None and after.epoch > before.epoch:
            return
        trouble = self._troubles.setdefault(run_id, Trouble())
        trouble.exits += 1
        if trouble.exits > 1 and (after is None or after.status == RunStatus.RUNNING):
            seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** min(trouble.exits - 2, 20), LONGEST_PAUSE_SECONDS)
            trouble.not_before = self._clock.monotonic() + seconds
            self._tell("pausing", {"run": run_id, "seconds": seconds, "exits": trouble.exits})

    def _part_from(self, child: Child, seen: Seen | None, *, trust_leases: bool) -> None:
        """Kill our own worker that does not hold its run any more: it hangs, and would keep its place for ever.

        One whose lease lapsed goes at once, one whose run is another's once it had the time to notice that.
        """
        if seen is None or seen.mark is None:
            return
        row, now = seen.row, self._clock.monotonic()
        if child.is_owner(seen.mark):
            if row.idle_ms >= row.lease_ms and trust_leases:
                self._kill(child, row.run_id, "its lease is over")
        elif row.epoch > child.epoch:
            child.useless_since = now if child.useless_since is None else child.useless_since
            if now - child.useless_since > max(LEAVE_SECONDS, 2 * self._terms.heartbeat_seconds):
                self._kill(child, row.run_id, "its run is another's")

    def _kill(self, child: Child, run_id: RunId, why: str) -> None:
        self._tell("killing", {"run": run_id, "pid": child.process.pid, "why": why})
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)  # with whatever it has started: its calls are another's now

    async def _drain(self) -> None:
        """Ask every worker to give its run back, and wait until they have."""
        self._tell("draining", {"workers": len(self._children)})
        for run_id, task in self._working.items():
            if run_id not in self._children:
                task.cancel()
        for child in self._children.values():
            child.process.terminate()
            child.process.send_signal(signal.SIGCONT)  # a frozen one hears nothing else
        while self._working:
            await asyncio.wait(self._working.values())

    def _tell(self, verb: str, fields: Mapping[str, object]) -> None:
        if self._watcher is not None:
            self._watcher(verb, fields, len(self._children))
        line = json.dumps({"event": verb, **fields}) if self._as_json else plain_line(verb, fields)
        with suppress(OSError):  # nobody listens any more; the work goes on
            print(line, flush=True)


# The program.


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a supervisor."""
    parser.add_argument("--store", metavar="URL", help="the store to watch (default: DATABASE_URL)")
    parser.add_argument(
        "--max-workers", type=int, default=max(4, 2 * (os.cpu_count() or 1)), metavar="N",
        help="how many workers run at once (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--purge-after",
        metavar="AGE",
        help="also remove this program's runs that ended so long ago: 30d, 12h (default: never)",
    )
    parser.add_argument(
        "--purge-status", action="append", choices=FINISHED, help="of those only these; may be repeated (default: all three)"
    )
    parser.add_argument("--until-idle", action="store_true", help="end once no run is left that a worker could go on with")
    parser.add_argument("--json", action="store_true", help="one JSON line an event; workers then write to standard error")
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve Prometheus metrics on 127.0.0.1:N (default: METRICS_PORT, or not)"
    )


def supervise(options: argparse.Namespace, *, program: Program = THIS_PROGRAM) -> int:
    """Supervise until told to stop; gives the exit code."""
    environ = dict(os.environ)
    if options.store:
        environ["DATABASE_URL"] = options.store
    if options.metrics_port is not None:
        environ["METRICS_PORT"] = str(options.metrics_port)
    try:
        settings = read_settings(environ)
        return asyncio.run(_until_told_to_stop(settings, program, options, environ))
    except AgentRuntimeError as error:
        print(f"ERROR {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return Exit.ERROR


async def _until_told_to_stop(
    settings: Settings, program: Program, options: argparse.Namespace, environ: Mapping[str, str]
) -> int:
    if settings.database_url.startswith("memory:"):
        raise InvalidSetting("a supervisor watches a store that other processes write, found memory://; set DATABASE_URL")
    terms, watcher = Terms.of(settings, options.max_workers), _watcher(settings.metrics_port)
    purge_after = None if options.purge_after is None else parse_duration(options.purge_after)
    store = open_store(settings.database_url)
    supervisor = Supervisor(
        store, program, terms, environ=environ, until_idle=options.until_idle, as_json=options.json, purge_after=purge_after,
        purge_status=options.purge_status or FINISHED, watcher=watcher,
    )  # fmt: skip
    task = asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def hear(number: int) -> None:
        told.append(number)
        if len(told) == 1:
            supervisor.stop()
        else:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, hear, number)
    try:
        await supervisor.supervise()
    except asyncio.CancelledError:
        if len(told) < 2:
            raise
        return 128 + told[1]
    finally:
        with suppress(asyncio.CancelledError):  # told twice: what the store still has to say is not waited for
            await store.close()
    return Exit.DONE


def _watcher(metrics_port: int | None) -> Watcher | None:
    if metrics_port is None:
        return None
    from agent_runtime.telemetry_prometheus import SupervisorMetrics, serve_metrics

    serve_metrics(metrics_port)
    return SupervisorMetrics()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m agent_runtime.supervisor`."""
    parser = argparse.ArgumentParser(prog="python -m agent_runtime.supervisor", description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    return supervise(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
