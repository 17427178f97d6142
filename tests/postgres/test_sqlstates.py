"""Every SQLSTATE is sorted: nothing was written, nothing will be until somebody acts, or nobody knows."""

from __future__ import annotations

import pytest
from asyncpg import exceptions

from agent_runtime.errors import ReadOnlyStore, StoreRefused, StoreUnavailable
from agent_runtime.stores.postgres_errors import FATES, Fate, fate_of, translate

KNOWN = [getattr(value, "sqlstate", None) for value in vars(exceptions).values()]
STATES = sorted({state for state in KNOWN if isinstance(state, str)})
NOT_ERRORS = {"00", "01"}


class Said(Exception):
    def __init__(self, sqlstate: str, message: str = "no") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message


def test_every_state_that_the_driver_knows_is_in_the_table_by_itself_or_by_its_class() -> None:
    assert len(STATES) > 200
    missing = [state for state in STATES if state not in FATES and state[:2] not in FATES and state[:2] not in NOT_ERRORS]
    assert missing == []


@pytest.mark.parametrize(
    ("state", "fate"),
    [
        ("08006", Fate.UNKNOWN),
        ("08003", Fate.UNKNOWN),
        ("08P01", Fate.UNKNOWN),
        ("40003", Fate.UNKNOWN),
        ("57P01", Fate.UNKNOWN),
        ("57P02", Fate.UNKNOWN),
        ("57P05", Fate.UNKNOWN),
        ("25P03", Fate.UNKNOWN),
        ("58030", Fate.UNKNOWN),
        ("XX000", Fate.UNKNOWN),
        ("ZZ999", Fate.UNKNOWN),
        ("", Fate.UNKNOWN),
        ("40001", Fate.UNDONE),
        ("40P01", Fate.UNDONE),
        ("53100", Fate.UNDONE),
        ("53300", Fate.UNDONE),
        ("55P03", Fate.UNDONE),
        ("57014", Fate.UNDONE),
        ("57P03", Fate.UNDONE),
        ("23505", Fate.UNDONE),
        ("22021", Fate.UNDONE),
        ("25006", Fate.REFUSED),
        ("28P01", Fate.REFUSED),
        ("42501", Fate.REFUSED),
        ("3D000", Fate.REFUSED),
    ],
)
def test_a_state_has_the_fate_that_its_moment_gives_it(state: str, fate: Fate) -> None:
    assert fate_of(Said(state)) is fate


def test_what_has_no_state_is_unknown_but_for_a_value_that_was_never_sent() -> None:
    unknown = (OSError("reset"), TimeoutError(), RuntimeError("odd"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
    assert {fate_of(error) for error in unknown} == {Fate.UNKNOWN}
    never_sent = (ValueError("no such number"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"))
    assert {fate_of(error) for error in never_sent} == {Fate.UNDONE}


def test_an_error_is_translated_by_who_has_to_act() -> None:
    assert type(translate(Said("25006"), "there")) is ReadOnlyStore
    assert type(translate(Said("42501"), "there")) is StoreRefused
    assert type(translate(Said("40P01"), "there")) is StoreUnavailable
    assert "DETAIL" not in str(translate(Said("23505", "duplicate\nDETAIL: (body)=(secret)"), "there"))
