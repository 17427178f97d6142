"""The URL of a Redis store: what of it is ours, what is the client's, and what may be shown. Never its password."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from agent_runtime.errors import InvalidSetting
from agent_runtime.stores.url_options import Reader, seconds, take_options, truth, whole_number, word

SCHEMES = ("redis", "rediss")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class Address(NamedTuple):
    """A URL taken apart: the client's part, whether it leads to a cluster, and the options of the store."""

    url: str
    is_cluster: bool
    options: dict[str, Any]


def place_of(url: str) -> str:
    """`redis://user@host:port/number`, without whatever could be part of a password."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("/")
    credentials, at, host = authority.rpartition("@")
    if "@" in path or "#" in rest.partition("?")[0] or not re.fullmatch(r"[\w.:\[\]-]*", host):
        return f"{scheme}://…"
    return f"{scheme}://{credentials.partition(':')[0] if '@' not in credentials else '…'}{at}{host}{slash}{path}"


def take_apart(url: str) -> Address:
    """The parts of a store's URL, or `InvalidSetting` where it is none."""
    front = url.partition("?")[0]
    scheme, mark, rest = front.partition("://")
    if scheme not in SCHEMES or not mark or not rest.rpartition("@")[2].partition("/")[0]:
        raise InvalidSetting(
            "a Redis store is redis://USER:PASSWORD@HOST:PORT/NUMBER, or rediss:// with TLS, found a URL that cannot be taken "
            "apart so (it is not shown here: it may hold a password)"
        )
    theirs, options = take_options(url, _READERS)
    is_cluster = bool(options.pop("cluster", False))
    return Address(theirs, is_cluster, options)


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that could be taken for another's, or for a part of a key of ours."""
    if not _PREFIX.fullmatch(prefix):
        raise InvalidSetting(
            f"prefix= is 1 to 64 letters, digits and the characters _ . : -, so that it stands for itself; found {prefix!r}"
        )


def make_client(url: str, *, is_cluster: bool) -> Callable[[], Any]:
    """What makes clients for the URL, once the driver is there and has taken it."""

    def make() -> Any:
        try:
            from redis.asyncio import Redis, RedisCluster
        except ImportError as error:
            raise InvalidSetting(
                "a Redis store needs the driver redis, which is not installed; pip install 'durable-agent-runtime[redis]'"
            ) from error
        try:
            return RedisCluster.from_url(url) if is_cluster else Redis.from_url(url)
        except (ValueError, TypeError, AttributeError) as error:
            # Without its cause: the driver may quote the URL.
            raise InvalidSetting(f"{place_of(url)}: the driver refuses the URL ({type(error).__name__}); correct it") from None

    return make


_READERS: dict[str, Reader] = {
    "prefix": word,
    "ttl_s": seconds,
    "wait_replicas": whole_number,
    "cluster": truth,
    "may_lose_writes": truth,
    "timeout_seconds": seconds,
}
