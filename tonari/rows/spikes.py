"""Rows that spoil steps: those that were trained in a step whose loss rose, each time."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataio.base.errors import DamagedFileError
from dataio.base.lines import read_checked_lines
from tonari.rows.run import RunRows
from tonari.trainer.checkpoint.directory import read_progress, whole_checkpoints
from tonari.trainer.config.saved import SETTINGS, read_settings
from tonari.trainer.watch.spikes import Logged, Spike

ROUNDING = 1e-9
"""Of shares: what an even one may differ by."""

SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()), ("spikes", pa.int64()), ("trained", pa.int64()),
        ("excess", pa.float64()), ("share", pa.float64()),
    ]
)  # fmt: skip
"""Of an answer. ``trained``: how often in the epochs that have a spike; ``spikes``: how often of
these in one; ``excess``: by how much these rose, mean; ``share``: the row's part of that rise, mean
of the spikes whose rows' losses are known, null if none are."""


def read_losses(run: Path) -> list[Logged]:
    """Read the losses of a run's steps; of steps that were trained again, the last time.

    Args:
        run: Its directory, or a checkpoint in it.

    Raises:
        ValueError: If there are no metrics, or they have no steps.
        DamagedFileError: If a line has changed since it was written, or the last ones are missing.
    """
    near = [run, *run.absolute().parents[:3]]
    path = next((p for place in near if (p := place / "metrics.jsonl").is_file()), None)
    if path is None:
        raise ValueError(
            f"{run}: found no metrics.jsonl, expected the run.directory of tonari train; give one"
        )
    found: list[Logged] = []
    ends = [0]  # steps at which an epoch ended, and its mean
    for line in read_checked_lines(path):
        kind, step = line.get("kind"), line.get("step", 0)
        # Where the run went on from an earlier checkpoint, what came behind is trained again
        while ends[-1] > step:
            ends.pop()
        while found and found[-1].steps[-1] > step - (kind == "step"):
            found.pop()
        if kind == "epoch":
            ends.append(step)
        elif kind == "step":
            loss = line.get("loss")
            value = math.inf if loss is None or not math.isfinite(loss) else float(loss)
            begun = max(ends[-1], found[-1].steps[-1] if found else 0)
            found.append(Logged(line["epoch"], range(min(begun, step - 1) + 1, step + 1), value))
    if not found:
        raise ValueError(
            f"{path}: has no line of a step, expected one every run.log_steps; train with fewer "
            "log_steps than the run has steps, 1 to know each"
        )
    _check_whole(path, found[-1].steps[-1], max(ends))
    return found


def _check_whole(path: Path, last_step: int, last_epoch_end: int) -> None:
    """Refuse lines that end long before a checkpoint of the run: they were cut.

    Raises:
        DamagedFileError: If so.
    """
    run = path.parent
    checkpoints = whole_checkpoints(run / "checkpoints")
    if not checkpoints or not (run / SETTINGS).exists():
        return
    last, reached = max(last_step, last_epoch_end), read_progress(checkpoints[-1]).steps
    log_steps = read_settings(run / SETTINGS).run.log_steps
    if reached - last >= log_steps:
        raise DamagedFileError(
            f"{path}: its lines end at step {last}, but {checkpoints[-1]} is of step {reached}, "
            f"expected a line every {log_steps} steps: it was cut; bring it back from a copy"
        )


def find_suspects(run: RunRows, spikes: Sequence[Spike], at_start: Sequence[Spike]) -> pa.Table:
    """List the rows that were in a spike each time that they were trained, the worst first.

    Counted are the epochs that have a spike. With one such epoch all rows of its spikes are listed.
    Where the losses of rows are known, those with no more than an even share of the rise are not.

    Args:
        run: Whose rows.
        spikes: Some at least.
        at_start: Spikes that speak neither against a row nor for it.

    Returns:
        Columns of `SCHEMA`.

    Raises:
        ValueError: If the log of rows has no such step.
    """
    epochs = pa.array({spike.logged.epoch for spike in spikes}, pa.int64())
    hits, excess = Counter[int](), defaultdict[int, float](float)
    shares: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for spike, rows in zip(spikes, _rows_of(run, spikes), strict=True):
        samples = rows["sample_id"].to_pylist()
        for sample in samples:
            hits[sample] += 1
            excess[sample] += spike.excess
        for sample, share in zip(samples, shares_of(rows, usual=spike.usual), strict=False):
            shares[sample].append((share, 1 / len(samples)))
    often = [
        sample
        for sample, count in hits.items()
        if count >= min(len(epochs), 2) and _has_more(shares[sample])
    ]
    trained = Counter[int]()
    if often:
        table = run.of(sample_id=often)
        is_one = pc.and_(
            pc.and_(table["kept"], pc.equal(table["what"], "trained")),
            pc.is_in(table["epoch"], epochs),
        )
        trained.update(table.filter(is_one)["sample_id"].to_pylist())
        known = epochs.to_pylist()
        for rows in _rows_of(run, [spike for spike in at_start if spike.logged.epoch in known]):
            trained.subtract(rows["sample_id"].to_pylist())
    listed = [
        (
            sample, hits[sample], trained[sample], excess[sample] / hits[sample],
            statistics.fmean(share for share, _ in known) if (known := shares[sample]) else None,
        )
        for sample in often
        if hits[sample] >= trained[sample]
    ]  # fmt: skip
    listed.sort(key=lambda row: (-row[1], -(row[4] or 0), -row[3], row[0]))
    columns = zip(*listed, strict=True) if listed else ((),) * len(SCHEMA)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _rows_of(run: RunRows, spikes: Sequence[Spike]) -> Iterator[pa.Table]:
    """List the rows that each spike trained, with their losses where these are known."""
    tables = []
    for spike in spikes:
        rows = pa.concat_tables([run.at(step=step) for step in spike.logged.steps])
        tables.append(rows.filter(pc.equal(rows["what"], "trained")))
    if not tables:
        return
    # Of all at once, as each time a save is read
    whole, start = run.losses(pa.concat_tables(tables)), 0
    for table in tables:
        yield whole.slice(start, len(table))
        start += len(table)


def shares_of(rows: pa.Table, *, usual: float) -> list[float]:
    """Divide the rise of steps among their rows, by how far each row's loss was above the usual.

    Args:
        rows: Of the steps, perhaps with the column ``loss``; a row whose loss is not known has no
            part.
        usual: What steps around lost.

    Returns:
        One a row, 1 in all; none where no loss is known or none is above the usual.
    """
    if "loss" not in rows.column_names or rows["loss"].null_count == len(rows):
        return []
    losses = rows["loss"].to_numpy().astype(np.float64)
    above = np.nan_to_num(losses - usual, nan=0.0, posinf=np.inf, neginf=0.0)
    rises = np.maximum(above, 0.0)
    if np.isinf(rises).any():  # what is infinite has all of it
        rises = np.isinf(rises).astype(np.float64)
    total = rises.sum()
    return (rises / total).tolist() if total else []


def _has_more(shares: list[tuple[float, float]]) -> bool:
    """Return whether a row had more than even shares of what rose, as far as that is known."""
    even = sum(even for _, even in shares)
    return not shares or sum(share for share, _ in shares) > even + ROUNDING
