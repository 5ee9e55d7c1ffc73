"""SPDL: a pipeline of threads over one mapped array, a batch a task.

Images: by its own decoder where the system has FFmpeg's libraries, else by the one of the others.
"""

from collections.abc import Iterator
from ctypes.util import find_library

import numpy as np
import spdl.io
from numpy.typing import NDArray
from spdl.pipeline import PipelineBuilder

from benchmarks.loader.peers.harness import DeliveredBatch, Feed, Task, copy_set, run
from benchmarks.loader.peers.pixels import decode


def load_images(samples: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Decode a batch by SPDL: uint8[batch, height, width, channels]."""
    encoded = [sample.tobytes() for sample in samples]
    buffer = spdl.io.load_image_batch(encoded, width=None, height=None, pix_fmt="rgb24")
    pixels: NDArray[np.uint8] = spdl.io.to_numpy(buffer)
    return pixels


def open_feed(task: Task) -> Feed:
    """Make what builds a pipeline an epoch."""
    packed = task.open_copy()
    rows = None if packed.spec.is_jpeg else np.asarray(packed.rows())
    own_decoder = rows is None and find_library("avutil") is not None
    threads = max(task.workers, 1)

    def load(ids: NDArray[np.int64]) -> DeliveredBatch:
        if rows is not None:
            return DeliveredBatch(ids, packed.labels[ids], rows.take(ids, axis=0))
        samples = [packed.sample(i) for i in ids.tolist()]
        pixels = load_images(samples) if own_decoder else decode(samples, packed.spec.shape)
        return DeliveredBatch(ids, packed.labels[ids], pixels)

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        pipeline = (
            PipelineBuilder()
            .add_source(task.batches_of_ids(number, packed.spec.num_samples))
            .pipe(load, concurrency=threads)
            .add_sink(2 * threads)
            .build(num_threads=threads)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return Feed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
