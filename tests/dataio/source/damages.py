"""The table of formats and damages: what it asks of each cell; see test_damages.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataio.base.errors import DataioError
from dataio.rows.fields import Field
from dataio.source import open_source
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import Row, rows_of

Damage = Callable[[bytes], bytes]

PAGE = 4096


@dataclass(frozen=True)
class Format:
    """A row of the table: a format, and a shard of it that is whole.

    Attributes:
        name: Of the row.
        write: Writes the shard into an empty directory; returns the file that is damaged.
        fields: What is read of a sample.
        checked: Of the file's bytes, offsets at which one flipped bit must be noticed.
        opens: What `open_source` is given, by the file.
        stale: Writes the shard anew, with an index beside it of before, and returns the file; None
            where there is no index.
    """

    name: str
    write: Callable[[Path], Path]
    fields: Mapping[str, Field]
    checked: Callable[[bytes], Iterable[int]]
    opens: Callable[[Path], Any] = str
    stale: Callable[[Path], Path] | None = None


def zeroed(start: float, stop: float, *, by: int = 1) -> Damage:
    """Zeros over a part of the file, cut to multiples of some bytes."""

    def damage(data: bytes) -> bytes:
        first, last = (int(len(data) * part) // by * by for part in (start, stop))
        return data[:first] + bytes(last - first) + data[last:]

    return damage


DAMAGES: dict[str, Damage] = {
    "nothing": lambda data: data,
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    **{
        f"cut at {part}": lambda data, part=part: data[: int(len(data) * part)]  # type: ignore[misc]
        for part in (0.1, 0.35, 0.5, 0.75, 0.9)
    },
    **{
        f"cut at {part}, of blocks": lambda data, part=part: data[  # type: ignore[misc]
            : int(len(data) * part) // 512 * 512
        ]
        for part in (0.25, 0.5, 0.7)
    },
    "without its last byte": lambda data: data[:-1],
    "zeros at its start": zeroed(0, 0.1),
    "zeros in its middle": zeroed(0.4, 0.6),
    "a page of zeros": lambda data: data[:PAGE] + bytes(PAGE) + data[2 * PAGE :],
    "zeros over its last third": zeroed(0.66, 1, by=512),
    "all zeros": zeroed(0, 1),
    "zeros behind it": lambda data: data + bytes(1 << 17),
    "rubbish behind it": lambda data: data + b"\x5a" * 3000,
    "rubbish before it": lambda data: b"\x5a" * 512 + data,
    "doubled": lambda data: data + data,
    "doubled, with zeros between": lambda data: data + bytes(5120) + data,
}
"""What happens to files. What changes data that no checksum covers is not among it."""
REPEATS = ("doubled", "doubled, with zeros between")
"""Damages after which the samples come twice, if they come: files that somebody joined."""


def flip(data: bytes, at: int) -> bytes:
    """One flipped bit."""
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def read_as(
    spec: Any, fields: Mapping[str, Field], *, num_ranks: int, num_readers: int
) -> list[list[bytes]] | DataioError:
    """Read all samples, each rank so many parts: their fields in order, or the first error."""

    def read(world: World) -> list[Row] | DataioError:
        rows: list[Row] = []
        try:
            source = open_source(spec, world=world)
            parts = np.array_split(np.arange(source.num_samples), num_ranks * num_readers)
            for part in parts[world.rank * num_readers : (world.rank + 1) * num_readers]:
                rows += rows_of(source.read(part, fields))
        except DataioError as error:
            return error
        return rows

    found: list[Row] = []
    for outcome in run_threads(thread_worlds([1] * num_ranks), read):
        if isinstance(outcome, DataioError):
            return outcome
        found += outcome
    assert [row[0] for row in found] == list(range(len(found)))
    return [row[1] for row in found]


def judge(path: Path, of: Format, expected: Sequence[list[bytes]]) -> DataioError | None:
    """Hold that a shard gives these samples, or one error that names it, to any readers alike.

    Returns:
        The error.
    """
    error: DataioError | None = None
    for number, (num_ranks, num_readers) in enumerate([(1, 1), (1, 3), (3, 1)]):
        found = read_as(of.opens(path), of.fields, num_ranks=num_ranks, num_readers=num_readers)
        failed = found if isinstance(found, DataioError) else None
        who = f"{of.name}: {num_ranks} ranks of {num_readers} readers"
        assert not number or (failed is None) == (error is None), f"{who}: {failed or 'no error'}"
        if failed is None:
            assert found == expected, f"{who}: {len(found)} samples of {len(expected)}"  # type: ignore[arg-type]
        else:
            message = str(failed)
            # A dataset's index may name another of its files.
            assert path.stem.partition(".")[0] in message, f"{who}: {message}"
            assert "expected" in message or "; " in message, f"{who}: {message}"
            error = failed
    return error


def samples_of(of: Format, path: Path) -> list[list[bytes]]:
    """Read all samples of a shard that is whole."""
    found = read_as(of.opens(path), of.fields, num_ranks=1, num_readers=1)
    assert not isinstance(found, DataioError), str(found)
    return found
