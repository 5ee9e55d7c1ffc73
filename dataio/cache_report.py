"""What lies in caches, without opening them for a job: for `tonari cache inspect`."""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.cache import FORMAT_VERSION, Cache, Identity
from dataio.errors import CacheError
from dataio.rows import FixedColumn, RowSchema, corrupt_rows

VERIFY_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class CacheReport:
    """One node's cache of one dataset.

    Attributes:
        directory: Where it is.
        source: Pattern it was staged from.
        num_slots: Rows of the pool.
        num_missing: Rows not there, as after a killed staging.
        epoch: Epoch whose placement was committed last.
        payload_bytes: Bytes of the rows.
        disk_bytes: Bytes the files take on the disk.
        fields: Names of the fields.
        in_use_by: The job that holds it, or None.
    """

    directory: str
    source: str
    num_slots: int
    num_missing: int
    epoch: int
    payload_bytes: int
    disk_bytes: int
    fields: tuple[str, ...]
    in_use_by: str | None


def find_caches(root: Path) -> list[Path]:
    """List the node directories below a cache root, sorted; ``root`` may be one itself."""
    return sorted(
        path.parent for path in [*root.glob("meta.json"), *root.glob("**/node*/meta.json")]
    )


def inspect_cache(directory: Path) -> CacheReport:
    """Read one node directory's manifest. Changes nothing, and needs no lock.

    Raises:
        CacheError: If it is not a cache of this format, or its manifest cannot be read.
    """
    cache = _opened(directory)
    entries = cache.entries
    here = entries.take(entries.present)
    names = [column.name for column in cache.schema.fixed] + list(cache.schema.variable)
    return CacheReport(
        directory=str(directory),
        source=cache.identity.source,
        num_slots=len(entries),
        num_missing=len(entries) - len(here),
        epoch=cache.epoch,
        payload_bytes=int(here.extent_bytes.sum()) + cache.schema.fixed_bytes * len(here),
        disk_bytes=sum(512 * path.stat().st_blocks for path in directory.iterdir()),
        fields=tuple(names),
        in_use_by=_owner(directory / "lock"),
    )


def verify_cache(directory: Path) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Read every row and compare it with its checksum.

    Yields:
        Rows checked so far, and int64[n]: the corrupt samples among those checked since the last.
    """
    cache = _opened(directory)
    slots = np.flatnonzero(cache.entries.present)
    for first in range(0, len(slots), VERIFY_BLOCK_ROWS):
        rows = cache.read_rows(slots[first : first + VERIFY_BLOCK_ROWS])
        yield first + len(rows), rows.sample_id[corrupt_rows(rows)]


def _opened(directory: Path) -> Cache:
    try:
        meta = json.loads((directory / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{directory}: meta.json cannot be read ({error}), expected a cache that tonari "
            f"wrote; name a cache root, or a node directory in it"
        ) from error
    if meta.get("format") != FORMAT_VERSION:
        raise CacheError(
            f"{directory}: cache format {meta.get('format')}, this version reads "
            f"{FORMAT_VERSION}; use the version that wrote it, or remove the directory"
        )
    schema = RowSchema(
        tuple(
            FixedColumn(f["name"], f["dtype"], tuple(f["shape"])) for f in meta["schema"]["fixed"]
        ),
        tuple(meta["schema"]["variable"]),
    )
    identity = Identity(meta["source"], meta["fingerprint"], schema)
    cache = Cache(directory, identity, num_slots=0, num_positions=0, local_rank=0, local_size=1)
    cache.load(writable=False)
    return cache


def _owner(lock: Path) -> str | None:
    if not lock.exists():
        return None
    descriptor = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 4096, 0).decode(errors="replace")
    finally:
        os.close(descriptor)
    return None
