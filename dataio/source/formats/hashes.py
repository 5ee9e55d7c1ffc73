"""Check shards by the sizes and hashes that the index of their dataset has, where it has any."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import xxhash

from dataio.base.errors import SourceError
from dataio.source.formats.index_json import ENTRY_BYTES, INDEX, described_shards, index_beside
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import READ_BYTES

HELD_BYTES = 128 << 20
"""A larger shard is read again behind its check, instead of being held."""

Recorded = tuple[int, Mapping[str, str]]
"""The length of a file, and its digests by their algorithms, in hexadecimal."""


@dataclass(frozen=True)
class HeldFile:
    """A file whose bytes were read for the check."""

    path: str
    data: bytes
    in_order: bool = False
    request_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def most_bytes(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int) -> bytes:
        """Give ``length`` bytes, fewer only at the end."""
        return self.data[offset : offset + length]

    def view_at(self, offset: int, length: int) -> memoryview:
        """View as `read_at` gives."""
        return memoryview(self.data)[offset : offset + length]


def check_whole(file: StorageFile, storage: Storage) -> StorageFile | HeldFile:
    """Check a file as a whole, the first time that a part of it is read with this storage.

    Args:
        file: An open shard of MDS.
        storage: Says whether hashes are checked, and remembers what was.

    Raises:
        SourceError: If it is longer or shorter, or has another hash, than the index says.
    """
    path = file.path
    if not storage.checks_hashes or path in storage.checked:
        return file
    num_bytes, recorded = _recorded_of(path, storage) or (file.size, {})
    if not recorded:
        if file.size != num_bytes:
            raise _refused(path, f"is {file.size} bytes long", f"{num_bytes} bytes")
        return file
    algorithm, hasher = _fastest(path, recorded)
    parts = []
    for start in range(0, file.size, READ_BYTES):
        part = file.read_at(start, READ_BYTES)
        hasher.update(part)
        if file.size <= HELD_BYTES:
            parts.append(part)
    if hasher.hexdigest() != recorded[algorithm]:
        raise _refused(path, f"has the {algorithm} {hasher.hexdigest()}", recorded[algorithm])
    storage.checked.add(path)
    return HeldFile(path, b"".join(parts)) if parts else file


def _refused(path: str, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{path}: {found}, expected {expected} by {INDEX} beside it; the shard was changed or is "
        "damaged: copy it again, or open it with dataio.Shards(..., hashes=False) to leave sizes "
        "and hashes unchecked"
    )


def _fastest(path: str, recorded: Mapping[str, str]) -> tuple[str, Any]:
    for name in sorted(recorded, key=lambda name: (not name.startswith("xxh"), name)):
        if name in xxhash.algorithms_available:
            return name, getattr(xxhash, name)()
        if name in hashlib.algorithms_available:
            return name, hashlib.new(name, usedforsecurity=False)
    raise SourceError(
        f"{path}: {INDEX} beside it has hashes by {', '.join(recorded)}, expected one that xxhash "
        "or hashlib has; open it with dataio.Shards(..., hashes=False) to leave them unchecked"
    )


def _recorded_of(path: str, storage: Storage) -> Recorded | None:
    index = index_beside(path)
    recorded = storage.metadata.once(
        index, lambda: _read_index(storage, index), size_of=lambda found: ENTRY_BYTES * len(found)
    )
    return recorded.get(PurePosixPath(path).name)


def _read_index(storage: Storage, index: str) -> Mapping[str, Recorded]:
    """Read the sizes and hashes of all files."""
    if not storage.exists(index):
        return {}
    with storage.open(index) as file:
        data = file.read_at(0, file.size)
    try:
        described = described_shards(json.loads(data))
        parts = [
            entry[part]
            for entry in described or []
            for part in ("raw_data", "zip_data")
            if entry.get(part)
        ]
        return {part["basename"]: (int(part["bytes"]), part.get("hashes") or {}) for part in parts}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{index}: does not read as the index of a dataset ({error!r}), expected what "
            "MDSWriter writes; copy or write the dataset again"
        ) from error
