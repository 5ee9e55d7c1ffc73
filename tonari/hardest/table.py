"""The hardest rows as a table, and as tiles of a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.plan.history import COLUMNS, HISTORY_EPOCHS, Scores, losses_in
from tonari.hardest.picture import Tile
from tonari.hardest.rank import Measure
from tonari.report.tables import to_csv
from tonari.sparkline import sparkline

HEADER = ("rank", "sample_id", "key", "shard", "position", "label", "class", *COLUMNS)

Row = Mapping[str, object]
"""A row of the table, by the names of `HEADER`; None where nobody knows."""


@dataclass(frozen=True)
class Described:
    """What the source knows of the rows, each as long as they are; None where it does not.

    Attributes:
        names: Of the samples.
        places: Shard and position in it.
        labels: Numbers or text.
    """

    names: Sequence[object]
    places: Sequence[tuple[str, int | None]]
    labels: Sequence[object]


def make_table(
    sample_ids: NDArray[np.int64],
    ranks: Sequence[int],
    scores: Scores,
    described: Described,
    classes: Mapping[str, str],
) -> list[Row]:
    """Put together what is known of each row.

    Args:
        sample_ids: int64[n], in the order of the table.
        ranks: Of each.
        scores: Of all samples.
        described: Of these rows.
        classes: Names by label, as text.
    """
    kept = scores.dtype.names or ()
    rows: list[Row] = []
    for i, (sample_id, rank) in enumerate(zip(sample_ids.tolist(), ranks, strict=True)):
        shard, position = described.places[i]
        remembered = {name: scores[name][sample_id].item() for name in kept if name != "history"}
        if "history" in kept:
            remembered["history"] = _history(scores[sample_id : sample_id + 1])
        rows.append(
            dict.fromkeys(HEADER)
            | {"rank": rank, "sample_id": sample_id, "key": described.names[i], "shard": shard}
            | {"position": position, "label": described.labels[i]}
            | {"class": classes.get(str(described.labels[i]))}
            | remembered
        )
    return rows


def _history(row: Scores) -> str:
    """Write the losses of a row, an epoch each, from the first one that is remembered."""
    last = int(row["epoch"][0])
    epochs = np.arange(max(last - HISTORY_EPOCHS + 1, 0), last + 1)
    losses = losses_in(row, epochs[:, None])[:, 0]
    known = np.flatnonzero(~np.isnan(losses))
    return " ".join(f"{loss:.4g}" for loss in losses[known[0] :]) if len(known) else ""


def drawn(row: Row) -> str:
    """Draw the losses of a row; nothing where they were not kept."""
    return sparkline([float(loss) for loss in str(row["history"] or "").split()])


def rows_csv(rows: Sequence[Row]) -> str:
    """Write the table, without scores that nobody kept; what else is not known is left empty."""
    unknown = {name for name in COLUMNS if all(row[name] is None for row in rows)}
    of_documents = [name for name in ("document", "place", "unusual") if rows and name in rows[0]]
    return to_csv([*(name for name in HEADER if name not in unknown), *of_documents], rows)


def to_tiles(
    rows: Sequence[Row], images: Sequence[bytes], *, by: Measure, grouped: bool
) -> list[Tile]:
    """Choose what stands under each image.

    Args:
        rows: Of the table.
        images: Of each row.
        by: What they were ranked by.
        grouped: Whether each label begins a new line.
    """
    return [
        Tile(
            image,
            _title(row),
            (f"#{row['rank']}  {hardness_words(row, by)}", f"sample {row['sample_id']}"),
            begins=grouped and row["rank"] == 1,
        )
        for row, image in zip(rows, images, strict=True)
    ]


def _title(row: Row) -> str:
    if row["label"] is None:
        return "no label"
    return str(row["class"] if row["class"] is not None else row["label"])


def words(row: Row, by: Measure) -> str:
    """Name how hard a row was, by what rows were ranked by, and draw its losses."""
    return f"{hardness_words(row, by)}  {drawn(row)}".rstrip()


def hardness_words(row: Row, by: Measure) -> str:
    """Name how hard a row was, by what rows were ranked by."""
    value = row[by]
    if by == "forgotten" and not value and not row["correct"]:
        return "never right"
    return f"{by} {value:.2f}" if isinstance(value, float) else f"{by} {value}"
