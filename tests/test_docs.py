"""The pages say what is: what they quote, print and list is checked against the package."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import agent_runtime
from agent_runtime import errors, recover_tool_loop, run_tool_loop, stores
from agent_runtime.crash import CrashPoint
from agent_runtime.journal.states import CallState, draw_run_life
from agent_runtime.settings import Settings
from tests.pages import TOP, blocks, name_of, pages, quoted_file, renewed

SOURCE = TOP / "src" / "agent_runtime"
PAGES = {name_of(page): page for page in pages()}
OURS = sorted(name for name in PAGES if name != "docs/speed.md")
NEXT = "next: python -m tests.pages"

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ROW = re.compile(r"(?m)^\| (.+) \|$")


def read(name: str) -> str:
    return (TOP / name).read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page, heads and rules included, cell by cell."""
    return [[cell.strip() for cell in line.split(" | ")] for line in ROW.findall(read(page))]


def backticked(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", text)


# What is made, not written.


@pytest.mark.parametrize("name", OURS)
def test_what_a_page_quotes_and_draws_and_prints_is_what_is(name: str) -> None:
    text = read(name)
    assert renewed(text) == text, NEXT


@pytest.mark.parametrize("name", OURS)
def test_python_on_a_page_is_quoted_from_an_example_that_runs(name: str) -> None:
    for block in blocks(read(name)):
        if block["language"] == "python":
            file, _ = quoted_file(block)
            assert block["body"] in file.read_text(encoding="utf-8"), f"{file.name} does not hold what {name} quotes; {NEXT}"


def test_a_changed_file_or_output_or_diagram_on_a_page_would_be_seen() -> None:
    quoted = (TOP / "examples" / "smallest.py").read_text(encoding="utf-8")
    right = (
        f"Words.\n\n<!-- examples/smallest.py -->\n```python\n{quoted}```\n\n"
        "```console\n$ python -c 'print(42)'\n42\n$ cat nothing-here 2>&1 | wc -l\n1\n```\n\n"
        f"<!-- drawn by draw_run_life -->\n```mermaid\n{draw_run_life()}\n```\n\n```sh\nmake test\n```\n"
    )
    assert renewed(right) == right
    for was, becomes in (("left + right", "left - right"), ("42\n$", "43\n$"), ("running --> done", "running --> gone")):
        assert was in right
        assert renewed(right.replace(was, becomes)) == right


def test_both_state_diagrams_stand_in_the_architecture_page() -> None:
    drawn = [block["marker"] for block in blocks(read("ARCHITECTURE.md")) if block["language"] == "mermaid"]
    assert drawn == ["drawn by draw_call_life", "drawn by draw_run_life"]
    assert {state.value for state in CallState} <= set(re.findall(r"[a-z]+", read("ARCHITECTURE.md")))


# Links.


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_link_to_another_page_leads_somewhere(name: str) -> None:
    broken = []
    for target in LINK.findall(prose(read(name))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = PAGES[name] if not path else PAGES[name].parent / path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, waiting = set(), [TOP / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in found or page.suffix != ".md" or not page.exists():
            continue
        found.add(page)
        links = LINK.findall(prose(page.read_text(encoding="utf-8")))
        waiting += [page.parent / link.partition("#")[0] for link in links if "://" not in link]
    assert [name for name, page in PAGES.items() if page not in found] == []


# What must be listed.


def test_every_public_name_is_documented() -> None:
    listed = backticked(read("docs/reference/names.md"))
    assert sorted(set(agent_runtime.__all__) - listed) == []
    offered = {name.rpartition(".")[2] for name in listed if name.startswith("agent_runtime.stores.")}
    assert offered == set(stores.__all__)


def test_every_error_says_on_its_page_when_it_comes_and_what_to_do() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__}
    page = "docs/reference/errors.md"
    listed = {cells[0].strip("`"): cells[1:] for cells in rows(page) if cells[0].startswith("`")}
    outside_the_tables = {"AgentRuntimeError", "UsageError", "Doubt", "Fenced"}
    assert classes - set(listed) == outside_the_tables
    assert outside_the_tables <= backticked(read(page))
    assert set(listed) - classes == set(), "expected only classes of errors.py"
    silent = [name for name, cells in listed.items() if not all(cells) and not cells[0].startswith("reserved")]
    assert silent == [], "expected a cell that says when, and one that says what to do"


def test_every_setting_that_is_read_is_listed_and_no_other() -> None:
    sources = (SOURCE / "settings.py").read_text(encoding="utf-8") + (SOURCE / "crash.py").read_text(encoding="utf-8")
    read_by_us = set(re.findall(r'(?:environ(?:\.get)?[\[(]|environ, )"([A-Z_]+)"', sources))
    table = {cells[0].strip("`"): cells[1] for cells in rows("docs/reference/settings.md") if cells[0].isupper()}
    assert set(table) == read_by_us
    defaults = Settings()
    assert table["DATABASE_URL"] == f"`{defaults.database_url}`"
    assert table["PLANNER"] == f"`{defaults.planner}`"
    assert table["LEASE"] == str(defaults.lease_seconds)
    assert table["HEARTBEAT"] == str(defaults.heartbeat_seconds)
    assert table["POLL"] == str(defaults.poll_seconds)
    assert table["MAX_ATTEMPTS"] == str(defaults.max_attempts)


def test_every_option_of_the_loop_is_listed_with_its_default() -> None:
    table = {
        name.strip("` "): cells[1].strip("`")
        for cells in rows("docs/reference/settings.md")
        if re.fullmatch(r"(`[a-z_]+`(, )?)+", cells[0])
        for name in cells[0].split(",")
    }
    started = dict(inspect.signature(run_tool_loop).parameters)
    options = {**inspect.signature(recover_tool_loop).parameters, **started}
    wanted = {name: option for name, option in options.items() if option.kind is option.KEYWORD_ONLY}
    assert set(table) == set(wanted)
    told_in_words = {"run_id", "crash", "clock", "entropy", "offload"}
    wrong = {n: table[n] for n, option in wanted.items() if n not in told_in_words and table[n] != repr(option.default)}
    assert wrong == {}


@pytest.mark.parametrize(
    ("store", "page"),
    [
        (stores.PostgresCheckpointStore, "postgres"),
        (stores.SQLAlchemyCheckpointStore, "sqlalchemy"),
        (stores.RedisCheckpointStore, "redis"),
    ],
)
def test_every_option_of_a_store_with_a_page_is_listed_with_its_default(store: type, page: str) -> None:
    options = dict(inspect.signature(store).parameters)
    wanted = {name: option.default for name, option in options.items() if option.kind is option.KEYWORD_ONLY}
    table = {cells[0].strip("`="): cells[1].strip("`") for cells in rows(f"docs/reference/{page}.md") if "=`" in cells[0]}
    assert set(table) == set(wanted)
    assert [name for name, told in table.items() if name != "clock" and told.replace('"', "'") != repr(wanted[name])] == []


def test_every_event_that_is_announced_is_listed_and_no_other() -> None:
    announced = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].strip("_").startswith("announce"):
                announced |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and "." in str(arg.value)}
    listed = {
        cells[0].strip("`") for cells in rows("docs/reference/events.md") if re.fullmatch(r"`[a-z]+\.[a-z_]+`", cells[0])
    }
    assert listed == announced
    assert len(announced) >= 14


def test_every_crash_point_is_explained() -> None:
    for page in ("docs/guides/fault-injection.md", "ARCHITECTURE.md"):
        explained = {name for cells in rows(page) for name in backticked(cells[0])}
        assert {point.value for point in CrashPoint} <= explained, page


# The map.


def test_the_map_names_every_module() -> None:
    [shown] = [block["body"] for block in blocks(read("ARCHITECTURE.md")) if block["body"].startswith("src/")]
    names = {path.name for path in SOURCE.glob("*.py")} | {path.name for path in (SOURCE / "journal").glob("*.py")}
    names |= {path.name for path in (SOURCE / "stores").glob("*.py")}
    names |= {f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert [name for name in sorted(names) if name not in shown] == []
    testing = {path.stem for path in (SOURCE / "testing").iterdir() if not path.name.startswith("__")}
    assert [name for name in sorted(testing) if name not in shown] == []


def test_the_floors_on_the_page_are_those_that_are_held() -> None:
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    [held] = [contract["layers"] for contract in contracts if contract.get("containers") == ["agent_runtime"]]
    shown = [cells for cells in rows("ARCHITECTURE.md") if cells[0].isdigit()]
    assert [set(backticked(cells[1])) for cells in shown] == [set(re.findall(r"\w+", layer)) for layer in held]
    assert [int(cells[0]) for cells in shown] == list(range(len(held) - 1, -1, -1))


def test_every_harness_that_a_page_names_is_a_target_of_make() -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", read("Makefile")))
    named = {target for name in OURS for target in re.findall(r"`make ([a-z]+)`", read(name))}
    assert named - targets == set()
    assert {"test", "sweep", "bench", "check", "demo"} <= named


# The form of a page.


def test_the_changelog_keeps_its_form() -> None:
    text = read("CHANGELOG.md")
    assert re.findall(r"(?m)^## (.+)$", text)[0] == "[Unreleased]"
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"(?m)^### (.+)$", text)) <= kinds
    released = re.findall(r"(?m)^## (?!\[Unreleased\])(.+)$", text)
    assert [line for line in released if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line)] == []


def test_every_decision_has_its_number_and_its_three_parts() -> None:
    decisions = sorted(path for path in PAGES.values() if path.parent.name == "decisions")
    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {int(path.name[:4])}. "), path.name
        assert re.findall(r"(?m)^## (.+)$", text) == ["Context", "Decision", "Consequences"], path.name
        assert len(text.splitlines()) <= 60, f"{path.name} is more than a page"


def test_the_names_of_the_first_decision_are_there() -> None:
    missing = []
    for word, *places in rows("docs/decisions/0001-names.md")[1:]:
        files = [SOURCE / file for file in backticked(places[0])]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        names = {name.rpartition(".")[2] for name in backticked(places[1])}
        missing += [f"{word}: {name}" for name in names if not re.search(rf"\b{name}\b", text)]
    assert missing == []
