"""Stores whose ears are broken on purpose: each must fail the case of the contract that is there to find it."""

from collections.abc import Callable, Collection, Sequence

import pytest

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import Ear
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.store_contract import StoreContract, cases, rings


class Deaf(MemoryCheckpointStore):
    """Its ear hears what `hears` lets through, and counts as `counts` does."""

    async def listen(self, ring: Callable[[], None]) -> Ear:
        return HardOfHearing(self, await super().listen(ring))

    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        return heard

    def counts(self, run_ids: Sequence[RunId], posted: list[int | None]) -> list[int | None]:
        return posted


class HardOfHearing:
    def __init__(self, store: Deaf, ear: Ear) -> None:
        self._store, self._ear = store, ear
        self.every = ear.every

    async def heard(self) -> Collection[RunId] | None:
        heard = await self._ear.heard()
        return heard if heard is None else self._store.hears(heard)

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        return self._store.counts(run_ids, await self._ear.posted(run_ids))

    async def close(self) -> None:
        await self._ear.close()


class HearsNothing(Deaf):
    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        return ()


class HearsTheFirstOfMany(Deaf):
    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        return sorted(heard)[:1]


class TellsOne(Deaf):
    """Only the ear that asks first hears of a message."""

    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        told: set[RunId] = self.__dict__.setdefault("told", set())
        new = [run_id for run_id in heard if run_id not in told]
        told.update(new)
        return new


class HearsFromTheFirstQuestionOn(Deaf):
    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        is_first = not self.__dict__.get("was_asked")
        self.__dict__["was_asked"] = True
        return () if is_first else heard


class HearsByTheNewestNumber(Deaf):
    """Takes a message for new by how many there are in all, which a deletion lowers."""

    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        before: int = self.__dict__.get("newest", 0)
        newest = self.__dict__["newest"] = sum(len(run.messages) for run in self._runs.values())
        return heard if newest > before else ()


class HearsNothingOfTheEnded(Deaf):
    def hears(self, heard: Collection[RunId]) -> Collection[RunId]:
        return [run_id for run_id in heard if self._runs[run_id].row.status < RunStatus.DONE]


class CountsForTheDeleted(Deaf):
    def counts(self, run_ids: Sequence[RunId], posted: list[int | None]) -> list[int | None]:
        return [0 if run_id in self._runs and many is None else many for run_id, many in zip(run_ids, posted, strict=True)]


class ClosesEveryEar(Deaf):
    async def listen(self, ring: Callable[[], None]) -> Ear:
        ear = await super().listen(ring)
        ear.close = self._close_all  # type: ignore[method-assign]
        return ear

    async def _close_all(self) -> None:
        self._ears.clear()


FOUND_BY: dict[type[Deaf], str] = {
    HearsNothing: "whoever listens hears of a message",
    HearsTheFirstOfMany: "messages through other connections are heard",
    TellsOne: "all who listen hear the same",
    HearsFromTheFirstQuestionOn: "a message that comes just before the first question is heard",
    HearsByTheNewestNumber: "a message after the newest was deleted with its run is heard",
    HearsNothingOfTheEnded: "a settlement of a run that ended is heard",
    CountsForTheDeleted: "an ear tells how many messages each run has had",
    ClosesEveryEar: "an ear may be closed twice and leaves the others alone",
}


@pytest.mark.parametrize(("broken", "name"), FOUND_BY.items(), ids=lambda value: getattr(value, "__name__", value))
async def test_the_contract_finds_an_ear_that_is_broken(
    broken: type[Deaf], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "LONG_SECONDS", 0.2)
    with pytest.raises(AssertionError):
        await cases()[name](StoreContract(), broken())


def test_every_ear_that_is_broken_here_is_looked_for() -> None:
    assert set(FOUND_BY) == set(Deaf.__subclasses__())
    assert set(FOUND_BY.values()) == {name for name in cases() if vars(rings.Listening).get(f"test_{name.replace(' ', '_')}")}


async def test_an_ear_that_hands_everything_on_is_not_found_broken() -> None:
    for name in sorted(FOUND_BY.values()):
        await cases()[name](StoreContract(), Deaf())
