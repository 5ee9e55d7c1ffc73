"""`Loader.skip` passes over batches; what comes behind them is what would have come."""

from pathlib import Path

import pytest

import shuffle
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
