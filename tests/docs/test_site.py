"""What the site does beside mkdocs: patterns in the navigation, links that leave docs/, keys."""

import importlib
import logging
import re
import sys
from dataclasses import fields
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from tests.multirank import ROOT
from tonari.trainer import Config
from tonari.trainer.config.config import DataConfig

sys.path.insert(0, str(ROOT / "docs" / "site"))
hooks = importlib.import_module("hooks")
PAGE = PurePosixPath("adr/0001-one-heap-per-local-rank.md")


def test_a_pattern_becomes_its_pages_and_a_section_without_pages_is_left_out():
    nav = ["index.md", {"Sites": ["no-such-folder/*.md"]}, {"Why": [{"Decisions": ["adr/*.md"]}]}]
    index, why = hooks.expand(nav)
    assert index == "index.md"
    pages = why["Why"][0]["Decisions"]
    assert pages == sorted(f"adr/{path.name}" for path in (ROOT / "docs/adr").glob("*.md"))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a test](../../tests/multirank.py)", "a test (`tests/multirank.py`)"),
        ("[multirank.py](../../tests/multirank.py#x)", "multirank.py"),
        ("[words](../glossary.md)", "[words](../glossary.md)"),
        ("[other](https://example.org/a.py)", "[other](https://example.org/a.py)"),
        ("![picture](../results/oracle.png)", "![picture](../results/oracle.png)"),
        ("[loop](../../examples/own_loop.py)", "[loop](../examples/own_loop.py.md)"),
        ("[`own`](../../examples/own_loop.py)", "[`own`](../examples/own_loop.py.md)"),
        ("[all](../../examples)", "[all](../examples/index.md)"),
        ("`examples/slurm`", "[`examples/slurm`](../examples/slurm/index.md)"),
        ("`examples/no.py`", "`examples/no.py`"),
        ("```\n[a](../../no.py) `examples/slurm`\n```",) * 2,
    ],
)
def test_a_link_out_of_the_docs_becomes_the_name_of_a_file(caplog, written, shown):
    assert hooks.unlink(written, PAGE) == shown
    assert caplog.records == []


def test_every_example_has_a_page_that_shows_it_and_is_in_the_list():
    pages = hooks.shown.example_pages()
    every = (ROOT / "examples").rglob("*.[pst]*")
    files = [path.relative_to(ROOT).as_posix() for path in every if path.suffix != ".pyc"]
    assert len(files) > 40
    for name in files:
        assert (ROOT / name).read_text().rstrip() in pages[f"{name}.md"]
        assert f"]({name.removeprefix('examples/')}.md) | " in pages[hooks.shown.LIST]


def test_a_block_that_bears_an_examples_name_is_that_example():
    block = re.compile(r'^```\w+ title="(examples/[^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    blocks = [found for page in pages for found in block.findall(page)]
    assert {"examples/slurm/loop.py", "examples/slurm/loop.sbatch"} <= {name for name, _ in blocks}
    for name, text in blocks:
        assert text == (ROOT / name).read_text(), f"copy {name} into its page"


def test_a_link_to_no_file_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        hooks.unlink("[a test](../../tests/no_such.py)", PAGE)
    assert "links to ../../tests/no_such.py, and there is no" in caplog.text


def test_every_key_of_a_run_is_in_the_reference_with_a_sentence(caplog):
    pytest.importorskip("griffe")
    made = hooks.toml_keys()
    assert caplog.records == []
    for name, section in get_type_hints(Config).items():
        assert f"## [{name}]" in made
        for key in fields(section):
            assert sentence(key.name, made) == (key.name != section.REST)
    for name in ("cache", "staging", "workers"):
        (table,) = re.findall(rf"## \[data.{name}\]\n(.*?)\n## ", made, re.DOTALL)
        for key in fields(get_type_hints(DataConfig)[name]):
            assert sentence(key.name, table) == (key.name != "transform"), key.name


def sentence(key: str, table: str) -> bool:
    return re.search(rf"^\| `{key}` \| [^| ]", table, re.MULTILINE) is not None


@pytest.mark.parametrize("section", hooks.OF_KINDS)
def test_every_setting_of_every_kind_is_in_the_reference_with_a_sentence(caplog, section):
    pytest.importorskip("griffe")
    named = importlib.import_module(f"tonari.trainer.config.{section}").NAMED
    made = hooks.kind_settings(section)
    assert caplog.records == []
    for kind in named.kinds:
        (_, table) = f"{made}\n### ".split(f'### {section}.kind = "{kind}"\n')
        for key in named.takes(kind):
            assert sentence(key, table.partition("\n### ")[0]), (kind, key)


def test_a_function_that_has_its_modules_name_is_shown_and_not_the_module():
    shown = hooks.api("importance", ["outcome"]) + hooks.api("tonari.trainer", ["seeded"])
    assert re.findall(r"::: (\S+)", shown) == [
        "importance.outcome.outcome", "tonari.trainer.models.seeded.seeded",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["dataio", "shuffle", "importance", "tonari.trainer"])
def test_the_reference_has_every_public_name_once_and_errors_last(name):
    page = (ROOT / f"docs/reference/{name.rpartition('.')[2]}.md").read_text()
    found = hooks.API.findall(page)
    shown = [each for package, names in found if package == name for each in names.split()]
    package = importlib.import_module(name)
    assert sorted(shown) == sorted(package.__all__)
    first = {"dataio": "Loader", "tonari.trainer": "train", "importance": "outcome"}
    assert shown[0] == first.get(name, "Partial")
    assert hooks.api(name, [shown[1]]).startswith(f"::: {name}.{shown[1]}\n    options:")
    is_error = [each.endswith("Error") for each in shown]
    assert is_error == sorted(is_error)


def test_a_key_without_a_sentence_is_a_warning(caplog):
    pytest.importorskip("griffe")
    docstring = """What it is.

    Attributes:
        first: Said of `dataio.Loader`.
        second:
    """
    said = hooks.sentences("run", docstring, ["first", "second", "third"])
    assert said["first"] == "Said of [`dataio.Loader`][dataio.Loader]."
    assert [record.message.partition(" has")[0] for record in caplog.records] == [
        "run.second", "run.third",
    ]  # fmt: skip


def test_what_the_checks_find_are_warnings_which_a_strict_build_does_not_pass(monkeypatch, caplog):
    monkeypatch.setattr(hooks.prose, "count_pages", lambda: {"docs/new.md": (1, 0)})
    monkeypatch.setattr(hooks.prose, "allowed_lengths", dict)
    monkeypatch.setattr(hooks.backticks, "pages", lambda: [ROOT / "README.md"])
    monkeypatch.setattr(hooks.backticks, "absent", lambda markdown: [(3, "Laoder")])
    hooks.on_config(SimpleNamespace(nav=[]))
    long, absent = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert long.startswith("docs/new.md has 1 long sentences")
    assert absent.startswith("README.md:3: names `Laoder`, and there is none")


def test_a_page_that_names_what_is_not_there_is_found():
    page = "`python -m benchmarks.gone`, `tests/lab/gone.py`, `tonari/cli.py`"
    page += "\n\n`tests/gone.py` at commit 4196f43."
    assert hooks.named_but_absent(page) == ["benchmarks/gone", "tests/lab/gone.py"]
