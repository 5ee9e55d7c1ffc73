"""Whatever people hold -> a source: shards by their names, pipelines, arrays, datasets."""

import json
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.checked import checked, checked_call
from dataio.base.errors import SourceError
from dataio.source.base import ShardedSource, ShardFormat, Source
from dataio.source.counts import (
    ShardCounter,
    ShardInfo,
    count_shards,
    number_samples,
    own_part,
    write_counts,
)
from dataio.source.expand import Names, expand, shown_name
from dataio.source.formats.arrays import NumpySource
from dataio.source.formats.folder import ImageFolderSource
from dataio.source.formats.grids import ArrayFiles, open_rows
from dataio.source.listing import (
    ARRAYS,
    FOLDER,
    FORMATS,
    GROWING,
    joined_format,
    list_parts,
    list_source,
    names_of,
)
from dataio.source.storage.files import Storage
from dataio.source.storage.retry import Retry
from dataio.source.storage.throttle import Throttle
from dataio.source.wrap.anemoi import Anemoi
from dataio.source.wrap.growing import CountedShard, GrowingSource
from dataio.source.wrap.packed import SequenceFormat, Sequences, SequenceSource, check_suffix
from dataio.source.wrap.stored import StoredFormat, StoredSource
from dataio.source.wrap.torch_dataset import DatasetSource, MapDataset
from dataio.source.wrap.webdataset import PipelineFormat, WebDatasetPipeline, is_pipeline
from dataio.world import World, single_world
from dataio.world.agree import agree

Arrays = Mapping[str, NDArray[np.generic] | str | os.PathLike[str]]
"""Arrays of one row a sample, or paths of such ``.npy`` files, by the keys of fields."""


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

    names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | WebDatasetPipeline
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
    | ArrayFiles
    | Anemoi
    | WebDatasetPipeline
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
            a sample open as `ArrayFiles` of them; give those of others. A dict of arrays becomes a
            `NumpySource`, a map-style dataset a `DatasetSource`.
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
    if isinstance(spec, ArrayFiles | Anemoi):
        return spec.open(world)
    check_openable(spec)
    if isinstance(spec, Mapping) or not (names_shards(spec) or is_pipeline(spec)):
        return wrapped(spec)
    pipeline = PipelineFormat(spec, version=version) if is_pipeline(spec) else None
    spelled: Names = pipeline.urls if pipeline is not None else _spelled(spec)
    if not spelled and not isinstance(spelled, str):
        raise ValueError("open_source: spec is empty, expected shards; name them, or a directory")
    world = world if world is not None else single_world()
    storage = storage if storage is not None else Storage()
    name, listing = shown_name(spelled), _agree_on_list(world, storage, spelled, pipeline)
    if grows:
        _refuse_growth(name, listing)
    if listing.startswith(FOLDER):
        return ImageFolderSource(name, listing.removeprefix(FOLDER), storage=storage)
    if listing == ARRAYS:
        return open_rows(names_of(spelled), world=world, storage=storage)
    suffix, paths, listed, urls = json.loads(listing)
    storage.adopt_urls(urls)
    kind = _choose(name, suffix, pipeline, sequences, joined=joined)
    return _open_shards(
        kind, paths, listed, grown_from=spelled if grows else None, world=world, storage=storage,
        index_cache=index_cache / kind.index if index_cache is not None else None,
    )  # fmt: skip


def open_some(spec: Names, *, num_shards: int, joined: bool = False) -> Source:
    """Open some of the shards that a pattern names, from first to last, or of its array files.

    In this process alone: to see what samples are like, not to train on them.

    Raises:
        SourceError: If it names nothing, or a shard is broken.
    """
    storage = Storage()
    listing = list_source(storage, spec)
    if listing.startswith(FOLDER):
        return ImageFolderSource(shown_name(spec), listing.removeprefix(FOLDER), storage=storage)
    parts = list_parts(spec, listing)
    at = np.unique(np.linspace(0, len(parts) - 1, num_shards, dtype=int)).tolist()
    return open_source([parts[number] for number in at], joined=joined)


@dataclass(frozen=True)
class _Kind:
    """What a list of shards becomes.

    Attributes:
        name: Of the source.
        key: By which its fingerprint differs from that of others of the same shards.
        shard_format: How the shards are read.
        made: Its class.
        index: Where its counts are kept, beside those of others of the same shards.
    """

    name: str
    key: str
    shard_format: ShardFormat
    made: type[ShardedSource] = ShardedSource
    index: str = ""


def _choose(
    name: str, suffix: str, pipeline: PipelineFormat | None, sequences: Sequences | None, *,
    joined: bool,
) -> _Kind:  # fmt: skip
    """Choose what shards of a suffix become.

    Raises:
        SourceError: If no sequences are made of them, or they cannot be joined.
    """
    if pipeline is not None:
        kind = _Kind(name, suffix, pipeline, index=pipeline.fingerprint)
    else:
        kind = _Kind(name, suffix, FORMATS[suffix])
    if sequences is not None:
        key, its = sequences.key, SequenceFormat(sequences)
        kind = _Kind(f"{name}#{key}", key, its, SequenceSource, index=key)
        if sequences.packing == "stored":
            stored = StoredFormat(FORMATS[suffix], sequences)
            kind = replace(kind, shard_format=stored, made=StoredSource)
        else:
            check_suffix(name, suffix)
    if joined:
        its_parts = joined_format(kind.name, kind.key)
        kind = replace(kind, shard_format=its_parts, index="joined")
    return kind


def _spelled(spec: object) -> Names:
    if isinstance(spec, (str, os.PathLike)):
        return os.fspath(spec)
    return [os.fspath(path) for path in cast("Sequence[str]", spec)]


def _agree_on_list(
    world: World, storage: Storage, spelled: Names, pipeline: PipelineFormat | None
) -> bytes:
    """Have one rank list, so that no other asks the metadata server, and all see the same."""

    def find() -> bytes:
        if world.rank:
            return b""
        if pipeline is None:
            return list_source(storage, spelled)
        shards = expand(spelled, storage)
        return json.dumps([pipeline.fingerprint, shards, None, storage.urls]).encode()

    return agree(world, find, doing="list the shards")[0]


def _open_shards(
    kind: _Kind,
    paths: Sequence[str],
    listed: Sequence[int] | None,
    *,
    grown_from: Names | None,
    world: World,
    storage: Storage,
    index_cache: Path | None,
) -> ShardedSource:
    """Count the samples of shards, and make a source of them.

    What they grow from is listed again for each epoch; None: they do not.
    """
    counter = ShardCounter(
        storage, kind.shard_format, len(paths), grows=grown_from is not None,
        may_be_empty=isinstance(kind.shard_format, PipelineFormat),
    )  # fmt: skip
    # More shards are the same source where it grows.
    known_by = paths if grown_from is None else [kind.name]
    found = count_shards(
        counter, paths, listed=listed, known_by=known_by, world=world, index_cache=index_cache
    )
    if grown_from is None:
        return _sharded(kind, paths, found, storage)

    def list_paths() -> list[str]:
        return list(json.loads(list_source(storage, grown_from))[1])

    def keep(known: Sequence[CountedShard]) -> None:
        if index_cache is not None:
            write_counts(index_cache, known_by, [shard.found for shard in known])

    return GrowingSource(
        kind.name, kind.shard_format,
        [CountedShard(*shard) for shard in zip(paths, found, strict=True)],
        num_shards=len(paths), own=own_part(len(paths), world), storage=storage,
        list_paths=list_paths, count=replace(counter, num_shards=len(paths) + 1).count, keep=keep,
    )  # fmt: skip


def _sharded(
    kind: _Kind, paths: Sequence[str], found: Sequence[ShardInfo], storage: Storage
) -> ShardedSource:
    # A filter of a pipeline may leave nothing of a shard.
    filled = [i for i, shard in enumerate(found) if sum(shard.counts)]
    if not filled:
        raise SourceError(
            f"{kind.name}: the pipeline gives no sample of {len(paths)} shards, expected at least "
            "one; check its filters, and the shards"
        )
    paths, found = [paths[i] for i in filled], [found[i] for i in filled]
    shards, piece_starts = number_samples(paths, found)
    files = [
        [PurePosixPath(shard.path).name, shard.num_samples, its.num_bytes, its.mtime_ns,
         *its.beside]
        for shard, its in zip(shards, found, strict=True)
    ]  # fmt: skip
    costs = b"".join(b64decode(shard.costs) for shard in found)
    return kind.made(
        kind.name, kind.shard_format, shards, storage=storage, piece_starts=piece_starts,
        fingerprint=xxhash.xxh3_64_hexdigest(json.dumps([kind.key, *files]).encode()),
        total_bytes=sum(shard.num_bytes for shard in found),
        costs=np.frombuffer(costs, np.uint8) if costs else None,
    )  # fmt: skip


def _refuse_growth(name: str, listing: bytes) -> None:
    """Refuse to grow what is not known shard by shard, or was never tried."""
    if listing.startswith(FOLDER):
        found = "a folder of images"
    elif listing == ARRAYS:
        found = "files of arrays"
    else:
        suffix = json.loads(listing)[0]
        if suffix in GROWING:
            return
        found = f"shards that end in {suffix}"
    raise SourceError(
        f"{name}: cannot grow, found {found}, expected shards that end in {', '.join(GROWING)}; "
        "convert it, or give grows=False"
    )


def check_openable(source: object) -> None:
    """Refuse what only looks like a dataset.

    Raises:
        TypeError: If it is a mapping of anything but arrays, a list of names and other things, or
            bytes.
    """
    kinds = (np.ndarray, str, os.PathLike)
    if isinstance(source, Mapping):
        other = next((key for key, value in source.items() if not isinstance(value, kinds)), None)
        if other is not None:
            raise TypeError(
                f"source: found a mapping of {', '.join(map(str, source))}, of which {other!r} "
                f"is a {type(source[other]).__name__}, expected arrays of NumPy or paths of .npy; "
                "give one of a dataset's splits, or convert each with np.asarray"
            )
    elif isinstance(source, (bytes, bytearray, memoryview)):
        raise TypeError(
            "source: found bytes, expected the names of shards; decode them: os.fsdecode(...)"
        )
    elif names_shards(source) and isinstance(source, (list, tuple)):
        wrong = [name for name in source if not isinstance(name, (str, os.PathLike))]
        if wrong:
            raise TypeError(
                f"source: found a list of names and of {wrong[0]!r:.100}, expected names of "
                "shards alone; give these, or only samples"
            )


def names_shards(source: object) -> bool:
    """Whether it is a name, or a list that holds any, or is empty."""
    each = source if isinstance(source, (list, tuple)) else [source]
    return any(isinstance(name, (str, os.PathLike)) for name in each) or not each


def wrapped(source: object) -> Source:
    """Make a source of arrays or of a dataset; a finished one is returned as it is."""
    if hasattr(source, "made_as"):
        return cast("Source", source)
    if isinstance(source, Mapping):
        return NumpySource(source)
    return DatasetSource(cast("MapDataset", source))
