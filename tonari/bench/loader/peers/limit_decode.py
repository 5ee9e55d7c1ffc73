"""Limit: the decoder alone, on as many threads, into reused buffers; of whole photos."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, copy_set, run
from tonari.bench.loader.sets import corner_brightness


def open_feed(task: PeerTask) -> PeerFeed:
    """Map the images."""
    packed = task.open_copy()
    threads = max(task.workers, 1)
    pool = ThreadPoolExecutor(threads) if task.workers else None
    buffer = np.empty((task.batch_size, *packed.spec.shape), np.uint8)

    def decode(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        for sample_id, pixels in zip(ids.tolist(), out, strict=True):
            if packed.spec.kind == "recipe":
                # Not what was asked for: of photos that are cropped, the bare decoding is timed.
                pixels[...] = corner_brightness(int(packed.labels[sample_id]))
                simplejpeg.decode_jpeg(packed.sample(sample_id), "RGB")
            else:
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

    return PeerFeed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
