"""`Loader.skip` passes over batches; what comes behind them is what would have come."""

from contextlib import ExitStack
from pathlib import Path

import pytest

import shuffle
from dataio import Mixture
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.exclude_run import make

Batches = list[tuple[int, int, list[int]]]
"""Epoch, step and samples."""


def played(root: Path, *, skip: range) -> list[Batches]:
    """Train two epochs, but for some steps of the first, on two nodes; give each rank's batches."""

    def on_rank(world: World) -> Batches:
        found: Batches = []
        with make(world, root, batch_size=5, shuffle=shuffle.Partial(0.3)) as loader:
            for epoch in loader.epochs(2):
                for batch in loader:
                    found.append((epoch, loader.step - 1, batch["sample_id"].tolist()))
                    if epoch == 0 and loader.step == skip.start:
                        break
                if epoch == 0 and skip:
                    with pytest.raises(ValueError, match=r"skip: 99 batches, expected .* in \[0, "):
                        loader.skip(99)
                    loader.skip(len(skip))
                    for batch in loader:
                        found.append((epoch, loader.step - 1, batch["sample_id"].tolist()))
        return found

    return run_threads(thread_worlds([1, 1], timeout_s=60), on_rank)


def test_the_batches_behind_are_those_that_would_have_come(tmp_path: Path) -> None:
    whole = played(tmp_path / "a", skip=range(0))
    cut = played(tmp_path / "b", skip=range(2, 5))
    for mine, rest in zip(whole, cut, strict=True):
        assert rest == [row for row in mine if row[0] or row[1] not in range(2, 5)]
        assert len(rest) == len(mine) - 3


def mixed(root: Path, *, skip: range) -> list[tuple[int, str, list[int]]]:
    """Train two loaders, of which one goes round twice, but for some steps."""

    def on_rank(world: World) -> list[tuple[int, str, list[int]]]:
        found = []
        with ExitStack() as opened:
            loaders = {
                name: opened.enter_context(make(world, root / name, batch_size=size))
                for name, size in (("short", 60), ("long", 20))
            }
            mixture = Mixture(loaders, {"short": 1, "long": 1}, steps=8)
            for epoch in mixture.epochs(2):
                for batch in mixture:
                    step = 8 * epoch + mixture.step - 1
                    found.append((step, str(batch["dataset"]), batch["sample_id"].tolist()))
                    if mixture.step == skip.start and not epoch:
                        break
                if skip and not epoch:
                    with pytest.raises(ValueError, match=r"skip: 99 batches, expected a number in"):
                        mixture.skip(99)
                    mixture.skip(len(skip))
                    found += [
                        (mixture.step - 1, str(batch["dataset"]), batch["sample_id"].tolist())
                        for batch in mixture
                    ]
        return found

    return run_threads(thread_worlds([1], timeout_s=60), on_rank)[0]


def test_a_mixture_passes_over_batches_of_each_loader(tmp_path: Path) -> None:
    whole = mixed(tmp_path / "a", skip=range(0))
    assert {name for step, name, _ in whole if step in range(1, 6)} == {"short", "long"}
    assert mixed(tmp_path / "b", skip=range(1, 6)) == [
        row for row in whole if row[0] not in range(1, 6)
    ]
