"""What a server must be before runs are kept on it: asked of each fresh connection; and what it may lose."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from agent_runtime.errors import ForeignStore, StoreRefused
from agent_runtime.stores.layouts import newer
from agent_runtime.stores.redis_errors import code_of, refused_as_replica, translate
from agent_runtime.stores.redis_link import Wire, ask_wire, load_scripts
from agent_runtime.stores.redis_pack import Command, Keys, plain, script

LAYOUT = 2
"""The layout of keys that this version makes. Those from 1 on it works with as they are."""
PROGRAM = "agent_runtime"
OLDEST = (6, 2)

_log = logging.getLogger("agent_runtime")
_SAFE = "noeviction"


class Level(NamedTuple):
    """How durable a server keeps what it has acknowledged, as far as it can be told."""

    policy: str | None
    """What is removed when the memory is full; None where it cannot be told."""
    appendonly: bool | None
    fsync: str | None
    replicas: int
    most_bytes: int | None = None
    """How large a value may be; None where it cannot be told."""

    def may_lose_writes(self, wait_replicas: int) -> bool:
        """Whether a power cut, or a failover to any replica there is, can lose an acknowledged write."""
        return not (self.appendonly and self.fsync == "always") or self.replicas > wait_replicas


class Said:
    """What was logged already: once is enough, however many connections a store opens."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning(text)


async def check_server(wire: Wire, place: str, said: Said, *, wait_replicas: int, is_cluster: bool) -> Level:
    """Refuse a server that is no primary, too old, or evicts; say what it may lose. Its scripts are loaded then."""
    settings = ("maxmemory-policy", "append*", "proto-max-bulk-len")
    asked = [plain("", "INFO"), *(plain("", "CONFIG", "GET", name) for name in settings)]
    info, policy, append, most = await ask_wire(wire, asked)
    facts = _facts(info, place)
    _check_version(facts, place)
    if facts.get("role", "master") != "master":
        raise refused_as_replica(place)
    if facts.get("cluster_enabled") == "1" and not is_cluster:
        raise StoreRefused(
            f"{place} is a node of a cluster; give the store a client for one, lambda: RedisCluster.from_url(…), or "
            "?cluster=yes in the URL"
        )
    level = _level(facts, _settings(policy), _settings(append), _settings(most))
    _check_policy(level, place, said)
    _say_what_may_be_lost(level, place, said, wait_replicas)
    await load_scripts(wire)
    return level


def mark(keys: Keys) -> Command:
    """Marks a database without a store as one, and tells what mark there is."""
    return script("set_up", (keys.mark,), (PROGRAM.encode(), b"%d" % LAYOUT))


def read_mark(keys: Keys) -> Command:
    """Tells what mark there is."""
    return script("read_mark", (keys.mark,))


def check_mark(found: Any, keys: Keys, place: str) -> int:
    """The layout that a mark tells. Refuses that of a newer version, and a key of another program."""
    program, form = (value.decode(errors="replace") for value in found)
    if program != PROGRAM or not (form.isascii() and form.isdigit() and int(form)):
        raise ForeignStore(
            f"{place} holds a key {keys.mark!r} of another program (found {program!r}); name another database or prefix="
        )
    if int(form) > LAYOUT:
        raise newer(f"the store under {keys.prefix!r} of {place}", int(form), LAYOUT)
    return int(form)


def _facts(info: Any, place: str) -> dict[str, str]:
    """What INFO told; nothing where it may not be asked."""
    if isinstance(info, Exception):
        if code_of(info) in ("NOPERM", ""):
            return {}
        if code_of(info) == "NOAUTH":
            raise info  # whoever connects says what is missing
        raise translate(info, place) from info
    text = info.decode(errors="replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))


def _settings(found: Any) -> dict[str, str]:
    """What CONFIG GET told; nothing where it may not be asked."""
    if isinstance(found, Exception):
        return {}
    texts = [value.decode(errors="replace") for value in found]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _level(facts: dict[str, str], policy: dict[str, str], append: dict[str, str], most: dict[str, str]) -> Level:
    appendonly = append.get("appendonly")
    told = appendonly == "yes" if appendonly is not None else facts["aof_enabled"] == "1" if "aof_enabled" in facts else None
    return Level(
        policy.get("maxmemory-policy") or facts.get("maxmemory_policy"),
        told,
        append.get("appendfsync"),
        int(facts.get("connected_slaves", "0")),
        int(most["proto-max-bulk-len"]) if most.get("proto-max-bulk-len", "").isdigit() else None,
    )


def _check_version(facts: dict[str, str], place: str) -> None:
    found = facts.get("redis_version")
    if found is None:
        return
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise StoreRefused(f"{place} is Redis {found}, expected 6.2 or newer, or Valkey; update the server")


def _check_policy(level: Level, place: str, said: Said) -> None:
    if level.policy is None:
        said.once(
            f"{place} does not tell its maxmemory-policy (INFO and CONFIG are forbidden); see that it is {_SAFE}: with any "
            "other, a full memory removes parts of runs"
        )
    elif level.policy != _SAFE:
        raise StoreRefused(
            f"{place} has maxmemory-policy {level.policy}, expected {_SAFE}: when its memory is full it would remove parts of "
            f"runs. Set it: CONFIG SET maxmemory-policy {_SAFE}, and the same in redis.conf"
        )


def _say_what_may_be_lost(level: Level, place: str, said: Said, wait_replicas: int) -> None:
    tell: Callable[[str], None] = lambda text: said.once(f"{place} {text}")  # noqa: E731
    match level:
        case Level(appendonly=None):
            tell("does not tell whether it has an append-only file (CONFIG is forbidden); find out what a restart of it loses")
        case Level(appendonly=False):
            tell(
                "has no append-only file: a restart loses every write since its last snapshot, runs that have acted included. "
                "Set appendonly yes and appendfsync always"
            )
        case Level(fsync=None):
            tell("does not tell its appendfsync (CONFIG is forbidden); unless it is always, a power cut loses some writes")
        case Level(fsync=fsync) if fsync != "always":
            lost = "the writes of its last second" if fsync == "everysec" else "whatever the system had not written"
            tell(f"has appendfsync {fsync}: a power cut loses {lost}, acknowledged as they are. Set appendfsync always")
    if level.replicas and not wait_replicas:
        tell(
            f"has {level.replicas} replica(s) that nobody waits for: a failover loses the writes they did not have yet, "
            "acknowledged as they are. Set wait_replicas="
        )
