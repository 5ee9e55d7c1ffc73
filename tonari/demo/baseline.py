"""What Tonari is compared with: torch's `DataLoader` over tar shards with an index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dataio.rows.decode import decode_image, image_shape
from dataio.rows.image import Image
from dataio.source import Storage, StorageFile, Throttle, scan_shard

Item = tuple[torch.Tensor, int]


@dataclass(frozen=True)
class Extent:
    """Where a sample lies: one read of a shard covers its members and their headers."""

    shard: str
    offset: int
    length: int
    image: tuple[int, int]
    label: tuple[int, int]


def index_shards(shards: Sequence[Path], *, extension: str) -> list[Extent]:
    """List every sample of the shards; done once and kept, so its cost is in no epoch."""
    header = 512
    extents = []
    for path in shards:
        with Storage().open(str(path)) as file:
            index = scan_shard(file)
        for members in index.members:
            first = min(offset for offset, _ in members.values()) - header
            last = max(offset + length for offset, length in members.values())
            image, label = members[extension], members["cls"]
            extents.append(
                Extent(str(path), first, last - first, (image[0] - first, image[1]),
                       (label[0] - first, label[1]))
            )  # fmt: skip
    return extents


class IndexedTar(Dataset[Item]):
    """Samples of tar shards, read one at a time from where the shards lie."""

    def __init__(
        self, extents: Sequence[Extent], *, throttle: Throttle | None, channels: int
    ) -> None:
        self.extents = extents
        self.throttle = throttle
        self.channels = channels
        self._files: dict[str, StorageFile] = {}

    def __len__(self) -> int:
        return len(self.extents)

    def __getitem__(self, number: int) -> Item:
        extent = self.extents[number]
        if extent.shard not in self._files:  # opened once a process: workers open their own
            self._files[extent.shard] = Storage(self.throttle).open(extent.shard)
        data = self._files[extent.shard].read_at(extent.offset, extent.length)
        start, length = extent.image
        encoded = np.frombuffer(data, np.uint8, length, start)
        how = Image("jpg", channels=self.channels)
        pixels = np.empty((*image_shape(encoded), self.channels), np.uint8)
        decode_image(encoded, pixels, how, where=f"{extent.shard}, sample {number}")
        start, length = extent.label
        return torch.from_numpy(pixels).permute(2, 0, 1), int(data[start : start + length])


class BaselineBatches:
    """The baseline's batches of one replica, in the form the trainer's steps take."""

    def __init__(
        self, dataset: IndexedTar, *, batch_size: int, num_workers: int, rank: int,
        world_size: int, seed: int,
    ) -> None:  # fmt: skip
        self.batch_size = batch_size
        self.sampler: DistributedSampler[Item] = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed
        )
        # forkserver: forking a process that runs MPI is not safe
        self.loader = DataLoader(
            dataset, batch_size, sampler=self.sampler, num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context="forkserver" if num_workers else None,
        )  # fmt: skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for image, label in self.loader:
            if len(label) == self.batch_size:
                yield {"image": image, "label": label, "weight": torch.ones(len(label))}
                continue
            # A pipeline takes batches of one shape: the last is filled up with rows of weight 0,
            # the others weigh more, so that its mean stays theirs.
            row = torch.arange(self.batch_size)
            valid = row < len(label)
            row = torch.where(valid, row, 0)
            weight = valid * (self.batch_size / len(label))
            yield {"image": image[row], "label": label[row], "weight": weight}

    needs_outcome = False

    def report(self, *_: object) -> None:
        """The baseline remembers nothing."""

    def refresh(self) -> Iterator[dict[str, torch.Tensor]]:
        """The baseline hides nothing."""
        return iter(())
