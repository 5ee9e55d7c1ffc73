"""The ``index.json`` of MDS and LitData datasets: which files, in which order, of how many samples.

Whoever lists a dataset reads it; what is read later of shards stands in themselves, but for
LitData's, whose index alone says what a sample is made of.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataio.base.errors import SourceError

INDEX = "index.json"


def indexed_shards(directory: Path) -> list[str] | None:
    """List the shards of an MDS or LitData dataset in their order; None if it is none.

    Raises:
        SourceError: If its index is damaged, or names shards that are missing.
    """
    entries = _entries(directory)
    if entries is None:
        return None
    paths = [str(directory / name) for name, _ in entries]
    missing = [path for path in paths if not Path(path).is_file()]
    if missing or not paths:
        raise SourceError(
            f"{directory / INDEX}: names {len(paths)} shards, of which {len(missing)} are missing, "
            f"expected all of them in the directory; copy {missing[0] if missing else 'them'} "
            "there, or write the dataset again"
        )
    return paths


def indexed_counts(paths: Sequence[str]) -> list[int] | None:
    """Find the samples of shards in the indexes beside them; None unless all of them are there."""
    counts: dict[str, int] = {}
    for directory in {str(Path(path).parent) for path in paths if "://" not in path}:
        entries = _entries(Path(directory)) or []
        counts |= {str(Path(directory) / name): count for name, count in entries}
    found = [counts.get(str(Path(path))) for path in paths]
    known = [count for count in found if count is not None]
    return known if len(known) == len(found) else None


def _entries(directory: Path) -> list[tuple[str, int]] | None:
    """Read names and counts; None where there is no index, or one of something else."""
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            return None
        if "chunks" in document and "config" in document:
            return [(entry["filename"], entry["chunk_size"]) for entry in document["chunks"]]
        shards = described_shards(document)
        return None if shards is None else [_mds_entry(path, entry) for entry in shards]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path}: does not read as the index of a dataset ({error!r}), expected what MDSWriter "
            "or litdata.optimize writes; copy or write the dataset again"
        ) from error


def described_shards(document: object) -> list[dict[str, Any]] | None:
    """Find what MosaicML's index says of each shard; None where it is another's."""
    shards = document.get("shards") if isinstance(document, dict) else None
    # Others name shards, too; MosaicML's say what each is.
    is_described = isinstance(shards, list) and all(
        isinstance(entry, dict) and "format" in entry for entry in shards
    )
    return shards if is_described else None


def _mds_entry(path: Path, entry: dict[str, Any]) -> tuple[str, int]:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise SourceError(
            f"{path}: names shards of the format {entry['format']!r}, version {entry['version']}, "
            "expected mds, version 2; write them again with MDSWriter"
        )
    # As a download leaves them: one or both.
    raw, packed = entry["raw_data"], entry.get("zip_data")
    is_raw = packed is None or (path.parent / raw["basename"]).is_file()
    name = raw["basename"] if packed is None or is_raw else packed["basename"]
    return name, int(entry["samples"])
