"""What rows lost each time that they were trained, where the run kept the column ``history``."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataio import StateError
from dataio.plan.history import Scores, losses_in
from dataio.rowlog.attempts import Course
from dataio.state.snapshot import find_snapshot, load_history
from tonari.rows.find import saved_place
from tonari.sparkline import sparkline
from tonari.trainer.checkpoint.directory import whole_checkpoints

MOST_DRAWN = 10
"""Samples whose losses are drawn on the terminal."""


def read_history(run: Path, course: Course, sample_id: NDArray[np.int64]) -> Scores | None:
    """Read the losses of samples from the newest save that led to the run's weights.

    Args:
        run: Its directory, a checkpoint, or what `Loader.save` wrote.
        course: What the run trained: a save of steps that were thrown away is not read.
        sample_id: int64[n]: Distinct, ascending.

    Returns:
        scores[n], with the column ``history``; None: the run has saved none so far.

    Raises:
        StateError: If the save is damaged.
    """
    checkpoints = whole_checkpoints(run / "checkpoints") or whole_checkpoints(run)
    for path in [*reversed(checkpoints), run]:
        inside = path / "loader"
        try:
            found = find_snapshot(inside if inside.is_dir() else path)
            place = saved_place(path)
        except StateError:
            continue
        kept = {piece.attempt.number: piece.steps.stop for piece in course.kept}
        if place is not None and place[2] <= kept.get(place[1], -1):
            return load_history(found, sample_id)
    return None


def with_losses(table: pa.Table, run: Path, course: Course) -> pa.Table:
    """Add the column ``loss``: null where it is not known; the table as it is where none is kept.

    Args:
        table: Of `RunRows`.
        run: As of `read_history`.
        course: Likewise.
    """
    ids, which = np.unique(table["sample_id"].to_numpy(), return_inverse=True)
    scores = read_history(run, course, ids)
    if scores is None:
        return table
    losses = losses_in(scores[which], table["epoch"].to_numpy())
    is_known = table["kept"].to_numpy(zero_copy_only=False) & ~np.isnan(losses)
    return table.append_column("loss", pa.array(losses, mask=~is_known))


def loss_words(table: pa.Table) -> list[str]:
    """Draw the losses of each sample, an epoch a bar; of many samples the first ones."""
    if "loss" not in table.column_names:
        return []
    known = table.filter(pc.is_valid(table["loss"]))
    losses: dict[int, dict[int, float]] = defaultdict(dict)
    for row in known.select(["sample_id", "epoch", "loss"]).to_pylist():
        losses[row["sample_id"]][row["epoch"]] = row["loss"]
    lines = [_line(sample, by_epoch) for sample, by_epoch in list(losses.items())[:MOST_DRAWN]]
    more = len(losses) - len(lines)
    return [*lines, *([f"... losses of {more:,} more samples: --json has all"] if more else [])]


def _line(sample: int, by_epoch: dict[int, float]) -> str:
    first, last = min(by_epoch), max(by_epoch)
    values = [by_epoch.get(epoch, np.nan) for epoch in range(first, last + 1)]
    low, high = min(by_epoch.values()), max(by_epoch.values())
    return (
        f"sample {sample}: loss {sparkline(values)} in epochs {first} to {last}, "
        f"from {low:.4g} to {high:.4g}"
    )
