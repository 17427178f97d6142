"""What `import agent_runtime` gives, and what it costs."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import agent_runtime
from agent_runtime import errors

NOT_NEEDED = ["asyncio", "sqlite3", "pydantic", "http.server", "http.client", "threading", "json", "hashlib", "ssl", "logging"]


def in_a_fresh_process(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_importing_the_package_imports_nothing_else_until_a_name_is_used() -> None:
    program = f"import sys, agent_runtime; print([name for name in {NOT_NEEDED} if name in sys.modules])"
    bare = in_a_fresh_process(f"import sys; print([name for name in {NOT_NEEDED} if name in sys.modules])")
    assert in_a_fresh_process(program) == bare


OURS = {"agent_runtime", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}


def test_all_names_used_by_a_program_need_pydantic_and_the_standard_library_alone() -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import agent_runtime, agent_runtime.stores.memory, agent_runtime.stores.postgres, agent_runtime.stores.sqlite\n"
        "for name in agent_runtime.__all__: getattr(agent_runtime, name)\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    others = {
        name for name in in_a_fresh_process(program).split() if not name.startswith("_sysconfigdata")
    }  # the library's own
    assert others <= OURS


@pytest.mark.parametrize("name", [name for name in agent_runtime.__all__ if name != "__version__"])
def test_every_name_of_the_front_door_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(agent_runtime, name)
    assert name in dir(agent_runtime)
    if isinstance(value, type) or inspect.isfunction(value):
        assert value.__doc__, f"{name} has no docstring"


def test_the_names_of_the_front_door_are_sorted_and_complete() -> None:
    assert set(agent_runtime.__all__) - {"__version__"} == set(agent_runtime._HOME_OF)
    assert len(set(agent_runtime.__all__)) == len(agent_runtime.__all__)
    for name, home in agent_runtime._HOME_OF.items():
        assert getattr(importlib.import_module(f"agent_runtime.{home}"), name) is getattr(agent_runtime, name)


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        agent_runtime.no_such_name  # noqa: B018  # the access is what fails


ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_one_of_ours_and_says_who_must_act(error: type[BaseException]) -> None:
    if error is errors.Fenced:
        assert not issubclass(error, Exception), "user code must not swallow it"
        return
    assert issubclass(error, errors.AgentRuntimeError)
    assert error.__doc__
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__, f"{error.__name__} is missing in the tree"


def test_stores_are_opened_by_their_url_alone() -> None:
    from agent_runtime.errors import InvalidSetting
    from agent_runtime.stores import open_store, sqlite_path

    assert type(open_store("memory://")).__name__ == "MemoryCheckpointStore"
    assert sqlite_path("sqlite:///runs.db") == "runs.db"
    assert sqlite_path("sqlite:////var/runs.db") == "/var/runs.db"
    wrong = "runs.db sqlite: sqlite:// sqlite:/// sqlite:///:memory: memory://x memory: mysql://x http://x"
    for url in ("", *wrong.split()):
        with pytest.raises(InvalidSetting):
            open_store(url)


def test_opening_a_memory_store_imports_no_database() -> None:
    program = (
        "import sys; from agent_runtime.stores import open_store; open_store('memory://'); print('sqlite3' in sys.modules)"
    )
    assert in_a_fresh_process(program).strip() == "False"
