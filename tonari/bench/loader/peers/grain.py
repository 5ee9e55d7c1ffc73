"""Grain over ArrayRecord: a global shuffle of indices, reads in threads, workers on top."""

import struct
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from tonari.bench.loader.peers.harness import (
    DeliveredBatch,
    NamedSample,
    PeerFeed,
    PeerTask,
    named_batches,
    run,
)
from tonari.bench.loader.peers.pixels import decode_one
from tonari.bench.loader.sets import SampleSet

HEAD = "<qq"


class Parse:
    """Converts a record into a sample; a class, because it is sent to workers."""

    def __init__(self, spec: SampleSet) -> None:
        self.spec = spec

    def __call__(self, record: bytes) -> NamedSample:
        sample_id, label = struct.unpack_from(HEAD, record)
        payload = np.frombuffer(record, np.uint8, offset=struct.calcsize(HEAD))
        if self.spec.is_jpeg:
            payload = decode_one(payload, self.spec.shape)
        return {"id": sample_id, "label": label, "payload": payload}


def prepare(task: PeerTask) -> None:
    """Write one file with a record a group, as is advised for random access."""
    packed = task.open_source()
    Path(task.prepared).mkdir(parents=True)
    writer = ArrayRecordWriter(f"{task.prepared}/train.array_record", "group_size:1")
    for sample_id in range(packed.spec.num_samples):
        head = struct.pack(HEAD, sample_id, int(packed.labels[sample_id]))
        writer.write(head + packed.sample(sample_id).tobytes())
    writer.close()


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the pipeline."""
    spec = task.open_source().spec
    source = grain.sources.ArrayRecordDataSource(f"{task.prepared}/train.array_record")

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        dataset = grain.MapDataset.source(source)[task.rank :: task.world_size]
        dataset = dataset.seed(task.seed + number).shuffle().map(Parse(spec))
        batches = dataset.batch(task.batch_size).to_iter_dataset()
        if task.workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=task.workers))
        return named_batches(batches)

    return PeerFeed(epoch)


if __name__ == "__main__":
    run(prepare, open_feed)
