"""The two remotes over real HTTP: what each request comes to."""

import json
import socket
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from time import monotonic

import pytest

from agent_runtime.mock import Mocks, Switches, SwitchRefused, start_cloud, start_mocks
from tests.mock.asking import (
    ANSWER_SECONDS,
    NEVER_MS,
    SMALL,
    address,
    ask,
    ask_raw,
    assert_refused,
    change,
    counts,
    create,
    created,
    decide,
    key_counts,
    step,
)

# The cloud


def test_a_new_key_creates_and_ids_count_from_one_for_each_kind(mocks: Mocks) -> None:
    answers = [create(mocks.cloud_url, f"run:{n}", kind) for n, kind in enumerate(["server", "database", "server"])]
    assert answers == [
        (200, {"id": "i-0000001", "remote": "created", "kind": "server"}),
        (200, {"id": "db-0000001", "remote": "created", "kind": "database"}),
        (200, {"id": "i-0000002", "remote": "created", "kind": "server"}),
    ]
    assert create(mocks.cloud_url, "run:3", "dns_record") == (
        200,
        {"id": "dns-0000001", "remote": "created", "kind": "dns_record"},
    )


def test_a_repeated_key_gets_the_first_result_and_creates_nothing(mocks: Mocks) -> None:
    create(mocks.cloud_url, "run:0", args={"name": "a", "size": "b"})
    assert create(mocks.cloud_url, "run:0", args={"size": "b", "name": "a"}) == (
        200,
        {"id": "i-0000001", "remote": "already_done", "kind": "server"},
    )
    assert created(mocks.cloud_url) == {"total": 1, "by_kind": {"server": 1}, "by_key": {"run:0": "i-0000001"}}


@pytest.mark.parametrize(("kind", "args"), [("server", {"name": "other"}), ("database", SMALL)])
def test_a_key_with_another_kind_or_other_arguments_is_a_conflict(mocks: Mocks, kind: str, args: dict[str, object]) -> None:
    create(mocks.cloud_url, "run:0")
    status, body = create(mocks.cloud_url, "run:0", kind, args)
    assert (status, body["error"], body["key"]) == (409, "conflict", "run:0")
    assert "i-0000001" in str(body["message"])
    assert created(mocks.cloud_url)["total"] == 1
    assert key_counts(mocks.cloud_url, "run:0") == counts(requests=2, created=1, conflict=1)


def test_the_counters_tell_what_each_request_came_to(mocks: Mocks) -> None:
    for args in (SMALL, SMALL, {"name": "other"}):
        create(mocks.cloud_url, "run:0", args=args)
    create(mocks.cloud_url, "run:1")
    assert ask(mocks.cloud_url, "GET", "/calls") == (
        200,
        {
            "total": 4,
            "by_key": {
                "run:0": counts(requests=3, created=1, already_done=1, conflict=1),
                "run:1": counts(requests=1, created=1),
            },
        },
    )


# The model


def test_the_model_decides_by_how_many_results_there_are(mocks: Mocks) -> None:
    server = {"tool": "create_server", "result": {"id": "i-0000042", "remote": "created", "kind": "server"}}
    database = {"tool": "create_database", "result": "db-0000001"}
    record = {"tool": "create_dns_record", "result": "dns-0000001"}
    assert decide(mocks.model_url, "a", []) == step(1, "create_server", name="srv-1", size="small")
    assert decide(mocks.model_url, "a", [server]) == step(2, "create_database", name="db-2", engine="postgres")
    history = [server, database]
    assert decide(mocks.model_url, "a", history) == step(3, "create_dns_record", name="www-3", target="i-0000042")
    assert decide(mocks.model_url, "a", [*history, record]) == {"text": "done: a web service", "count": 4}


@pytest.mark.parametrize(
    ("server", "target"),
    [
        ({"tool": "create_server", "result": "i-0000007"}, "i-0000007"),
        ({"tool": "create_server", "result": None}, "srv"),
        ({"tool": "create_server", "result": {"other": 1}}, "srv"),
        ("create_server", "srv"),
    ],
)
def test_the_record_points_at_the_server_where_its_id_is_known(mocks: Mocks, server: object, target: str) -> None:
    decided = decide(mocks.model_url, "a", [server, "create_database"])
    assert decided == step(1, "create_dns_record", name="www-1", target=target)


def test_a_step_decided_twice_shows_and_a_second_run_starts_at_one_again(mocks: Mocks) -> None:
    first, again, other = (decide(mocks.model_url, run, []) for run in ("a", "a", "b"))
    assert first == step(1, "create_server", name="srv-1", size="small")
    assert again == step(2, "create_server", name="srv-2", size="small")
    assert other == step(1, "create_server", name="srv-1", size="small")
    assert ask(mocks.model_url, "GET", "/calls") == (200, {"total": 3, "by_run": {"a": 2, "b": 1}})


# The switches


@pytest.mark.parametrize("switch", ["latency_ms", "late_ms"])
def test_slowness_delays_the_answer_and_not_the_counters(mocks: Mocks, switch: str) -> None:
    change(mocks.cloud_url, {switch: NEVER_MS})
    with pytest.raises(TimeoutError):
        create(mocks.cloud_url, "run:0", patience_seconds=0.1)
    assert key_counts(mocks.cloud_url, "run:0")["requests"] == 1
    assert created(mocks.cloud_url)["total"] == (0 if switch == "latency_ms" else 1)


def test_slowness_ends_and_the_answer_comes(mocks: Mocks) -> None:
    change(mocks.model_url, {"latency_ms": 30, "late_ms": 20})
    begin = monotonic()
    assert decide(mocks.model_url, "a", [])["count"] == 1
    assert monotonic() - begin >= 0.05


def test_a_dropped_answer_is_acted_upon(mocks: Mocks) -> None:
    change(mocks.cloud_url, {"drop": 2})
    for _ in range(2):
        with pytest.raises(RemoteDisconnected):
            create(mocks.cloud_url, "run:0")
    assert create(mocks.cloud_url, "run:0")[1]["remote"] == "already_done"
    assert key_counts(mocks.cloud_url, "run:0") == counts(requests=3, created=1, already_done=2)
    assert ask(mocks.cloud_url, "GET", "/switches")[1] == Switches().values()


def test_a_dropped_decision_was_counted(mocks: Mocks) -> None:
    change(mocks.model_url, {"drop": 1})
    with pytest.raises(RemoteDisconnected):
        decide(mocks.model_url, "a", [])
    assert decide(mocks.model_url, "a", [])["count"] == 2


def test_a_refused_request_is_counted_and_does_nothing(mocks: Mocks) -> None:
    change(mocks.cloud_url, {"refuse": 1, "drop": 1})
    assert create(mocks.cloud_url, "run:0")[0] == 503
    assert created(mocks.cloud_url)["total"] == 0
    with pytest.raises(RemoteDisconnected):
        create(mocks.cloud_url, "run:0")
    assert key_counts(mocks.cloud_url, "run:0") == counts(requests=2, created=1)


def test_a_cloud_that_forgets_creates_again_and_remembers_the_newest(mocks: Mocks) -> None:
    create(mocks.cloud_url, "run:0")
    change(mocks.cloud_url, {"forget": True})
    assert create(mocks.cloud_url, "run:0")[1] == {"id": "i-0000002", "remote": "created", "kind": "server"}
    change(mocks.cloud_url, {"forget": False})
    assert create(mocks.cloud_url, "run:0")[1] == {"id": "i-0000002", "remote": "already_done", "kind": "server"}
    assert created(mocks.cloud_url) == {"total": 2, "by_kind": {"server": 2}, "by_key": {"run:0": "i-0000002"}}


def test_a_keyless_cloud_needs_no_key_and_creates_each_time(mocks: Mocks) -> None:
    assert create(mocks.cloud_url, None)[0] == 400
    change(mocks.cloud_url, {"keyless": True})
    ids = [create(mocks.cloud_url, key)[1]["id"] for key in (None, None, "run:0", "run:0")]
    assert ids == ["i-0000001", "i-0000002", "i-0000003", "i-0000004"]
    assert ask(mocks.cloud_url, "GET", "/calls")[1] == {
        "total": 4,
        "by_key": {"run:0": counts(requests=2, created=2)},
    }


def test_each_remote_has_its_own_switches(mocks: Mocks) -> None:
    change(mocks.cloud_url, {"refuse": 5})
    assert decide(mocks.model_url, "a", [])["count"] == 1
    assert ask(mocks.model_url, "GET", "/switches")[1]["refuse"] == 0


def test_switches_are_set_at_the_start_and_outlive_it(state: Path) -> None:
    with start_mocks(state, switches=Switches(late_ms=1, drop=3), model_switches={"drop": 0}) as mocks:
        assert ask(mocks.cloud_url, "GET", "/switches")[1] == Switches(late_ms=1, drop=3).values()
        assert ask(mocks.model_url, "GET", "/switches")[1] == Switches(late_ms=1).values()
    with start_cloud(state, switches={"refuse": 1}) as cloud:
        assert ask(cloud.url, "GET", "/switches")[1] == Switches(late_ms=1, drop=3, refuse=1).values()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"latency": 5}, "known are latency_ms, late_ms, drop, refuse, forget, keyless"),
        ({"drop": -1}, "drop takes 0 to"),
        ({"drop": True}, "drop takes a whole number"),
        ({"late_ms": 1.5}, "late_ms takes a whole number"),
        ({"late_ms": 10**30}, "late_ms takes 0 to"),
        ({"forget": 1}, "forget takes true or false"),
    ],
)
def test_a_switch_that_cannot_be_is_refused_and_changes_nothing(mocks: Mocks, changes: dict[str, object], said: str) -> None:
    status, body = ask(mocks.cloud_url, "POST", "/switches", {"refuse": 1, **changes})
    assert status == 400
    assert said in str(body["message"])
    assert ask(mocks.cloud_url, "GET", "/switches")[1] == Switches().values()
    with pytest.raises(SwitchRefused, match=said):
        Switches().changed(changes)


# Requests that make no sense


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b'{"kind": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b"", "not JSON"),
        (b'{"args": {}}', '"kind" must be one of server, database, dns_record'),
        (b'{"kind": "toaster", "args": {}}', '"kind" must be one of'),
        (b'{"kind": ["server"], "args": {}}', '"kind" must be one of'),
        (b'{"kind": "server"}', '"args" must be an object'),
        (b'{"kind": "server", "args": []}', '"args" must be an object'),
    ],
)
def test_the_cloud_says_what_it_expected(mocks: Mocks, body: bytes, said: str) -> None:
    assert_refused(ask_raw(mocks.cloud_url, "POST", "/create", body, key="run:0"), 400, said)
    assert ask(mocks.cloud_url, "GET", "/calls")[1]["total"] == 0


@pytest.mark.parametrize("key", [None, "", "k" * 256])
def test_the_cloud_wants_a_key_of_1_to_255_characters(mocks: Mocks, key: str | None) -> None:
    assert_refused(create(mocks.cloud_url, key), 400, "Idempotency-Key")
    assert create(mocks.cloud_url, "k" * 255)[0] == 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"goal": "g", "history": []}, '"run" must be a text'),
        ({"run": "", "goal": "g", "history": []}, '"run" must be a text'),
        ({"run": "\ud800", "goal": "g", "history": []}, '"run" must be a text'),
        ({"run": "a", "goal": 1, "history": []}, '"goal" must be a text'),
        ({"run": "a", "goal": "g"}, '"history" must be a list'),
        ({"run": "a", "goal": "g", "history": [1]}, "each step of"),
        ({"run": "a", "goal": "g", "history": [{"tool": "create_server"}]}, "each step of"),
    ],
)
def test_the_model_says_what_it_expected(mocks: Mocks, fields: dict[str, object], said: str) -> None:
    assert_refused(ask(mocks.model_url, "POST", "/decide", fields), 400, said)
    assert ask(mocks.model_url, "GET", "/calls")[1]["total"] == 0


def test_a_wrong_path_or_method_is_told_the_right_ones(mocks: Mocks) -> None:
    assert_refused(ask(mocks.cloud_url, "POST", "/decide", {}), 404, "POST /create, GET /created, GET /calls")
    assert_refused(ask(mocks.cloud_url, "GET", "/create"), 405, "/create takes POST, not GET")
    assert_refused(ask(mocks.model_url, "DELETE", "/switches"), 405, "/switches takes GET, POST, not DELETE")
    assert ask_raw(mocks.model_url, "HEAD", "/calls", b"") == (405, {})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Transfer-Encoding: chunked\r\n", 411),
        (b"Content-Length: many\r\n", 400),
        (b"Content-Length: 99999999999\r\n", 413),
        (b"no colon\r\n" * 200, 431),
    ],
)
def test_a_request_that_cannot_be_read_is_answered_in_json_and_the_connection_closed(
    mocks: Mocks, headers: bytes, status: int
) -> None:
    with socket.create_connection(address(mocks.cloud_url), ANSWER_SECONDS) as connection:
        connection.sendall(b"POST /create HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert json.loads(body)["message"]


def test_a_client_that_leaves_in_the_middle_of_its_request_has_asked_for_nothing(mocks: Mocks) -> None:
    head = b"POST /create HTTP/1.1\r\nHost: x\r\nIdempotency-Key: run:0\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(address(mocks.cloud_url), ANSWER_SECONDS) as connection:
        connection.sendall(head + b'{"kind": "server", "args": {}}')
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert ask(mocks.cloud_url, "GET", "/calls")[1]["total"] == 0


def test_a_connection_serves_many_requests_also_after_a_bad_one(mocks: Mocks) -> None:
    connection = HTTPConnection(*address(mocks.cloud_url), timeout=ANSWER_SECONDS)
    statuses = []
    for body in (b'{"kind": "server", "args": {}}', b"nonsense", b'{"kind": "server", "args": {}}'):
        connection.request("POST", "/create", body, {"Idempotency-Key": "run:0"})
        own_port = connection.sock.getsockname()[1]
        response = connection.getresponse()
        response.read()
        statuses.append((response.status, own_port))
    connection.close()
    assert [status for status, _ in statuses] == [200, 400, 200]
    assert len({own_port for _, own_port in statuses}) == 1
