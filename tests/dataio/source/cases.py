"""What the table of sources asks of each: see test_table.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataio.rows.fields import Field


@dataclass(frozen=True)
class Case:
    """A source that a loader opens.

    Attributes:
        name: Of the row in the table.
        write: Writes the files into an empty directory; returns what a loader is given.
        fields: What is kept of a sample.
        sample: What batches hold of a sample, by its number: as NumPy arrays, bytes or str.
        num_samples: How many there are.
        large: Writes files of some MB; returns what is opened, and the fields that are read.
        half_fraction: The most of the files that reading the first half of the samples may take;
            more than 1 where the format can only be read from its beginning, or counts first.
        broken: Writes files that are damaged or lack what is asked for.
        message: What the error then says, as a pattern.
    """

    name: str
    write: Callable[[Path], Any]
    fields: Mapping[str, Field]
    sample: Callable[[int], Mapping[str, Any]]
    num_samples: int
    large: Callable[[Path], tuple[Any, Mapping[str, Field]]]
    half_fraction: float
    broken: Callable[[Path], Any]
    message: str
