"""`python -m agent_runtime` on Postgres: it dies between act and record, and another process finishes the run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.processes.job import Job, assert_refused, environment
from tests.servers import Server, free_port

SECRET = "s3cret-pa55"


def test_a_run_that_died_between_act_and_record_is_finished_by_another_process(postgres: Server, tmp_path: Path) -> None:
    url = postgres.url_as("postgres", database=postgres.database())
    job = Job(tmp_path)
    first = job.run(DATABASE_URL=url, RUN_ID="demo", CRASH_AT="after_call")
    assert first.code == 1, first
    assert first.lines[-1] == "!!! CRASH_AT=after_call seq=0 -- os._exit(1)"
    second = job.run(DATABASE_URL=url.replace("postgresql://", "postgres://"), RUN_ID="demo")
    assert second.code == 0, second
    assert "INFO confirmed run=demo seq=0 key=demo:0 result=i-0000001 remote=already_done" in second.lines
    assert job.saw().kinds == {"server": 1, "database": 1, "dns_record": 1}
    again = job.run(DATABASE_URL=url, RUN_ID="demo")
    assert (again.code, again.lines[-1]) == (0, second.lines[-1])


def test_the_key_is_kept_in_the_working_directory_for_its_owner_alone(postgres: Server, tmp_path: Path) -> None:
    url = postgres.url_as("postgres", database=postgres.database())
    job = Job(tmp_path)
    assert job.run(DATABASE_URL=url, RUN_ID="demo").code == 0
    assert job.files() == ["agent_runtime.key", "agent_runtime.mock.db"]
    key = job.folder / "agent_runtime.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.unlink()
    assert_refused(job.run(DATABASE_URL=url, RUN_ID="demo"), "InvalidKey", "key file 'agent_runtime.key' is gone")
    assert job.files() == ["agent_runtime.mock.db"]


def test_a_store_that_cannot_be_used_is_named_and_nothing_is_made(postgres: Server, tmp_path: Path) -> None:
    job = Job(tmp_path)
    user = postgres.user(password=SECRET)
    wrong = postgres.url_as(user, password=f"not-{SECRET}")
    nowhere = f"postgresql://me:{SECRET}@127.0.0.1:{free_port()}/runs"
    nothing = postgres.url_as("postgres", database="nothing")
    for url, error, said in (
        (wrong, "StoreRefused", "correct the password"),
        (nowhere, "StoreUnavailable", "does not answer"),
        (nothing, "StoreRefused", "create the database"),
        (f"postgresql://me:{SECRET}@local host", "InvalidSetting", "cannot be taken apart"),
        (f"postgress://me:{SECRET}@localhost", "InvalidSetting", "set DATABASE_URL"),
    ):
        ended = job.run(DATABASE_URL=url, RUN_ID="demo")
        assert_refused(ended, error, said)
        assert SECRET not in ended.out + ended.err
    assert job.files() == []


def test_the_doctor_shows_no_password(tmp_path: Path) -> None:
    settings = environment({"DATABASE_URL": f"postgresql://me:{SECRET}@host/runs"})
    for words in (["doctor"], ["doctor", "--json"]):
        command = [sys.executable, "-m", "agent_runtime", *words]
        ended = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "postgresql://me@host/runs" in ended.stdout
        assert SECRET not in ended.stdout + ended.stderr


def test_the_store_module_is_imported_without_its_driver(tmp_path: Path) -> None:
    program = "import sys; from agent_runtime.stores.postgres import *; sys.exit('asyncpg' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=dict(os.environ), check=True)
