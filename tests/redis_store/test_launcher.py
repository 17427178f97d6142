"""The servers of these tests are real, keep what they were told through a kill, and never outlive who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.redis_servers import RedisOrigin, RedisServer, redis_origins, until

TOP = Path(__file__).resolve().parent.parent.parent
_HOLDER = """
import sys, time
from tests.redis_servers import RedisCluster, RedisServer, redis_origins
program = redis_origins()[0].program
with RedisServer(program) as server, RedisCluster(program) as cluster:
    print(*(each.pid for each in (server, *cluster.nodes)), server.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("origin", redis_origins(), ids=lambda origin: origin.name)
def test_a_server_that_is_killed_and_started_again_has_what_it_acknowledged(origin: RedisOrigin) -> None:
    with RedisServer(origin.program) as server:
        for i in range(50):
            server.tell("RPUSH", "kept", i)
        server.kill()
        server.start()
        assert server.tell("LLEN", "kept") == 50
        folder = server.folder
    assert not folder.exists()


def test_servers_are_gone_when_who_started_them_was_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], cwd=TOP, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    *pids, folder = holder.stdout.readline().split()
    assert len(pids) == 4
    assert all(_is_alive(int(pid)) for pid in pids)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    until(lambda: not any(_is_alive(int(pid)) for pid in pids))
    with RedisServer(redis_origins()[0].program):  # whoever comes next clears up
        assert not Path(folder).exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
