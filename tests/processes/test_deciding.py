"""People who decide, as processes: two who answer at the same instant, a cancel from elsewhere, the command line."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from agent_runtime import Outcome, Runs, cli
from agent_runtime.approvals import read_verdict
from agent_runtime.ids import RunId
from agent_runtime.journal.keys import key_beside
from agent_runtime.journal.records import RecordKind
from agent_runtime.run import RunContext
from agent_runtime.stores import open_store
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import Asked, Bench, Script, error_of
from tests.processes.decider import KEY
from tests.processes.job import Job, environment, until
from tests.processes.test_operating import assert_error, command, plain
from tests.servers import Server

TOP = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60
CHARGE: list[Asked] = [("charge", {"amount": 5})]


@contextmanager
def decider(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `decider.py` that is gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.processes.decider", *words], cwd=TOP, env=environment({"PYTHONPATH": str(TOP)}),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that it says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended without a word"
    said: dict[str, Any] = json.loads(line)
    return said


def order(process: subprocess.Popen[str], **what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


# Two answers at the same instant.


async def pause_many(url: str, count: int) -> Bench:
    bench, store = Bench(needs_approval=True), open_store(url)
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    await asyncio.gather(
        *(run_tool_loop(Script(CHARGE, "done"), bench.registry, "go", run_id=f"run-{i}", **options) for i in range(count))
    )
    await store.close()
    return bench


async def recover_many(url: str, bench: Bench, count: int) -> dict[str, str]:
    """Who is on record as having answered each run; it acts on that one answer."""
    store, recorded = open_store(url), {}
    for run in (f"run-{i}" for i in range(count)):
        result = await recover_tool_loop(
            Script(CHARGE, "done"), bench.registry, run, checkpoints=store, checkpoint_key=KEY
        )  # fmt: skip
        assert result.status == "done"
        verdicts = [read_verdict(each.body) for each in await store.calls(RunId(run)) if each.kind == RecordKind.VERDICT]
        [recorded[run]] = [verdict.by for verdict in verdicts]
    await store.close()
    return recorded


def answer_at_once(url: str, count: int) -> None:
    bench = asyncio.run(pause_many(url, count))
    winners: dict[str, str] = {}
    with decider("answer", url, "ana") as ana, decider("answer", url, "ben") as ben:
        assert {told(ana)["ready"], told(ben)["ready"]} == {"ana", "ben"}
        for i in range(count):
            at = monotonic() + 0.008
            order(ana, run=f"run-{i}", at=at, answer="approve")
            order(ben, run=f"run-{i}", at=at, answer="deny")
            said = {"ana": told(ana)["told"], "ben": told(ben)["told"]}
            [winner] = [name for name, what in said.items() if what == "yes"]
            [no] = [what for what in said.values() if what != "yes"]
            assert f"by {winner}; the first answer stands" in no
            winners[f"run-{i}"] = winner
    assert asyncio.run(recover_many(url, bench, count)) == winners
    assert bench.effects == sum(winner == "ana" for winner in winners.values()), "it acts on an approval, and once"


def test_of_two_processes_that_answer_one_request_at_the_same_instant_one_is_told_yes_a_hundred_times(tmp_path: Path) -> None:
    answer_at_once(f"sqlite:///{tmp_path / 'runs.db'}", 100)


def test_on_postgres_too_one_of_two_processes_is_told_yes_and_a_person_decides_from_outside(one_postgres: Server) -> None:
    url = one_postgres.url_as("postgres", database=one_postgres.database())
    answer_at_once(url, 25)
    asyncio.run(decide_from_outside(url))


async def decide_from_outside(url: str) -> None:
    """Settle, cancel, settle what has ended, release nothing, delete."""
    bench, store = Bench(), open_store(url)
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    runs = Runs(store, checkpoint_key=KEY)
    for run in ("settled", "cancelled"):
        await block(bench, run, **options)
    assert await runs.settle("settled", "0", Outcome.done("paid"), by="ana", why="saw it")
    assert (await recover_tool_loop(Script(CHARGE, "done"), bench.registry, "settled", **options)).status == "done"
    assert await runs.cancel("cancelled", by="ana", why="enough")
    assert not await runs.cancel("cancelled", by="ben", why="enough")
    assert await runs.settle("cancelled", "0", Outcome.not_done(), by="ana", why="saw it")
    assert {info.run_id: info.status for info in await runs.list(after="b", limit=2)} == {
        "cancelled": "cancelled",
        "run-0": "done",
    }
    assert list(await runs.verify()) == []
    await runs.delete("cancelled", by="ana")
    assert "cancelled" not in {info.run_id for info in await runs.list()}
    assert list(await runs.pending()) == []
    await store.close()


async def block(bench: Bench, run: str, **options: Any) -> None:
    """Leave a run with a call in doubt, given back by its worker."""

    async def after(_: str, __: dict[str, object]) -> None:
        raise RuntimeError("after which nobody knows")

    bench.after = after
    assert await error_of(run_tool_loop(Script(CHARGE, "done"), bench.registry, "go", run_id=run, **options))
    bench.after = Bench().after


# A cancel from another process.


def cancel(url: str, *words: str) -> dict[str, Any]:
    said = subprocess.run(
        [sys.executable, "-m", "agent_runtime", "cancel", "run", "--store", url, "--json", *words], cwd=TOP,
        env=environment({"CHECKPOINT_KEY": _base64(KEY)}), capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        check=True,
    )  # fmt: skip
    plain: dict[str, Any] = json.loads(said.stdout)
    return plain


def _base64(key: bytes) -> str:
    return base64.b64encode(key).decode()


async def show(url: str) -> Any:
    store = open_store(url)
    try:
        return await Runs(store, checkpoint_key=KEY).show("run")
    finally:
        await store.close()


@pytest.mark.parametrize("is_dead", [False, True], ids=["its worker lives", "its worker was killed"])
def test_a_cancel_from_elsewhere_keeps_the_finished_sibling_and_is_for_good(tmp_path: Path, *, is_dead: bool) -> None:
    url, log = f"sqlite:///{tmp_path / 'runs.db'}", tmp_path / "log"
    with decider("work", url, "run", str(log)) as worker:
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 2, "both calls are on their way")
        until(lambda: "0.0" in _ended(url), "one of them is recorded as done")
        if is_dead:
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(PATIENCE_SECONDS)
        first = cancel(url, "--by", "ana", "--why", "a mistake")
        assert first["cancelled"] is True
        if not is_dead:
            assert told(worker) == {"status": "cancelled"}
    second = cancel(url, "--by", "ben")
    assert (second["cancelled"], second["status"]) == (False, "cancelled")
    with decider("work", url, "run", str(log)) as again:
        assert told(again) == {"status": "cancelled"}
    report = asyncio.run(show(url))
    assert report.timeline.cancelled == {"by": "ana", "why": "a mistake"}
    assert report.timeline.calls["0.0"].outcome == {"result": "quick 1"}
    assert [call.call for call in report.timeline.doubts] == ["0.1"]
    assert sorted(log.read_text().splitlines()) == ["endless", "quick"], "nothing ran again"


def _ended(url: str) -> Sequence[str]:
    report = asyncio.run(show(url))
    return [call.call for call in report.timeline.calls.values() if call.outcome]


# The command line.


@pytest.fixture
def waiting(job: Job) -> Job:
    """A run that waits for approval, one with a call in doubt, and one that is done."""
    key_beside(job.key, KEY)
    asyncio.run(_fill(job))
    return job


async def _fill(job: Job) -> None:
    store = open_store(f"sqlite:///{job.store}")
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    asking = Bench(needs_approval=True, approval_expires=3600)
    evil = "ana\x1b]0;title\x07\x7f\u202e"
    await run_tool_loop(Script(CHARGE, "done"), asking.registry, "go", run_id="asks", ctx=RunContext(user="u"), **options)
    await run_tool_loop(Script([("email", {"to": evil})], "done"), asking.registry, "go", run_id="evil", **options)
    await block(Bench(), "doubtful", **options)
    await run_tool_loop(Script("done"), ToolRegistry(), "go", run_id="over", **options)
    await store.close()


async def _recovered(job: Job, bench: Bench, run: str) -> list[str]:
    """What the tools gave, once a worker has gone on with the run."""
    store = open_store(f"sqlite:///{job.store}")
    result = await recover_tool_loop(Script(CHARGE, "done"), bench.registry, run, checkpoints=store, checkpoint_key=KEY)
    await store.close()
    return [message.content for message in result.messages if message.role == "tool"]


def test_what_waits_is_listed_and_answered_without_tools_and_models(waiting: Job) -> None:
    head, *rows = command(waiting, "approvals").stdout.splitlines()
    assert head.split() == ["RUN", "REQUEST", "TOOL", "STEP", "ASKED", "EXPIRES", "ANSWERED", "ARGUMENTS"]
    assert [row.split()[:3] for row in rows] == [["asks", "0", "charge"], ["evil", "0", "email"]]
    assert rows[0].endswith('{"amount": 5}')
    [asked] = plain(waiting, "approvals", "asks")
    assert (asked["run"], asked["request"], asked["args"], asked["key"]) == ("asks", "0", {"amount": 5}, "asks:0")
    assert plain(waiting, "approvals", "over") == []

    answered = command(waiting, "approve", "asks", "0", "--by", "ana", "--edit", '{"amount": 3}', "--note", "less")
    assert (answered.returncode, answered.stderr) == (0, "")
    assert (
        answered.stdout == "run asks is told: request 0 is approved with other arguments, which whoever has the tools checks\n"
    )
    assert_error(command(waiting, "deny", "asks", "0"), "VerdictRefused", "edit, by ana", "the first answer stands")
    assert_error(command(waiting, "approve", "asks", "7"), "VerdictRefused", "open are ['0']")
    assert_error(command(waiting, "approve", "over", "0"), "VerdictRefused", "no request")
    assert_error(command(waiting, "approve", "nobody", "0"), "CheckpointNotFound", "'nobody'")
    asking = Bench(needs_approval=True)
    assert asyncio.run(_recovered(waiting, asking, "asks")) == ["effect 1"]
    assert [effect.args for effect in asking.remote.effects] == [{"amount": 3}]
    assert plain(waiting, "deny", "evil", "0", "--note", "no") == [{"run": "evil", "request": "0", "answered": "denied"}]


def test_no_control_character_of_a_request_reaches_the_terminal(waiting: Job) -> None:
    for words in (("approvals",), ("approvals", "--json"), ("show", "evil"), ("show", "evil", "--json"), ("runs",)):
        said = command(waiting, *words).stdout
        assert "title" in said, words
        assert not set(said) & set("\x1b\x07\x7f\u202e"), words


def test_a_call_in_doubt_is_shown_and_settled(waiting: Job) -> None:
    shown = command(waiting, "show", "doubtful").stdout
    assert 'in doubt: call 0, charge{"amount": 5}, attempt 1; nobody knows whether it happened' in shown
    [listed] = plain(waiting, "runs", "--status", "in-doubt")
    assert listed["why"] == "in doubt: charge amount=5 (call 0)"
    assert_error(command(waiting, "settle", "doubtful", "1", "--rerun", "--why", "x"), "NotInDoubt", "no such call", "['0']")
    assert_error(command(waiting, "settle", "doubtful", "0", "--rerun", "--why", " "), "InvalidSetting", "why='…'")
    assert_error(command(waiting, "settle", "doubtful", "0", "--done", "NaN", "--why", "x"), "Unrecordable")
    settled = command(waiting, "settle", "doubtful", "0", "--done", '{"id": 7}', "--why", "saw it", "--by", "ana")
    assert (settled.returncode, settled.stdout) == (0, "run doubtful call 0 is settled: done\n")
    assert "settled call 0 as done, by ana (saw it)" in command(waiting, "show", "doubtful").stdout
    assert asyncio.run(_recovered(waiting, Bench(), "doubtful")) == ['{"id":7}']


def test_a_call_that_gave_nothing_is_settled_as_done_without_a_result(waiting: Job) -> None:
    assert_error(command(waiting, "settle", "doubtful", "1", "--done", "--why", "x"), "NotInDoubt", "no such call")
    assert plain(waiting, "settle", "doubtful", "0", "--done", "--why", "saw it") == [
        {"run": "doubtful", "call": "0", "settled": "done", "recorded": True}
    ]
    assert asyncio.run(_recovered(waiting, Bench(), "doubtful")) == ["null"]


def test_an_answer_that_waits_for_a_worker_is_shown_beside_its_request(waiting: Job) -> None:
    [shown] = plain(waiting, "show", "asks")
    assert shown["left"] == []
    command(waiting, "deny", "asks", "0", "--by", "ana\x1b", "--note", "too much")
    said = "answered: deny, by ana\\x1b (too much); whoever works the run takes it up"
    assert f'waiting for approval: call 0, charge{{"amount": 5}}; {said}' in command(waiting, "show", "asks").stdout
    head, asks, evil = command(waiting, "approvals").stdout.splitlines()
    assert head.split()[4:] == ["ASKED", "EXPIRES", "ANSWERED", "ARGUMENTS"]
    assert (" deny, by ana" in asks, " by " in evil) == (True, False)
    [shown] = plain(waiting, "show", "asks")
    assert shown["left"] == [{"what": "verdict", "call": "0", "how": "deny", "by": "ana\x1b", "why": "too much"}]
    assert [each["answered"] for each in plain(waiting, "approvals")] == [
        {"decision": "deny", "by": "ana\x1b", "note": "too much"},
        None,
    ]


def test_a_run_is_cancelled_once_and_deleted_once_decided_about(waiting: Job) -> None:
    assert plain(waiting, "cancel", "asks", "--by", "ana", "--why", "enough") == [
        {"run": "asks", "cancelled": True, "status": "cancelled"}
    ]
    again = command(waiting, "cancel", "asks", "--by", "ben")
    assert (again.returncode, again.stdout) == (0, "run asks is cancelled; nothing was changed\n")
    [shown] = plain(waiting, "show", "asks")
    assert (shown["why"], shown["pending"]) == ("cancelled by ana: enough", [])
    assert_error(command(waiting, "approve", "asks", "0"), "CheckpointConflict", "has ended (cancelled)")
    assert_error(command(waiting, "delete", "doubtful"), "CheckpointConflict", "calls in doubt (0)", "force")
    assert plain(waiting, "delete", "doubtful", "--force") == [{"run": "doubtful", "deleted": True}]
    assert command(waiting, "delete", "over").stdout == "run over is deleted, and its id is not used again\n"
    assert_error(command(waiting, "delete", "over"), "CheckpointConflict", "was deleted")
    assert [each["run"] for each in plain(waiting, "runs")] == ["asks", "evil"]


@pytest.mark.parametrize(
    "words",
    [
        ("approve", "run"),
        ("approve", "run", "0", "--edit", "{"),
        ("approve", "run", "0", "--edit", "[1]"),
        ("deny", "run", "0", "--edit", "{}"),
        ("settle", "run", "0", "--why", "x"),
        ("settle", "run", "0", "--done", "1"),
        ("settle", "run", "0", "--done", "1", "--rerun", "--why", "x"),
        ("settle", "run", "0", "--done", "{", "--why", "x"),
        ("cancel",),
        ("delete", "run", "--why", "x"),
    ],
    ids=" ".join,
)
def test_a_decision_that_cannot_be_is_refused_with_its_usage(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: agent-runtime")


@pytest.mark.parametrize(
    "words", [("approvals",), ("approve", "x", "0"), ("deny", "x", "0"), ("cancel", "x"), ("delete", "x")], ids=" ".join
)
def test_deciding_about_a_store_that_is_not_there_makes_none(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    assert cli.main(words) == 1
    assert capsys.readouterr().err.startswith("ERROR InvalidSetting: there is no store at")
    assert list(tmp_path.iterdir()) == []
