"""NVIDIA DALI on the CPU: its own decoder of random crops, resize and flip, on threads."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types

from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, copy_set, run
from tonari.bench.loader.sets import CROP

Fed = tuple[list[NDArray[np.uint8]], list[NDArray[np.int64]]]
"""Photos and ids of a batch."""


@pipeline_def  # type: ignore[untyped-decorator, unused-ignore]
def recipe(take: Callable[[], Fed], decoder: str = "cpu", *, on_gpu: bool = False) -> Any:
    """Decode a random crop of each photo, resize it, flip every other.

    Args:
        take: Gives photos and ids of a batch.
        decoder: "cpu", or "mixed": the GPU.
        on_gpu: Whether the pixels end there.
    """
    photos, ids = fn.external_source(source=take, num_outputs=2, batch=True)
    pixels = fn.decoders.image_random_crop(
        photos, device=decoder, output_type=types.RGB, random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3], num_attempts=10,
    )  # fmt: skip
    pixels = fn.resize(
        pixels, resize_x=CROP, resize_y=CROP, interp_type=types.INTERP_LINEAR, antialias=True
    )
    pixels = fn.flip(pixels, horizontal=fn.random.coin_flip(probability=0.5))
    return pixels.gpu() if on_gpu else pixels, ids


def open_feed(task: PeerTask) -> PeerFeed:
    """Make a pipeline that takes a batch of the shuffled photos at a time."""
    packed = task.open_copy()
    batches: Iterator[NDArray[np.int64]] = iter(())

    def take() -> Fed:
        # Where none is left, the StopIteration ends the epoch.
        ids = next(batches)
        return [np.asarray(packed.sample(i)) for i in ids.tolist()], list(ids[:, None])

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        nonlocal batches
        batches = task.batches_of_ids(number, packed.spec.num_samples)
        if number:
            pipeline.reset()
        while True:
            try:
                pixels, ids = pipeline.run()
            except StopIteration:
                return
            rows = np.asarray(ids.as_tensor()).reshape(-1)
            yield DeliveredBatch(rows, packed.labels[rows], np.asarray(pixels.as_tensor()))

    pipeline = recipe(
        take, batch_size=task.batch_size, num_threads=max(task.workers, 1), device_id=None,
        prefetch_queue_depth=2, seed=task.seed,
    )  # fmt: skip
    return PeerFeed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
