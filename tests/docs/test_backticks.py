"""A name in backticks that names nothing is found where it stands; others are let through."""

import importlib
import sys

import pytest

from tests.multirank import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
backticks = importlib.import_module("backticks")


@pytest.mark.parametrize(
    ("there", "absent"),
    [
        ("Loader", "Laoder"),
        ("Loader.save", "Loader.svae"),
        ("Loader(exclude=)", "Loader(exlcude=)"),
        ('NodeCache(quota="200GB")', 'NodeCache(qouta="200GB")'),
        ("loader.stats()", "loader.stat()"),
        ('loader.stats()["source_bytes"]', 'loader.stat()["source_bytes"]'),
        ("loader.max_steps(epochs)", "loader.max_steps(epoch=3)"),
        ("Evaluation.close()", "Evaluation.clsoe()"),
        ("dataio.Loader.restore", "dataio.Loader.resotre"),
        ("dataio.Shards", "dataio.Shard"),
        ("dataio.plan.history.QUANTUM", "dataio.plan.history.QUANTA"),
        ("dataio.store.pool", "dataio.store.pol"),
        ("data.batch_size", "data.batchsize"),
        ("data.cache.quota", "data.cache.qouta"),
        ("run.epochs=3", "run.epoch=3"),
        ("importance.alphas", "importance.alphos"),
        ("importance.Weighted", "importance.Wieghted"),
        ("run.is_whole", "run.is_hole"),
        ("study.seeds", "study.seed"),
        ("host.memory_gib", "host.memory_gb"),
        ("[train.data]", "[train.dat]"),
        ("[mesh] tp", "[mesh] tpp"),
        ("[mesh] tp = 2", "[meshes] tp = 2"),
        ("TONARI_CACHE=/local", "TONARI_CASH=/local"),
        ("dataio/store/", "dataio/stores/"),
        ("tests/docs/test_*.py", "tests/docs/text_*.py"),
        ("store/cache.py", "store/cash.py"),
        ("tonari cache ls", "tonari cache list"),
        ("tonari train CONFIG", "tonari trian"),
    ],
)
def test_a_name_is_there_or_is_found(there, absent):
    assert backticks.absent(f"A page.\n\nSee `{there}` and\n`{absent}`.\n") == [(4, absent)]


@pytest.mark.parametrize(
    "span",
    [
        "DataLoader.dataset", "None", "float32[rows]", "optimizer.step()", "model.safetensors",
        "weight", "batch", "exchange=0.1", "torch.save", "nn.Linear", "a.b", "MPI_Init",
        "tonari COMMAND", "tonari --help", "tonari cache", "lfs setstripe -c 1 DIR", "[5]",
    ],
)  # fmt: skip
def test_what_is_none_of_our_names_is_let_through(span):
    assert backticks.absent(f"`{span}`") == []


def test_options_are_those_of_the_command(monkeypatch):
    block = "```\nsrun tonari cache ls --josn \\\n  --bytes | wc\n```"
    page = f"`tonari cache ls --json --jason`\n\n{block}"
    assert backticks.absent(page) == [
        (1, "tonari cache ls --jason"), (4, "tonari cache ls --bytes"),
        (4, "tonari cache ls --josn"),
    ]  # fmt: skip
    monkeypatch.setattr(backticks, "COMMANDS", ("cache ls",))
    assert backticks.absent("`--json`, `--jason X`, `--requeue`, `--pairs`") == [(1, "--jason")]


def test_names_of_our_packages_are_looked_at_in_blocks_of_python():
    block = """```python
from tonari.trainer import train, seedde
loader = dataio.Loader(
    fields={"image": dataio.Image("jpg", sise=224)},
    shuffle=shuffle.Partail(0.1), bacth_size=8,
)
loader.sav(), torch.sav()
```"""
    assert backticks.absent(f"So:\n\n{block}") == [
        (4, "tonari.trainer.seedde"), (5, "dataio.Loader(fields=, shuffle=, bacth_size=)"),
        (6, "dataio.Image(sise=)"), (7, "shuffle.Partail()"),
    ]  # fmt: skip
    assert backticks.absent("```python\ndataio.Laoder(..., *)\n```") == [], "not Python"


def test_what_was_there_at_a_commit_may_be_named():
    assert backticks.absent("`Laoder`,\nat commit 4196f43.") == []
    assert backticks.absent("`Laoder`.\n\nAt commit 4196f43.") == [(1, "Laoder")]


def test_every_page_but_results_and_decisions_is_looked_at():
    pages = {path.relative_to(ROOT).as_posix() for path in backticks.pages()}
    assert {"README.md", "docs/plan.md", "docs/tutorial/index.md"} <= pages
    assert not [page for page in pages if "/adr/" in page or "/results/" in page]
