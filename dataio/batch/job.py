"""A batch that is being made: what it needs, and what has been filled so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import Key, key, uniform
from dataio.batch.stack import StackedColumns
from dataio.rows.at_once import PicturesAtOnce
from dataio.rows.fields import Decodes
from dataio.rows.image import Image, Mask
from dataio.rows.on_device import PicturesOnDevice
from dataio.rows.patch import Patches
from dataio.rows.samples import Array, Sample, Value
from dataio.rows.views import MIDDLE, NUM_DRAWS, Draws
from dataio.store.files.reader import Located, RowPieces, RowReader

OCCURRENCE_BIT = 48
"""No sample's number reaches it."""


@dataclass(slots=True)
class BatchWork:
    """A batch to be made.

    Attributes:
        epoch: For the transform's randomness.
        step: For messages, and for the randomness of a batch.
        located: The rows.
        small: Fixed fields that were gathered already.
        bad: Rows known to be corrupt.
        repeat: int64[batch]: Number of each row's occurrence in the epoch, from 0 on: it draws
            other numbers each time. None where each row comes once.
        reader: Where they lie; None: in the cache's files.
    """

    epoch: int
    step: int
    located: Located
    small: Mapping[str, Array]
    bad: frozenset[int] = frozenset()
    repeat: NDArray[np.int64] | None = None
    reader: RowReader | None = None

    @property
    def occurrences(self) -> NDArray[np.int64]:
        """int64[batch]: A number for each row that it has once in the epoch."""
        sample_id = self.located.sample_id
        return sample_id if self.repeat is None else sample_id + (self.repeat << OCCURRENCE_BIT)

    def key_of(self, row: int, seed: int) -> Key:
        """Derive the key of what a row draws: of (seed, epoch, sample), and of its occurrence."""
        repeat = int(self.repeat[row]) if self.repeat is not None else 0
        sample_id = int(self.located.sample_id[row])
        # The first occurrence draws what it would if each row came once
        return key(seed, "transform", epoch=self.epoch, sample_id=sample_id, step=repeat or None)


class Pictures(NamedTuple):
    """A field of pictures of a batch.

    Attributes:
        name: The field's.
        kind: How it is declared.
        data: The compressed pictures by row; or, where they were decoded while staging,
            uint8[batch, height, width, channels].
        out: uint8[batch, height, width, channels]: Where they go; or, of those that a device
            decodes, what is known of them until then.
        addresses: uint64[batch]: Where each lies.
        lengths: int64[batch]: Its bytes.
        at_once: Delivers most of them; None: nothing does.
    """

    name: str
    kind: Image | Mask
    data: RowPieces | NDArray[np.uint8]
    out: NDArray[np.uint8] | PicturesOnDevice
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    at_once: PicturesAtOnce | None = None


@dataclass(slots=True)
class BatchJob:
    """A batch being made: `copies`, `images`, `decodes` and `cuts` list what `run` fills.

    Attributes:
        drawn: The stream of what pictures draw, and int64[batch], by which each does; None where
            nothing is drawn.
        results: What the transform's samples go into, or what fields with a ``decode`` return.
        samples: The samples themselves, for a collate.
        done: The first rows, which `prepare` has transformed already.
        fed: Rows that feeders have made.
        here: Whether all others are transformed by `complete`, on the loader's own thread.
    """

    work: BatchWork
    values: dict[str, Value]
    copies: list[tuple[Array, Array]]
    images: list[Pictures]
    decodes: list[tuple[str, Decodes, RowPieces]]
    cuts: list[tuple[Array, Patches, Array]]
    drawn: tuple[Key, NDArray[np.int64]] | None = None
    results: StackedColumns | None = None
    samples: list[Sample | None] | None = None
    done: int = 0
    fed: set[int] = field(default_factory=set)
    here: bool = False
    _draws: NDArray[np.float64] | None = None

    def draws(self, row: int) -> Draws:
        """Give the numbers of a row's pictures: those in the middle where nothing is drawn."""
        if self.drawn is None:
            return MIDDLE
        if self._draws is None:  # threads that find this together find the same
            self._draws = uniform(*self.drawn, NUM_DRAWS)
        return self._draws[row].tolist()  # type: ignore[no-any-return]


def num_rows(job: BatchJob) -> int:
    """Count a job's rows."""
    return len(job.work.located.position)


def is_pictures_alone(job: BatchJob) -> bool:
    """Whether compiled code does all that takes time."""
    others = job.copies, job.decodes, job.cuts
    return bool(job.images) and not any(others) and all(one.at_once for one in job.images)
