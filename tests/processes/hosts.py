"""Hosts for workers: real ones as far as Linux can tell, made of namespaces, and cables between them and the server.

A host has a network, a host name, a boot and processes of its own. Making one takes root and the programs `unshare`,
`nsenter` and `ip`. Where these are missing, a worker stands on this host, behind a proxy that can be partitioned.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agent_runtime.testing.tcp_proxy import TcpProxy, Way
from tests.processes.hired import Worker
from tests.processes.job import until
from tests.servers import Server

PROGRAM = Path(__file__).with_name("far_worker.py")
TOP = PROGRAM.parents[2]
NETWORK = "198.18.0.0/15"
"""Set aside for tests of networks: nobody's own."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NOBODY = "02:00:00:00:00:99"
_SETTING_UP = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && hostname "$2" && read -r _ && shift 2 && exec "$@"'


@cache
def kinds() -> tuple[str, ...]:
    """Which kinds of cable this machine can lay: always one, behind a proxy; with root and the tools, a real one too."""
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip", "mount", "hostname")))
    probe = ["unshare", "--uts", "--pid", "--net", "--mount", "--fork", "--mount-proc", "true"]
    may = tools and os.geteuid() == 0 and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return ("namespaces", "proxy") if may else ("proxy",)


class Cable(Protocol):
    """Between a host and the server."""

    def cut(self, *ways: Way) -> None:
        """From now on nothing gets through that way, or both ways if none is named."""

    def heal(self) -> None:
        """From now on everything does, and what was sent again and again in between."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host, with one worker on it."""

    worker: Worker
    cable: Cable
    mark: dict[str, Any]
    """Which process on which host the worker takes itself for."""

    def lose_power(self) -> None:
        """The host is gone, with all that was on it."""
        self.worker.dismiss()


class Place(NamedTuple):
    """What a host is to be like, and what its worker finds there."""

    server: Server
    database: str
    remote: Path
    folder: Path
    hours: float
    """How far its wall clock is off."""
    is_container: bool
    """Whether it is one more container of this machine, with its boot and its name."""

    def program(self, address: str, port: int) -> list[str]:
        """The worker's command, which reaches the server there."""
        url = f"postgresql://postgres@{address}:{port}/{self.database}"
        return [sys.executable, str(PROGRAM), url, str(self.remote), str(self.hours)]


@asynccontextmanager
async def host(kind: str, place: Place) -> AsyncIterator[Host]:
    """A host that is gone when the block is left."""
    if kind == "namespaces":
        with _namespaces(place) as made:
            yield made
        return
    async with TcpProxy("127.0.0.1", place.server.port) as proxy:
        with _worker(place.program("127.0.0.1", proxy.port)) as worker:
            yield Host(worker, _Proxied(proxy), worker.hear()["mark"])


@contextmanager
def _namespaces(place: Place) -> Iterator[Host]:
    name = f"h{secrets.token_hex(4)}"
    subnet = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}.{4 * secrets.randbelow(64)}"
    ours, theirs = (f"{subnet.rpartition('.')[0]}.{int(subnet.rpartition('.')[2]) + i}" for i in (1, 2))
    boot, called = place.folder / name, platform.node() if place.is_container else name
    boot.write_text(_BOOT.read_text() if place.is_container else f"{secrets.token_hex(16)}\n")
    words = [
        "unshare", "--uts", "--pid", "--net", "--mount", "--fork", "--mount-proc", "--kill-child",
        "sh", "-c", _SETTING_UP, "sh", str(boot), called, *place.program(ours, place.server.port),
    ]  # fmt: skip
    with _worker(words) as worker:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        until(lambda: children.read_text().split(), "the host has a first process")
        [first] = children.read_text().split()
        inside = ("nsenter", "--target", first, "--net")
        until(lambda: Path(f"/proc/{first}/ns/net").readlink() != Path("/proc/self/ns/net").readlink(), "it has a network")
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", first)
        _run("ip", "addr", "add", f"{ours}/30", "dev", name)
        _run("ip", "link", "set", name, "up")
        _run(*inside, "ip", "addr", "add", f"{theirs}/30", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        worker.go_on()
        yield Host(worker, _Veth(name, ours, theirs, inside), worker.hear()["mark"])


class _Proxied:
    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy

    def cut(self, *ways: Way) -> None:
        self._proxy.partition(*ways)

    def heal(self) -> None:
        self._proxy.heal()


class _Veth:
    """A pair of network devices. A way is cut by sending what goes there to an address that nobody has."""

    def __init__(self, name: str, ours: str, theirs: str, inside: tuple[str, ...]) -> None:
        self._ways = {
            Way.TO_SERVER: (inside, ours, "eth0"),
            Way.TO_CLIENT: ((), theirs, name),
        }

    def cut(self, *ways: Way) -> None:
        for way in ways or Way:
            prefix, address, device = self._ways[way]
            _run(*prefix, "ip", "neigh", "replace", address, "lladdr", _NOBODY, "dev", device, "nud", "permanent")

    def heal(self) -> None:
        for prefix, address, device in self._ways.values():
            _run(*prefix, "ip", "neigh", "flush", "to", address, "dev", device, "nud", "all")


@contextmanager
def _worker(words: list[str]) -> Iterator[Worker]:
    with ExitStack() as stack:
        worker = Worker(words, PYTHONPATH=str(TOP))
        stack.callback(worker.dismiss)
        yield worker


def _run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
