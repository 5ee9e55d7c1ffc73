"""The files that DLIO generates, as samples; nothing here needs DLIO."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio import Field, Source, SourceError, open_source
from dataio.rows.encoding import NPY_LOCK
from dataio.rows.rows import Rows
from dataio.source.base import check_ids
from dataio.source.row_block import RowBlock
from dataio.world import World

NUM_CHECKED = 1000
"""Files whose size and time of change go into the fingerprint."""

Record = bytes | NDArray[np.generic]
Open = Callable[[str], tuple[Callable[[int], Record], int]]
"""A path -> what returns its samples by number, and how many bytes were read for that."""


def open_files(
    files: Sequence[str], file_format: str, *, samples_per_file: int, world: World
) -> tuple[Source, str]:
    """Open generated files. Collective.

    Args:
        files: Their paths; a sample's number is its file's place in the sorted list, and its own
            in the file.
        file_format: DLIO's word: ``"npz"``, ``"npy"``, ``"hdf5"``, ``"jpeg"``, ``"png"`` or
            ``"tfrecord"``.
        samples_per_file: As the workload says, >= 1.
        world: All ranks.

    Returns:
        The source, and the key under which it has a sample's bytes: of arrays those of their
        numbers, of pictures the file.

    Raises:
        SourceError: If there is no file, or the format is another.
    """
    if not files:
        raise SourceError(
            "DLIO: the list of files is empty, expected at least one file; generate the data with "
            "++workload.workflow.generate_data=True"
        )
    files = sorted(map(os.path.abspath, files))
    if file_format == "tfrecord":
        return open_source(files, world=world), "image"
    if file_format not in FORMATS:
        raise SourceError(
            f"DLIO: the files are {file_format}, expected {', '.join([*FORMATS, 'tfrecord'])}; "
            "set workload.dataset.format to one of these, or use DLIO's own loader"
        )
    return GeneratedFiles(files, file_format, samples_per_file=samples_per_file), "record"


class GeneratedFiles:
    """A `Source` of files with some samples each, whose sizes may differ.

    The only key is ``record``.

    Args:
        files: Absolute paths, sorted, at least one.
        file_format: A key of `FORMATS`.
        samples_per_file: >= 1.
    """

    made_as = "DlioFiles"
    total_bytes = 0

    def __init__(self, files: Sequence[str], file_format: str, *, samples_per_file: int) -> None:
        self.name = f"dlio://{Path(files[0]).parent}"
        self.num_samples = len(files) * samples_per_file
        self.shard_starts = np.arange(0, self.num_samples, samples_per_file)
        self.bytes_read = 0
        self._files, self._open = files, FORMATS[file_format]
        self._samples_per_file = samples_per_file
        marks = xxhash.xxh3_64(f"{file_format} {samples_per_file}".encode())
        marks.update("\0".join(files).encode(errors="surrogateescape"))
        for path in files[:: -(-len(files) // NUM_CHECKED)]:
            status = Path(path).stat()
            marks.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        self.fingerprint = marks.hexdigest()

    def place_of(self, sample_id: int) -> str:
        """Name a sample's file, and its number there."""
        number, sample = divmod(sample_id, self._samples_per_file)
        return f"{self._files[number]}, sample {sample} of {self._samples_per_file}"

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples; see `dataio.Source.read`."""
        check_ids(self, sample_ids)
        return self._read(sample_ids, fields)

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        block, opened = RowBlock(fields), -1
        for sample_id in sample_ids.tolist():
            number, sample = divmod(sample_id, self._samples_per_file)
            try:
                if number != opened:
                    take, num_bytes = self._open(self._files[number])
                    opened, self.bytes_read = number, self.bytes_read + num_bytes
                record = take(sample)
            except (OSError, ValueError, KeyError, IndexError) as error:
                raise SourceError(
                    f"{self.place_of(sample_id)}: {type(error).__name__}: {error}; expected a file "
                    "as DLIO writes it: generate the data again"
                ) from error
            value = record if isinstance(record, bytes) else record.tobytes()
            block.add(sample_id, dict.fromkeys(fields, value), self.place_of(sample_id))
            if block.full:
                yield block.take()
        if len(block):
            yield block.take()


def _open_npz(path: str) -> tuple[Callable[[int], Record], int]:
    data = Path(path).read_bytes()
    with NPY_LOCK, np.load(BytesIO(data)) as file:
        values = file["x"]
    return lambda sample: values[..., sample], len(data)


def _open_npy(path: str) -> tuple[Callable[[int], Record], int]:
    data = Path(path).read_bytes()
    with NPY_LOCK:
        values = np.load(BytesIO(data))
    return lambda sample: values[..., sample], len(data)


def _open_hdf5(path: str) -> tuple[Callable[[int], Record], int]:
    import h5py  # comes with DLIO, and with an extra of ours

    with h5py.File(path, "r") as file:
        parts = [file[name][:] for name in sorted(file) if name.startswith("records_")]
    num_bytes = Path(path).stat().st_size
    values = [part.reshape(len(part), -1) for part in parts]
    return lambda sample: np.concatenate([part[sample] for part in values]), num_bytes


def _open_picture(path: str) -> tuple[Callable[[int], Record], int]:
    data = Path(path).read_bytes()
    return lambda _: data, len(data)


FORMATS: Mapping[str, Open] = {
    "npz": _open_npz,
    "npy": _open_npy,
    "hdf5": _open_hdf5,
    "jpeg": _open_picture,
    "png": _open_picture,
}
