"""Large bodies lie in a folder beside the store: sealed as they are, each with its run, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from pydantic import BaseModel

from agent_runtime import Flow, FlowRunner, Outcome, RecoveryNeedsDecision, Runs
from agent_runtime.errors import CheckpointConflict, CheckpointStoreCorrupt, InvalidSetting, StoreUnavailable
from agent_runtime.executor import Executor
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.offload import Job, ThreadOffload
from agent_runtime.stores import file_at, open_store
from agent_runtime.stores.blobs import AT_ONCE, BlobStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Script, results_in

T = TypeVar("T")

LARGE = "x" * 100_000
registry = ToolRegistry()


@registry.tool(pure=True)
def read(page: int) -> str:
    """A page that is large, and another one each time."""
    return f"{page}{LARGE}"


@registry.tool
def act() -> str:
    """What it came to is lost."""
    raise TimeoutError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    return blobs


def files_in(folder: Path) -> list[Path]:
    """The blobs that lie in a folder, without the words whose they are."""
    return sorted(path for path in folder.glob("??/*/*") if path.name != "run")


def homes_in(folder: Path) -> list[Path]:
    """The folders of runs."""
    return list(folder.glob("??/*"))


def unmount(folder: Path) -> None:
    """Where nothing is mounted there is an empty folder."""
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()


async def work(store: CheckpointStore, run_id: str = "run") -> str:
    model = Script([("read", {"page": 1})], [("read", {"page": 2})], "end")
    result = await run_tool_loop(model, registry, "go", run_id=run_id, checkpoints=store, checkpoint_key=KEY)
    assert results_in(result.messages) == [f"1{LARGE}", f"2{LARGE}"]
    return result.run_id


async def test_a_large_body_lies_in_the_folder_and_the_store_holds_a_stub_of_it(folder: Path) -> None:
    path = folder.parent / "runs.db"
    store = BlobStore(SQLiteCheckpointStore(path), folder)
    run_id = await work(store)
    one, two = files_in(folder)
    assert [0 < each.stat().st_size - len(LARGE) < 40 for each in (one, two)] == [True, True]
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in one.parents[:2]} == {0o700}
    again = await recover_tool_loop(Script("end"), registry, run_id, checkpoints=store, checkpoint_key=KEY)
    assert results_in(again.messages) == [f"1{LARGE}", f"2{LARGE}"]
    await store.close()
    assert path.stat().st_size < len(LARGE)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, 100),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b"xx", b"xy", 1)),
    "another's": lambda path: path.write_bytes(b'{"result":"' + b"y" * (path.stat().st_size - 13) + b'"}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_blob_that_is_not_as_it_was_written_makes_its_own_run_corrupt_and_no_other(damage: str, folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    await work(store, "whole")
    before = set(files_in(folder))
    await work(store, "hurt")
    [hurt, _] = sorted(set(files_in(folder)) - before)
    DAMAGES[damage](hurt)
    with pytest.raises(CheckpointStoreCorrupt, match=f"'hurt'.*{hurt.name}"):
        await recover_tool_loop(Script("end"), registry, "hurt", checkpoints=store, checkpoint_key=KEY)
    assert (await recover_tool_loop(Script("end"), registry, "whole", checkpoints=store, checkpoint_key=KEY)).status == "done"
    verified = {each.run_id: each.why async for each in Runs(store, checkpoint_key=KEY).verify_each()}
    assert verified["whole"] == ""
    assert str(hurt) in verified["hurt"]


class Notes(BaseModel):
    at: int = 0
    text: str = ""


def writing() -> Flow[Notes]:
    flow = Flow("writing", state=Notes)
    flow.node("write", lambda state: {"at": state.at + 1, "text": f"{state.at}" * 100_000})
    return flow.edge("write", "write", when=lambda state: state.at < 5).end("write")


async def test_a_state_that_is_replaced_takes_its_blob_along(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    runner = FlowRunner(Executor(ToolRegistry()), checkpoints=store, checkpoint_key=KEY)
    result = await runner.run(writing(), Notes(), run_id="run")
    assert result.state.text == "4" * 100_000
    [state] = files_in(folder)
    assert (await runner.recover(writing(), "run")).state == result.state
    state.unlink()
    with pytest.raises(CheckpointStoreCorrupt, match=state.name):
        await runner.recover(writing(), "run")


async def test_a_message_whose_blob_is_gone_makes_its_run_corrupt_until_it_is_back(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    with pytest.raises(RecoveryNeedsDecision):
        await run_tool_loop(Script([("act", {})], "end"), registry, "go", run_id="run", checkpoints=store, checkpoint_key=KEY)
    runs = Runs(store, checkpoint_key=KEY)
    await runs.settle("run", "0", Outcome.done(LARGE), by="ana", why="seen")
    blobs = files_in(folder)
    assert len(blobs) == 2  # the settlement, and the message that told a worker who may wait
    kept = {path: path.read_bytes() for path in blobs}
    for path in blobs:
        path.unlink()
        with pytest.raises(CheckpointStoreCorrupt, match=path.name):
            await recover_tool_loop(Script("end"), registry, "run", checkpoints=store, checkpoint_key=KEY)
        path.write_bytes(kept[path])
    model = Script([("act", {})], "end")
    result = await recover_tool_loop(model, registry, "run", checkpoints=store, checkpoint_key=KEY)
    assert results_in(result.messages) == [LARGE]


async def test_lists_read_no_blob(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    await work(store)
    for path in files_in(folder):
        path.unlink()
    assert [info.status for info in await Runs(store, checkpoint_key=KEY).list()] == ["done"]
    assert [row.run_id for row in await store.list_runs()] == ["run"]


async def test_a_folder_that_is_away_is_the_stores_trouble_and_makes_no_run_corrupt(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    await work(store)
    unmount(folder)
    with pytest.raises(StoreUnavailable, match="away"):
        await recover_tool_loop(Script("end"), registry, "run", checkpoints=store, checkpoint_key=KEY)


async def test_blobs_go_with_their_run_and_its_id_stays_used(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    await work(store, "run")
    await work(store, "other")
    await Runs(store, checkpoint_key=KEY).delete("run", by="ana")
    assert len(files_in(folder)) == 2
    assert len(homes_in(folder)) == 1
    with pytest.raises(CheckpointConflict):
        await work(store, "run")
    await work(store, "third")


# Sweeping.


DAY = 86_400


def age(path: Path, seconds: float = 2 * DAY) -> None:
    """As if nobody had wanted it for so long."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def age_all(folder: Path) -> None:
    for path in folder.glob("??/*/*"):
        age(path)


async def test_a_sweep_removes_what_is_old_and_named_by_nothing_and_tells_before(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    await work(store, "lives")
    named = files_in(folder)
    never, left = Draft.of("never").open(b"n" * 100_000), Draft.of("deleted").open(b"d" * 100_000)
    await store.commit([left])
    [dead] = set(files_in(folder)) - set(named)
    content, home = dead.read_bytes(), (dead.parent / "run").read_bytes()
    told = Draft.of("lives").message(b"m" * 100_000)
    await store.post(RunId("lives"), told)  # a run that is done takes no message: nothing names its blob
    waits = Draft.of("waits").open()
    await store.commit([waits])
    await store.post(waits.row.run_id, Draft.of("waits").message(b"w" * 100_000))
    named = [path for path in files_in(folder) if path != dead and path.read_bytes()[:1] != b"m"]
    await store.delete(left.row.run_id, guard=Draft.of("deleted").after(left).guard)
    dead.parent.mkdir(parents=True)
    dead.write_bytes(content)  # somebody died before they were removed
    (dead.parent / "run").write_bytes(home)
    await store._pack_all([never])  # and somebody before the commit
    crumb = named[0].with_name("0123456789abcdef.tmp")
    crumb.write_bytes(b"half of one")
    stranger = folder / "ab" / "nobody knows whose"
    stranger.mkdir(parents=True)
    (stranger / "blob").write_bytes(b"?")

    assert (await store.sweep()).files == 0, "what is young may be of a write that is on its way"
    age_all(folder)
    would = await store.sweep(dry_run=True)
    assert would == (4, 300_011, 1)
    assert len(files_in(folder)) == len(named) + 5
    assert await store.sweep() == would
    assert files_in(folder) == sorted([*named, stranger / "blob"])
    assert len(homes_in(folder)) == 3, "a folder goes with its run"
    assert (await store.sweep()).files == 0
    await work(store, "never")


async def test_a_blob_that_is_wanted_again_while_it_is_swept_stays(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    append = Draft.of("run").open(b"b" * 100_000)
    await store._pack_all([append])
    [blob] = files_in(folder)
    age(blob)
    before = blob.stat().st_mtime + DAY
    lying = store._folder.look(f"{blob.parent}/", before)
    assert [name for name, _ in lying.files] == [blob.name]
    await store.commit([append])  # between the look and the removal
    store._folder.sweep(lying, frozenset(), before, is_gone=True)
    [run] = await store.load_many([RunId("run")])
    assert run is not None
    assert [record.body for record in run.records] == [record.body for record in append.records]
    assert (blob.parent / "run").exists()


async def test_a_blob_that_a_dead_sweep_had_set_aside_is_read_and_put_back(folder: Path) -> None:
    store = BlobStore(MemoryCheckpointStore(), folder)
    append = Draft.of("run").open(b"b" * 100_000)
    await store.commit([append])
    [blob] = files_in(folder)
    age(blob)
    blob.rename(blob.with_name(f"{blob.name}.swept"))
    assert [record.body for record in await store.calls(RunId("run"))] == [record.body for record in append.records]
    assert (await store.sweep()).files == 0
    assert files_in(folder) == [blob]


async def test_a_sweep_of_what_may_be_on_its_way_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="older_than_seconds"):
        await BlobStore(MemoryCheckpointStore(), folder).sweep(older_than_seconds=60)


# The door.


@contextmanager
def somebody_else() -> Iterator[None]:
    """As a user who is not allowed everything."""
    user = os.geteuid()
    if user:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_that_is_none_for_blobs_is_named_at_the_door(folder: Path) -> None:
    (folder / "letters.txt").write_text("mine")
    wrong = {folder / "missing": "found nothing", folder / "letters.txt": "found a file", folder: "letters.txt"}
    for path, why in wrong.items():
        with pytest.raises(InvalidSetting, match=why):
            BlobStore(MemoryCheckpointStore(), path)
    assert [path.name for path in folder.iterdir()] == ["letters.txt"]
    for above in (-1, 1.5, True):
        with pytest.raises(InvalidSetting, match="above="):
            BlobStore(MemoryCheckpointStore(), folder, above=above)  # type: ignore[arg-type]  # what is refused


def test_a_folder_that_cannot_be_written_is_named_at_the_door() -> None:
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o555)
        with somebody_else(), pytest.raises(InvalidSetting, match="cannot be read and written"):
            BlobStore(MemoryCheckpointStore(), place)
    finally:
        place.chmod(0o700)
        shutil.rmtree(place)


def test_a_url_names_the_folder_behind_whatever_the_store_takes(folder: Path) -> None:
    path = folder.parent / "runs.db"
    store = open_store(f"sqlite:///{path}?blobs={folder}&blobs_above=1000")
    assert isinstance(store, BlobStore)
    assert repr(store) == f"BlobStore(SQLiteCheckpointStore({str(path)!r}), {str(folder)!r})"
    assert file_at(f"sqlite:///{path}?blobs={folder}") == str(path)
    spaced = folder.parent / "a b"
    spaced.mkdir()
    assert str(spaced) in repr(open_store(f"redis://localhost:1/0?prefix=p&blobs={folder.parent}/a%20b&ttl_s=60"))
    for wrong, why in (
        ("blobs_above=10", "name it too"),
        (f"blobs={folder}&blobs_above=1k", "whole number"),
        ("blobs=", "name it"),
    ):
        with pytest.raises(InvalidSetting, match=why):
            open_store(f"sqlite:///{path}?{wrong}")


# Speed.


class Crowd(ThreadOffload):
    """Counts how many threads are at work at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.begun = 0

    def start(self, work: Callable[[], T]) -> Job[T]:
        self.now += 1
        self.begun += 1
        self.most = max(self.most, self.now)
        job = super().start(work)
        job.outcome.add_done_callback(self._leave)
        return job

    def _leave(self, outcome: asyncio.Future[T]) -> None:
        self.now -= 1


async def test_a_run_of_many_blobs_is_read_by_a_few_threads_at_a_time_and_off_the_loop(folder: Path) -> None:
    crowd = Crowd()
    store = BlobStore(MemoryCheckpointStore(), folder, offload=crowd)
    bodies = [bytes([at]) * 1_000_000 for at in range(100)]
    await store.commit([Draft.of("run").open(*bodies)])
    crowd.most = crowd.begun = 0
    [run] = await store.load_many([RunId("run")])
    assert run is not None
    assert [record.body for record in run.records][-100:] == bodies
    assert (crowd.most, crowd.begun) == (AT_ONCE, AT_ONCE)
