"""What a certificate claims of a run's rows: samples never trained, epochs that train each once."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.excluding import LISTS, read_list
from dataio.rowlog.attempts import AttemptSteps
from dataio.rowlog.trained import TrainedRows
from dataio.source.names import find_name, find_named
from tonari.errors import CommandError
from tonari.rows.run import RunRows

ROWS_AT_ONCE = 1 << 21
"""Rows of an epoch that are listed at a time."""

Named = Sequence[str | int]
"""Samples, by their keys or by their numbers."""


def read_names(path: Path) -> Named:
    """Read a file of keys or sample ids: a key a line, or a list as `exclude` takes it.

    Raises:
        CommandError: If it cannot be read, or is empty.
        SourceError: If it is a list without a column ``sample_id`` or ``key``.
    """
    names: list[str | int]
    if path.suffix.lower() in LISTS:
        columns = read_list(path)
        parts = columns.get("sample_id") or columns.get("key") or []
        names = [name for part in parts for name in part.tolist()]
    else:
        try:
            names = [*path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(
                f"--never {path}: cannot be read ({error}), expected a key a line, or a CSV or "
                "Parquet file with a column key or sample_id; correct the path"
            ) from error
    names = sorted({name for name in names if name != ""}, key=str)
    if not names:
        raise CommandError(f"--never {path}: is empty, expected a key at least; give a longer file")
    return names


def never(run: RunRows, names: Named) -> dict[str, Any]:
    """Find how often samples were trained, and what became of them in the other epochs.

    Raises:
        CommandError: If several samples have one of the keys.
        ValueError: If the dataset is not at hand, or has no keys.
        DataioError: If it cannot be read.
    """
    ids: dict[str | int, int] = {name: name for name in names if isinstance(name, int)}
    ids.update(_ids_of(run, {name for name in names if isinstance(name, str)}).items())
    count = run.num_samples
    known = sorted({one for one in ids.values() if 0 <= one < count})
    fates: dict[int, list[dict[str, Any]]] = {one: [] for one in known}
    if known:
        table = run.of(sample_id=known).group_by(["sample_id", "kept", "what"])
        for row in table.aggregate([([], "count_all")]).to_pylist():
            fates[row["sample_id"]].append(row)
    found = []
    for name in names:
        sample_id = ids.get(name, -1)
        there = sample_id in fates
        what = Counter[str]()
        thrown = 0
        for row in fates.get(sample_id, ()):
            if row["kept"]:
                what[row["what"]] += row["count_all"]
            elif row["what"] == "trained":
                thrown += row["count_all"]
        trained = what.pop("trained", 0)
        found.append(
            {
                "name": name, "sample_id": sample_id if there else None, "trained": trained,
                "thrown_away": thrown, "epochs_without": dict(sorted(what.items())),
            }
        )  # fmt: skip
    return {"holds": not any(one["trained"] for one in found), "found": found}


def exactly_once(run: RunRows) -> dict[str, Any]:
    """Count for each epoch the samples that were trained once, more often, and not, and why not."""
    epochs: dict[int, list[AttemptSteps]] = {}
    for piece in run.answers.course.kept:
        epochs.setdefault(piece.attempt.epoch, []).append(piece)
    counted = [_count(run, pieces) for pieces in epochs.values()]
    finished = [one for one in counted if one["finished"]]
    holds = bool(finished) and not any(
        one["trained_more_often"] or one["not reached"] or one["unknown"] for one in finished
    )
    return {"holds": holds, "epochs": counted}


def _count(run: RunRows, pieces: Sequence[AttemptSteps]) -> dict[str, Any]:
    attempt = pieces[-1].attempt
    total = attempt.position.running.layout(attempt.setup.num_samples).num_samples
    counts, order = np.zeros(total, np.uint16), hashlib.sha256()
    for piece in pieces:
        for rows in _rows_of(run, piece):
            since = piece.since(rows.step)
            trained = ~piece.attempt.skips(since)
            trained &= ~piece.attempt.pads(since, rows.replica, rows.position)
            np.add.at(counts, rows.sample_id[trained], 1)
            # int64[rows, 5]
            columns = (rows.step, rows.replica, rows.position, rows.sample_id, trained)
            order.update(np.stack(columns, axis=1).astype("<i8").tobytes())
    missing = np.flatnonzero(counts == 0)
    states = _states(run, pieces, missing)
    steps = run.answers.group(attempt, 0).plan.order.steps
    return {
        "epoch": attempt.epoch, "finished": pieces[-1].steps.stop >= steps, "samples": total,
        "trained_once": int((counts == 1).sum()), "trained_more_often": int((counts > 1).sum()),
        **{what: states[what] for what in (*REASONS, "not reached", "unknown")},
        "rows_sha256": order.hexdigest(),
    }  # fmt: skip


REASONS = ("hidden", "excluded", "left out", "skipped", "unreadable")
"""For which a finished epoch may not train a sample."""


def _rows_of(run: RunRows, piece: AttemptSteps) -> Iterator[TrainedRows]:
    step_rows = max(piece.attempt.position.running.step_rows, 1)
    at_once = max(ROWS_AT_ONCE // step_rows, 1)
    for first in range(piece.steps.start, piece.steps.stop, at_once):
        yield run.answers.at(piece, range(first, min(first + at_once, piece.steps.stop)))


def _states(
    run: RunRows, pieces: Sequence[AttemptSteps], missing: NDArray[np.int64]
) -> Counter[str]:
    """Count why samples were not trained in an epoch, by the last piece that has a reason."""
    states = ["unknown"] * len(missing)
    for piece in pieces if len(missing) else ():
        for number, state in enumerate(run.answers.of(piece, missing).states):
            if state is not None and states[number] not in ("skipped", "unreadable"):
                states[number] = state
    return Counter(states)


def _ids_of(run: RunRows, keys: set[str]) -> dict[str, int]:
    if not keys:
        return {}
    source = run.source()
    field = find_name(source)
    if field is None:
        raise CommandError(
            f"--never: {source.name} has no keys, expected sample ids; give a CSV or Parquet file "
            "with a column sample_id"
        )
    found, several = find_named(source, field, keys)
    if several:
        key, (one, other) = next(iter(several.items()))
        raise CommandError(
            f"--never: the key {key!r} is that of the samples {one} and {other}, expected one "
            "sample a key; give a CSV or Parquet file with a column sample_id"
        )
    return found
