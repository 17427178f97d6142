"""The main job dies at each named point and is picked up again: real processes, `os._exit`, real HTTP remotes.

What a death leaves does not depend on the store: one table is for all.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_runtime.crash import CrashPoint
from tests.mock.asking import launched
from tests.processes.job import Ended, Job, args_of, assert_refused, saw
from tests.servers import Server

RUN = "demo"
DONE = 8
TOOLS = ("create_server", "create_database", "create_dns_record")
IDS = ("i-0000001", "db-0000001", "dns-0000001")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table that users are promised: what a death at a point leaves, and what the restart shows."""

    decided: bool = False
    """The decision was written down."""
    lost_reply: bool = False
    """The model had answered, and nobody wrote the answer down."""
    intended: bool = False
    """The call was written down."""
    acted: bool = False
    """The remote had acted."""
    confirmed: bool = False
    """The result was written down."""

    @property
    def in_doubt(self) -> bool:
        return self.intended and not self.confirmed


TABLE = {
    CrashPoint.BEFORE_DECIDE: Row(),
    CrashPoint.AFTER_DECIDE_BEFORE_JOURNAL: Row(lost_reply=True),
    CrashPoint.AFTER_DECIDE: Row(decided=True),
    CrashPoint.BEFORE_INTENT: Row(decided=True),
    CrashPoint.AFTER_INTENT: Row(decided=True, intended=True),
    CrashPoint.AFTER_CALL: Row(decided=True, intended=True, acted=True),
    CrashPoint.AFTER_CONFIRM: Row(decided=True, intended=True, acted=True, confirmed=True),
}
POINTS = [pytest.param(point, row, id=point.value) for point, row in TABLE.items()]


on_each_store = pytest.mark.parametrize("job", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """The main job, on SQLite if nothing else is said."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return Job(tmp_path)
    server: Server = request.getfixturevalue("one_postgres")
    return Job(tmp_path, url=server.url_as("postgres", database=server.database()))


def args_at(seq: int, count: int) -> str:
    """The arguments of decision `seq` as request number `count` of the run decides it."""
    return args_of(
        (
            {"name": f"srv-{count}", "size": "small"},
            {"name": f"db-{count}", "engine": "postgres"},
            {"name": f"www-{count}", "target": IDS[0]},
        )[seq]
    )


def chosen(verb: str, seq: int, count: int, llm_calls: int) -> str:
    return f"INFO {verb} run={RUN} seq={seq} tool={TOOLS[seq]} args={args_at(seq, count)} llm_calls={llm_calls}"


def calling(seq: int, attempt: int) -> str:
    return f"INFO calling run={RUN} seq={seq} tool={TOOLS[seq]} key={RUN}:{seq} attempt={attempt}"


def confirmed(seq: int, remote: str) -> str:
    return f"INFO confirmed run={RUN} seq={seq} key={RUN}:{seq} result={IDS[seq]} remote={remote}"


def lines_of_restart(row: Row, at: int) -> list[str]:
    """What a restart prints, line by line, after a death in decision `at`."""
    asked = at + (row.decided or row.lost_reply)
    replayed = 2 * at + row.decided + row.confirmed
    lines = [f"INFO claimed run={RUN} epoch=2 why=recovery"]
    lines.append(f"INFO recovered run={RUN} replayed={replayed} rerun={int(row.in_doubt)}")
    lines += [chosen("replayed", seq, seq + 1, asked) for seq in range(at)]
    for seq in range(at, 3):
        if seq == at and row.decided:
            lines.append(chosen("replayed", seq, seq + 1, asked))
        else:
            count = seq + 1 + row.lost_reply
            lines.append(chosen("decided", seq, count, count))
        if seq == at and row.confirmed:
            continue
        again = seq == at and row.in_doubt
        lines.append(calling(seq, 2 if again else 1))
        lines.append(confirmed(seq, "already_done" if seq == at and row.acted else "created"))
    total = 4 + row.lost_reply
    return [*lines, f"INFO done run={RUN} steps=3 llm_calls={total}", "done: stand up a web service"]


def lines_of_death(point: CrashPoint, row: Row, at: int) -> list[str]:
    """What the process prints that dies there."""
    lines = [f"INFO started run={RUN}"]
    for seq in range(at):
        lines += [chosen("decided", seq, seq + 1, seq + 1), calling(seq, 1), confirmed(seq, "created")]
    lines += [chosen("decided", at, at + 1, at + 1)] * row.decided
    lines += [calling(at, 1)] * row.intended
    lines += [confirmed(at, "created")] * row.confirmed
    return [*lines, f"!!! CRASH_AT={point.value} seq={at} -- os._exit(1)"]


def count(requests: int) -> dict[str, int]:
    """A key that created once, and was answered from memory ever after."""
    return {"requests": requests, "created": 1, "already_done": requests - 1, "conflict": 0}


def assert_died(ended: Ended, point: CrashPoint) -> None:
    assert ended.code == 1
    assert ended.lines[-1].startswith(f"!!! CRASH_AT={point.value} ")
    assert ended.err == ""


# In the first decision on one store: its death at each point of the last has all of that behind it.
@pytest.mark.parametrize(("job", "at"), [("sqlite", 0), ("sqlite", 2), ("postgres", 2)], indirect=["job"])
@pytest.mark.parametrize(("point", "row"), POINTS)
def test_a_death_at_each_point_is_recovered_as_the_table_says(job: Job, point: CrashPoint, row: Row, at: int) -> None:
    died = job.run(RUN_ID=RUN, CRASH_AT=point.value, CRASH_SEQ=str(at))
    assert (died.code, died.err) == (1, "")
    assert died.lines == lines_of_death(point, row, at)
    before = job.saw()
    assert before.asked.get(RUN, 0) == at + (row.decided or row.lost_reply)
    assert before.ids == {f"{RUN}:{seq}": IDS[seq] for seq in range(at + row.acted)}

    back = job.run(RUN_ID=RUN)
    assert (back.code, back.err) == (0, "")
    assert back.lines == lines_of_restart(row, at)
    after = job.saw()
    assert after.asked == {RUN: 4 + row.lost_reply}
    assert after.ids == {f"{RUN}:{seq}": IDS[seq] for seq in range(3)}
    assert after.kinds == {"server": 1, "database": 1, "dns_record": 1}
    asked_twice = at if row.acted and not row.confirmed else None
    assert after.requests == {f"{RUN}:{seq}": count(2 if seq == asked_twice else 1) for seq in range(3)}
    assert job.statuses() == {RUN: DONE}
    assert job.files() == [*([] if job.url else [job.store.name]), job.key.name, job.mocks.name]


# Where a recovery may die at the same point of the same step again; after the two others the step is behind it.
AGAIN_AT = {CrashPoint.AFTER_DECIDE: 1, CrashPoint.AFTER_CONFIRM: 1}


@pytest.mark.parametrize(("point", "row"), POINTS)
def test_a_recovery_that_dies_at_each_point_is_recovered_as_well(job: Job, point: CrashPoint, row: Row) -> None:
    again_at = AGAIN_AT.get(point, 0)
    assert_died(job.run(RUN_ID=RUN, CRASH_AT=point.value), point)
    second = job.run(RUN_ID=RUN, CRASH_AT=point.value, CRASH_IN="recovery", CRASH_SEQ=str(again_at))
    assert_died(second, point)
    assert f"INFO claimed run={RUN} epoch=2 why=recovery" in second.lines
    third = job.run(RUN_ID=RUN)
    assert (third.code, third.err) == (0, "")
    assert third.lines[0] == f"INFO claimed run={RUN} epoch=3 why=recovery"
    assert third.lines[-2] == f"INFO done run={RUN} steps=3 llm_calls={4 + 2 * row.lost_reply}"

    after = job.saw()
    assert after.asked == {RUN: 4 + 2 * row.lost_reply}
    assert after.ids == {f"{RUN}:{seq}": IDS[seq] for seq in range(3)}
    assert after.kinds == {"server": 1, "database": 1, "dns_record": 1}
    sent = {seq: 1 + 2 * (seq == 0 and row.acted and not row.confirmed) for seq in range(3)}
    assert after.requests == {f"{RUN}:{seq}": count(sent[seq]) for seq in range(3)}
    attempts = 3 if row.in_doubt else 1
    if not row.confirmed:
        assert calling(again_at, 1 if again_at else attempts) in third.lines


def test_points_that_are_armed_for_recovery_leave_a_first_run_alone(job: Job) -> None:
    ended = job.run(RUN_ID=RUN, CRASH_AT="after_call", CRASH_IN="recovery")
    assert (ended.code, ended.lines[-2]) == (0, f"INFO done run={RUN} steps=3 llm_calls=4")


def test_remotes_that_run_as_processes_of_their_own_see_the_same(job: Job, tmp_path: Path) -> None:
    state = tmp_path / "remotes.db"
    with launched(state) as servers:
        ready = servers.wait_until_ready()
        where = {"MOCK_CLOUD_URL": ready.cloud_url, "MOCK_LLM_URL": ready.model_url}
        assert_died(job.run(RUN_ID=RUN, CRASH_AT="after_call", **where), CrashPoint.AFTER_CALL)
        back = job.run(RUN_ID=RUN, **where)
    assert back.lines == lines_of_restart(TABLE[CrashPoint.AFTER_CALL], 0)
    after = saw(state)
    assert (after.asked, after.kinds["server"], after.requests[f"{RUN}:0"]) == ({RUN: 4}, 1, count(2))
    assert not job.mocks.exists()


def test_a_worker_that_stalls_at_a_point_goes_on_and_nothing_is_made_twice(job: Job) -> None:
    ended = job.run(RUN_ID=RUN, STALL_AT="after_call", STALL_MS="50", CRASH_SEQ="1")
    row = Row()
    lines = lines_of_restart(row, 0)[2:]
    lines.insert(5, "!!! STALL_AT=after_call seq=1 -- 50 ms")
    assert (ended.code, ended.lines) == (0, [f"INFO started run={RUN}", *lines])
    assert job.saw().requests == {f"{RUN}:{seq}": count(1) for seq in range(3)}


@on_each_store
@pytest.mark.parametrize(("point", "made"), [("after_intent", 0), ("after_call", 1)])
def test_a_worker_that_stalls_and_is_killed_there_left_what_a_death_there_leaves(job: Job, point: str, made: int) -> None:
    with job.started(RUN_ID=RUN, STALL_AT=point, STALL_MS="600000") as worker:
        worker.wait_for("!!! STALL_AT=")
        assert job.saw().kinds.get("server", 0) == made
        worker.process.kill()
    back = job.run(RUN_ID=RUN)
    assert back.lines == lines_of_restart(TABLE[CrashPoint(point)], 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"CRASH_AT": "after_lunch"}, "CRASH_AT is one of before_decide, after_decide_before_journal"),
        ({"STALL_AT": "AFTER_CALL"}, "STALL_AT is one of before_decide"),
        ({"CRASH_AT": "after_call", "CRASH_SEQ": "-1"}, "CRASH_SEQ is a whole number from 0; found '-1'"),
        ({"STALL_AT": "after_call", "STALL_MS": "1.5"}, "STALL_MS is a whole number from 0; found '1.5'"),
        ({"CRASH_AT": "after_call", "CRASH_IN": "bed"}, "CRASH_IN is 'recovery' or unset; found 'bed'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_fault_that_cannot_be_injected_is_refused_and_nothing_is_stored(
    job: Job, settings: dict[str, str], said: str
) -> None:
    assert_refused(job.run(RUN_ID=RUN, **settings), "InvalidSetting", said)
    assert job.files() == []
