"""What lies in caches, without opening them for a job: for `tonari cache ls` and `inspect`."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from dataio.base.errors import CacheError, DataioError
from dataio.base.location import bare
from dataio.rows.rows import FixedColumn, RowSchema
from dataio.store.cache import Cache
from dataio.store.lock import describe, owners
from dataio.store.manifest_files import Identity, read_meta
from dataio.store.prepare import disk_bytes

NODE_DIRECTORY = re.compile(r"node\d+(\.\d+)?")


@dataclass(frozen=True)
class CacheReport:
    """One node's cache of one dataset.

    Attributes:
        directory: Where it is.
        source: Pattern it was staged from; empty where that cannot be read.
        fingerprint: Of the source's content when it was staged.
        num_slots: Rows of the pool.
        num_missing: Rows not there, as after a killed staging.
        epoch: Epoch whose placement was committed last.
        payload_bytes: Bytes of the rows.
        disk_bytes: Bytes the files take on the disk.
        fields: Names of the fields.
        owner: Number of the user it belongs to.
        last_used_s: When a job last took it, in seconds since 1970.
        in_use_by: The jobs that hold it, or None.
        problem: What is damaged, or None.
    """

    directory: str
    source: str = ""
    fingerprint: str = ""
    num_slots: int = 0
    num_missing: int = 0
    epoch: int = 0
    payload_bytes: int = 0
    disk_bytes: int = 0
    fields: tuple[str, ...] = ()
    owner: int = 0
    last_used_s: float = 0.0
    in_use_by: str | None = None
    problem: str | None = None


def find_caches(root: Path) -> list[Path]:
    """List the node directories below a cache root, sorted, what a kill left behind included.

    Args:
        root: A cache root, a dataset's directory in it, or a node directory itself.
    """
    candidates = [root, *root.glob("node*"), *root.glob("*/node*")]
    return sorted(path for path in candidates if _is_cache(path))


def _is_cache(path: Path) -> bool:
    if not NODE_DIRECTORY.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return any((path / name).exists() for name in ("lock", "meta.json", "manifest.json"))


def survey(root: Path) -> list[CacheReport]:
    """Describe every cache below a root; a damaged one says so, and ends nothing."""
    return [survey_cache(directory) for directory in find_caches(root)]


def survey_cache(directory: Path) -> CacheReport:
    """Describe one cache, whatever state it is in. Changes nothing."""
    try:
        return inspect_cache(directory)
    except (DataioError, OSError) as error:
        report = CacheReport(directory=str(directory), problem=str(error))
    try:
        return _with_outside(report, directory)
    except (DataioError, OSError):
        return report  # Its problem says already that it cannot be read.


def inspect_cache(directory: Path) -> CacheReport:
    """Read one node directory's manifest. Changes nothing, and needs no lock.

    Raises:
        CacheError: If it is not a cache of this format, or its manifest cannot be read.
    """
    cache = open_to_read(directory)
    entries = cache.entries
    here = entries.take(entries.present)
    names = [column.name for column in cache.schema.fixed] + list(cache.schema.variable)
    report = CacheReport(
        directory=str(directory),
        source=bare(cache.identity.source),
        fingerprint=cache.identity.fingerprint,
        num_slots=len(entries),
        num_missing=len(entries) - len(here),
        epoch=cache.log.epoch,
        payload_bytes=int(here.extent_bytes.sum()) + cache.schema.fixed_bytes * len(here),
        fields=tuple(names),
    )
    return _with_outside(report, directory)


def _with_outside(report: CacheReport, directory: Path) -> CacheReport:
    """Add what is known without the manifest."""
    lock = directory / "lock"
    found = owners(directory)
    return replace(
        report,
        disk_bytes=disk_bytes(directory),
        owner=directory.stat().st_uid,
        last_used_s=(lock if lock.exists() else directory).stat().st_mtime,
        in_use_by=describe(found) if found else None,
    )


def open_to_read(directory: Path) -> Cache:
    """Load a cache's manifest and map its files, to read.

    Raises:
        CacheError: If it is not a cache of this format, or cannot be read.
    """
    cache = Cache(
        directory, identity_of(directory), num_slots=0, num_positions=0, local_rank=0, local_size=1
    )
    cache.load(writable=False)
    return cache


def identity_of(directory: Path) -> Identity:
    """Read what a cache says that it holds.

    Raises:
        CacheError: If it is not a cache of this format, or does not say.
    """
    try:
        meta = read_meta(directory)
        return Identity(
            str(meta["source"]), str(meta["fingerprint"]), _schema(meta), meta["fields"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(
            f"{directory}: meta.json cannot be read ({error}), expected a cache that tonari "
            f"wrote; name a cache root or a node directory in it, or remove what is damaged with "
            f"`tonari cache prune --stale`"
        ) from error


def _schema(meta: dict[str, dict[str, list[dict[str, str]]]]) -> RowSchema:
    stored = meta["schema"]
    return RowSchema(
        tuple(
            FixedColumn(f["name"], f["dtype"], tuple(map(int, f["shape"]))) for f in stored["fixed"]
        ),
        tuple(str(name) for name in stored["variable"]),
    )
