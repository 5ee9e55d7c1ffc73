"""Shards that are compressed, by what they begin with."""

from collections.abc import Callable

from dataio.base.errors import SourceError
from dataio.source.storage.codecs import HEAD_BYTES, codec_of
from dataio.source.storage.compressed import DecompressedFile, ReadFile
from dataio.source.storage.window import File

ARROW_NAMES = {"gzip": "gzip", "zlib": "gzip", "zstd": "zstd", "bz2": "bz2"}
"""How each codec is read; the reader of gzip looks which of two it is."""


def decompressed(
    file: ReadFile, *, is_plain: Callable[[bytes], bool] = lambda begin: False
) -> File:
    """Read what a file holds: its own bytes, or what they decompress to, by its first bytes.

    Args:
        file: An open file.
        is_plain: Whether a file that begins so is not compressed, whatever else it looks like.

    Raises:
        SourceError: If it is compressed by a codec that is not read.
    """
    begin = file.read_at(0, HEAD_BYTES)
    found = None if is_plain(begin) else codec_of(begin)
    if found is None:
        return file
    if found not in ARROW_NAMES:
        raise SourceError(
            f"{file.path}: is compressed by {found}, expected a shard as it is, or by one of "
            f"{', '.join(ARROW_NAMES)}; decompress the shard"
        )
    return DecompressedFile(file, ARROW_NAMES[found])
