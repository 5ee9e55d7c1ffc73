"""SPDL: a pipeline of threads over one mapped array, a batch a task.

Images: by its own decoder where the system has FFmpeg's libraries, else by the one of the others.
"""

from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import spdl.io
from numpy.typing import NDArray
from spdl.pipeline import PipelineBuilder

from benchmarks.loader.peers.harness import Batch, Feed, Task, copy_set, run
from benchmarks.loader.peers.pixels import decode
from benchmarks.loader.sets import open_set


def load_images(samples: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Decode a batch by SPDL: uint8[batch, height, width, channels]."""
    encoded = [sample.tobytes() for sample in samples]
    buffer = spdl.io.load_image_batch(encoded, width=None, height=None, pix_fmt="rgb24")
    pixels: NDArray[np.uint8] = spdl.io.to_numpy(buffer)
    return pixels


def open_feed(task: Task) -> Feed:
    """Make what builds a pipeline an epoch."""
    packed = open_set(Path(task.prepared))
    rows = None if packed.spec.is_jpeg else np.asarray(packed.rows())
    own_decoder = rows is None and find_library("avutil") is not None
    threads = max(task.workers, 1)

    def load(ids: NDArray[np.int64]) -> Batch:
        if rows is not None:
            return Batch(ids, packed.labels[ids], rows.take(ids, axis=0))
        samples = [packed.sample(i) for i in ids.tolist()]
        pixels = load_images(samples) if own_decoder else decode(samples, packed.spec.shape)
        return Batch(ids, packed.labels[ids], pixels)

    def epoch(number: int) -> Iterator[Batch]:
        order = np.random.default_rng([task.seed, number]).permutation(packed.spec.num_samples)
        mine = order[task.rank :: task.world_size]
        batches = [mine[i : i + task.batch_size] for i in range(0, len(mine), task.batch_size)]
        pipeline = (
            PipelineBuilder()
            .add_source(batches)
            .pipe(load, concurrency=threads)
            .add_sink(2 * threads)
            .build(num_threads=threads)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return Feed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
