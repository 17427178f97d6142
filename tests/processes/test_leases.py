"""Who may work a run: races, frozen, killed, copied and slow workers, as real processes on one SQLite file."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest

from agent_runtime.errors import CheckpointConflict, CheckpointNotFound, RecoveryNeedsDecision
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.processes.hired import Place, Worker
from tests.processes.job import PATIENCE_SECONDS, column, dump, statuses
from tests.processes.worker import KEY, Order, model_of, tools_of

RACES = 50
BLOCKED, DONE = 3, 8
SHORT = 1.0
BEATS = 0.25
LONG = 600.0
LOOK_AGAIN_SECONDS = 0.02


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def worker(place: Place) -> Iterator[Worker]:
    with place.hire() as [worker]:
        yield worker


async def recover(
    place: Place, run: str, *, idempotent: bool = True, take_over: bool = False, rerun: bool = False
) -> LoopResult:
    """The run, recovered by this process."""
    order, store = Order(run, idempotent=idempotent), SQLiteCheckpointStore(place.store)
    try:
        return await recover_tool_loop(
            model_of(order, place.remote), tools_of(order, place.remote), run,
            checkpoints=store, checkpoint_key=KEY, take_over=take_over, rerun_in_doubt=rerun,
        )  # fmt: skip
    finally:
        await store.close()


async def recover_once_free(place: Place, run: str, *, idempotent: bool = True) -> LoopResult:
    """The same, as soon as its owner's lease is over."""
    deadline = monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await recover(place, run, idempotent=idempotent)
        except CheckpointConflict:
            assert monotonic() < deadline, f"run {run} stays held"
            await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def start(place: Place, run: str) -> LoopResult:
    order, store = Order(run), SQLiteCheckpointStore(place.store)
    try:
        model, registry = model_of(order, place.remote), tools_of(order, place.remote)
        return await run_tool_loop(model, registry, "charge them", run_id=run, checkpoints=store, checkpoint_key=KEY)
    finally:
        await store.close()


def pids(place: Place, kind: str, run: str) -> list[int]:
    """Which processes the remote heard from, request by request."""
    return [request["pid"] for request in place.remote.seen(kind, run)]


def abandon(place: Place, runs: int) -> None:
    """Runs `race-0` and so on, whose worker is dead and whose calls are in doubt."""
    with place.hire() as [first]:
        first.order(Order("race", verb="abandon", runs=runs))
        assert first.wait() == 1
    assert len(statuses(place.store)) == runs


# Races


@pytest.mark.parametrize("verb", ["recover", "start"])
def test_two_processes_that_race_for_a_run_have_one_winner_and_the_other_runs_nothing(place: Place, verb: str) -> None:
    if verb == "recover":
        abandon(place, RACES)
    with place.hire(2) as workers:
        for i in range(RACES):
            run = f"race-{i}"
            for worker in workers:
                worker.order(Order(run, verb=verb, inside="wait"))
            said = {worker: worker.hear() for worker in workers}
            [winner] = [worker for worker in workers if "acting" in said[worker]]
            [loser] = [worker for worker in workers if worker is not winner]
            assert said[loser]["ended"] == "CheckpointConflict"
            if verb == "recover":
                assert f"is held by process {winner.pid} on " in said[loser]["message"]
                assert " until 20" in said[loser]["message"]
            winner.go_on()
            assert winner.hear()["ended"] == "done"
            assert pids(place, "tool", run) == [winner.pid]
            assert loser.pid not in pids(place, "model", run)
    assert set(statuses(place.store).values()) == {DONE}
    assert set(column(place.store, "epoch").values()) == {2 if verb == "recover" else 1}


async def test_two_tasks_that_race_for_a_run_have_one_winner_and_the_other_runs_nothing(place: Place) -> None:
    abandon(place, RACES)
    stores = [SQLiteCheckpointStore(place.store) for _ in range(2)]
    for i in range(RACES):
        order, lost, acts = Order(f"race-{i}"), asyncio.Event(), [0, 0]

        async def attempt(me: int, order: Order = order, lost: asyncio.Event = lost, acts: list[int] = acts) -> str:
            registry = ToolRegistry()

            @registry.tool(idempotent=True)
            async def charge(cents: int) -> int:
                acts[me] += 1
                await lost.wait()
                return cents

            try:
                model = model_of(order, place.remote)
                await recover_tool_loop(model, registry, order.run, checkpoints=stores[me], checkpoint_key=KEY)
            except CheckpointConflict as conflict:
                lost.set()
                return str(conflict)
            return "done"

        ended = await asyncio.gather(attempt(0), attempt(1))
        [winner] = [me for me in (0, 1) if ended[me] == "done"]
        assert "is held by process" in ended[1 - winner]
        assert (acts[winner], acts[1 - winner]) == (1, 0)
    for store in stores:
        await store.close()


# Frozen workers


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_a_worker_frozen_at_any_write_changes_and_starts_nothing_once_another_has_finished(
    place: Place, worker: Worker, commits: str
) -> None:
    worker.order(Order("whole", commits=commits))
    writes = worker.hear()["writes"]
    assert writes >= (4 if commits == "grouped" else 7)
    cells = [(number, when) for number in range(1, writes + 1) for when in ("before", "after")]
    with ExitStack() as hired:
        frozen = dict(zip(cells, hired.enter_context(place.hire(len(cells))), strict=True))
        for (number, when), each in frozen.items():
            run = f"{when}-{number}"
            each.order(Order(run, commits=commits, lease=SHORT, heartbeat=BEATS, freeze_at=number, freeze=when))
        for each in frozen.values():
            each.wait_until_frozen()
        for number, when in cells:
            run = f"{when}-{number}"
            try:
                assert (await recover_once_free(place, run)).output == "content"
            except CheckpointNotFound:
                assert (number, when) == (1, "before"), "only before its first write is a run unknown"
                await start(place, run)
        stored, seen = dump(place.store), place.remote_file.read_bytes()

        for each in frozen.values():
            each.thaw()
        for (number, when), each in frozen.items():
            had_ended = (number, when) == (writes, "after")
            assert each.hear()["ended"] == ("done" if had_ended else "CheckpointConflict"), (number, when)
    assert dump(place.store) == stored
    assert place.remote_file.read_bytes() == seen
    for number, when in cells:
        assert len({request["key"] for request in place.remote.seen("tool", f"{when}-{number}")}) == 1


async def test_a_worker_frozen_inside_a_call_without_a_rule_leaves_it_in_doubt_and_only_its_result_later(
    place: Place, worker: Worker
) -> None:
    worker.order(Order("run", idempotent=False, inside="freeze", lease=SHORT, heartbeat=BEATS))
    worker.wait_until_frozen()
    with pytest.raises(RecoveryNeedsDecision) as doubt:
        await recover_once_free(place, "run", idempotent=False)
    assert [(each.tool, each.key, each.attempt) for each in doubt.value.doubts] == [("charge", "run:0", 1)]
    assert statuses(place.store) == {"run": BLOCKED}
    with pytest.raises(RecoveryNeedsDecision):
        await recover(place, "run", idempotent=False)
    stored = dump(place.store)

    worker.thaw()
    assert worker.hear()["ended"] == "CheckpointConflict"
    assert dump(place.store)["journal"] == stored["journal"]
    assert statuses(place.store) == {"run": BLOCKED}
    assert (await recover(place, "run", idempotent=False)).status == "done", "the result that it left is adopted"
    assert pids(place, "tool", "run") == [worker.pid]


# Dead and living workers


@pytest.mark.parametrize("is_zombie", [False, True], ids=["reaped", "zombie"])
async def test_the_run_of_a_killed_worker_is_taken_at_once_whatever_its_lease(
    place: Place, worker: Worker, is_zombie: bool
) -> None:
    worker.order(Order("run", inside="wait", lease=LONG))
    assert worker.hear()["acting"] == "run"
    with pytest.raises(CheckpointConflict):
        await recover(place, "run")
    worker.kill()
    if not is_zombie:
        worker.wait()
    assert (await recover(place, "run")).status == "done"
    requests = place.remote.seen("tool", "run")
    assert [request["key"] for request in requests] == ["run:0", "run:0"]
    assert column(place.store, "epoch") == {"run": 2}


@pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "no rule"])
async def test_a_living_worker_that_is_taken_over_is_refused_its_next_write(
    place: Place, worker: Worker, idempotent: bool
) -> None:
    worker.order(Order("run", inside="wait", lease=LONG, idempotent=idempotent))
    assert worker.hear()["acting"] == "run"
    with pytest.raises(CheckpointConflict, match=rf"held by process {worker.pid} on .* until 20.* take_over=True"):
        await recover(place, "run", idempotent=idempotent)
    if idempotent:
        assert (await recover(place, "run", take_over=True)).status == "done"
    else:
        with pytest.raises(RecoveryNeedsDecision):
            await recover(place, "run", take_over=True, idempotent=False)
    stored, seen = dump(place.store), place.remote_file.read_bytes()

    worker.go_on()
    assert worker.hear()["ended"] == "CheckpointConflict"
    assert dump(place.store)["journal"] == stored["journal"]
    assert len(dump(place.store)["inbox"]) == (0 if idempotent else 1), "a result that is of use is left, and no other"
    assert place.remote_file.read_bytes() == seen
    assert len(pids(place, "tool", "run")) == (2 if idempotent else 1)


async def test_a_call_that_takes_three_leases_keeps_its_run_even_where_it_blocks_the_event_loop(place: Place) -> None:
    styles = ("sync", "async")
    with place.hire(len(styles)) as workers:
        for worker, style in zip(workers, styles, strict=True):
            order = Order(
                style, style=style, inside="sleep", seconds=3 * SHORT, lease=SHORT, heartbeat=BEATS, idempotent=False
            )
            worker.order(order)
            assert worker.hear()["acting"] == style
        ended = asyncio.gather(*(asyncio.to_thread(worker.hear) for worker in workers))
        refused = 0
        while not ended.done():
            for style in styles:
                try:
                    await recover(place, style, idempotent=False)
                except CheckpointConflict:
                    refused += 1
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        assert [said["ended"] for said in await ended] == ["done", "done"]
    assert refused >= 2 * len(styles)
    assert column(place.store, "epoch") == dict.fromkeys(styles, 1)
    assert [len(pids(place, "tool", style)) for style in styles] == [1, 1]


# Copies and clocks


def test_a_copy_made_by_fork_is_refused_its_first_write_and_the_worker_goes_on(place: Place, worker: Worker) -> None:
    worker.order(Order("run", style="async", inside="fork", calls=2))
    said = [worker.hear() for _ in range(3)]
    copies = [each for each in said if each["pid"] != worker.pid]
    assert [each["ended"] for each in copies] == ["CheckpointConflict"] * 2
    assert all("is a copy of it" in each["message"] for each in copies)
    assert (said[-1]["pid"], said[-1]["ended"]) == (worker.pid, "done")
    assert set(pids(place, "model", "run") + pids(place, "tool", "run")) == {worker.pid}
    assert (len(pids(place, "model", "run")), len(pids(place, "tool", "run"))) == (3, 2)
    assert column(place.store, "epoch") == {"run": 1}


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_wall_clock_that_jumps_takes_no_run_from_its_owner(tmp_path: Path, hours: int) -> None:
    clock, lease = ManualClock(), timedelta(seconds=12)
    store = SQLiteCheckpointStore(tmp_path / "runs.db", clock=clock)
    acting, may_end, registry, order = asyncio.Event(), asyncio.Event(), ToolRegistry(), Order("run")

    @registry.tool
    async def charge(cents: int) -> int:
        acting.set()
        await may_end.wait()
        return cents

    model = model_of(order, Place(tmp_path).remote)
    working = asyncio.create_task(
        run_tool_loop(model, registry, "charge them", run_id="run", checkpoints=store, checkpoint_key=KEY, clock=clock)
    )
    await acting.wait()
    clock.jump_wall(3600 * hours)
    until = (clock.now() + lease).isoformat(timespec="seconds")
    other = store.reopen()
    with pytest.raises(CheckpointConflict, match=f"until {until}".replace("+", r"\+")):
        await recover_tool_loop(model, registry, "run", checkpoints=other, checkpoint_key=KEY, clock=clock)
    may_end.set()
    assert (await working).status == "done"
    await other.close()
    await store.close()
