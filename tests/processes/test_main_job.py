"""The main job at its door: what it says of finished, unfinished and foreign runs, of keys and of settings."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from stat import S_IMODE

import pytest

from agent_runtime import __version__
from agent_runtime.mock import start_mocks
from tests.mock.asking import create
from tests.processes.job import Ended, Job, assert_refused, environment, statuses

RUN = "demo"
RUNNING, DONE = 1, 8
CONTROL_CHARACTERS = "\n\t\x1b[31m"


def unfinished(job: Job, run: str = RUN, **settings: str) -> Ended:
    """A run whose worker died with nothing but its first decision made."""
    return job.run(RUN_ID=run, CRASH_AT="after_decide", **settings)


def key_of(size: int, byte: int = 7) -> str:
    return base64.b64encode(bytes([byte]) * size).decode()


# Runs


def test_a_run_that_is_done_says_so_and_gives_its_result_again_without_a_call(job: Job) -> None:
    first = job.run(RUN_ID=RUN)
    stored, saw = job.dump(), job.saw()
    again = job.run(RUN_ID=RUN)
    assert (again.code, again.err) == (0, "")
    assert again.lines == first.lines[-2:] == [f"INFO done run={RUN} steps=3 llm_calls=4", "done: stand up a web service"]
    assert job.saw() == saw
    assert job.dump() == stored


def test_without_a_run_id_a_fresh_one_is_printed_and_an_unfinished_run_is_named(job: Job) -> None:
    unfinished(job, "left-behind")
    ended = job.run()
    [fresh] = re.findall(r"INFO new run=([0-9a-f]{32})$", ended.out, re.MULTILINE)
    assert 'INFO unfinished run=left-behind hint="RUN_ID=left-behind picks it up"' in ended.lines
    assert f"INFO done run={fresh} steps=3 llm_calls=4" in ended.lines
    assert statuses(job.store) == {"left-behind": RUNNING, fresh: DONE}

    [hint] = re.findall(r'hint="RUN_ID=(\S+) picks it up"', ended.out)
    assert f"INFO done run={hint} steps=3 llm_calls=4" in job.run(RUN_ID=hint).lines, "the hint is a command that works"
    assert not {fresh, "left-behind"} & set(re.split("[ =]", job.run().out)), "no id is drawn twice, and done is done"


@pytest.mark.parametrize("is_done", [False, True], ids=["unfinished", "done"])
def test_another_goal_for_a_known_run_is_refused_and_the_run_is_left_as_it_was(job: Job, is_done: bool) -> None:
    if is_done:
        job.run(RUN_ID=RUN)
    else:
        unfinished(job)
    stored, saw = job.dump(), job.saw()
    said = ("'stand up a web service'", "'mine coins'", "choose another RUN_ID")
    assert_refused(job.run(RUN_ID=RUN, GOAL="mine coins"), "CheckpointConflict", *said)
    assert job.dump() == stored
    assert job.saw() == saw
    assert job.run(RUN_ID=RUN, GOAL="stand up a web service").code == 0


def test_the_goal_of_a_run_is_kept_with_it(job: Job) -> None:
    unfinished(job, GOAL="open a shop")
    assert job.run(RUN_ID=RUN).lines[-1] == "done: open a shop"


@pytest.mark.parametrize(
    ("run_id", "said"),
    [
        ("", "a run id has 1 to 512 characters, found 0"),
        ("x" * 513, "found 513"),
        (f"a{CONTROL_CHARACTERS}b", "printable characters only"),
    ],
    ids=["empty", "over-long", "control characters"],
)
def test_a_run_id_that_cannot_be_is_refused_and_nothing_is_made(job: Job, run_id: str, said: str) -> None:
    ended = job.run(RUN_ID=run_id)
    assert_refused(ended, "InvalidRunId", said)
    assert not set(CONTROL_CHARACTERS[1:3]) & set(ended.err), "control characters never reach the terminal"
    assert job.files() == []


def test_a_run_id_may_hold_every_printable_character_and_512_of_them(job: Job) -> None:
    run_id = ("ü/:%#~ '\"$(x)`😀" * 40)[:512]
    assert unfinished(job, run_id).code == 1
    assert job.run(RUN_ID=run_id).lines[-1] == "done: stand up a web service"
    assert job.saw().kinds == {"server": 1, "database": 1, "dns_record": 1}
    assert all(len(key) <= 255 for key in job.saw().ids)


def test_one_run_at_two_processes_at_once_is_worked_by_one_of_them(job: Job) -> None:
    with start_mocks(job.mocks, cloud_switches={"latency_ms": 400}), ExitStack() as running:
        both = [running.enter_context(job.started(RUN_ID=RUN)) for _ in range(2)]
        winner, loser = sorted((worker.ended() for worker in both), key=lambda ended: ended.code)
    assert (winner.code, winner.err) == (0, "")
    assert_refused(loser, "CheckpointConflict", f"run {RUN!r}")
    assert "decided" not in loser.out
    assert "calling" not in loser.out
    saw = job.saw()
    assert (saw.asked, saw.kinds) == ({RUN: 4}, {"server": 1, "database": 1, "dns_record": 1})
    assert {key: counts["requests"] for key, counts in saw.requests.items()} == {f"{RUN}:{seq}": 1 for seq in range(3)}


def test_a_run_that_a_living_worker_holds_is_refused_by_owner_and_until_when(job: Job) -> None:
    with job.started(RUN_ID=RUN, STALL_AT="after_intent", STALL_MS="600000") as worker:
        worker.wait_for("!!! STALL_AT=")
        loser = job.run(RUN_ID=RUN)
        assert_refused(loser, "CheckpointConflict", f"is held by process {worker.process.pid} on ", " until ", "+00:00")
        assert "INFO" not in loser.out


def test_a_key_that_the_remote_knows_with_other_arguments_stops_the_run(job: Job) -> None:
    with start_mocks(job.mocks) as mocks:
        create(mocks.cloud_url, f"{RUN}:0", args={"name": "somebody else's"})
    for _ in range(2):
        ended = job.run(RUN_ID=RUN)
        assert_refused(ended, "KeyConflict", f"key {RUN}:0", "with other arguments")
        assert "confirmed" not in ended.out
        assert "INFO done" not in ended.out
    assert job.saw().ids == {f"{RUN}:0": "i-0000001"}
    assert statuses(job.store) == {RUN: RUNNING}


# Keys


def test_the_store_and_the_key_are_the_owners_alone(job: Job) -> None:
    with job.started(RUN_ID=RUN, STALL_AT="after_call", STALL_MS="600000") as worker:
        worker.wait_for("!!! STALL_AT=")
        ours = [path for path in job.folder.iterdir() if not path.name.startswith(job.mocks.name)]
        modes = {path.name: oct(S_IMODE(path.stat().st_mode)) for path in ours}
    store = job.store.name
    assert modes == dict.fromkeys((store, f"{store}-wal", f"{store}-shm", job.key.name), "0o600")


@pytest.mark.parametrize("form", ["base64", "file"])
def test_a_key_is_taken_as_base64_or_from_a_file(job: Job, tmp_path: Path, form: str) -> None:
    text = key_of(16)
    path = tmp_path / "the.key"
    path.write_text(f"{text}\n")
    setting = text if form == "base64" else f"file:{path}"
    unfinished(job, CHECKPOINT_KEY=setting)
    assert job.run(RUN_ID=RUN, CHECKPOINT_KEY=text).code == 0
    assert not job.key.exists(), "a key that is given is written nowhere"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (key_of(15), "must have 16 bytes or more, found 15"),
        ("no base64 at all!", "a key is base64, or file:PATH"),
        ("file:not/there", "no key could be read from 'not/there'"),
    ],
    ids=["short", "garbage", "no such file"],
)
def test_a_key_that_is_none_is_refused_and_nothing_is_made(job: Job, setting: str, said: str) -> None:
    ended = job.run(RUN_ID=RUN, CHECKPOINT_KEY=setting)
    assert_refused(ended, "InvalidKey", said)
    assert setting not in ended.err or setting.startswith("file:"), "a key is never printed"
    assert job.files() == []


@pytest.mark.parametrize("is_done", [False, True], ids=["unfinished", "done"])
def test_another_key_than_the_one_that_sealed_a_run_opens_nothing_and_changes_nothing(job: Job, is_done: bool) -> None:
    right, wrong = key_of(32, 1), key_of(32, 2)
    if is_done:
        job.run(RUN_ID=RUN, CHECKPOINT_KEY=right)
    else:
        unfinished(job, CHECKPOINT_KEY=right)
    stored, saw = job.dump(), job.saw()
    ended = job.run(RUN_ID=RUN, CHECKPOINT_KEY=wrong)
    assert_refused(ended, "CheckpointStoreCorrupt", f"run {RUN!r}", "another key sealed it")
    assert ended.out == ""
    assert job.dump() == stored
    assert job.saw() == saw
    assert job.run(RUN_ID=RUN, CHECKPOINT_KEY=right).code == 0


def test_a_key_file_that_is_gone_is_not_made_anew_under_the_runs_it_sealed(job: Job) -> None:
    unfinished(job)
    job.key.rename(job.folder / "kept")
    stored = job.dump()
    assert_refused(job.run(RUN_ID=RUN), "InvalidKey", "the key file", "is gone")
    assert not job.key.exists()
    assert job.dump() == stored
    (job.folder / "kept").rename(job.key)
    assert job.run(RUN_ID=RUN).code == 0


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PLANNER": "openai:gpt-5-mini"}, "PLANNER is 'mock' in this version, found 'openai:gpt-5-mini'"),
        ({"DATABASE_URL": "mongodb://somewhere/runs"}, "found 'mongodb://somewhere/runs'"),
        ({"DATABASE_URL": "runs.db"}, "sqlite:///PATH"),
        ({"LEASE": "nan"}, "LEASE is a number of seconds above 0; found 'nan'"),
        ({"HEARTBEAT": "soon"}, "HEARTBEAT is a number of seconds above 0; found 'soon'"),
        ({"LEASE": "3", "HEARTBEAT": "2"}, "HEARTBEAT is at most half of LEASE; found 2.0 s and 3.0 s"),
        ({"MAX_ATTEMPTS": "0"}, "MAX_ATTEMPTS is a whole number from 1; found '0'"),
    ],
    ids=lambda value: "-".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_is_refused_and_nothing_is_made(job: Job, settings: dict[str, str], said: str) -> None:
    assert_refused(job.run(RUN_ID=RUN, **settings), "InvalidSetting", said)
    assert job.files() == []


def test_settings_that_are_empty_count_as_unset(job: Job) -> None:
    empty = dict.fromkeys(("DATABASE_URL", "GOAL", "PLANNER", "MOCK_CLOUD_URL", "CHECKPOINT_KEY", "LEASE", "CRASH_AT"), "")
    assert job.run(RUN_ID=RUN, **empty).lines[-1] == "done: stand up a web service"


@pytest.mark.parametrize("name", ["MOCK_LLM_URL", "MOCK_CLOUD_URL"])
def test_a_remote_that_is_not_there_leaves_a_run_that_recovers(job: Job, name: str) -> None:
    ended = job.run(RUN_ID=RUN, **{name: "http://127.0.0.1:1"})
    assert ended.code not in (0, None)
    assert ended.err.startswith("ERROR "), ended.err
    assert "Traceback" not in ended.err
    assert statuses(job.store)[RUN] not in (DONE, DONE + 1)
    assert job.run(RUN_ID=RUN).lines[-1] == "done: stand up a web service"
    assert job.saw().kinds == {"server": 1, "database": 1, "dns_record": 1}


# The command line


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a command must leave nothing."""
    folder = tmp_path / "empty"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def command(folder: Path, *arguments: str, **settings: str) -> Ended:
    words = [sys.executable, "-m", "agent_runtime", *arguments]
    ended = subprocess.run(words, cwd=folder, env=environment(settings), text=True, capture_output=True, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def test_doctor_says_what_this_machine_has_for_people_and_for_programs(empty: Path) -> None:
    for_people, for_programs = command(empty, "doctor"), command(empty, "doctor", "--json")
    assert (for_people.code, for_programs.code) == (0, 0)
    facts = json.loads(for_programs.out)
    assert {"agent_runtime", "python", "sqlite", "store", "key", "warnings"} <= set(facts)
    assert facts["agent_runtime"] == __version__
    assert all(str(facts[name]) in for_people.out for name in ("agent_runtime", "python", "sqlite", "store"))


def test_doctor_never_shows_a_key(empty: Path) -> None:
    key = key_of(32)
    assert key not in command(empty, "doctor", "--json", CHECKPOINT_KEY=key).out


def test_keygen_prints_a_fresh_key_that_the_main_job_takes(empty: Path) -> None:
    first, second = command(empty, "keygen"), command(empty, "keygen")
    assert first.out != second.out
    assert len(base64.b64decode(first.out, validate=False)) == 32


def test_help_and_version_answer_and_an_unknown_command_is_refused(empty: Path) -> None:
    shown, version, unknown = command(empty, "--help"), command(empty, "--version"), command(empty, "provisoin")
    assert shown.code == 0
    assert all(name in shown.out for name in ("provision", "keygen", "doctor"))
    assert (version.code, version.out) == (0, f"agent-runtime {__version__}\n")
    assert unknown.code == 2
    assert "'provisoin'" in unknown.err
    assert "provision" in unknown.err
    assert "Traceback" not in unknown.err


# What is imported


def loaded(program: str) -> set[str]:
    """The modules that are there once a fresh interpreter has run the program."""
    shown = f"{program}\nimport sys; print(' '.join(sys.modules))"
    words = [sys.executable, "-c", shown]
    return set(subprocess.run(words, env=environment({}), text=True, capture_output=True, check=True).stdout.split())


OPEN = "from agent_runtime.stores import open_store; open_store({!r})"


def test_opening_a_store_imports_only_the_backend_asked_for(tmp_path: Path) -> None:
    memory, sqlite = loaded(OPEN.format("memory://")), loaded(OPEN.format(f"sqlite:///{tmp_path}/runs.db"))
    assert "agent_runtime.stores.memory" in memory
    assert not {"agent_runtime.stores.sqlite", "sqlite3"} & memory
    assert "agent_runtime.stores.sqlite" in sqlite
    assert "agent_runtime.stores.memory" not in sqlite


def test_importing_the_package_alone_is_light() -> None:
    heavy = {"pydantic", "asyncio", "sqlite3", "json", "threading", "http", "agent_runtime.tool_loop", "agent_runtime.mock"}
    assert not heavy & (loaded("import agent_runtime") - loaded("pass"))
