"""Rows of an answer to look at, and a batch as a file of arrays."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dataio.base.atomic import write_file
from dataio.rows.samples import Batch
from dataio.source.names import find_name, read_field
from tonari.errors import CommandError
from tonari.hardest.page import rows_page
from tonari.hardest.samples import find_image, find_label
from tonari.hardest.texts import with_texts
from tonari.rows.run import RunRows
from tonari.trainer.config.config import Config

MOST_PICTURES = 500


def write_page(
    path: Path, run: RunRows, table: pa.Table, *, image: str | None, config: Config | None
) -> None:
    """Write a page of the rows, each sample once: its picture or text, and what is known of it.

    Args:
        path: Of the page.
        run: Opens the dataset.
        table: Of `RunRows`.
        image: Extension or column of the picture; None: a usual one.
        config: Settings of the run, by which its tokens are read; None: not known.

    Raises:
        ValueError: If the dataset is not at hand.
        DataioError: If it cannot be read, or has no such field.
    """
    source, seen = run.source(), set[int]()
    rows: list[dict[str, object]] = []
    for row in table.to_pylist():
        if row["sample_id"] not in seen and len(rows) < MOST_PICTURES:
            seen.add(row["sample_id"])
            rows.append(row)
    ids = np.array([row["sample_id"] for row in rows], np.int64)
    name, field = find_name(source), find_image(source, image)
    keys = read_field(source, ids, name).tolist() if name else [None] * len(ids)
    labelled = find_label(source, None)
    labels = [None] * len(ids) if labelled is None else read_field(source, ids, labelled).tolist()
    for row, key, label in zip(rows, keys, labels, strict=True):
        where = "" if row["step"] is None else f", step {row['step']}, weight {row['weight']:.4g}"
        of_loss = [f", {n} {row[n]:.4g}" for n in ("loss", "share") if row.get(n) is not None]
        words = f"epoch {row['epoch']}: {row['what']}{where}{''.join(of_loss)}"
        row |= {"key": key, "label": label, "words": words}
    images = None if field is None else read_field(source, ids, field).tolist()
    title = f"{run.name}: {len(rows):,} of {len(table):,} rows"
    cards = with_texts(rows, source, config) if field is None else rows
    write_file(path, rows_page(cards, images, title=title).encode())


def write_batch(path: Path, batch: Batch) -> None:
    """Write a batch as an .npz of its arrays.

    Raises:
        CommandError: If it has none, or the file cannot be written.
    """
    values: Mapping[str, object] = batch if isinstance(batch, dict) else {}
    arrays = {k: v.cpu().numpy() for k, v in values.items() if isinstance(v, torch.Tensor)}
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise CommandError(
            f"--replay {path}: cannot be written ({error}); give a file with room"
        ) from error
