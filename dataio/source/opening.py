"""A pattern -> a source: which format, how many samples in each shard."""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import PurePosixPath

import xxhash

from dataio.errors import SourceError
from dataio.source.base import Shard, ShardedSource, ShardFormat, Source
from dataio.source.files import SHARD_SUFFIXES, Storage, expand
from dataio.source.parquet import ParquetFormat
from dataio.source.tar import TarFormat
from dataio.source.throttle import Throttle
from dataio.world import World, single_world

FORMATS: dict[str, ShardFormat] = {".tar": TarFormat(), ".parquet": ParquetFormat()}
COMPRESSED = (".gz", ".tgz", ".zst", ".bz2", ".xz")


def open_source(
    spec: str | Sequence[str], *, world: World | None = None, throttle: Throttle | None = None
) -> Source:
    """Open shards of samples. Collective: the ranks share the work of counting.

    Args:
        spec: Paths of ``.tar`` (WebDataset) or ``.parquet`` shards; see `expand`.
        world: The ranks that open it; by default this process alone.
        throttle: Slows down every read.

    Raises:
        SourceError: On every rank, if the pattern names nothing, or any rank finds a broken shard.
    """
    world = world if world is not None else single_world()
    storage = Storage(throttle)
    # One rank lists, so that no other asks the metadata server, and all see the same shards.
    listing = _agree(world, lambda: _listing(storage, spec) if world.rank == 0 else b"", "list")[0]
    suffix, paths, counts = json.loads(listing)
    shard_format = FORMATS[suffix]

    def survey() -> bytes:
        mine = range(world.rank, len(paths), world.world_size)
        known = counts if counts is not None else [None] * len(paths)
        return json.dumps(
            [_survey(storage, shard_format, paths[i], known[i]) for i in mine]
        ).encode()

    parts = [json.loads(part) for part in _agree(world, survey, "count the samples of")]
    found = [parts[i % world.world_size][i // world.world_size] for i in range(len(paths))]
    firsts = accumulate((count for count, _, _ in found), initial=0)
    shards = [
        Shard(path, count, first)
        for path, (count, _, _), first in zip(paths, found, firsts, strict=False)
    ]
    marks = [suffix, *([PurePosixPath(p).name, *f] for p, f in zip(paths, found, strict=True))]
    fingerprint = xxhash.xxh3_64_hexdigest(json.dumps(marks).encode())
    return ShardedSource(
        _name(spec),
        shard_format,
        shards,
        fingerprint=fingerprint,
        storage=storage,
        total_bytes=sum(size for _, size, _ in found),
    )


def _listing(storage: Storage, spec: str | Sequence[str]) -> bytes:
    paths = expand(spec)
    suffix = _suffix(paths)
    counts = FORMATS[suffix].known_counts(storage, paths)
    return json.dumps([suffix, paths, counts]).encode()


def _suffix(paths: Sequence[str]) -> str:
    first = paths[0]
    for path in paths:
        suffix = PurePosixPath(path).suffix
        if suffix in COMPRESSED:
            raise SourceError(
                f"{path}: compressed shards are not supported yet, expected "
                f"{' or '.join(SHARD_SUFFIXES)}; decompress it, or pack it with `tonari pack`"
            )
        if suffix not in FORMATS:
            raise SourceError(
                f"{path}: found the suffix {suffix!r}, expected one of "
                f"{', '.join(SHARD_SUFFIXES)}; bring the data to one of these with `tonari pack`"
            )
        if suffix != PurePosixPath(first).suffix:
            raise SourceError(
                f"{path}: found together with {first}, expected shards of one format; open them "
                "as two sources"
            )
    return PurePosixPath(first).suffix


def _survey(
    storage: Storage, shard_format: ShardFormat, path: str, count: int | None
) -> tuple[int, int, int]:
    """Find a shard's samples, bytes and time of change."""
    with storage.open(path) as file:
        size, mtime_ns = file.size, file.mtime_ns
    if count is None:
        count = shard_format.count(storage, path)
    if size == 0 or count < 1:
        raise SourceError(
            f"{path}: holds no samples ({size} bytes), expected at least one; remove the shard or "
            "write it again"
        )
    return count, size, mtime_ns


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
