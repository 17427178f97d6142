"""The reference from the docstrings is what the docstrings say, and no public name is missing from it."""

import re

import pytest

import agent_runtime
from agent_runtime import stores, testing
from scripts import reference
from tests.pages import TOP

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_what_the_docstrings_say(name: str) -> None:
    stored = (TOP / "docs" / "reference" / "api" / f"{name}.md").read_text(encoding="utf-8")
    assert stored == PAGES[name], "next: make pages"


def test_every_public_name_has_its_place_in_the_reference_and_only_one() -> None:
    told = [name for text in PAGES.values() for name in re.findall(r"(?m)^## (\w+)$", text)]
    offered = {*agent_runtime.__all__, *stores.__all__, *testing.__all__} - {"__version__"}
    assert offered - set(told) == set()
    assert sorted(told) == sorted(set(told))


def test_no_page_of_the_reference_is_left_over() -> None:
    assert {page.stem for page in (TOP / "docs" / "reference" / "api").glob("*.md")} == set(PAGES)


def test_a_changed_docstring_a_default_and_a_raised_error_would_be_seen() -> None:
    def recover(run_id: str, *, patience: float = 2.5) -> None:
        """Goes on with a run."""
        raise LookupError(run_id)

    told = "".join(reference.function_entry("recover", recover))
    assert "recover(run_id: str, *, patience: float = 2.5) -> None" in told
    assert "Goes on with a run." in told
    assert "`LookupError`" in told
