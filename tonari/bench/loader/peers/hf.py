"""Hugging Face datasets: mapped Arrow files, fetched by batch through a BatchSampler."""

from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tonari.bench.loader.peers.harness import (
    DeliveredBatch,
    NamedSample,
    PeerFeed,
    PeerTask,
    named_batches,
    named_sample,
    run,
)  # fmt: skip
from tonari.bench.loader.peers.pixels import decode
from tonari.bench.loader.peers.torch_packed import rank_sampler


def prepare(task: PeerTask) -> None:
    """Write the Arrow files."""
    packed = task.open_source()
    spec = packed.spec
    binary = datasets.Value("binary")
    array = datasets.Sequence(datasets.Value("uint8"), length=spec.sample_bytes)
    whole = datasets.Value("int64")
    features = datasets.Features(
        {"id": whole, "label": whole, "payload": binary if spec.is_jpeg else array}
    )

    def samples() -> Iterator[NamedSample]:
        return (named_sample(packed, sample_id) for sample_id in range(spec.num_samples))

    dataset = datasets.Dataset.from_generator(
        samples,
        features=features,
        cache_dir=f"{task.prepared}.tmp",
        writer_batch_size=max(min(1000, (1 << 26) // max(spec.sample_bytes, 1)), 1),
    )
    dataset.save_to_disk(task.prepared)
    dataset.cleanup_cache_files()


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    spec = task.open_source().spec
    dataset = datasets.load_from_disk(task.prepared)

    def decoded(columns: dict[str, list[Any]]) -> dict[str, object]:
        return {**columns, "payload": decode(columns["payload"], spec.shape)}

    def arrays(table: pa.Table) -> dict[str, object]:
        ids, labels = (table.column(name).to_numpy() for name in ("id", "label"))
        flat = table.column("payload").combine_chunks().flatten().to_numpy()
        return {"id": ids, "label": labels, "payload": flat.reshape(len(ids), *spec.shape)}

    # Its torch and NumPy formats would store every byte as eight.
    dataset = dataset.with_transform(decoded) if spec.is_jpeg else dataset.with_format("arrow")
    distributed = rank_sampler(dataset, task)
    sampler = RandomSampler(dataset) if distributed is None else distributed
    loader = DataLoader(
        dataset,
        sampler=BatchSampler(sampler, task.batch_size, drop_last=False),
        batch_size=None,
        collate_fn=None if spec.is_jpeg else arrays,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        if distributed is not None:
            distributed.set_epoch(number)
        return named_batches(loader)

    return PeerFeed(epoch)


if __name__ == "__main__":
    run(prepare, open_feed)
