"""A signature of plain types is checked as pydantic itself checks it, although most of pydantic is never loaded."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.errors import InvalidArguments
from agent_runtime.signatures import ArgumentCheck, _declared_check, read_arguments, read_hints


def scalars(text: str, whole: int, real: float, sure: bool, none: None = None) -> None: ...
def choices(a: int | str, b: float | None, c: Literal["x", 1, True], d: bool | int | None = None) -> None: ...
def nested(rows: list[dict[str, int]], items: list[Any], tree: dict[str, list[float | None]] | None = None) -> None: ...
def anything(x: Any, y: object, z=3) -> None: ...  # type: ignore[no-untyped-def]  # a parameter without a type on purpose


FUNCTIONS: list[Callable[..., None]] = [scalars, choices, nested, anything]

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4),
    st.sampled_from(["1", "1.0", "true", "yes", "x", "", "1e3", " 7 ", "null"]), st.sampled_from([0, 1, 2**70, -1, 1.0, 1.5]),
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def both_checks(function: Callable[..., None]) -> tuple[ArgumentCheck, ArgumentCheck]:
    hints = read_hints(function, "tool")
    plain, _ = read_arguments(function, "tool", hints)
    declared, _ = _declared_check("tool", list(inspect.signature(function).parameters.values()), hints)
    return plain, declared


def outcome(check: ArgumentCheck, args: bytes, plain: dict[str, object] | None = None) -> object:
    """The arguments by type and value, or which of them do not fit."""
    try:
        return repr(check(args, plain))
    except InvalidArguments:
        return "refused"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_plain_signature_takes_and_refuses_what_pydantic_takes_and_refuses(function: Callable[..., None]) -> None:
    plain, declared = both_checks(function)
    names = [*inspect.signature(function).parameters, "unknown"]

    @settings(max_examples=150, deadline=None)
    @given(st.dictionaries(st.sampled_from(names), values, max_size=5))
    def compare(args: dict[str, object]) -> None:
        data = json.dumps(args).encode()
        expected = outcome(declared, data)
        assert outcome(plain, data) == expected
        assert outcome(plain, data, args) == expected, "arguments that the caller has as plain data are taken as they are read"

    compare()
    assert plain is not declared


@pytest.mark.parametrize(("args", "taken", "is_loaded"), [({"q": "x", "i": 3}, 3, False), ({"q": "x", "i": "3"}, 3, True)])
def test_arguments_of_exactly_the_declared_types_are_taken_without_pydantic(
    args: dict[str, object], taken: int, is_loaded: bool
) -> None:
    program = (
        "import sys\n"
        "from agent_runtime.signatures import read_arguments, read_hints\n"
        "def tool(q: str, i: int) -> None: ...\n"
        "check, _ = read_arguments(tool, 'tool', read_hints(tool, 'tool'))\n"
        f"print(check({json.dumps(args).encode()!r}, None) == {{'q': 'x', 'i': {taken}}}, 'pydantic_core' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["True", str(is_loaded)]
