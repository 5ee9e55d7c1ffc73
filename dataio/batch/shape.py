"""Values or samples -> the batch that the user gets: padded, collated, transformed as a whole."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from dataio.base.errors import WorkerError
from dataio.base.seeding import key
from dataio.batch.global_generators import globals_kept
from dataio.batch.lookup import Pending
from dataio.batch.stack import as_tensor
from dataio.batch.watch import How, TransformWatch
from dataio.plan.order import PADDING
from dataio.rows.samples import Batch, BatchTransform, Collate, Sample, Value

log = logging.getLogger(__name__)

SAMPLES_NAMED = 3
"""Of a batch, in an error about it."""


class Shaper:
    """Makes batches of values; the lock guards what it notes of rows that became padding.

    Args:
        collate: Makes a batch of a list of samples; None stacks them.
        batch_transform: Changes a batch.
        seed: The run's seed.
        replica: This rank's replica.
        place_of: Says where the source has a sample, for messages; None: nobody knows.

    Attributes:
        num_skipped: Rows that became padding because they could not be repaired or decoded.
    """

    def __init__(
        self,
        *,
        collate: Collate | None,
        batch_transform: BatchTransform | None,
        seed: int,
        replica: int,
        place_of: Callable[[int], str] | None = None,
    ) -> None:
        self._collate, self._batch_transform = collate, batch_transform
        self._seed, self._replica = seed, replica
        self._place_of = place_of
        names = {"collate": collate, "batch_transform": batch_transform}
        given = [name for name, function in names.items() if function is not None]
        self._watch = (
            TransformWatch(
                " or ".join(given),
                unit="batch",
                cure="draw from the rng of batch_transform instead",
                logs=replica == 0,
            )
            if given
            else None
        )
        self._lock = threading.Lock()
        self._padded: dict[tuple[int, int], list[int]] = {}
        self.num_skipped = 0

    def take_padded(self, epoch: int, step: int) -> list[int]:
        """Return the places of the rows of a batch that became padding; of each batch once."""
        if not self._padded:
            return []
        with self._lock:
            return self._padded.pop((epoch, step), [])

    def plan(self) -> How:
        """Decide how the next batch's ``collate`` and ``batch_transform`` are called."""
        return self._watch.plan() if self._watch is not None else "free"

    def batch(
        self,
        pending: Pending,
        how: How,
        *,
        values: Mapping[str, Value] | None = None,
        samples: Sequence[Sample] = (),
    ) -> Batch:
        """Put a batch together, of values by field or of samples.

        Args:
            pending: What it is made of.
            how: Its ``collate`` and ``batch_transform`` are called.
            values: The fields, where there is no ``collate``.
            samples: For ``collate``.

        Raises:
            WorkerError: If ``collate`` or ``batch_transform`` raises; it names step and samples.
        """
        work = pending.work
        if work.bad:
            self._pad(pending, sorted(work.bad))
        known = {
            "weight": torch.from_numpy(pending.weight),
            "sample_id": torch.from_numpy(pending.sample_id),
            "slot": torch.from_numpy(pending.slot),
        }
        if self._watch is None:
            return {name: as_tensor(value) for name, value in (values or {}).items()} | known
        stream = key(
            self._seed, "batch_transform", epoch=work.epoch, replica=self._replica, step=work.step
        )

        def shape(parts: tuple[Batch, list[Sample]], rng: np.random.Generator) -> Batch:
            return self._shaped(*parts, known, rng, pending)

        parts = ({name: as_tensor(value) for name, value in (values or {}).items()}, list(samples))
        with globals_kept() if how == "seeded" else nullcontext():
            return self._watch.call(shape, parts, stream, how)

    def _shaped(
        self,
        values: Batch,
        samples: list[Sample],
        known: Batch,
        rng: np.random.Generator,
        pending: Pending,
    ) -> Batch:
        batch = dict(values)
        if self._collate is not None:
            with self._named("collate", pending):
                batch = self._collate(samples)  # type: ignore[assignment]
        if isinstance(batch, dict):
            batch.update(known)
        if self._batch_transform is None:
            return batch
        with self._named("batch_transform", pending):
            return self._batch_transform(batch, rng)

    @contextmanager
    def _named(self, what: str, pending: Pending) -> Iterator[None]:
        """Name the step and its first samples in what a user's function raises."""
        try:
            yield
        except Exception as error:
            place_of, work = self._place_of, pending.work
            ids = [number for number in pending.sample_id.tolist() if number != PADDING]
            shown = [
                f"{number} ({place_of(number)})" if place_of is not None else str(number)
                for number in ids[:SAMPLES_NAMED]
            ]
            more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
            raise WorkerError(
                f"{what}: epoch {work.epoch}, step {work.step}, samples {', '.join(shown)}{more}: "
                f"raised {type(error).__name__}: {error}, expected the batch; correct it"
            ) from error

    def _pad(self, pending: Pending, bad: list[int]) -> None:
        # Nobody would have trained on padding that is bad too.
        rows = [place for place in bad if pending.slot[place] != PADDING]
        epoch, step = pending.work.epoch, pending.work.step
        with self._lock:
            if rows and not self.num_skipped:
                first = int(pending.sample_id[rows[0]])
                place = "" if self._place_of is None else f" ({self._place_of(first)})"
                log.warning(
                    "replica %d: sample %d%s cannot be read and is padding in epoch %d, step %d, "
                    'as on_error="skip" asks; later ones are counted as skipped_rows in stats: '
                    'on_error="raise" says what is wrong',
                    self._replica, first, place, epoch, step,
                )  # fmt: skip
            self.num_skipped += len(rows)
            # Batches of an earlier epoch that nobody has asked of were not delivered
            self._padded = {k: v for k, v in self._padded.items() if k[0] >= epoch}
            self._padded[epoch, step] = rows
        pending.slot[bad] = PADDING
        pending.sample_id[bad] = PADDING
        pending.weight[bad] = 0
