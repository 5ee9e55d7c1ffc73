"""Rows that were trained as an Arrow table."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.rowlog.answers import State
from dataio.rowlog.attempts import AttemptSteps
from dataio.rowlog.trained import TrainedRows

STATES: tuple[State, ...] = get_args(State)
LISTED = ("trained", "skipped", "unreadable")
"""Of these a sample has a row for each step."""

Columns = dict[str, NDArray[Any]]
"""Of `SCHEMA`; ``what`` by its place in `STATES`, -1 where a sample was not trained."""

SCHEMA = pa.schema(
    [
        ("what", pa.string()), ("kept", pa.bool_()), ("epoch", pa.int64()), ("step", pa.int64()),
        ("run_step", pa.int64()), ("attempt", pa.int64()), ("node", pa.int64()),
        ("replica", pa.int64()), ("position", pa.int64()), ("slot", pa.int64()),
        ("sample_id", pa.int64()), ("weight", pa.float32()),
    ]
)  # fmt: skip
"""Of an answer. ``what``: "trained", "skipped": its step was passed over, or "unreadable": it did
not decode and was padding, by on_error="skip"; of a sample that an epoch did not train "hidden",
"excluded", "left out" (drop_last) or "not reached". ``kept``: whether the step is in the weights;
false: it was thrown away when the run went on from an earlier save. ``step``: batch of the epoch,
from 0 on. ``run_step``: optimizer step of the run, from 1 on. ``position``: in the replica's
batch."""


def trained_rows(piece: AttemptSteps, rows: TrainedRows) -> Columns:
    """List the rows of a piece, trained or not."""
    count, attempt = len(rows.step), piece.attempt
    since = piece.since(rows.step)
    into = (since - piece.steps.start) // attempt.setup.accumulate
    what = np.where(attempt.pads(since, rows.replica, rows.position), STATES.index("unreadable"), 0)
    return {
        "what": np.where(attempt.skips(since), STATES.index("skipped"), what),
        "kept": np.full(count, piece.kept),
        "epoch": np.full(count, attempt.epoch), "run_step": piece.run_steps.start + into,
        "attempt": np.full(count, attempt.number), **rows._asdict(),
    }  # fmt: skip


def missed_rows(piece: AttemptSteps, what: NDArray[np.int64], ids: NDArray[np.int64]) -> Columns:
    """List samples that a piece's epoch did not train, by why."""
    unknown = np.full(len(ids), -1)
    return {
        **{field.name: unknown for field in SCHEMA}, "what": what,
        "kept": np.ones(len(ids), np.bool_), "epoch": np.full(len(ids), piece.attempt.epoch),
        "attempt": np.full(len(ids), piece.attempt.number), "sample_id": ids,
        "weight": np.zeros(len(ids), np.float32),
    }  # fmt: skip


def make_table(parts: Sequence[Columns]) -> pa.Table:
    """Make one table; what is -1 is not known."""
    whole = {field.name: np.concatenate([part[field.name] for part in parts]) for field in SCHEMA}
    is_known = whole["slot"] >= 0
    mask = None if is_known.all() else ~is_known
    arrays = []
    for field in SCHEMA:
        values = whole[field.name]
        if field.name == "what":
            arrays.append(pa.array(STATES, pa.string()).take(pa.array(values)))
        else:
            always = field.name in ("kept", "epoch", "attempt", "sample_id")
            arrays.append(pa.array(values, field.type, mask=None if always else mask))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
