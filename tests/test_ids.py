"""Ids and keys: what a run may be called, the places of calls, and one key a call that nobody else has."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agent_runtime.errors import InvalidRunId
from agent_runtime.ids import MAX_KEY, MAX_RUN_ID, build_key, check_run_id, is_reply, key_prefix, reply_call, seq_of, tool_call

RUN_IDS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]) | st.sampled_from(":/%#~.a1 "), min_size=1, max_size=40)
PLACES = st.sampled_from(["0", "1", "10", "0.0", "1.0", "0.1", "0.10", "0/model", "1/model", "10/model"])


@pytest.mark.parametrize("run_id", ["a", "order-7", "Ünïcode ☃", "a b", "a:b/c%d#e", "x" * MAX_RUN_ID, "😀" * 100])
def test_a_printable_id_of_fair_length_is_one(run_id: str) -> None:
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize(
    "run_id",
    [
        "", "x" * (MAX_RUN_ID + 1), "a\nb", "a\0", "\x1b[31m", "a\u200bb", "\u202eabc", "\ud83d", "a\u2028",
        None, 5, b"a", ["a"],
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused_and_shown_without_harm(run_id: object) -> None:
    with pytest.raises(InvalidRunId) as refused:
        check_run_id(run_id)
    assert str(refused.value).isprintable()


@given(RUN_IDS)
def test_what_passes_can_be_encoded_and_printed(run_id: str) -> None:
    assume(run_id.isprintable())
    check_run_id(run_id).encode()


@given(RUN_IDS, RUN_IDS | st.just(""), PLACES, RUN_IDS, RUN_IDS | st.just(""), PLACES)
@example("a", "b/c", "0", "a", "b", "0")
@example("b/a", "", "0", "a", "b", "0")
@example("a:0", "", "1", "a", "", "0")
@example("a%3A", "", "0", "a:", "", "0")
@example("r" * 300, "", "0", "r" * 300, "", "0.0")
def test_no_two_calls_share_a_key(run: str, space: str, place: str, run2: str, space2: str, place2: str) -> None:
    one, two = build_key(key_prefix(run, space), place), build_key(key_prefix(run2, space2), place2)
    assert (one == two) is ((run, space, place) == (run2, space2, place2))
    assert len(one) <= MAX_KEY
    assert one.isascii()
    assert one.isprintable()


def test_a_key_reads_as_the_run_and_the_place() -> None:
    assert build_key(key_prefix("run42"), "3") == "run42:3"
    assert build_key(key_prefix("run42"), "3.1") == "run42:3.1"
    assert build_key(key_prefix("run42"), "3/model") == "run42:3/model"
    assert build_key(key_prefix("run42", "prod"), "3") == "prod/run42:3"
    assert build_key(key_prefix("a:b/c"), "0") == "a%3Ab%2Fc:0"


@given(st.integers(200, 520), st.integers(200, 520))
def test_a_long_key_is_cut_to_one_of_its_own(length: int, other: int) -> None:
    keys = {n: build_key(key_prefix("r" * n), "0") for n in (length, other)}
    assert len(set(keys.values())) == len(keys)
    for n, key in keys.items():
        assert len(key) <= MAX_KEY
        assert ("#" in key) is (n + 2 > MAX_KEY)
        assert key == build_key(key_prefix("r" * n), "0")


@given(st.integers(0, 10**6), st.integers(0, 99), st.integers(2, 100))
def test_a_place_names_its_decision_and_whether_it_is_a_reply(seq: int, index: int, count: int) -> None:
    for place in (reply_call(seq), tool_call(seq, 0, 1), tool_call(seq, index, count)):
        assert seq_of(place) == seq
        assert is_reply(place) is place.endswith("/model")
    assert tool_call(seq, 0, 1) == str(seq)
    assert tool_call(seq, index, count) == f"{seq}.{index}"


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99), st.integers(1, 99))
def test_no_two_calls_of_one_run_share_a_place(seq: int, other: int, one: int, two: int) -> None:
    places = [tool_call(seq, at, one) for at in range(one)] + [reply_call(seq)]
    if other != seq:
        places += [tool_call(other, at, two) for at in range(two)] + [reply_call(other)]
    assert len(set(places)) == len(places)
