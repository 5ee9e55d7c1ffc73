"""A batch that is being made: what it needs, and what has been filled so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.batch.stack import Columns
from dataio.batch.values import Array, Sample, Value
from dataio.cache.files.reader import Located
from dataio.rows.fields import Decodes, Image


@dataclass(slots=True)
class Work:
    """A batch to be made.

    Attributes:
        epoch: For the transform's randomness.
        step: For messages, and for the randomness of a batch.
        located: The rows.
        small: Fixed fields that were gathered already.
        bad: Rows known to be corrupt.
    """

    epoch: int
    step: int
    located: Located
    small: Mapping[str, Array]
    bad: frozenset[int] = frozenset()


@dataclass(slots=True)
class Job:
    """A batch being made: `copies`, `images` and `decodes` list what `run` fills.

    Attributes:
        results: What the transform's samples go into, or what fields with a ``decode`` return.
        samples: The samples themselves, for a collate.
        done: The first rows, which `prepare` has transformed already.
        here: Whether all others are transformed by `complete`, on the loader's own thread.
    """

    work: Work
    values: dict[str, Value]
    copies: list[tuple[Array, Array]]
    images: list[tuple[str, Image, Sequence[memoryview], NDArray[np.uint8]]]
    decodes: list[tuple[str, Decodes, Sequence[memoryview]]]
    results: Columns | None = None
    samples: list[Sample | None] | None = None
    done: int = 0
    here: bool = False


def num_rows(job: Job) -> int:
    """Count a job's rows."""
    return len(job.work.located.position)
