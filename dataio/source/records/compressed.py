"""What a compressed shard holds, read forwards."""

import io
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from dataio.base.errors import SourceError
from dataio.source.io.codecs import HEAD_BYTES, codec_of
from dataio.source.io.window import IN_ORDER_BYTES, File

CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
"""Arrow's name of the codec, by the suffix."""
ARROW_NAMES = {"gzip": "gzip", "zlib": "gzip", "zstd": "zstd", "bz2": "bz2"}
"""Arrow's name of each codec; that of gzip looks which of two it is."""
COMPRESSED_BYTES = 1 << 20
UNKNOWN_SIZE = 1 << 62


class ReadFile(File, Protocol):
    """A file whose bytes can be had as such."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Read, fewer bytes only at the end of the file."""
        ...


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

    Attributes:
        path: Of the file.
        size: Length of what it holds; more than any file's until the end was seen.
        in_order: Whatever is passed over is decompressed all the same.
        request_bytes: Without meaning, as nothing can be passed over.
    """

    in_order = True
    request_bytes = 0

    def __init__(self, file: ReadFile, codec: str) -> None:
        self.path = file.path
        self.size = UNKNOWN_SIZE
        self._codec = codec
        self._stream = pa.CompressedInputStream(pa.PythonFile(_Compressed(file), mode="r"), codec)
        self._position = 0

    def read_at(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end; never before what was read last.

        Raises:
            SourceError: If the file is not compressed so, damaged or truncated.
        """
        assert offset >= self._position, "a compressed shard is read forwards"
        while self._position < offset:
            if not self._next(min(offset - self._position, IN_ORDER_BYTES)):
                return b""
        parts, missing = [], length
        while missing and (part := self._next(missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def view_at(self, offset: int, length: int) -> memoryview:
        """Read as `read_at` does."""
        return memoryview(self.read_at(offset, length))

    def _next(self, length: int) -> bytes:
        try:
            data: bytes = self._stream.read(length)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{self.path}: found bytes that do not decompress behind byte {self._position} of "
                f"what it holds ({' '.join(str(error).split())}), expected a whole {self._codec} "
                "file; it is truncated or damaged: copy the shard again"
            ) from error
        self._position += len(data)
        if not data:
            self.size = self._position
        return data


class _Compressed(io.RawIOBase):
    """The compressed bytes, as Arrow expects a Python file."""

    def __init__(self, file: ReadFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        length = COMPRESSED_BYTES if size is None or size < 0 else size
        data = self._file.read_at(self._position, length)
        self._position += len(data)
        return data
