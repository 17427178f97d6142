"""The site of the documentation: it builds without a warning, its links lead somewhere, and it fetches from nobody else."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from scripts import build_docs, pictures
from tests.pages import TOP, pages

FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data"), ("use", "href")}
RELS_FETCHED = {"stylesheet", "icon", "preconnect", "preload", "dns-prefetch", "modulepreload", "prefetch", "manifest"}


class Page(HTMLParser):
    """What of a page leads elsewhere, what the browser fetches by itself, and what can be led to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.fetched += [found[name] for its, name in FETCHED if its == tag and name in found]
        if tag == "link" and RELS_FETCHED & set(found.get("rel", "").split()):
            self.fetched.append(found.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build_docs.build(folder) == []
    return folder


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_the_documentation_is_on_the_site_and_in_its_navigation(site: Path, built: dict[Path, Page]) -> None:
    expected = {site / build_docs.place(page.relative_to(TOP)).with_suffix(".html") for page in pages()}
    assert expected - set(built) == set()
    index = site / "index.html"
    reached = {(index.parent / link.partition("#")[0]).resolve() for link in built[index].links if "://" not in link}
    assert expected - reached - {index} == {site / build_docs.OUTSIDE / "readme.html"}


def test_every_link_of_the_site_leads_to_a_page_and_to_an_anchor_that_is_there(built: dict[Path, Page]) -> None:
    assert list(broken(built)) == []


def test_a_broken_link_and_a_broken_anchor_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").touch()
    here = Page('<a href="b.html#gone">b</a><a href="c.html">c</a><a href="b.html#here">b</a>')
    found = list(broken({tmp_path / "a.html": here, tmp_path / "b.html": Page('<h1 id="here">b</h1>')}))
    assert found == [f"{tmp_path}/a.html: b.html#gone", f"{tmp_path}/a.html: c.html"]


def broken(built: dict[Path, Page]) -> Iterator[str]:
    for path, page in built.items():
        for link in page.links:
            if "://" in link or link.startswith("mailto:"):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in built and anchor not in built[target].anchors):
                yield f"{path}: {link}"


def test_a_page_fetches_nothing_from_elsewhere(site: Path, built: dict[Path, Page]) -> None:
    elsewhere = [(path.name, url) for path, page in built.items() for url in page.fetched if "//" in url]
    assert elsewhere == []
    styles = [path for path in site.rglob("*.css") if "url(http" in path.read_text(encoding="utf-8").replace('"', "")]
    assert styles == []


def test_the_pictures_are_those_that_the_script_draws() -> None:
    for name, draw in pictures.PICTURES.items():
        stored = (TOP / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert stored == draw(), "next: .venv/bin/python scripts/pictures.py"


def test_our_pictures_stand_in_the_page_and_a_state_diagram_is_a_table(site: Path) -> None:
    concepts = (site / "concepts.html").read_text(encoding="utf-8")
    assert concepts.count('class="picture" viewbox') + concepts.count('class="picture" viewBox') == len(pictures.PICTURES)
    architecture = (site / build_docs.OUTSIDE / "ARCHITECTURE.html").read_text(encoding="utf-8")
    assert "stateDiagram" not in architecture
    assert "It begins as running and ends as" in architecture
