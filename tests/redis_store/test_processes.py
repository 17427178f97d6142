"""A real worker that dies while its run is in Redis, and a supervisor that has it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.redis_servers import RedisServer

ENDED_SECONDS = 100


def agent(folder: Path, server: RedisServer, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package in a folder of its own, with its runs in Redis."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE")}
    environment |= {"DATABASE_URL": f"{server.url}?prefix={folder.name}", "LEASE": "2", "HEARTBEAT": "0.5", "POLL": "0.1"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=kept | environment, capture_output=True, text=True, check=False,
        timeout=ENDED_SECONDS,
    )  # fmt: skip


def test_a_run_whose_worker_died_after_an_act_is_ended_by_a_supervisor(redis_server: RedisServer, tmp_path: Path) -> None:
    died = agent(tmp_path, redis_server, "agent_runtime", CRASH_AT="after_call")
    assert died.returncode == 1, died.stderr
    assert "CRASH_AT=after_call" in died.stdout + died.stderr
    watched = agent(tmp_path, redis_server, "agent_runtime.supervisor", "--until-idle")
    assert watched.returncode == 0, watched.stderr
    listed = agent(tmp_path, redis_server, "agent_runtime", "runs")
    assert listed.stdout.count(" done ") == 1, listed.stdout + watched.stdout + watched.stderr
    verified = agent(tmp_path, redis_server, "agent_runtime", "verify")
    assert "verified 1 run" in verified.stdout
    assert "none corrupt" in verified.stdout
