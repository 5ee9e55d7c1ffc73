"""A pattern -> a source: which format, how many samples in each shard."""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import cast

import numpy as np
import xxhash

from dataio.base.checked import checked, checked_call
from dataio.base.errors import SourceError
from dataio.base.location import bare
from dataio.source.advice import ARRAY_SUFFIXES, advice
from dataio.source.base import (
    Contents,
    HasHints,
    HasIndexes,
    Shard,
    ShardedSource,
    ShardFormat,
    Source,
)
from dataio.source.counts import Surveyed, read_counts, write_counts
from dataio.source.expand import (
    CHUNK,
    LINE_SUFFIXES,
    MAGIC,
    NUMBERED,
    RECORD_SUFFIXES,
    expand,
    is_shard,
)
from dataio.source.formats.arrow import ArrowFormat
from dataio.source.formats.folder import ImageFolderSource, is_image_folder, list_images
from dataio.source.formats.grids import name_arrays, open_rows
from dataio.source.formats.hugging_face import dataset_shards
from dataio.source.formats.index_json import indexed_shards
from dataio.source.formats.json_lines import json_lines_format
from dataio.source.formats.litdata import LitDataFormat
from dataio.source.formats.mds import MdsFormat
from dataio.source.formats.megatron import MegatronFormat
from dataio.source.formats.parquet import ParquetFormat
from dataio.source.formats.tar.tar import TarFormat
from dataio.source.formats.tfrecord import tfrecord_format
from dataio.source.storage.files import Storage
from dataio.source.storage.retry import Retry
from dataio.source.storage.throttle import Throttle
from dataio.source.wrap.growing import Counted, GrowingSource, check_tar_end
from dataio.source.wrap.packed import SequenceFormat, Sequences, SequenceSource, check_suffix
from dataio.source.wrap.torch_dataset import MapDataset
from dataio.source.wrap.webdataset import Pipeline, PipelineFormat, is_pipeline
from dataio.source.wrapping import Arrays, check_openable, names_shards, wrapped
from dataio.world import World, single_world
from dataio.world.agree import agree

GZIP, ARROW, MDS, TFRECORD = TarFormat(gzipped=True), ArrowFormat(), MdsFormat(), tfrecord_format()
LITDATA, JSON_LINES = LitDataFormat(), json_lines_format()
TAR = TarFormat()
FORMATS: dict[str, ShardFormat] = {
    ".tar": TAR,
    ".tar.gz": GZIP,
    ".tgz": GZIP,
    ".parquet": ParquetFormat(),
    ".arrow": ARROW,
    ".feather": ARROW,
    ".ipc": ARROW,
    **dict.fromkeys((".mds", ".mds.zstd", ".mds.gz", ".mds.bz2"), MDS),
    **dict.fromkeys(RECORD_SUFFIXES, TFRECORD),
    **dict.fromkeys(LINE_SUFFIXES, JSON_LINES),
    "chunk.bin": LITDATA,
    ".bin": MegatronFormat(),
}
"""How the shards of each suffix are read; LitData's chunks are known by more, see `CHUNK`."""
GROWING = tuple(
    suffix for suffix in FORMATS if not suffix.startswith((".mds", ".tfrec", "chunk", ".bin"))
)
"""What shards may be appended of."""
JOINABLE = tuple(suffix for suffix, its in FORMATS.items() if its in (TAR, GZIP))
"""Of what a shard may be several files, one behind the other."""

COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".br", ".snappy")
FOLDER, ARRAYS = b"folder", b"arrays"
LISTED = (0, 0)
"""In place of a hint: an index of all shards says how many samples each holds."""
MAX_MARKS = 1 << 16
"""Of all shards: every rank receives all. Where shards are many, few ranks read parts of them."""
COUNT_THREADS = 4
"""Shards that a rank counts at once: most of the time goes into waiting for the filesystem."""


@checked
@dataclass(frozen=True)
class Shards:
    """Shards for a `Loader` to open, with limits of their own.

    Args:
        names: Pattern, path, a list of them, or a pipeline of webdataset, as `open_source` takes.
        retry: How long a request may last, and be repeated.
        throttle: Slows down every read.
        version: Of a pipeline: whatever changes when functions that its own functions call do.
        hashes: Whether shards of MDS are checked by the hashes that their index has of them, if
            any: each is then read whole the first time that a process reads any of it. Without
            hashes, whether their sizes are compared.
        grows: Whether shards are appended while a run trains: each epoch is of those that are there
            when it begins. See docs/sources.md.
        sequences: Of documents of tokens, the sequences of one length to make of them.
        joined: Whether tar shards may be several archives, one behind the other, as ``cat`` joins
            them: zeros between and behind members then end nothing, the end marker may lack, and a
            key that comes again is another sample.

    Raises:
        ValueError: If it is a pipeline, and grows or has sequences.
    """

    names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Pipeline
    _: KW_ONLY
    retry: Retry | None = None
    throttle: Throttle | None = None
    version: str = ""
    hashes: bool = True
    grows: bool = False
    sequences: Sequences | None = None
    joined: bool = False

    def __post_init__(self) -> None:
        if (self.grows or self.sequences or self.joined) and is_pipeline(self.names):
            raise ValueError(
                "Shards: a pipeline excludes grows=True, joined=True and sequences; give the "
                "pattern of the shards, or leave these out"
            )


@checked_call
def open_source(
    spec: str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | Pipeline
    | Arrays
    | MapDataset,
    *,
    world: World | None = None,
    storage: Storage | None = None,
    index_cache: Path | None = None,
    version: str = "",
    grows: bool = False,
    sequences: Sequences | None = None,
    joined: bool = False,
) -> Source:
    """Open shards of samples. Collective: the ranks share the work of counting.

    Args:
        spec: Paths of ``.tar`` (WebDataset, also gzipped), ``.parquet``, Arrow, MDS, TFRecord,
            JSON lines or Megatron shards, see `expand`; or a directory: of shards, of a Hugging
            Face, MDS or LitData dataset, or of one directory of images for each class; or a
            `webdataset.WebDataset`, whose decoders, maps and filters run once over each sample as
            it is counted, and once as it is staged. Array files all of whose arrays have one row
            a sample open as `ArrayFiles` of them. A dict of arrays becomes a `NumpySource`, a
            map-style dataset a `DatasetSource`.
        world: The ranks that open it; by default this process alone.
        storage: Reads, with its own limits; by default without any.
        index_cache: A directory of this node, made where it is not there, that keeps how many
            samples each shard holds: the next start opens no shard that has not changed.
        version: Of a pipeline; see `Shards`.
        grows: Whether shards may be appended; see `Shards`.
        sequences: To make of documents; see `Shards`.
        joined: Whether tar shards may be several archives; see `Shards`.

    Raises:
        SourceError: On every rank, if the pattern names nothing, or any rank finds a broken shard.
    """
    check_openable(spec)
    if not names_shards(spec) and not is_pipeline(spec):
        return wrapped(spec)
    named: str | list[str]
    pipeline: PipelineFormat | None = None
    if isinstance(spec, (str, os.PathLike)):
        named = os.fspath(spec)
    elif is_pipeline(spec):
        pipeline = PipelineFormat(spec, version=version)
        named = pipeline.urls
        index_cache = index_cache / pipeline.fingerprint if index_cache is not None else None
    else:
        named = [os.fspath(path) for path in cast("Sequence[str]", spec)]
    if named == []:
        raise ValueError("open_source: spec is empty, expected shards; name them, or a directory")
    world = world if world is not None else single_world()
    storage = storage if storage is not None else Storage()
    # One rank lists, so that no other asks the metadata server, and all see the same shards.
    listing = agree(
        world,
        lambda: _listing(storage, named, pipeline) if world.rank == 0 else b"",
        doing="list the shards",
    )[0]
    if grows:
        _refuse_growth(_name(named), listing)
    if listing.startswith(FOLDER):
        return ImageFolderSource(_name(named), listing.removeprefix(FOLDER), storage=storage)
    if listing == ARRAYS:
        return open_rows(_names(named), world=world, storage=storage)
    suffix, paths, counts, urls = json.loads(listing)
    storage.adopt_urls(urls)
    shard_format = pipeline if pipeline is not None else FORMATS[suffix]
    name, made = _name(named), ShardedSource
    if sequences is not None:
        check_suffix(name, suffix)
        shard_format = SequenceFormat(sequences)
        name, suffix, made = f"{name}#{sequences.key}", sequences.key, SequenceSource
        index_cache = index_cache / sequences.key if index_cache is not None else None
    if joined:
        shard_format = _joined(name, suffix)
        index_cache = index_cache / "joined" if index_cache is not None else None

    # More shards are the same source there.
    known_by = [_name(named)] if grows else paths
    kept = read_counts(index_cache, known_by) if index_cache is not None else None
    found_before: Sequence[Surveyed | None] = [*(kept or ()), *([None] * len(paths))]

    # In the order that nodes stage them: this one's page cache may still hold what it counted.
    size = world.world_size
    cuts = [len(paths) * rank // size for rank in range(size + 1)]

    def survey() -> bytes:
        def one(i: int) -> Surveyed:
            known = Contents([counts[i]]) if counts is not None else None
            found = _survey(storage, shard_format, paths[i], known, found_before[i])
            if pipeline is None:
                _refuse_empty(paths[i], found)
            is_plain = isinstance(shard_format, TarFormat) and not shard_format.gzipped
            if grows and is_plain and found != found_before[i]:
                check_tar_end(storage, paths[i])
            return found._replace(marks=_thinned(found.marks, len(paths)))

        mine = range(*cuts[world.rank : world.rank + 2])
        with ThreadPoolExecutor(COUNT_THREADS, thread_name_prefix="tonari-count") as threads:
            return json.dumps(list(threads.map(one, mine))).encode()

    parts = agree(world, survey, doing="count the samples of the shards")
    found = [Surveyed(*entry) for part in parts for entry in json.loads(part)]
    if index_cache is not None and found != kept and world.local_rank == 0:
        write_counts(index_cache, known_by, found)
    for i, (path, shard) in enumerate(zip(paths, found, strict=True)):
        # Another node's copy may have another time.
        own = cuts[world.rank] <= i < cuts[world.rank + 1]
        storage.expect(path, shard.num_bytes, shard.mtime_ns if own else None)
        if shard.beside and isinstance(shard_format, HasIndexes):
            num_bytes, mtime_ns = shard.beside
            storage.expect(shard_format.index_of(path), num_bytes, mtime_ns if own else None)
    if grows:
        return _growing(
            named, shard_format, list(zip(paths, found, strict=True)), storage=storage,
            own=range(*cuts[world.rank : world.rank + 2]), index_cache=index_cache,
        )  # fmt: skip
    if pipeline is not None:
        # A filter may leave nothing of a shard.
        filled = [i for i, shard in enumerate(found) if sum(shard.counts)]
        if not filled:
            raise SourceError(
                f"{_name(named)}: the pipeline gives no sample of {len(paths)} shards, expected at "
                "least one; check its filters, and the shards"
            )
        paths, found = [paths[i] for i in filled], [found[i] for i in filled]
    pieces = np.concatenate([shard.counts for shard in found]).astype(np.int64)
    totals = [sum(shard.counts) for shard in found]
    shards = [
        Shard(path, count, first, np.array(shard.marks, np.int64).reshape(-1, 2))
        for path, shard, count, first in zip(
            paths, found, totals, accumulate(totals, initial=0), strict=False
        )
    ]
    marks = [
        [PurePosixPath(path).name, count, shard.num_bytes, shard.mtime_ns, *shard.beside]
        for path, count, shard in zip(paths, totals, found, strict=True)
    ]
    fingerprint = xxhash.xxh3_64_hexdigest(json.dumps([suffix, *marks]).encode())
    costs = b"".join(b64decode(shard.costs) for shard in found)
    return made(
        name, shard_format, shards, fingerprint=fingerprint, storage=storage,
        piece_starts=np.cumsum(pieces) - pieces,
        total_bytes=sum(shard.num_bytes for shard in found),
        costs=np.frombuffer(costs, np.uint8) if costs else None,
    )  # fmt: skip


def _growing(
    named: str | list[str],
    shard_format: ShardFormat,
    counted: Sequence[tuple[str, Surveyed]],
    *,
    storage: Storage,
    own: Sequence[int],
    index_cache: Path | None,
) -> GrowingSource:
    def list_paths() -> list[str]:
        return list(json.loads(_listing(storage, named, None))[1])

    def survey(path: str) -> Surveyed:
        found = _survey(storage, shard_format, path, None, None)
        _refuse_empty(path, found)
        if isinstance(shard_format, TarFormat) and not shard_format.gzipped:
            check_tar_end(storage, path)
        return found._replace(marks=_thinned(found.marks, len(counted) + 1))

    def keep(known: Sequence[Counted]) -> None:
        if index_cache is not None:
            write_counts(index_cache, [_name(named)], [shard.found for shard in known])

    return GrowingSource(
        _name(named), shard_format, [Counted(*shard) for shard in counted],
        num_shards=len(counted), own=own, storage=storage, list_paths=list_paths, survey=survey,
        keep=keep,
    )  # fmt: skip


def _joined(name: str, suffix: str) -> ShardFormat:
    """Choose the format that reads several archives in a shard."""
    if suffix not in JOINABLE:
        raise SourceError(
            f"{name}: found shards that end in {suffix}, expected tar shards, as joined=True says; "
            "leave it out"
        )
    return TarFormat(gzipped=FORMATS[suffix] is GZIP, joined=True)


def _refuse_growth(name: str, listing: bytes) -> None:
    """Refuse to grow what is not known shard by shard, or was never tried."""
    suffix = "" if listing.startswith(FOLDER) else json.loads(listing)[0]
    if suffix not in GROWING:
        found = f"shards that end in {suffix}" if suffix else "a folder of images"
        raise SourceError(
            f"{name}: cannot grow, found {found}, expected shards that end in "
            f"{', '.join(GROWING)}; convert it, or give grows=False"
        )


def _listing(storage: Storage, spec: str | Sequence[str], pipeline: PipelineFormat | None) -> bytes:
    if pipeline is not None:
        shards = expand(spec, storage)
        return json.dumps([pipeline.fingerprint, shards, None, storage.urls]).encode()
    directory = _directory(spec)
    paths = None if directory is None else dataset_shards(directory)
    if paths is None and (place := _place(spec, storage)):
        paths = indexed_shards(place, storage)
    if directory is not None and paths is None and not _holds_shards(directory):
        root = str(directory)
        if is_image_folder(root):
            return FOLDER + list_images(root, storage)
    if paths is None and name_arrays([bare(name) for name in _names(spec)]):
        return ARRAYS
    paths = expand(spec, storage) if paths is None else paths
    suffix = _suffix(paths)
    counts = FORMATS[suffix].known_counts(storage, paths)
    return json.dumps([suffix, paths, counts, storage.urls]).encode()


def _names(spec: str | Sequence[str]) -> list[str]:
    return [spec] if isinstance(spec, str) else list(spec)


def _directory(spec: str | Sequence[str]) -> Path | None:
    """Find the directory that the pattern names, if it is one and no more."""
    name = spec if isinstance(spec, str) else spec[0] if len(spec) == 1 else ""
    path = Path(name).expanduser()
    return path if name and "://" not in name and path.is_dir() else None


def _place(spec: str | Sequence[str], storage: Storage) -> str:
    """Name the directory, or what may be one behind a URL, if the pattern is no more."""
    name = _names(spec)[0] if len(_names(spec)) == 1 else ""
    if "://" not in name:
        return str(_directory(spec) or "")
    url = storage.canonical(name)
    # Whoever may read a file need not be allowed to ask what lies beside it.
    is_file = is_shard(url) or url.endswith((*FORMATS, *ARRAY_SUFFIXES))
    return "" if is_file or not (MAGIC | {"{"}).isdisjoint(url) else url


def _holds_shards(directory: Path) -> bool:
    return any(is_shard(child.name) for child in directory.iterdir())


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
    if CHUNK.search(path):
        return "chunk.bin"
    for suffix in FORMATS:
        if path.endswith(suffix):
            return suffix
    if NUMBERED.search(path):
        return ".tfrecord"
    suffix = PurePosixPath(path).suffix
    if suffix in COMPRESSED:
        raise SourceError(
            f"{path}: shards compressed with {suffix} are not supported, expected one of "
            f"{', '.join(FORMATS)}; decompress it"
        )
    raise SourceError(
        f"{path}: found the suffix {suffix!r}, expected one of {', '.join(FORMATS)}; {advice(path)}"
    )


def _survey(
    storage: Storage,
    shard_format: ShardFormat,
    path: str,
    known: Contents | None,
    kept: Surveyed | None,
) -> Surveyed:
    """Find a shard's samples, piece by piece, its bytes and time of change."""
    now = storage.stat(path)
    beside = (
        _stat(storage, shard_format.index_of(path)) if isinstance(shard_format, HasIndexes) else ()
    )
    hinted = shard_format.hint_of(path) if isinstance(shard_format, HasHints) and not known else ""
    if kept is not None and (kept.num_bytes, kept.mtime_ns, *kept.beside) == (*now, *beside):
        # What was taken from elsewhere is as good as that still is.
        hint = () if not kept.hint else LISTED if known else _stat(storage, hinted)
        if (*kept.hint,) == (*hint,) and (known is None or known.counts == kept.counts):
            return kept
    hint = LISTED if known else _stat(storage, hinted)
    counts, marks, costs = known if known is not None else shard_format.survey(storage, path)
    costs_text = b64encode(costs).decode()
    return Surveyed(counts, *now, marks.ravel().tolist(), beside, costs_text, hint)


def _stat(storage: Storage, path: str) -> tuple[int, ...]:
    """Bytes and time of change of a file, if it is there."""
    return storage.stat(path) if path and storage.exists(path, is_optional=True) else ()


def _refuse_empty(path: str, found: Surveyed) -> None:
    if found.num_bytes == 0 or sum(found.counts) < 1:
        raise SourceError(
            f"{path}: holds no samples ({found.num_bytes} bytes), expected at least one; remove "
            "the shard or write it again"
        )


def _thinned(marks: list[int], num_shards: int) -> list[int]:
    """Keep a shard's part of all marks that there may be."""
    step = 1 + len(marks) // 2 * num_shards // MAX_MARKS
    return np.array(marks, np.int64).reshape(-1, 2)[::step].ravel().tolist()


def _name(spec: str | Sequence[str]) -> str:
    if isinstance(spec, str):
        return bare(spec)
    first, last = bare(spec[0]), bare(spec[-1])
    return first if len(spec) == 1 else f"{first} and {len(spec) - 1} more, to {last}"
