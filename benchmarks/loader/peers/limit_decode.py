"""Limit: the decoder alone, on as many threads, into reused buffers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from benchmarks.loader.peers.harness import DeliveredBatch, Feed, Task, copy_set, run


def open_feed(task: Task) -> Feed:
    """Map the images."""
    packed = task.open_copy()
    threads = max(task.workers, 1)
    pool = ThreadPoolExecutor(threads) if task.workers else None
    buffer = np.empty((task.batch_size, *packed.spec.shape), np.uint8)

    def decode(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        for sample_id, pixels in zip(ids.tolist(), out, strict=True):
            simplejpeg.decode_jpeg(packed.sample(sample_id), "RGB", buffer=pixels)

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        for ids in task.batches_of_ids(number, packed.spec.num_samples):
            out = buffer[: len(ids)]
            if pool is None:
                decode(ids, out)
            else:
                parts = zip(np.array_split(ids, threads), np.array_split(out, threads), strict=True)
                for done in [pool.submit(decode, *part) for part in parts]:
                    done.result()
            yield DeliveredBatch(ids, packed.labels[ids], out)

    return Feed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
