"""Which documents of packed text a table's sequences hold, and which of these stand out."""

import pyarrow as pa

from tonari.hardest.texts import ShownDocument, read_documents
from tonari.rows.run import RunRows
from tonari.trainer.config.config import Config

MOST_NAMED = 10
"""Sequences whose documents are named on the terminal."""

NO_PLACE = "no file and line, as the pack has none: pack the text again to know them"


def find_documents(
    run: RunRows, table: pa.Table, config: Config | None, *, all: bool
) -> dict[int, list[ShownDocument]]:
    """Find the documents of a table's samples, the most unusual first; none where not packed.

    Of all samples, or of the first ones that are named on the terminal.

    Raises:
        DataioError: If the dataset cannot be read, or the tokenizer is not at hand.
    """
    ids = table["sample_id"].combine_chunks().unique()
    ids = ids if all else ids[:MOST_NAMED]
    if config is None or "documents" not in table.column_names or not len(ids):
        return {}
    found = read_documents(run.source(), ids.to_numpy(), config)
    return dict(zip(ids.to_pylist(), found, strict=True))


def with_suspects(table: pa.Table, documents: dict[int, list[ShownDocument]]) -> pa.Table:
    """Add the document of each sample that stands out: ``document``, its number, and ``place``."""
    first = [documents[sample][0] for sample in table["sample_id"].to_pylist()]
    columns = {
        "document": pa.array([its.number for its in first], pa.int64()),
        "place": pa.array([its.place or None for its in first], pa.string()),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def document_words(documents: dict[int, list[ShownDocument]], *, all: bool) -> list[str]:
    """Name the documents of each sample, in lines, or say only that no lines are known."""
    if not all:
        return [NO_PLACE] if any(not its[0].place for its in documents.values()) else []
    lines = []
    for sample, its in documents.items():
        most, numbers = its[0], sorted(each.number for each in its if each.number is not None)
        if not numbers:
            continue
        lines.append(
            f"sample {sample}: document{'s' * (len(its) > 1)} {', '.join(map(str, numbers))}; "
            f"{most.number} has the most unusual tokens: {most.place or NO_PLACE}"
        )
    return lines
