"""The command line: `agent-runtime`, and `python -m agent_runtime` with arguments."""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import sqlite3
import sys
from collections.abc import Sequence

from agent_runtime import __version__
from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.settings import read_settings
from agent_runtime.stores import shown_url

KEY_SIZE = 32
WAL_RESET_FIXED = (3, 51, 3)
"""The SQLite release that fixed a corruption when two connections checkpoint and write at once (its release notes)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        match chosen.command:
            case "provision":
                from agent_runtime import provision

                return provision.main()
            case "keygen":
                print(base64.b64encode(SYSTEM_ENTROPY.draw(KEY_SIZE)).decode())
                return 0
            case "doctor":
                return _doctor(as_json=chosen.json)
            case _:
                parser.print_help()
                return 2
    except AgentRuntimeError as error:
        print(f"ERROR {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agent-runtime", description="Agent runs that survive their worker.")
    parser.add_argument("--version", action="version", version=f"agent-runtime {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("provision", help="work the provisioning agent (as `python -m agent_runtime` does)")
    commands.add_parser("keygen", help="print a fresh checkpoint key, base64")
    doctor = commands.add_parser("doctor", help="say what this machine has, and what is not as it should be")
    doctor.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser


def _doctor(*, as_json: bool) -> int:
    settings = read_settings(os.environ)
    facts = {
        "agent_runtime": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "store": shown_url(settings.database_url),
        "key": "set" if settings.checkpoint_key else "in its file, beside the store or in the working directory",
    }
    warnings = _warnings()
    if as_json:
        print(json.dumps({**facts, "warnings": warnings}))
    else:
        for name, value in facts.items():
            print(f"{name:14} {value}")
        for warning in warnings:
            print(f"warning        {warning}")
    return 0


def _warnings() -> list[str]:
    if sqlite3.sqlite_version_info >= WAL_RESET_FIXED:
        return []
    fixed = ".".join(map(str, WAL_RESET_FIXED))
    return [
        f"SQLite {sqlite3.sqlite_version} is older than {fixed}, which fixed a rare corruption of the write-ahead log when "
        "several processes write one file; use a Python with a newer SQLite where many processes share a store"
    ]
