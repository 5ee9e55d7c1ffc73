"""What a compressed file holds, read forwards: by gzip, zstd or bzip2, as its first bytes say.

Names lie, or say nothing. One reader serves all formats: what it takes of tar shards, it takes of
records.
"""

import zlib
from collections.abc import Callable, Iterator

import pyarrow as pa

from dataio.base.errors import SourceError
from dataio.source.storage.file_object import FileObject
from dataio.source.storage.window import IN_ORDER_BYTES, File, ReadFile

LEAST_BYTES, COMPRESSED_BYTES = 64 << 10, 1 << 20
"""What is read of the file at once: little at first, as some need its head alone."""
UNKNOWN_SIZE = 1 << 62
OF_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
VALUE_BYTES, MOST_EXPANSION = 64 << 20, 100
"""What one value of a compressed file may have: so much, or so many times the file."""

HEAD_BYTES = 12
"""Enough of the first bytes for any codec."""
_MAGIC = {
    **{b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\0": "xz"},
    **{b"PK\3\4": "zip", b"\4\x22\x4d\x18": "lz4"},
}
_SKIPPED_BY_ZSTD = b"\x2a\x4d\x18"
"""Behind a first byte of 0x50 to 0x5f: a frame that holds no data."""
ARROW_NAMES = {"gzip": "gzip", "zlib": "gzip", "zstd": "zstd", "bz2": "bz2"}
"""How each codec is read; the reader of gzip looks which of two it is."""


def codec_of(begin: bytes) -> str | None:
    """Name the codec that a file begins with: gzip, zlib, zstd, bz2, xz, zip or lz4, or None.

    Args:
        begin: Its first `HEAD_BYTES`, fewer if it is shorter.
    """
    for magic, codec in _MAGIC.items():
        if begin.startswith(magic):
            return codec
    if begin[1:4] == _SKIPPED_BY_ZSTD and begin[0] >> 4 == 5:
        return "zstd"
    # Deflate with a window of 32 KiB; the two bytes are a multiple of 31.
    is_zlib = begin[:1] == b"\x78" and int.from_bytes(begin[:2], "big") % 31 == 0
    return "zlib" if is_zlib else None


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


class DecompressedFile:
    """What a compressed file holds, read forwards.

    Several compressed files may stand one behind the other; zeros behind those of gzip are passed
    over.

    Args:
        file: An open file.
        codec: ``gzip``, which zlib is read as too, ``zstd`` or ``bz2``.

    Attributes:
        path: Of the file.
        size: Length of what it holds; more than any file's until the end was seen.
        most_bytes: How many bytes are read at once, at most: a small file may expand to what no
            memory holds.
        in_order: Whatever is passed over is decompressed all the same.
        request_bytes: Without meaning, as nothing can be passed over.
    """

    in_order = True
    request_bytes = 0

    def __init__(self, file: ReadFile, codec: str) -> None:
        self.path = file.path
        self.size = UNKNOWN_SIZE
        self.most_bytes = max(VALUE_BYTES, MOST_EXPANSION * file.size)
        self._position = 0
        self._ready = memoryview(b"")
        self._pieces = _gunzipped(file) if codec == "gzip" else _by_arrow(file, codec)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end; never before what was read last.

        Raises:
            SourceError: If the file is not compressed so, damaged or truncated, or if so many bytes
                are more than `most_bytes`.
        """
        assert offset >= self._position, "a compressed shard is read forwards"
        parts, num_bytes = [], 0
        while self._position < offset + length:
            if not self._ready:
                self._ready = memoryview(next(self._pieces, b""))
                if not self._ready:
                    self.size = self._position
                    break
            passed = offset - self._position
            part = self._ready[: passed if passed > 0 else offset + length - self._position]
            if passed <= 0:
                parts.append(part)
                num_bytes += len(part)
            if num_bytes > self.most_bytes:
                raise SourceError(
                    f"{self.path}: found a value of {length} bytes, expected at most "
                    f"{self.most_bytes} in a compressed file so small; decompress the shard first "
                    "if it is meant to hold that"
                )
            self._position += len(part)
            self._ready = self._ready[len(part) :]
        return b"".join(parts)

    def view_at(self, offset: int, length: int) -> memoryview:
        """Read as `read_at` does."""
        return memoryview(self.read_at(offset, length))


def _gunzipped(file: ReadFile) -> Iterator[bytes]:
    """Decompress piece by piece. Without the GIL where it takes time."""
    inflate, compressed, num_compressed = zlib.decompressobj(OF_GZIP_OR_ZLIB), b"", 0
    piece_bytes = LEAST_BYTES
    while True:
        if not compressed:
            compressed = file.read_at(num_compressed, min(piece_bytes, COMPRESSED_BYTES))
            num_compressed += len(compressed)
        if inflate.eof:
            # Files may be written one behind the other, and filled up with zeros.
            compressed = compressed.lstrip(b"\0")
            if not compressed and num_compressed == file.size:
                return
            if not compressed:
                continue
            inflate = zlib.decompressobj(OF_GZIP_OR_ZLIB)
        if not compressed:
            raise _bad(file, num_compressed, "bytes that do not decompress (they end too early)")
        try:
            data = inflate.decompress(compressed, piece_bytes)
        except zlib.error as error:
            found = f"bytes that do not decompress ({error})"
            raise _bad(file, num_compressed, found) from error
        compressed = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        piece_bytes = min(2 * piece_bytes, IN_ORDER_BYTES)
        if data:
            yield data


def _bad(file: ReadFile, num_compressed: int, found: str) -> SourceError:
    return SourceError(
        f"{file.path}: found {found} before byte {num_compressed} of {file.size}, expected a whole "
        "gzip file; it is truncated or damaged: copy the shard again, or write it again; where it "
        "is not compressed, give it a name without .gz"
    )


def _by_arrow(file: ReadFile, codec: str) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.PythonFile(FileObject(file), mode="r"), codec)
    position, piece_bytes = 0, LEAST_BYTES
    while True:
        try:
            data: bytes = stream.read(piece_bytes)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{file.path}: found bytes that do not decompress behind byte {position} of what "
                f"it holds ({' '.join(str(error).split())}), expected a whole {codec} file; it is "
                "truncated or damaged: copy the shard again"
            ) from error
        if not data:
            return
        position, piece_bytes = position + len(data), min(2 * piece_bytes, IN_ORDER_BYTES)
        yield data
