"""Builds the site of the documentation from the pages, offline, into a folder.

    python scripts/build_docs.py [FOLDER]      (default: site/)

The pages are written for a reader of the repository. Here they become a site: a link to a file outside of `docs/` leads to a
page with that file, a list that follows its sentence at once gets the empty line that this renderer needs, our drawings are
put into the page so that they follow its colours, and a state diagram becomes a table. The navigation is read from the
folders. Nothing is fetched, neither now nor by the reader's browser; a link that leads nowhere is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

TOP = Path(__file__).resolve().parent.parent
NAME = "durable-agent-runtime"
OUTSIDE = "repository"
PICTURES = (".svg", ".png")
"""The folder of the site for what lies outside of `docs/`."""
FIRST = ("tool-loop", "flows", "after-a-crash", "in-doubt", "approvals", "supervisor", "stores", "names", "settings", "errors")
"""What is best read first of a folder, where it is there; the rest follows by title."""
FENCED = re.compile(r"(?ms)^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)$")
LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()(?P<target>[^)\s]+)(?P<after>\))")
PICTURE = re.compile(r"!\[(?P<says>[^\]]*)\]\((?P<target>[^)\s]+\.svg)\)")
MOVE = re.compile(r"(?m)^ +(\S+) --> (\S+?)(?:: (.+))?$")
ITEM = re.compile(r" *([*-]|\d+\.) ")

SETTINGS = """\
[project]
site_name = "{name}"
docs_dir = "docs"
site_dir = "site"
use_directory_urls = false
extra_css = ["site.css"]
copyright = "Apache-2.0"
nav = {nav}

[project.theme]
language = "en"
font = false
features = ["content.code.copy", "content.code.select", "navigation.footer", "navigation.sections", "navigation.top",
  "search.highlight", "toc.follow"]
icon = {{ logo = "lucide/book-open" }}

[[project.theme.palette]]
media = "(prefers-color-scheme)"
toggle.icon = "lucide/sun-moon"
toggle.name = "Switch to light mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to system preference"

[project.plugins.search]

[project.markdown_extensions]
admonition = {{}}
attr_list = {{}}
md_in_html = {{}}
tables = {{}}
toc.permalink = true
toc.slugify = {{ object = "pymdownx.slugs.slugify", kwds = {{ case = "lower" }} }}
pymdownx.highlight.pygments_lang_class = true
pymdownx.superfences = {{}}
"""


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TOP / "site"
    faults = build(target)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"wrote {target}/index.html; its search works when it is served: python -m http.server -d {target}")
    return 1 if faults else 0


def build(target: Path, top: Path = TOP) -> list[str]:
    """Build the site of a checkout into a folder, whose old contents go. Gives what is wrong; then nothing is written."""
    with TemporaryDirectory() as folder:
        project = Path(folder)
        put_pages(top, project / "docs")
        settings = SETTINGS.format(name=NAME, nav=in_toml(navigation(project / "docs")))
        (project / "zensical.toml").write_text(settings, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(project / "zensical.toml")],
            cwd=project, env={**os.environ, "NO_COLOR": "1"}, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if ended.returncode:
            return [ended.stdout]
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(project / "site", target)
    return []


# From the repository to the pages of the site.


def put_pages(top: Path, into: Path) -> None:
    """Every page and picture of `docs/`, those beside it, and whatever else they lead to, as pages of the site."""
    shutil.copytree(top / "docs", into, ignore=shutil.ignore_patterns("*.md"))
    done: set[Path] = set()
    waiting = [*sorted((top / "docs").rglob("*.md")), *sorted(top.glob("*.md"))]
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        page = into / place(source.relative_to(top))
        page.parent.mkdir(parents=True, exist_ok=True)
        text = page_text(source, top)
        page.write_text(for_the_site(text, source, top), encoding="utf-8")
        waiting += [linked for linked in links(text, source) if linked.exists() and linked.suffix not in PICTURES]
    from scripts import pictures

    (into / "site.css").write_text(pictures.site_css(), encoding="utf-8")


def place(path: Path) -> Path:
    """Where a file of the repository is on the site."""
    if path.parts[0] == "docs":
        return Path(*path.parts[1:])
    if path.name == "README.md":
        return Path(OUTSIDE, *path.parts[:-1], "readme.md")
    return Path(OUTSIDE, path) if path.suffix == ".md" else Path(OUTSIDE, f"{path}.md")


def page_text(source: Path, top: Path) -> str:
    """A page as it is written; of a folder what is in it, of another file the file."""
    path = source.relative_to(top)
    if source.is_dir():
        listed = [f"* `{file.name}`: {opening(file)}\n" for file in sorted(source.glob("*.py"))]
        return f"# {path}/\n\n{''.join(listed)}"
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text
    return f"# {path}\n\n````{source.suffix.lstrip('.')}\n{text}````\n"


def opening(module: Path) -> str:
    """The sentence that a module opens with."""
    return module.read_text(encoding="utf-8").lstrip('"').partition("\n")[0].rstrip('"')


def for_the_site(text: str, source: Path, top: Path) -> str:
    """A page of the repository, as this renderer and the site need it."""
    pieces = []
    for block, piece in in_pieces(text):
        if block is None:
            pieces.append(with_links(with_pictures(with_breathing_lists(piece), source), source, top))
        elif block["language"] == "mermaid":
            pieces.append(moves_as_table(block["body"]))
        else:
            pieces.append(piece)
    return "".join(pieces)


def in_pieces(text: str) -> Iterator[tuple[re.Match[str] | None, str]]:
    """The text between fenced blocks, and the blocks."""
    at = 0
    for block in FENCED.finditer(text):
        yield None, text[at : block.start()]
        yield block, block[0]
        at = block.end()
    yield None, text[at:]


def links(text: str, source: Path) -> list[Path]:
    """The files that a page leads to."""
    found = [match["target"] for block, piece in in_pieces(text) if block is None for match in LINK.finditer(piece)]
    return [(source.parent / target.partition("#")[0]).resolve() for target in found if is_inside(target)]


def is_inside(target: str) -> bool:
    return "://" not in target and not target.startswith(("#", "mailto:"))


def with_links(text: str, source: Path, top: Path) -> str:
    page = place(source.relative_to(top))

    def lead(match: re.Match[str]) -> str:
        target = match["target"]
        if not is_inside(target):
            return match[0]
        path, mark, anchor = target.partition("#")
        file = (source.parent / path).resolve()
        if not file.exists() or not file.is_relative_to(top):
            return match[0]  # the renderer refuses it, with its page
        there = file.relative_to(top)
        there = Path(*there.parts[1:]) if there.parts[0] == "docs" and file.suffix != ".md" else place(there)
        return f"{match['before']}{os.path.relpath(there, page.parent)}{mark}{anchor}{match['after']}"

    return LINK.sub(lead, text)


def with_pictures(text: str, source: Path) -> str:
    """Our drawings stand in the page itself: so they have its colours, also where the reader switches them."""

    def put(match: re.Match[str]) -> str:
        picture = source.parent / match["target"]
        drawing = picture.read_text(encoding="utf-8") if picture.suffix == ".svg" else ""
        if 'class="picture"' not in drawing:
            return match[0]
        drawing = re.sub(r"(?s)<style>.*?</style>", "", drawing)
        drawing = re.sub(r"\n\s*", "", drawing)
        return f'<div class="picture">{drawing}</div>'

    return PICTURE.sub(put, text)


def with_breathing_lists(text: str) -> str:
    """A list that follows a sentence at once, with an empty line before it."""
    lines: list[str] = []
    for line in text.split("\n"):
        if ITEM.match(line) and lines and lines[-1].strip() and not is_of_list(lines):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def is_of_list(lines: Sequence[str]) -> bool:
    """Whether the lines end within a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
        if not line.startswith(" "):
            return False
    return False


def moves_as_table(diagram: str) -> str:
    """A state diagram as a table: from which state what leads where."""
    moves = [move for move in MOVE.findall(diagram) if "[*]" not in move[:2]]
    first = [ends for before, ends, _ in MOVE.findall(diagram) if before == "[*]"]
    rows = []
    for state in dict.fromkeys([*first, *(before for before, _, _ in moves)]):
        ways = [f"{by} → **{ends}**" if by else f"**{ends}**" for before, ends, by in moves if before == state]
        rows.append(f"| **{state}** | {' · '.join(ways)} |\n")
    last = [before for before, ends, _ in MOVE.findall(diagram) if ends == "[*]"]
    return f"| from | to |\n|---|---|\n{''.join(rows)}\nIt begins as {', '.join(first)} and ends as {', '.join(last)}.\n"


# The navigation.


def navigation(pages: Path) -> list[object]:
    """The pages by their folders, each under its title."""
    return [
        {"Start": entries(pages, "index", "quickstart", "concepts")},
        {"Guides": folder(pages, "guides")},
        {"Compared": [*entries(pages, "comparison"), *folder(pages, "coming-from"), *entries(pages, "speed", "scale")]},
        {"Promises": entries(pages, "not-promised", "troubleshooting")},
        {"Reference": [*folder(pages, "reference"), {"From the docstrings": folder(pages, "reference/api")}]},
        {"Inside": [*entries(pages, f"{OUTSIDE}/ARCHITECTURE", f"{OUTSIDE}/CHANGELOG"), decisions(pages)]},
    ]


def decisions(pages: Path) -> object:
    return {"Decisions": [*entries(pages, "decisions"), *folder(pages, "decisions")]}


def entries(pages: Path, *names: str) -> list[object]:
    return [entry(pages, pages / f"{name}.md") for name in names if (pages / f"{name}.md").is_file()]


def folder(pages: Path, name: str) -> list[object]:
    """The pages of a folder, those that are best read first before the others."""
    found = sorted((pages / name).glob("*.md"), key=lambda page: (rank(page.stem), order(page)))
    return [entry(pages, page) for page in found]


def rank(stem: str) -> int:
    return FIRST.index(stem) if stem in FIRST else len(FIRST)


def order(page: Path) -> str:
    """Decisions by number, others by title."""
    return page.stem if page.stem[:4].isdigit() else title(page).lower()


def entry(pages: Path, page: Path) -> object:
    return {title(page): page.relative_to(pages).as_posix()}


def title(page: Path) -> str:
    """A page's first heading."""
    found = re.search(r"(?m)^# (.+)$", page.read_text(encoding="utf-8"))
    return re.sub(r"[`*]", "", found[1]) if found else page.stem


def in_toml(value: object) -> str:
    match value:
        case list():
            return f"[{', '.join(map(in_toml, value))}]"
        case dict():
            return f"{{ {', '.join(f'{json.dumps(name)} = {in_toml(inner)}' for name, inner in value.items())} }}"
        case _:
            return json.dumps(value)


if __name__ == "__main__":
    sys.path.insert(0, str(TOP))
    sys.exit(main())
