"""Shards of tokens, as Megatron's indexed datasets: one sequence of tokens a document."""

import os
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dataio.base.atomic import write_file
from dataio.source.formats.megatron import DTYPES, HEAD, MAGIC
from dataio.source.text.dataset import LINES

VERSION = 1


class TokenShard:
    """A ``.bin`` under way; its ``.idx`` is written when it is closed.

    Args:
        path: Of the ``.bin``.
        dtype: Of the tokens, one of Megatron's.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.generic]) -> None:
        self.path, self.dtype = path, dtype
        self.num_bytes = 0
        self._lengths: list[int] = []
        self._places = array("q")
        self._file: BinaryIO = path.open("wb")

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self.num_bytes // self.dtype.itemsize

    def add(
        self, documents: Sequence[NDArray[np.int64]], places: Sequence[tuple[int, int]]
    ) -> None:
        """Append documents, each int64[num_tokens], and where each stood: file and line."""
        if documents:
            data = np.concatenate(documents).astype(self.dtype.newbyteorder("<"))
            self._file.write(data.data)
            self.num_bytes += data.nbytes
            self._lengths += [len(tokens) for tokens in documents]
            self._places.extend(chain.from_iterable(places))

    def finish(self) -> None:
        """Flush the tokens to disk, then write the index: who finds it finds both whole."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.array(self._lengths, "<i4")
        num_documents = len(lengths)
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        code = next(code for code, name in DTYPES.items() if name == self.dtype.name)
        head = HEAD.pack(MAGIC, VERSION, code, num_documents, num_documents + 1)
        parts = (
            head, lengths.tobytes(), (ends - lengths * self.dtype.itemsize).astype("<i8").tobytes(),
            np.arange(num_documents + 1, dtype="<i8").tobytes(),
        )  # fmt: skip
        write_file(self.path.with_suffix(LINES), np.array(self._places, "<i8").tobytes())
        write_file(self.path.with_suffix(".idx"), b"".join(parts))

    def close(self) -> None:
        """Close the file as it is; idempotent."""
        self._file.close()
