"""Slots -> a batch: one gather per fixed field, threaded decode for images, reused buffers."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.buffers import BufferRing
from dataio.cache import Cache
from dataio.decode import decode_image, image_shape
from dataio.errors import FieldError
from dataio.fields import Field, Image
from dataio.order import PADDING, BatchSlots
from dataio.seeding import generator, key

Array = NDArray[np.generic]
Value = Array | list[bytes]
Sample = dict[str, Array | bytes]
Batch = dict[str, torch.Tensor]
Transform = Callable[[Sample, np.random.Generator], Sample]
BatchTransform = Callable[[Batch, np.random.Generator], Batch]


class Gather:
    """Makes batches of one pool's rows. Thread-safe; the same batch for any number of threads.

    Args:
        cache: The rows.
        fields: How each is decoded.
        num_threads: Threads that decode and transform; 0 does both on the calling thread.
        transform: Changes one sample; its randomness is keyed by (seed, epoch, sample_id).
        batch_transform: Changes a batch; keyed by (seed, epoch, replica, step).
        seed: The run's seed.
        replica: This rank's replica.
    """

    def __init__(
        self,
        cache: Cache,
        fields: Mapping[str, Field],
        *,
        num_threads: int,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        seed: int = 0,
        replica: int = 0,
    ) -> None:
        self._cache = cache
        self._fields = fields
        self._transform = transform
        self._batch_transform = batch_transform
        self._seed = seed
        self._replica = replica
        self._ring = BufferRing()
        self._num_threads = max(num_threads, 1)
        self._threads = (
            ThreadPoolExecutor(num_threads, "tonari-decode") if num_threads > 0 else None
        )
        self._image_shapes: dict[str, tuple[int, int, int]] = {}

    def batch(
        self, chosen: BatchSlots, *, epoch: int, step: int, weight: NDArray[np.float32]
    ) -> Batch:
        """Read, decode and transform the rows of one step.

        Args:
            chosen: The rows.
            epoch: For the transforms' randomness.
            step: Likewise.
            weight: float32[batch]: As delivered, padding 0.

        Returns:
            The fields, and ``weight`` float32[batch], ``sample_id`` int64[batch], ``slot``
            int64[batch]; the last two are PADDING on rows that only keep the shape.
        """
        ids = self._cache.entries.sample_id[chosen.slots]
        values = self._read(chosen.slots, ids)
        if self._transform is not None:
            values = self._transformed(values, ids, epoch)
        valid = np.arange(len(ids)) < chosen.num_valid
        values |= {
            "weight": weight,
            "sample_id": np.where(valid, ids, PADDING),
            "slot": np.where(valid, chosen.slots, PADDING),
        }
        batch = {name: self._tensor(name, value) for name, value in values.items()}
        if self._batch_transform is not None:
            stream = key(
                self._seed, "batch_transform", epoch=epoch, replica=self._replica, step=step
            )
            batch = self._batch_transform(batch, generator(stream))
        return batch

    def _read(self, slots: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        positions = self._cache.entries.position[slots]
        for file in self._cache.fixed:
            column = file.column
            out = self._ring.take((len(slots), *column.shape), column.dtype)
            # mode="clip" because the default checks by way of a second buffer
            np.take(
                file.rows,
                positions,
                axis=0,
                mode="clip",
                out=out.reshape(len(slots), -1).view(np.uint8),
            )
            values[column.name] = out
        if self._cache.schema.variable:
            views = self._cache.variable_fields(slots)
            for number, name in enumerate(self._cache.schema.variable):
                values[name] = self._decode(name, [row[number] for row in views], ids)
        return {name: values[name] for name in self._fields}

    def _decode(self, name: str, data: list[NDArray[np.uint8]], ids: NDArray[np.int64]) -> Value:
        field = self._fields[name]
        if not isinstance(field, Image):
            return [row.tobytes() for row in data]
        out = self._ring.take((len(data), *self._image_shape(name, field, data[0])), np.uint8)
        pixels = out.view(np.uint8)

        def decode(row: int) -> None:
            where = f"sample {ids[row]}, field {name!r}"
            decode_image(data[row], pixels[row], where=where, resize=field.size is not None)

        self._each(decode, len(data))
        # uint8[batch, channels, height, width], channels last in memory
        return pixels.transpose(0, 3, 1, 2)

    def _image_shape(
        self, name: str, field: Image, first: NDArray[np.uint8]
    ) -> tuple[int, int, int]:
        if name not in self._image_shapes:
            if field.size is None:
                height, width = image_shape(first)
            elif isinstance(field.size, int):
                height = width = field.size
            else:
                height, width = field.size
            self._image_shapes[name] = (height, width, field.channels)
        return self._image_shapes[name]

    def _transformed(
        self, values: dict[str, Value], ids: NDArray[np.int64], epoch: int
    ) -> dict[str, Value]:
        transform = self._transform
        assert transform is not None

        def apply(row: int) -> Sample:
            stream = key(self._seed, "transform", epoch=epoch, sample_id=int(ids[row]))
            return transform(
                {name: value[row] for name, value in values.items()}, generator(stream)
            )

        first = apply(0)
        if not isinstance(first, dict):
            raise FieldError(
                f"transform: returned {type(first).__name__} for sample {ids[0]}, expected the "
                f"sample as a dict; return it at the end of the transform"
            )
        results: dict[str, Value] = {}
        for name, value in first.items():
            if isinstance(value, bytes):
                results[name] = [value] * len(ids)
            else:
                array = np.asarray(value)
                results[name] = self._ring.take((len(ids), *array.shape), array.dtype)

        def store(row: int) -> None:
            sample = first if row == 0 else apply(row)
            for name, column in results.items():
                column[row] = sample[name]  # type: ignore[assignment]

        self._each(store, len(ids))
        return results

    def _each(self, work: Callable[[int], None], num_rows: int) -> None:
        """Call work(row) for every row, cut into one run of rows a thread."""

        def run(rows: range) -> None:
            for row in rows:
                work(row)

        if self._threads is None:
            run(range(num_rows))
            return
        bounds = [num_rows * part // self._num_threads for part in range(self._num_threads + 1)]
        parts = [range(a, b) for a, b in pairwise(bounds) if b > a]
        for done in [self._threads.submit(run, part) for part in parts]:
            done.result()

    def _tensor(self, name: str, value: Value) -> torch.Tensor:
        # Bytes have no tensor form: they stay a list, the one exception.
        return value if isinstance(value, list) else torch.from_numpy(value)  # type: ignore[return-value]

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown()
