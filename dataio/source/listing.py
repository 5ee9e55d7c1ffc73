"""A pattern -> what it names: shards of one format, a folder of images, or files of arrays."""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from dataio.base.errors import SourceError
from dataio.base.location import bare
from dataio.source.advice import ARRAY_SUFFIXES, advice
from dataio.source.base import ShardFormat
from dataio.source.expand import (
    CHUNK,
    LINE_SUFFIXES,
    MAGIC,
    NUMBERED,
    RECORD_SUFFIXES,
    Names,
    expand,
    is_shard,
)
from dataio.source.formats.arrow import ArrowFormat
from dataio.source.formats.folder import is_image_folder, list_images
from dataio.source.formats.grids import list_files, name_arrays
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
"""What the list of something else than shards begins with."""


def list_source(storage: Storage, spec: Names) -> bytes:
    """List what a pattern names.

    Returns:
        Of a folder of images `FOLDER`, then as `list_images`; `ARRAYS` of files of arrays; of
        shards JSON: their suffix, paths, the samples of each if an index says so, and URLs.

    Raises:
        SourceError: If it names nothing, or shards of several formats.
    """
    directory = _directory(spec)
    paths = None if directory is None else dataset_shards(directory)
    if paths is None and (place := _place(spec, storage)):
        paths = indexed_shards(place, storage)
    if directory is not None and paths is None and not _holds_shards(directory):
        root = str(directory)
        if is_image_folder(root):
            return FOLDER + list_images(root, storage)
    if paths is None and name_arrays([bare(name) for name in names_of(spec)]):
        return ARRAYS
    paths = expand(spec, storage) if paths is None else paths
    suffix = find_suffix(paths)
    counts = FORMATS[suffix].known_counts(storage, paths)
    return json.dumps([suffix, paths, counts, storage.urls]).encode()


def list_parts(spec: Names, listing: bytes = b"") -> list[str]:
    """Name what a pattern is made of: shards, files and stores of arrays, or a folder of images.

    Args:
        spec: The pattern.
        listing: What `list_source` returned of it, if it is known.

    Raises:
        SourceError: As `list_source`.
    """
    storage = Storage()
    listing = listing or list_source(storage, spec)
    if listing.startswith(FOLDER):
        return names_of(spec)
    return list_files(names_of(spec), storage) if listing == ARRAYS else json.loads(listing)[1]


def names_of(spec: Names) -> list[str]:
    """Give the names of one or several."""
    return [spec] if isinstance(spec, str) else list(spec)


def _directory(spec: Names) -> Path | None:
    """Find the directory that the pattern names, if it is one and no more."""
    name = spec if isinstance(spec, str) else spec[0] if len(spec) == 1 else ""
    path = Path(name).expanduser()
    return path if name and "://" not in name and path.is_dir() else None


def _place(spec: Names, storage: Storage) -> str:
    """Name the directory, or what may be one behind a URL, if the pattern is no more."""
    name = names_of(spec)[0] if len(names_of(spec)) == 1 else ""
    if "://" not in name:
        return str(_directory(spec) or "")
    url = storage.canonical(name)
    # Whoever may read a file need not be allowed to ask what lies beside it.
    is_file = is_shard(url) or url.endswith((*FORMATS, *ARRAY_SUFFIXES))
    return "" if is_file or not (MAGIC | {"{"}).isdisjoint(url) else url


def _holds_shards(directory: Path) -> bool:
    return any(is_shard(child.name) for child in directory.iterdir())


def find_suffix(paths: Sequence[str]) -> str:
    """Find the suffix, a key of `FORMATS`, by which shards are read.

    Raises:
        SourceError: If they are of several formats, or of none.
    """
    first = _suffix(paths[0])
    for path in paths:
        if FORMATS[_suffix(path)] is not FORMATS[first]:
            raise SourceError(
                f"{path}: found together with {paths[0]}, expected shards of one format; open "
                "them as two sources"
            )
    return first


def _suffix(path: str) -> str:
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


def joined_format(name: str, suffix: str) -> ShardFormat:
    """Choose the format that reads several archives in a shard.

    Raises:
        SourceError: If the shards are no tar files.
    """
    if suffix not in JOINABLE:
        raise SourceError(
            f"{name}: found shards that end in {suffix}, expected tar shards, as joined=True says; "
            "leave it out"
        )
    return TarFormat(gzipped=FORMATS[suffix] is GZIP, joined=True)
