"""A pattern -> a source: which format, how many samples in each shard."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path, PurePosixPath

import xxhash

from dataio.errors import SourceError
from dataio.source.base import Shard, ShardedSource, ShardFormat, Source
from dataio.source.counts import Surveyed, read_counts, write_counts
from dataio.source.files import SHARD_SUFFIXES, Storage, expand
from dataio.source.parquet import ParquetFormat
from dataio.source.tar import TarFormat
from dataio.source.tar_gz import GzipTarFormat
from dataio.source.throttle import Throttle
from dataio.world import World, single_world

FORMATS: dict[str, ShardFormat] = {
    ".tar": TarFormat(),
    ".tgz": GzipTarFormat(),
    ".parquet": ParquetFormat(),
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
COUNT_THREADS = 4
"""Shards that a rank counts at once: most of the time goes into waiting for the filesystem."""


def open_source(
    spec: str | Sequence[str],
    *,
    world: World | None = None,
    throttle: Throttle | None = None,
    index_cache: Path | None = None,
) -> Source:
    """Open shards of samples. Collective: the ranks share the work of counting.

    Args:
        spec: Paths of ``.tar`` or ``.tar.gz`` (WebDataset) or ``.parquet`` shards; see `expand`.
        world: The ranks that open it; by default this process alone.
        throttle: Slows down every read.
        index_cache: A directory of this node, made where it is not there, that keeps how many
            samples each shard holds: the next start opens no shard that has not changed.

    Raises:
        SourceError: On every rank, if the pattern names nothing, or any rank finds a broken shard.
    """
    world = world if world is not None else single_world()
    storage = Storage(throttle)
    # One rank lists, so that no other asks the metadata server, and all see the same shards.
    listing = _agree(world, lambda: _listing(storage, spec) if world.rank == 0 else b"", "list")[0]
    suffix, paths, counts = json.loads(listing)
    shard_format = FORMATS[suffix]

    kept = read_counts(index_cache, paths) if index_cache is not None else None

    def survey() -> bytes:
        def one(i: int) -> Surveyed:
            count = counts[i] if counts is not None else None
            return _survey(storage, shard_format, paths[i], count, kept[i] if kept else None)

        with ThreadPoolExecutor(COUNT_THREADS, thread_name_prefix="tonari-count") as pool:
            return json.dumps(
                list(pool.map(one, range(world.rank, len(paths), world.world_size)))
            ).encode()

    parts = [json.loads(part) for part in _agree(world, survey, "count the samples of")]
    found = [
        Surveyed(*parts[i % world.world_size][i // world.world_size]) for i in range(len(paths))
    ]
    if index_cache is not None and found != kept and world.local_rank == 0:
        write_counts(index_cache, paths, found)
    firsts = accumulate((shard.num_samples for shard in found), initial=0)
    shards = [
        Shard(path, surveyed.num_samples, first)
        for path, surveyed, first in zip(paths, found, firsts, strict=False)
    ]
    marks = [suffix, *([PurePosixPath(p).name, *f] for p, f in zip(paths, found, strict=True))]
    fingerprint = xxhash.xxh3_64_hexdigest(json.dumps(marks).encode())
    return ShardedSource(
        _name(spec), shard_format, shards, fingerprint=fingerprint, storage=storage
    )


def _listing(storage: Storage, spec: str | Sequence[str]) -> bytes:
    paths = expand(spec)
    suffix = _suffix(paths)
    counts = FORMATS[suffix].known_counts(storage, paths)
    return json.dumps([suffix, paths, counts]).encode()


def _suffix(paths: Sequence[str]) -> str:
    for path in paths:
        suffix = _suffix_of(path)
        if suffix in COMPRESSED:
            raise SourceError(
                f"{path}: shards compressed like this are not read, expected "
                f"{' or '.join(SHARD_SUFFIXES)}; decompress it, or pack it with `tonari pack`"
            )
        if suffix not in FORMATS:
            raise SourceError(
                f"{path}: found the suffix {suffix!r}, expected one of "
                f"{', '.join(SHARD_SUFFIXES)}; bring the data to one of these with `tonari pack`"
            )
        if suffix != _suffix_of(paths[0]):
            raise SourceError(
                f"{path}: found together with {paths[0]}, expected shards of one format; open them "
                "as two sources"
            )
    return _suffix_of(paths[0])


def _suffix_of(path: str) -> str:
    return ".tgz" if path.endswith(".tar.gz") else PurePosixPath(path).suffix


def _survey(
    storage: Storage,
    shard_format: ShardFormat,
    path: str,
    count: int | None,
    kept: Surveyed | None,
) -> Surveyed:
    """Find a shard's samples, bytes and time of change."""
    size, mtime_ns = storage.stat(path)
    if count is None and kept is not None and kept[1:] == (size, mtime_ns):
        count = kept.num_samples
    if count is None:
        count = shard_format.count(storage, path)
    if size == 0 or count < 1:
        raise SourceError(
            f"{path}: holds no samples ({size} bytes), expected at least one; remove the shard or "
            "write it again"
        )
    return Surveyed(count, size, mtime_ns)


def _agree(world: World, work: Callable[[], bytes], doing: str) -> list[bytes]:
    """Gather what the ranks found; if one failed, all raise its error instead of waiting for it."""
    try:
        part = b"+" + work()
    except SourceError as error:
        part = b"-" + str(error).encode(errors="replace")
    parts = world.allgather(part, doing=f"{doing} the shards")
    for found in parts:
        if found.startswith(b"-"):
            raise SourceError(found[1:].decode())
    return [found[1:] for found in parts]


def _name(spec: str | Sequence[str]) -> str:
    if isinstance(spec, str):
        return spec
    return spec[0] if len(spec) == 1 else f"{spec[0]} and {len(spec) - 1} more, to {spec[-1]}"
