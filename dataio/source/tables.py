"""Directories of tables: a log, which is not read here, says which of their files are in them."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from dataio.base.errors import SourceError

LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi", "_spark_metadata": "Spark's streams"}
"""Directories beside the files, and whose tables have them."""
ICEBERG_LOG, ICEBERG_DATA, ICEBERG_END = "metadata", "data", ".metadata.json"


def refuse_tables(places: Iterable[Path]) -> None:
    """Refuse directories of which files were listed, if they are those of a table, or in one.

    Args:
        places: The directories; partitions (``year=2020``) and Iceberg's ``data`` lie in a table.

    Raises:
        SourceError: If one is; what the log removed would be read as well.
    """
    seen: set[Path] = set()
    for place in places:
        at = place.absolute()
        while at not in seen:
            seen.add(at)
            names = {name for name in (*LOGS, ICEBERG_LOG) if (at / name).is_dir()}
            refuse_table(str(at), names, partial(_names_in, at))
            if "=" in at.name or at.name == ICEBERG_DATA:
                at = at.parent


def refuse_table(
    place: str, names: Iterable[str], names_in: Callable[[str], Iterable[str]]
) -> None:
    """Refuse a directory that is that of a table.

    Args:
        place: The directory.
        names: What it holds.
        names_in: Lists what a directory in it holds.

    Raises:
        SourceError: If it is.
    """
    for name in names:
        kind = LOGS.get(name, "")
        if name == ICEBERG_LOG and any(each.endswith(ICEBERG_END) for each in names_in(name)):
            kind = "Iceberg"
        if kind:
            raise SourceError(
                f"{place}: is a table of {kind}: what lies in {name} says which rows of which "
                "files are in it, and is not read, expected a directory of shards; read the table "
                "with a reader of its own (deltalake, pyiceberg, Spark) and write it as Parquet, "
                "or give a list of the files that it names, if no row of these was removed"
            )


def _names_in(place: Path, name: str) -> list[str]:
    return [child.name for child in (place / name).iterdir()]
