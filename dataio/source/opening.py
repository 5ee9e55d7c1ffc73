"""A pattern -> a source: which format, how many samples in each shard."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath

import numpy as np
import xxhash

from dataio.errors import SourceError
from dataio.source.agree import agree
from dataio.source.arrow import ArrowFormat
from dataio.source.base import PiecedFormat, Shard, ShardedSource, ShardFormat, Source
from dataio.source.files import SHARD_SUFFIXES, Storage, expand
from dataio.source.hugging_face import dataset_shards
from dataio.source.image_folder import ImageFolderSource, is_image_folder, list_images
from dataio.source.parquet import ParquetFormat
from dataio.source.tar import TarFormat
from dataio.source.throttle import Throttle
from dataio.world import World, single_world

TAR, ARROW = TarFormat(), ArrowFormat()
FORMATS: dict[str, ShardFormat] = {
    ".tar": TAR,
    ".tar.gz": TAR,
    ".tgz": TAR,
    ".parquet": ParquetFormat(),
    ".arrow": ARROW,
    ".feather": ARROW,
    ".ipc": ARROW,
}
"""How the shards of each suffix are read."""

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
FOLDER = b"folder"


def open_source(
    spec: str | Sequence[str], *, world: World | None = None, throttle: Throttle | None = None
) -> Source:
    """Open shards of samples. Collective: the ranks share the work of counting.

    Args:
        spec: Paths of ``.tar`` (WebDataset, also gzipped), ``.parquet`` or Arrow shards, see
            `expand`; or a directory: of shards, of a Hugging Face dataset, or of one directory of
            images for each class.
        world: The ranks that open it; by default this process alone.
        throttle: Slows down every read.

    Raises:
        SourceError: On every rank, if the pattern names nothing, or any rank finds a broken shard.
    """
    world = world if world is not None else single_world()
    storage = Storage(throttle)
    # One rank lists, so that no other asks the metadata server, and all see the same shards.
    listing = agree(
        world,
        lambda: _listing(storage, spec) if world.rank == 0 else b"",
        doing="list the shards",
    )[0]
    if listing.startswith(FOLDER):
        return ImageFolderSource(_name(spec), listing.removeprefix(FOLDER), storage=storage)
    suffix, paths, counts = json.loads(listing)
    shard_format = FORMATS[suffix]

    def survey() -> bytes:
        mine = range(world.rank, len(paths), world.world_size)
        known = counts if counts is not None else [None] * len(paths)
        return json.dumps(
            [_survey(storage, shard_format, paths[i], known[i]) for i in mine]
        ).encode()

    parts = [
        json.loads(part) for part in agree(world, survey, doing="count the samples of the shards")
    ]
    found = [parts[i % world.world_size][i // world.world_size] for i in range(len(paths))]
    pieces = np.concatenate([counts for counts, _, _ in found]).astype(np.int64)
    totals = [sum(counts) for counts, _, _ in found]
    shards = [
        Shard(path, count, first)
        for path, count, first in zip(paths, totals, accumulate(totals, initial=0), strict=False)
    ]
    marks = [
        [PurePosixPath(path).name, count, size, mtime_ns]
        for path, count, (_, size, mtime_ns) in zip(paths, totals, found, strict=True)
    ]
    fingerprint = xxhash.xxh3_64_hexdigest(json.dumps([suffix, *marks]).encode())
    return ShardedSource(
        _name(spec),
        shard_format,
        shards,
        fingerprint=fingerprint,
        storage=storage,
        piece_starts=np.cumsum(pieces) - pieces,
    )


def _listing(storage: Storage, spec: str | Sequence[str]) -> bytes:
    directory = _directory(spec)
    paths = None if directory is None else dataset_shards(directory)
    if directory is not None and paths is None and not _holds_shards(directory):
        root = str(directory)
        if is_image_folder(root):
            return FOLDER + list_images(root, storage)
    paths = expand(spec) if paths is None else paths
    suffix = _suffix(paths)
    counts = FORMATS[suffix].known_counts(storage, paths)
    return json.dumps([suffix, paths, counts]).encode()


def _directory(spec: str | Sequence[str]) -> Path | None:
    """Say which directory the pattern names, if it is one and no more."""
    name = spec if isinstance(spec, str) else spec[0] if len(spec) == 1 else ""
    path = Path(name).expanduser()
    return path if name and "://" not in name and path.is_dir() else None


def _holds_shards(directory: Path) -> bool:
    return any(child.name.endswith(SHARD_SUFFIXES) for child in directory.iterdir())


def _suffix(paths: Sequence[str]) -> str:
    first = _known_suffix(paths[0])
    for path in paths:
        if FORMATS[_known_suffix(path)] is not FORMATS[first]:
            raise SourceError(
                f"{path}: found together with {paths[0]}, expected shards of one format; open "
                "them as two sources"
            )
    return first


def _known_suffix(path: str) -> str:
    for suffix in FORMATS:
        if path.endswith(suffix):
            return suffix
    suffix = PurePosixPath(path).suffix
    if suffix in COMPRESSED:
        raise SourceError(
            f"{path}: shards compressed with {suffix} are not supported, expected one of "
            f"{', '.join(FORMATS)}; decompress it, or pack it with `tonari pack`"
        )
    raise SourceError(
        f"{path}: found the suffix {suffix!r}, expected one of {', '.join(FORMATS)}; bring the "
        "data to one of these with `tonari pack`"
    )


def _survey(
    storage: Storage, shard_format: ShardFormat, path: str, count: int | None
) -> tuple[list[int], int, int]:
    """Find a shard's samples, piece by piece, its bytes and time of change."""
    with storage.open(path) as file:
        size, mtime_ns = file.size, file.mtime_ns
    if isinstance(shard_format, PiecedFormat):
        counts = shard_format.piece_counts(storage, path)
    else:
        counts = [shard_format.count(storage, path) if count is None else count]
    if size == 0 or sum(counts) < 1:
        raise SourceError(
            f"{path}: holds no samples ({size} bytes), expected at least one; remove the shard or "
            "write it again"
        )
    return counts, size, mtime_ns


def _name(spec: str | Sequence[str]) -> str:
    if isinstance(spec, str):
        return spec
    return spec[0] if len(spec) == 1 else f"{spec[0]} and {len(spec) - 1} more, to {spec[-1]}"
