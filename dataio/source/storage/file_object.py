"""A file of the source as libraries want one: with a position."""

import io
from collections import OrderedDict

from dataio.source.storage.window import ReadFile

PAGE_BYTES = 16 << 10
SMALL_BYTES = 4 << 10
"""Longer reads are made as they are: chunks that lie beside this one may not be wanted."""
NUM_PAGES = 256
"""Pages that are kept: libraries come back to the same few places of a file for its index."""


class FileObject(io.RawIOBase):
    """Reads a file forwards and by seeking, each read as it is asked for.

    Args:
        file: An open file.
    """

    def __init__(self, file: ReadFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, fewer only at the end of the file."""
        length = self._file.size - self._position if size is None or size < 0 else size
        data = self._read(self._position, length)
        self._position += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as the file goes."""
        memory = memoryview(buffer).cast("B")
        data = self.read(len(memory))
        memory[: len(data)] = data
        return len(data)

    def _read(self, start: int, length: int) -> bytes:
        return self._file.read_at(start, length)


class PagedFileObject(FileObject):
    """Reads less than 4 KiB by whole pages, which are kept.

    Args:
        file: An open file.
    """

    def __init__(self, file: ReadFile) -> None:
        super().__init__(file)
        self._pages: OrderedDict[int, bytes] = OrderedDict()

    def _read(self, start: int, length: int) -> bytes:
        if length >= SMALL_BYTES:
            return super()._read(start, length)
        stop = min(start + length, self._file.size)
        pages = range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
        data = b"".join(self._page(number) for number in pages)
        skipped = start % PAGE_BYTES
        return data[skipped : skipped + max(stop - start, 0)]

    def _page(self, number: int) -> bytes:
        page = self._pages.pop(number, None)
        if page is None:
            page = self._file.read_at(number * PAGE_BYTES, PAGE_BYTES)
            if len(self._pages) >= NUM_PAGES:
                self._pages.popitem(last=False)
        self._pages[number] = page
        return page
