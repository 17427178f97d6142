"""Asks the mock cloud over HTTP what it saw of a run; fails unless exactly one server exists."""

import json
import sys
from pathlib import Path
from typing import TypedDict
from urllib.request import urlopen

from agent_runtime.mock import start_cloud


class Count(TypedDict):
    requests: int
    created: int
    already_done: int


class Calls(TypedDict):
    by_key: dict[str, Count]


class Created(TypedDict):
    by_kind: dict[str, int]
    by_key: dict[str, str]


def main(state: str) -> int:
    """The exit code: 0 if one server exists, else 1."""
    with start_cloud(Path(state)) as cloud:
        with urlopen(cloud.url + "/calls") as answer:
            calls: Calls = json.load(answer)
        with urlopen(cloud.url + "/created") as answer:
            created: Created = json.load(answer)
    print("   key       requests   created   already done   exists")
    for key, count in calls["by_key"].items():
        exists = created["by_key"].get(key, "nothing")
        print(f"   {key:<10}{count['requests']:>8}{count['created']:>10}{count['already_done']:>15}   {exists}")
    servers = created["by_kind"].get("server", 0)
    print(f"\n{'One server exists' if servers == 1 else f'{servers} servers exist, expected one'}.")
    return 0 if servers == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
