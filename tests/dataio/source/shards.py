"""Small tar shards, and what is read of them."""

import io
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.rows.fields import Field
from dataio.rows.rows import Rows, corrupt_rows, row_offsets
from dataio.source import Source
from dataio.source.base import ShardedSource

Members = Sequence[tuple[str, bytes]]
Row = tuple[int, list[bytes]]


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, form: int | None = None) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT if form is None else form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def damage(path: Path, data: bytes | bytearray) -> None:
    """Change bytes as a bad disk does: nobody wrote, so the time stays."""
    times = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def numbered(num_samples: int, *, num_bytes: int = 3000, first: int = 0) -> Members:
    """Samples with ``bin`` of about ``num_bytes`` and ``cls``, each its own."""
    members = []
    for number in range(first, first + num_samples):
        data = (number + 1).to_bytes(4, "little") * (num_bytes // 4 + number % 5)
        members += [(f"{number:06d}.bin", data), (f"{number:06d}.cls", str(number).encode())]
    return members


def rows_of(blocks: Iterable[Rows]) -> list[Row]:
    """Each row's id and fields, fixed ones first; the checksums are checked on the way."""
    found: list[Row] = []
    for rows in blocks:
        assert len(corrupt_rows(rows)) == 0
        bounds = [row_offsets(rows.lengths[:, i]) for i in range(len(rows.variable))]
        for row, sample_id in enumerate(rows.sample_id.tolist()):
            fields = [column[row].tobytes() for column in rows.fixed]
            for column, bound in zip(rows.variable, bounds, strict=True):
                fields.append(column[bound[row] : bound[row + 1]].tobytes())
            found.append((sample_id, fields))
    return found


def forget_survey(source: Source) -> None:
    """Let a shard that changed be opened, for tests of what its reader says."""
    assert isinstance(source, ShardedSource)
    source.storage._expected.clear()


def read_all(source: Source, fields: Mapping[str, Field]) -> list[Row]:
    return rows_of(source.read(np.arange(source.num_samples), fields))


def ids(*sample_ids: int) -> NDArray[np.int64]:
    return np.array(sample_ids, np.int64)
