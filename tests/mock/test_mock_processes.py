"""The two remotes as processes: starting, stopping, being killed, and sharing one state file."""

import json
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path

import pytest

from agent_runtime.mock import CannotListen, StateUnusable, Switches, start_cloud, start_mocks, start_model
from agent_runtime.mock.state import MockState
from tests.mock.asking import (
    ANSWER_SECONDS,
    NEVER_MS,
    SMALL,
    address,
    ask,
    command,
    counts,
    create,
    created,
    decide,
    environment,
    key_counts,
    launched,
    until,
)

# Starting, stopping, and what remains


def test_state_outlives_the_servers(state: Path) -> None:
    with start_mocks(state) as mocks:
        create(mocks.cloud_url, "run:0")
        decide(mocks.model_url, "a", [])
    with start_mocks(state) as mocks:
        assert create(mocks.cloud_url, "run:0")[1]["remote"] == "already_done"
        assert create(mocks.cloud_url, "run:1")[1]["id"] == "i-0000002"
        assert key_counts(mocks.cloud_url, "run:0") == counts(requests=2, created=1, already_done=1)
        assert decide(mocks.model_url, "a", [])["count"] == 2


def test_closing_ends_the_waits_and_the_open_connections_and_leaves_no_thread(state: Path) -> None:
    before = set(threading.enumerate())
    mocks = start_mocks(state, cloud_switches={"late_ms": NEVER_MS})
    idle = HTTPConnection(*address(mocks.model_url), timeout=ANSWER_SECONDS)
    idle.connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, mocks.cloud_url, "run:0")
        until(lambda: created(mocks.cloud_url)["total"] == 1)
        mocks.close()
        assert isinstance(waiting.exception(ANSWER_SECONDS), RemoteDisconnected)
    mocks.close()
    idle.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        ask(mocks.model_url, "GET", "/calls")


def test_a_port_in_use_is_named_and_nothing_is_left_behind(state: Path) -> None:
    with start_model(state) as model:
        port = address(model.url)[1]
        with pytest.raises(CannotListen, match=f"port {port} on 127.0.0.1 is in use"):
            start_mocks(state, model_port=port, switches={"refuse": 9})
        assert ask(model.url, "GET", "/switches")[1] == Switches().values()


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    database, text = tmp_path / "other.db", tmp_path / "text.db"
    other = sqlite3.connect(database)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    text.write_text("not a database " * 100)
    for path in (database, text):
        content = path.read_bytes()
        with pytest.raises(StateUnusable, match="give another path"):
            start_cloud(path)
        assert path.read_bytes() == content


def test_importing_the_package_loads_no_server_and_no_database() -> None:
    program = "import sys, agent_runtime.mock; print({'http.server', 'sqlite3', 'socket', 'fcntl'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


# Real processes


def test_two_processes_share_one_file_without_creating_anything_twice(state: Path) -> None:
    keys = [f"run:{n}" for n in range(12)]
    with ExitStack() as running:
        # Both start at the same time on a file that is not there yet.
        processes = [running.enter_context(launched(state)) for _ in range(2)]
        urls = [process.wait_until_ready().cloud_url for process in processes]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: create(urls[n % 2], keys[n // 4]), range(4 * len(keys))))
        made = created(urls[0])
        totals = [ask(url, "GET", "/calls")[1]["total"] for url in urls]
    assert {status for status, _ in answers} == {200}
    assert sorted(str(body["remote"]) for _, body in answers) == ["already_done"] * 36 + ["created"] * 12
    assert made["total"] == 12
    assert {str(body["id"]) for _, body in answers} == {f"i-{n:07d}" for n in range(1, 13)}
    assert totals == [48, 48]


def test_many_processes_may_set_up_the_file_at_once(state: Path) -> None:
    program = (
        "import sys, pathlib; from agent_runtime.mock.state import MockState\n"
        "sys.stdin.read(); MockState(pathlib.Path(sys.argv[1])).arrive('model', 'a')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(state)], env=environment(), stdin=subprocess.PIPE)
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(ANSWER_SECONDS) for process in processes] == [0] * 6
    with start_model(state) as model:
        assert ask(model.url, "GET", "/calls")[1]["total"] == 6


def test_many_threads_may_set_up_the_file_at_once(tmp_path: Path) -> None:
    # Several files, since a mistake here shows only now and then.
    for n in range(20):
        path = tmp_path / f"{n}.db"
        with ThreadPoolExecutor(8) as pool:
            opened = list(pool.map(MockState, [path] * 8))
        for state in opened:
            state.close()


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_ends_the_process_cleanly(state: Path, signal_name: str) -> None:
    with launched(state) as running:
        running.wait_until_ready()
        running.process.send_signal(signal.Signals[signal_name])
        assert running.process.wait(ANSWER_SECONDS) == 0
        assert running.error_output() == ""


def test_a_kill_between_act_and_answer_does_not_undo_the_act(state: Path) -> None:
    with launched(state, "--late-ms", str(NEVER_MS)) as running, ThreadPoolExecutor(1) as pool:
        url = running.wait_until_ready().cloud_url
        waiting = pool.submit(create, url, "run:0")
        until(lambda: created(url)["total"] == 1)
        running.process.kill()
        assert isinstance(waiting.exception(ANSWER_SECONDS), ConnectionError)
    with launched(state, "--late-ms", "0") as running:
        url = running.wait_until_ready().cloud_url
        assert create(url, "run:0")[1] == {"id": "i-0000001", "remote": "already_done", "kind": "server"}
        assert key_counts(url, "run:0") == counts(requests=2, created=1, already_done=1)


def test_mocks_started_inside_a_worker_end_with_it_and_forget_nothing(state: Path) -> None:
    program = (
        "import os, pathlib, sys, urllib.request; from agent_runtime.mock import start_mocks\n"
        "url = start_mocks(pathlib.Path(sys.argv[1]), cloud_switches={'drop': 1}).cloud_url + '/create'\n"
        "headers = {'Idempotency-Key': 'run:0'}; body = sys.argv[2].encode()\n"
        "try: urllib.request.urlopen(urllib.request.Request(url, body, headers))\n"
        "except ConnectionError: os._exit(42)"
    )
    order = json.dumps({"kind": "server", "args": SMALL})
    ended = subprocess.run([sys.executable, "-c", program, str(state), order], env=environment(), check=False)
    assert ended.returncode == 42
    with start_cloud(state) as cloud:
        assert create(cloud.url, "run:0")[1] == {"id": "i-0000001", "remote": "already_done", "kind": "server"}


def test_the_command_line_sets_switches_for_one_remote_or_both(state: Path) -> None:
    with launched(state, "--latency-ms", "7") as running:
        running.wait_until_ready()
    with launched(state, "--switches-for", "cloud", "--drop", "2", "--forget") as running:
        ready = running.wait_until_ready()
        assert ask(ready.cloud_url, "GET", "/switches")[1] == Switches(latency_ms=7, drop=2, forget=True).values()
        assert ask(ready.model_url, "GET", "/switches")[1] == Switches(latency_ms=7).values()


def test_a_port_in_use_ends_the_command_with_advice(state: Path) -> None:
    with start_cloud(state) as cloud:
        port = address(cloud.url)[1]
        ended = command(state, "--cloud-port", str(port))
    assert ended.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "--cloud-port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_option_that_cannot_be_ends_the_command_with_advice(state: Path) -> None:
    for options, said in ((("--drop", "-1"), "drop takes 0 to"), (("--model-port", "70000"), "from 0 to 65535")):
        ended = command(state, *options)
        assert ended.returncode == 2
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
