"""A file of the source as libraries want one: with a position, and cheap small reads."""

import io
from collections import OrderedDict

from dataio.source.storage.files import StorageFile

PAGE_BYTES = 16 << 10
SMALL_BYTES = 4 << 10
"""Longer reads are made as they are: chunks that lie beside this one may not be wanted."""
NUM_PAGES = 256
"""Pages that are kept: libraries come back to the same few places of a file for its index."""


class FileObject(io.RawIOBase):
    """Reads by `StorageFile`, counted, throttled and retried; less than 4 KiB by whole pages."""

    def __init__(self, file: StorageFile) -> None:
        self._file = file
        self._position = 0
        self._pages: OrderedDict[int, bytes] = OrderedDict()

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

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as the file goes."""
        memory = memoryview(buffer).cast("B")
        data = self._read(self._position, len(memory))
        memory[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, start: int, length: int) -> bytes:
        if length >= SMALL_BYTES:
            return self._file.read_at(start, length)
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
