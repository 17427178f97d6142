"""Asks the mock remotes over HTTP what they saw of a run; fails unless everything was made exactly once."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict
from urllib.request import urlopen

from agent_runtime.mock import start_mocks

KINDS = ("server", "database", "dns_record")
DECISIONS = len(KINDS) + 1
"""One for each call, and the last one, which asks for none."""


class Count(TypedDict):
    requests: int
    created: int
    already_done: int


class Calls(TypedDict):
    by_key: dict[str, Count]


class Created(TypedDict):
    by_kind: dict[str, int]
    by_key: dict[str, str]


class Asked(TypedDict):
    by_run: dict[str, int]


def main(state: str, run: str) -> int:
    """The exit code: 0 if the remotes saw what they should have, else 1."""
    with start_mocks(Path(state)) as mocks:
        calls: Calls = _get(f"{mocks.cloud_url}/calls")
        created: Created = _get(f"{mocks.cloud_url}/created")
        asked: Asked = _get(f"{mocks.model_url}/calls")
    requests = asked["by_run"].get(run, 0)
    _show(calls, created, requests)
    wrong = _what_is_wrong(calls, created["by_kind"], requests)
    print(f"\n{wrong or 'One server exists. Nothing was decided twice, and nothing was made twice.'}")
    return 1 if wrong else 0


def _show(calls: Calls, created: Created, requests: int) -> None:
    print("   key       requests   created   already done   exists")
    for key, count in calls["by_key"].items():
        exists = created["by_key"].get(key, "nothing")
        print(f"   {key:<10}{count['requests']:>8}{count['created']:>10}{count['already_done']:>15}   {exists}")
    print(f"\n   model     {requests:>8} requests, {DECISIONS} decisions")


def _what_is_wrong(calls: Calls, by_kind: Mapping[str, int], requests: int) -> str:
    """What differs from a run in which nothing went wrong; empty if nothing does."""
    servers = by_kind.get("server", 0)
    if servers != 1:
        return f"{servers} servers exist, expected one."
    if by_kind != dict.fromkeys(KINDS, 1):
        return f"Expected one of each kind to exist, found {by_kind}."
    again = [count["already_done"] for count in calls["by_key"].values()]
    if again != [1, 0, 0]:
        return f"Expected the first call, and no other, to be sent twice, found {again} calls sent again."
    return "" if requests == DECISIONS else f"Expected {DECISIONS} model requests, found {requests}."


def _get(url: str) -> Any:
    """The JSON at an address, which has the shape that its remote's README shows."""
    with urlopen(url) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
