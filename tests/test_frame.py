"""What must be true of the repository as a whole: names, pins, imports, and what no file may say."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
SOURCE = TOP / "src" / "agent_runtime"

# Written in halves, so that this file does not say what it forbids.
REGISTRY_HOSTS = ("py" + "pi.org", "pythonhosted" + ".org", "npm" + "js.org", "crates" + ".io", "golang" + ".org")
MACHINE_PATHS = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/bash" + "_jobs")
PUT_OFF = ("TO" + "DO", "FIX" + "ME")
LEFT_OUT = ("pytest.sk" + "ip", "mark.sk" + "ip", "mark.xf" + "ail", "importor" + "skip", "unittest.sk" + "ip")

POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
CORE_DISTRIBUTIONS = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
# What works after a bare install. The tests of a user may import pytest; these may not.
CORE_FACES = ("cli", "mock", "provision", "runs", "supervisor", "stores.memory", "stores.sqlite", "tool_loop")

MOST_LINES = 500


def project_table() -> dict[str, object]:
    with (TOP / "pyproject.toml").open("rb") as file:
        table: dict[str, object] = tomllib.load(file)["project"]
    return table


def repository_files() -> list[Path]:
    """Every file that is, or is about to be, in the repository; links aside."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        candidates = [TOP / name for name in listing.stdout.split("\0") if name]
    else:  # An unpacked archive: no git, and no folder but the ones we ship.
        candidates = [path for folder in ("src", "tests", "scripts", "requirements") for path in (TOP / folder).rglob("*")]
        candidates += TOP.glob("*")
    return sorted(path for path in candidates if path.is_file() and "__pycache__" not in path.parts)


def repository_texts() -> Iterator[tuple[str, str]]:
    """Name and text of every file of the repository that is text."""
    for path in repository_files():
        try:
            yield str(path.relative_to(TOP)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def places_of(words: tuple[str, ...], texts: Iterator[tuple[str, str]]) -> list[str]:
    """Each `file:line` in which one of the words stands, as a word of its own."""
    pattern = re.compile("|".join(rf"(?<![A-Za-z0-9_~]){re.escape(word)}" for word in words))
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def code_texts() -> Iterator[tuple[str, str]]:
    return ((name, text) for name, text in repository_texts() if name.endswith((".py", ".sql", ".sh", ".lua")))


def source_modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """The first names of all modules that are imported while the module itself is being imported."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]
        waiting.extend(ast.iter_child_nodes(node))


def modules_loaded_by(*names: str) -> set[str]:
    """First names of the modules that a fresh interpreter loads in order to import `names`."""
    program = (
        "import importlib, sys\n"
        "before = set(sys.modules)\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print('\\n'.join({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "COVERAGE"))}
    answer = subprocess.run(
        [sys.executable, "-c", program, *names], capture_output=True, text=True, check=True, env=environment
    )
    return set(answer.stdout.split())


def requirement_entries(text: str) -> list[str]:
    """The logical lines of a requirements file, comments aside."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def test_the_distribution_needs_pydantic_alone() -> None:
    project = project_table()
    assert project["name"] == "durable-agent-runtime"
    assert project["dependencies"] == ["pydantic>=2.12,<3"]


def test_the_command_agent_runtime_is_declared_and_can_be_called() -> None:
    assert project_table()["scripts"] == {"agent-runtime": "agent_runtime.cli:main"}
    (command,) = entry_points(group="console_scripts", name="agent-runtime")
    assert callable(command.load())


def test_the_package_can_be_run_as_a_module() -> None:
    assert find_spec("agent_runtime.__main__") is not None


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_ci_runs_what_a_person_runs() -> None:
    script = TOP / ".ci" / "run"
    assert os.access(script, os.X_OK), "expected .ci/run to be executable; next: chmod +x .ci/run"
    assert "make test" in script.read_text(encoding="utf-8").splitlines()


def test_make_lists_every_target_with_a_line_of_its_own() -> None:
    makefile = (TOP / "Makefile").read_text(encoding="utf-8")
    declared = re.search(r"(?m)^\.PHONY: (.+)$", makefile)
    assert declared is not None
    assert re.findall(r"(?m)^([a-z]+):.* ## \S", makefile) == declared[1].split()


@pytest.mark.parametrize("path", sorted((TOP / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_every_requirement_is_pinned_and_hashed(path: Path) -> None:
    entries = requirement_entries(path.read_text(encoding="utf-8"))
    assert entries
    loose = [entry for entry in entries if not re.match(r"[a-z0-9._-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry)]
    assert loose == [], "expected `name==version` and a hash; next: make pins"


def test_both_requirements_files_agree_on_every_version() -> None:
    core, dev = (
        {entry.split()[0] for entry in requirement_entries((TOP / "requirements" / name).read_text(encoding="utf-8"))}
        for name in ("core.txt", "dev.txt")
    )
    assert core <= dev


def test_no_file_names_a_package_registry() -> None:
    hosts = re.compile("|".join(re.escape(host) for host in REGISTRY_HOSTS))
    assert [name for name, text in repository_texts() if hosts.search(text)] == []


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    assert places_of(MACHINE_PATHS, repository_texts()) == []


def test_nothing_is_put_off_to_later() -> None:
    assert places_of(PUT_OFF, code_texts()) == []


def test_no_test_is_left_out() -> None:
    assert places_of(LEFT_OUT, code_texts()) == []


def test_importing_the_package_loads_only_the_standard_library_and_pydantic() -> None:
    assert modules_loaded_by("agent_runtime") - sys.stdlib_module_names - CORE_DISTRIBUTIONS == {"agent_runtime"}


def test_the_main_job_and_the_command_line_load_only_the_standard_library_and_pydantic() -> None:
    loaded = modules_loaded_by(*(f"agent_runtime.{face}" for face in CORE_FACES))
    assert loaded - sys.stdlib_module_names - CORE_DISTRIBUTIONS == {"agent_runtime"}


def test_no_module_needs_posix_to_be_imported() -> None:
    found = {
        str(path.relative_to(SOURCE)): sorted(needed)
        for path in source_modules()
        if (needed := POSIX_ONLY.intersection(top_level_imports(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}, "expected these to be imported inside the function that uses them"


def test_no_file_of_the_package_holds_a_second_noun() -> None:
    lengths = {name: len(text.splitlines()) for name, text in repository_texts() if name.startswith("src/")}
    too_long = {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert too_long == {}, f"expected at most {MOST_LINES} lines; next: look for the second noun in the file"
