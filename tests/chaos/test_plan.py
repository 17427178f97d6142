"""What strikes when, and whom."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.chaos.plan import A_MINUTE, OF_ANY, OF_POSTGRES, OF_SQLITE, Kind, draw_death, draw_strikes, pick_one

POSTGRES = OF_ANY | OF_POSTGRES


def test_a_seed_stands_for_the_same_faults_and_another_seed_for_others() -> None:
    one, same, other = (draw_strikes(seed, 60, POSTGRES, kills_a_second=2) for seed in (7, 7, 8))
    assert one == same
    assert one != other
    deaths = [[draw_death(seed, number) for number in range(50)] for seed in (7, 7, 8)]
    assert deaths[0] == deaths[1] != deaths[2]


@pytest.mark.parametrize("seconds", [3.0, 60.0, 300.0])
def test_every_kind_of_the_store_strikes_within_the_time_and_no_other(seconds: float) -> None:
    strikes = draw_strikes(1, seconds, POSTGRES, kills_a_second=2)
    assert {strike.kind for strike in strikes} == POSTGRES
    assert all(0 <= strike.at <= seconds and 0 <= strike.pick < 1 for strike in strikes)
    assert all(earlier.at <= later.at for earlier, later in pairwise(strikes))


def test_five_minutes_hold_five_hundred_kills_and_each_other_kind_as_often_as_it_says() -> None:
    counts = Counter(strike.kind for strike in draw_strikes(1, 300, POSTGRES, kills_a_second=2))
    assert counts.pop(Kind.KILL) >= 500
    assert counts == {kind: 5 * A_MINUTE[kind] for kind in POSTGRES - {Kind.KILL}}


def test_every_kind_belongs_somewhere_and_has_its_rate() -> None:
    assert set(Kind) == OF_ANY | OF_POSTGRES | OF_SQLITE
    assert set(A_MINUTE) == set(Kind) - {Kind.KILL}


def test_a_pick_stands_for_one_of_those_that_are_there_and_each_can_be_hit() -> None:
    assert pick_one(0.5, []) is None
    assert [pick_one(pick, [4, 5, 6]) for pick in (0.0, 0.34, 0.99, 1.0)] == [4, 5, 6, 6]
