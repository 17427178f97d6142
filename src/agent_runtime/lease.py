"""Leases: who holds a run and whether they live, the heartbeat that says so, and the window of self-trust.

Rules of this file:

* A lease says when a claim is worth trying; safety never depends on it, nor on any clock.
* An owner is dead at once when this host can tell: its process is gone (pid and start time, and no zombie), its boot is
  over, or it is this process and no longer among its live owners. Everything else waits for the lease to lapse.
* No signal is ever sent as a probe: `kill(pid, 0)` calls a zombie alive.
* The heartbeat runs on a thread with a store instance and an event loop of its own: a blocked loop must not look dead.
  One that hangs for good would hold its run for ever: past `stuck_after` without a write it is no longer renewed.
"""

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.clock import Clock
from agent_runtime.errors import Fenced
from agent_runtime.journal.journal import Journal
from agent_runtime.journal.records import NO_OWNER, RecordKind, StoredRecord, StoredRow
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.offload import Offload

MARK_WINDOW = 32
"""How many records of a journal's end are read at first to find who claimed it."""

LIVE_OWNERS: set[bytes] = set()
"""The owners that this process still works for, or whose call still runs on one of its threads."""


MOST_GONE = 1000


class ProcessMark(NamedTuple):
    """Which process an owner is. Empty fields where the system does not tell."""

    host: str
    boot: str
    namespace: str
    pid: int
    born: str

    def to_plain(self) -> dict[str, object]:
        return self._asdict()

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "ProcessMark":
        return ProcessMark(*(plain[name] for name in ("host", "boot", "namespace", "pid", "born")))


_GONE: set[ProcessMark] = set()
"""Processes of this boot that were seen to be gone: none comes back under its old start time."""


def own_mark() -> ProcessMark:
    """The mark of this process; a copy of it made by `fork` has another."""
    return _mark_of(os.getpid())


@lru_cache(maxsize=4)
def _mark_of(pid: int) -> ProcessMark:
    name, machine = socket.gethostname(), _read("/etc/machine-id")
    return ProcessMark(
        host=f"{name}/{machine}" if machine else name,
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        pid=pid,
        born=_own_birth(pid),
    )


def _own_birth(pid: int) -> str:
    try:
        return _birth(pid) or ""
    except OSError:  # no /proc here
        return ""


@lru_cache(maxsize=16)
def claimed_body(pid: int, why: str, *, is_owner_gone: bool = False, trace: str = "") -> bytes:
    """The body of a `claimed` record: who claims, why, and whether the owner before is known to be gone.

    `trace`: where in a trace this owner's work stands, for the next one's to refer to.
    """
    gone = {"gone": True} if is_owner_gone else {}
    traced = {"trace": trace} if trace else {}
    return codec.encode({**_mark_of(pid).to_plain(), "why": why, **gone, **traced})


def last_trace(records: Sequence[StoredRecord]) -> str:
    """Where in a trace the work of the latest owner stands that wrote it down; empty where none did."""
    for record in reversed(records):
        if record.kind == RecordKind.CLAIMED and (trace := codec.decode(record.body).get("trace")):
            return str(trace)
    return ""


def mark_of_child(pid: int) -> ProcessMark:
    """The mark of a process that this one has started and not yet taken leave of."""
    return own_mark()._replace(pid=pid, born=_birth(pid) or "")


async def find_mark(store: CheckpointStore, row: StoredRow) -> ProcessMark | None:
    """Which process claimed the run, read from the end of its journal; None where that cannot be told.

    No seal is checked: this is a hint, as a lease is. Whoever claims the run verifies it.
    """
    window = MARK_WINDOW
    while True:
        since = max(0, row.number - window)
        records = await store.calls(row.run_id, since=since)
        claimed = next((record for record in reversed(records) if record.kind == RecordKind.CLAIMED), None)
        if claimed is not None:
            return read_mark(claimed.body) if claimed.epoch == row.epoch else None
        if since == 0:
            return None
        window *= MARK_WINDOW


def read_mark(body: bytes) -> ProcessMark | None:
    """Which process a `claimed` record names; None where that cannot be read."""
    try:
        mark = ProcessMark.from_plain(codec.decode(body))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    is_sound = type(mark.pid) is int and all(type(part) is str for part in (mark.host, mark.boot, mark.namespace, mark.born))
    return mark if is_sound else None


def is_dead(mark: ProcessMark, owner: bytes, *, me: ProcessMark | None = None) -> bool:
    """Whether it is certain that the owner will not act again. False where nobody can tell."""
    me = me or own_mark()
    if not mark.boot or not me.boot:
        return False
    if mark.boot != me.boot:
        return mark.host == me.host
    if not mark.namespace or mark.namespace != me.namespace:
        return False
    if (mark.pid, mark.born) == (me.pid, me.born):
        return owner not in LIVE_OWNERS
    return mark in _GONE or _is_gone(mark)


def seconds_held(row: StoredRow, mark: ProcessMark | None) -> float | None:
    """How long the run is still held by its owner if nothing more is heard; None where it may be claimed now."""
    if row.owner == NO_OWNER or not 0 <= row.idle_ms < row.lease_ms:
        return None
    if mark is not None and is_dead(mark, row.owner):
        return None
    return (row.lease_ms - row.idle_ms) / 1000


def _is_gone(mark: ProcessMark) -> bool:
    try:
        gone = _birth(mark.pid) != mark.born
    except OSError:
        return False  # it cannot be looked at just now, which says nothing about it
    if gone:
        if len(_GONE) >= MOST_GONE:
            _GONE.clear()
        _GONE.add(mark)
    return gone


def _birth(pid: int) -> str | None:
    """When the process started, in ticks since boot; None where it is gone, or a zombie. `OSError` where nobody can tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        os.stat("/proc/1/stat")  # one is always there: where it does not show, others are hidden too
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Watch(NamedTuple):
    """How often a run is renewed, and after how long without a write it is taken to be stuck (None: never)."""

    every_seconds: float
    stuck_after: float | None


def _is_stuck(journal: Journal, watch: Watch, now: float) -> bool:
    """Whether the worker makes no progress: its process lives, and the loop that should work the run hangs."""
    return watch.stuck_after is not None and now - journal.written_at >= watch.stuck_after


class Heartbeat:
    """Says for every run that this process holds in one store that its owner lives."""

    def __init__(self, store: CheckpointStore, clock: Clock, offload: Offload) -> None:
        self._store = weakref.ref(store)  # its heartbeat must not keep a store that nobody uses any more
        self._clock = clock
        self._offload = offload
        self._lock = threading.Lock()
        self._watched: dict[Journal, Watch] = {}
        self._pause = float("inf")
        self._runs = False
        self._changed = threading.Event()

    def watch(self, journal: Journal, every_seconds: float, *, stuck_after: float | None = None) -> None:
        """Renew the journal's lease from now on, unless it wrote nothing for `stuck_after` seconds."""
        with self._lock:
            self._watched[journal] = Watch(every_seconds, stuck_after)
            sooner = every_seconds < self._pause
            self._pause = min(self._pause, every_seconds)
            start, self._runs = not self._runs, True
        if start:
            self._offload.spawn("agent-runtime-heartbeat", self._beat)
        elif sooner:
            self._changed.set()

    def unwatch(self, journal: Journal) -> None:
        """The run is given back, or lost."""
        with self._lock:
            self._watched.pop(journal, None)

    def _beat(self) -> None:
        """The thread: it ends with the first beat that finds nothing to watch."""
        loop = asyncio.new_event_loop()
        own: CheckpointStore | None = None
        try:
            while (seconds := self._next_pause()) is not None:
                self._clock.wait(self._changed, seconds)
                self._changed.clear()
                silent = self._silent()
                if silent:
                    own = own or self._reopen()
                    loop.run_until_complete(self._renew(own, silent))
        finally:
            if own is not None:
                loop.run_until_complete(own.close())
            loop.close()

    def _reopen(self) -> CheckpointStore:
        store = self._store()
        assert store is not None, "a run that is watched holds its store"
        return store.reopen()

    def _next_pause(self) -> float | None:
        with self._lock:
            if not self._watched:
                self._runs, self._pause = False, float("inf")
                return None
            self._pause = min(watch.every_seconds for watch in self._watched.values())
            return self._pause

    def _silent(self) -> list[Journal]:
        """The journals that wrote nothing lately: an append is a heartbeat too. One that is stuck is left to its lease."""
        now = self._clock.monotonic()
        with self._lock:
            due = [
                (journal, watch)
                for journal, watch in self._watched.items()
                if journal.is_claimed and journal.trusted_until - journal.trust_seconds + watch.every_seconds / 2 <= now
            ]
        return [journal for journal, watch in due if not _is_stuck(journal, watch, now)]

    async def _renew(self, store: CheckpointStore, journals: list[Journal]) -> None:
        sent_at = self._clock.monotonic()
        guards = [(journal.run_id, journal.guard) for journal in journals]
        try:
            answers = await store.renew_all([(run_id, guard) for run_id, guard in guards if guard is not None])
        except Exception:  # the store is away, or breaks its promise; the worker stops trusting itself in time
            return
        for journal, answer in zip(journals, answers, strict=False):
            if answer.kind is AnswerKind.OK:
                journal.heard(sent_at, answer.posted)
            elif answer.kind is AnswerKind.FENCED:
                self.unwatch(journal)
                journal.fail_from_thread(Fenced(f"run {journal.run_id!r} is held by another owner, or has ended"))


_BY_STORE: weakref.WeakKeyDictionary[CheckpointStore, Heartbeat] = weakref.WeakKeyDictionary()


def heartbeat(store: CheckpointStore, clock: Clock, offload: Offload) -> Heartbeat:
    """The one heartbeat of this process for a store."""
    found = _BY_STORE.get(store)
    if found is None:
        found = _BY_STORE[store] = Heartbeat(store, clock, offload)
    return found
