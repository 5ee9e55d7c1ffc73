"""The ``index.json`` of MDS and LitData datasets: which files, in which order, of how many samples.

Whoever lists a dataset reads it; what is read later of shards stands in themselves, but for
LitData's, whose index alone says what a sample is made of.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataio.base.errors import SourceError
from dataio.source.storage.files import Storage

INDEX = "index.json"
ENTRY_BYTES = 500
"""In memory, what such an index says of a shard, about."""
IS_INDEXED = re.compile(r"\.mds(\.(zstd|zst|gz|bz2))?$|^chunk-\d+-\d+(\.zstd)?\.bin$")
"""Names of shards that such an index names."""


def indexed_shards(directory: str, storage: Storage) -> list[str] | None:
    """List the shards of an MDS or LitData dataset in their order; None if it is none.

    Args:
        directory: A path or a URL.
        storage: Asks for what there is.

    Raises:
        SourceError: If its index is damaged, names shards that are missing, or does not name some
            that are there.
    """
    path = _join(directory, INDEX)
    if not storage.exists(path):
        return None
    with storage.open(path) as file:
        shards = _parse(path, file.read_at(0, file.size))
    if shards is None:
        return None
    there = storage.ask(path, lambda: _names(directory, storage))
    chosen = [_chosen(shard.names, there) for shard in shards]
    paths = [_join(directory, name) for name in chosen]
    # What an index of several directories names lies below.
    missing = [
        path
        for path, name in zip(paths, chosen, strict=True)
        if name not in there
        and path not in storage.may_lack
        and not ("/" in name and storage.exists(path))
    ]
    if missing or not paths:
        raise SourceError(
            f"{path}: names {len(paths)} shards, of which {len(missing)} are missing, "
            f"expected all of them in the directory; copy {missing[0] if missing else 'them'} "
            "there, write the dataset again, or train without them with "
            f"exclude={missing[:3]}{'[...]' * (len(missing) > 3)}, spelled so (data.exclude of "
            "`tonari train`)"
        )
    named = {name for shard in shards for name in shard.names}
    others = [name for name in sorted(there - named) if IS_INDEXED.search(name)]
    if others:
        raise SourceError(
            f"{path}: names {len(paths)} shards, but not {others[0]}, of {len(others)} others that "
            "lie there, expected all; it is older than they: write the dataset or its index again, "
            "or remove what does not belong to it"
        )
    return paths


def index_beside(path: str) -> str:
    """Name the index of a shard."""
    return f"{path.rpartition('/')[0] or '.'}/{INDEX}"


def _names(directory: str, storage: Storage) -> frozenset[str]:
    if "://" not in directory:
        return frozenset(child.name for child in Path(directory).iterdir())
    children = storage.children(directory)
    return frozenset(child.rstrip("/").rpartition("/")[2] for child in children)


def _join(directory: str, name: str) -> str:
    is_url = "://" in directory
    return f"{directory.rstrip('/')}/{name}" if is_url else str(Path(directory) / name)


def _chosen(names: Sequence[str], there: frozenset[str]) -> str:
    # As a download leaves them: the first, the last, or both.
    return next((name for name in names if name in there), names[-1])


def indexed_counts(paths: Sequence[str]) -> list[int] | None:
    """Find the samples of shards in the indexes beside them; None unless all of them are there."""
    counts: dict[str, int] = {}
    for directory in {Path(path).parent for path in paths if "://" not in path}:
        index = directory / INDEX
        shards = _parse(str(index), index.read_bytes()) if index.is_file() else None
        for names, count in shards or []:
            counts |= {str(directory / name): count for name in names}
    found = [counts.get(str(Path(path))) for path in paths]
    known = [count for count in found if count is not None]
    return known if len(known) == len(found) else None


class _Shard(NamedTuple):
    """What an index says of a shard: the names that it may have, and its samples."""

    names: Sequence[str]
    num_samples: int


def _parse(path: str, data: bytes) -> list[_Shard] | None:
    """Read what an index says; None of one of something else."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            return None
        if "chunks" in document and "config" in document:
            chunks = document["chunks"]
            return [_Shard([str(entry["filename"])], int(entry["chunk_size"])) for entry in chunks]
        shards = described_shards(document)
        return None if shards is None else [_mds_shard(path, entry) for entry in shards]
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


def _mds_shard(path: str, entry: dict[str, Any]) -> _Shard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise SourceError(
            f"{path}: names shards of the format {entry['format']!r}, version {entry['version']}, "
            "expected mds, version 2; write them again with MDSWriter"
        )
    parts = [entry["raw_data"], entry.get("zip_data")]
    return _Shard([str(part["basename"]) for part in parts if part], int(entry["samples"]))
