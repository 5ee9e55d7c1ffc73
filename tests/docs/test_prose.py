"""What is too long on a page is found where it stands, and what pages are allowed only falls."""

import importlib
import re
import sys

import pytest

from tests.multirank import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
prose = importlib.import_module("prose")


def words(number: int) -> str:
    return "Word" + " word" * (number - 1)


LONG = f"{words(40)} more."
PARAGRAPH = f"{words(39)} end. " * 3 + "One more."


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (f"A title.\n\n{LONG}\n", [("sentence", 3, 41)]),
        (f"Short. {LONG}\n", [("sentence", 1, 41)]),
        (f"Short,\nlonger `so.` to say.\n{LONG}\n", [("sentence", 3, 41)]),
        (f"- an item\n- {LONG}\n", [("sentence", 2, 41)]),
        (f"1. an item,\n\n    {LONG}\n", [("sentence", 3, 41)]),
        (f"> {LONG}\n", [("sentence", 1, 41)]),
        (f"Text.\n\n!!! note\n    {LONG}\n", [("sentence", 4, 41)]),
        (f"{words(20)} e.g. {words(20)} so.\n", [("sentence", 1, 42)]),
        (f"{words(38)} [a link](there.md) `and name`.\n", [("sentence", 1, 42)]),
        (PARAGRAPH, [("paragraph", 1, 122)]),
        (f"{words(60)}.\n\n{PARAGRAPH}", [("sentence", 1, 60), ("paragraph", 3, 122)]),
    ],
)
def test_what_is_too_long_is_found_in_its_place(page, found):
    assert [(long.kind, long.line, long.words) for long in prose.find_long(page)] == found


@pytest.mark.parametrize(
    "page",
    [
        f"{words(40)}.\n",
        f"{words(39)} end. " * 3,
        f"{words(30)}. {words(30)}.\n",
        f"{words(30)}! `name` {words(30)}.\n",
        "\n".join(f"- {words(39)}" for _ in range(9)),
        f"| {LONG} |\n|---|\n| {LONG} |\n",
        f"# {LONG}\n",
        f"```python\n{LONG}\n```\n",
        f"- an item:\n\n    ```\n    {LONG}\n    ```\n",
        f"A line.\n\n    {LONG}\n",
        f"---\nkey: {LONG}\n---\n<!-- {LONG} -->\n",
        f"[1]: https://example.org {LONG}\n",
    ],
)
def test_what_is_short_or_no_prose_is_let_through(page):
    assert prose.find_long(page) == []


def test_every_page_but_results_and_decisions_is_looked_at():
    pages = prose.pages()
    assert {"README.md", "docs/plan.md", "docs/tutorial/index.md"} <= {*pages}
    assert [page for page in pages if "/adr/" in page or "/results/" in page] == []


@pytest.mark.parametrize(
    ("has", "allowed", "said"),
    [
        ({"a.md": (0, 0)}, {}, ""),
        ({"a.md": (2, 1)}, {"a.md": (2, 1)}, ""),
        ({"a.md": (1, 0)}, {}, "a.md has 1 long sentences and 0 long paragraphs, expected at most"),
        ({"a.md": (2, 0)}, {"a.md": (1, 1)}, "a.md has 2 long sentences .* expected at most 1"),
        ({"a.md": (0, 2)}, {"a.md": (1, 1)}, "2 long paragraphs, expected at most 1"),
        ({"a.md": (1, 1)}, {"a.md": (2, 1)}, "long_pages.toml allows 2 .* --write` lowers that"),
        ({"a.md": (0, 0)}, {"a.md": (1, 0)}, "--write` lowers that"),
        ({}, {"a.md": (1, 0)}, "a.md stands in long_pages.toml and is no page; take it out"),
    ],
)
def test_a_page_is_as_long_as_it_is_allowed_to_be(has, allowed, said):
    found = prose.disallowed(has, allowed)
    assert len(found) == bool(said)
    if said:
        assert re.search(said, found[0])


def test_what_pages_are_allowed_is_lowered_and_never_raised(tmp_path, monkeypatch):
    file = tmp_path / "long_pages.toml"
    file.write_text('# Why.\n\n"a.md" = [2, 1]\n"b.md" = [1, 0]\n"gone.md" = [1, 1]\n')
    monkeypatch.setattr(prose, "ALLOWED", file)
    prose.write_allowed({"a.md": (1, 3), "b.md": (0, 0), "new.md": (5, 5)})
    assert file.read_text() == '# Why.\n\n"a.md" = [1, 1]\n'


def test_the_pages_are_as_long_as_they_are_allowed_to_be():
    assert prose.disallowed(prose.count_pages(), prose.allowed_lengths()) == []
