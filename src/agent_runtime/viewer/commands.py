"""Each action of the viewer as the line of `agent-runtime` that does the same. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

NAME = "NAME"
"""Stands for who says so, where nobody has said who they are."""


def command(verb: str, run_id: str, *places: str, by: str = "", options: Mapping[str, str | None] | None = None) -> str:
    """A line for a shell; an option without a value stands alone."""
    words = ["agent-runtime", verb, "--by", by or NAME]
    for name, value in (options or {}).items():
        words += [f"--{name}"] if value is None else [f"--{name}", value]
    positions = [run_id, *places]
    words += ["--", *positions] if any(each.startswith("-") for each in positions) else positions
    return shlex.join(words)


def edit(run_id: str, call: str, args: Mapping[str, object], *, by: str) -> str:
    """The line that lets a call go out with other arguments."""
    return command("approve", run_id, call, by=by, options={"edit": json.dumps(dict(args))})


def verify(run_id: str) -> str:
    """The line that opens every seal of a run."""
    return shlex.join(["agent-runtime", "verify", *(["--"] if run_id.startswith("-") else []), run_id])
