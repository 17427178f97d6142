"""The URL of a Postgres store, taken apart as far as it may be shown: never its password."""

from __future__ import annotations

import re
from typing import Any

from agent_runtime.errors import InvalidSetting
from agent_runtime.stores.redis_url import SCHEMES as REDIS_SCHEMES
from agent_runtime.stores.redis_url import place_of as redis_place_of
from agent_runtime.stores.url_options import Reader, seconds, take_options, truth, word

SCHEMES = ("postgresql", "postgres")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]@,/]*)(:[0-9]+)?")
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_NAME_OR_NOTHING = re.compile(f"({_NAME.pattern})?")
_LONGEST_NAME = 63
_LONGEST_SUFFIX = len("checkpoints_pkey")


def shown_url(url: str) -> str:
    """A store's URL as it may be printed: a password is left out, and so is everything that could be part of one."""
    scheme, mark, rest = url.partition("://")
    if scheme in REDIS_SCHEMES and mark:
        return redis_place_of(url)
    base, plus, driver = scheme.partition("+")  # of SQLAlchemy's URLs
    if base not in SCHEMES or not mark:
        return url if "@" not in url else f"{scheme.partition('@')[0].partition(':')[0]}:…"
    try:
        return f"{base}{plus}{driver}{place_of(f'{base}://{rest}').removeprefix(base)}"
    except InvalidSetting:
        return f"{scheme}://…"


def place_of(url: str) -> str:
    """`postgresql://user@host:port/database`, or `InvalidSetting` where this is no such URL."""
    scheme, mark, rest = url.partition("://")
    rest = rest.partition("?")[0]
    authority, slash, database = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    wrong = (
        scheme not in SCHEMES
        or not mark
        or "#" in rest
        or "@" in database
        or "@" in credentials
        or not all(_HOST.fullmatch(host) for host in hosts.split(","))
    )
    if wrong:
        raise InvalidSetting(
            "a Postgres store is postgresql://USER:PASSWORD@HOST:PORT/DATABASE, found a URL that cannot be taken apart so; "
            "write special characters of user and password as %XX (the URL is not shown here: it may hold a password)"
        )
    return f"{scheme}://{credentials.partition(':')[0]}{at}{hosts}{slash}{database}"


def take_apart(url: str) -> tuple[str, dict[str, Any]]:
    """The URL as the driver gets it, and the options of the store that stood behind its `?`."""
    return take_options(url, _READERS)


def each_host(url: str) -> list[str]:
    """The URL once for each of its hosts, in their order."""
    scheme, mark, rest = url.partition("://")
    end = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    credentials, at, hosts = rest[:end].rpartition("@")
    return [f"{scheme}{mark}{credentials}{at}{host}{rest[end:]}" for host in hosts.split(",")]


def check_names(schema: str, prefix: str) -> None:
    """Refuse a schema or table prefix that is no plain name: both become part of every statement."""
    for option, name, form, most in (
        ("schema", schema, _NAME, _LONGEST_NAME),
        ("prefix", prefix, _NAME_OR_NOTHING, _LONGEST_NAME - _LONGEST_SUFFIX),
    ):
        if not form.fullmatch(name) or len(name) > most:
            raise InvalidSetting(
                f"{option}= is a plain name: lower-case letters, digits and _, not beginning with a digit, at most {most} "
                f"characters; found {name!r}"
            )
    if schema.startswith("pg_") or schema == "information_schema":
        raise InvalidSetting(f"schema= {schema!r} belongs to Postgres itself; choose another")


_READERS: dict[str, Reader] = {"schema": word, "prefix": word, "pooler": truth, "timeout_seconds": seconds}
