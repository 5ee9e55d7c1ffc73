"""Runs that save and restore, for the tests of this folder."""

import json
from pathlib import Path

from dataio import Loader
from tests.dataio.loaders import POLICIES, loss_of

KAKURENBO = POLICIES["kakurenbo"]


def train_to(loader: Loader, epoch: int, step: int) -> None:
    """Train from wherever the loader stands to a step of an epoch, as if there were one more."""
    for running in loader.epochs(epoch + 2):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], running))
            if (running, loader.step) == (epoch, step):
                return
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], running + 0.5))


def standing(loader: Loader) -> object:
    """All that a restore decides of a rank."""
    plan = loader._run.running.plan
    return (
        json.dumps(loader.state_dict(), sort_keys=True), loader._session.pool.scores.tobytes(),
        plan.selection.hidden.tobytes(), loader.order_hash(), loader.lr_factor,
    )  # fmt: skip


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, with a file's bytes."""
    found = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in found}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
