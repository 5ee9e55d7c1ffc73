"""torch DataLoader over one file a sample, as most projects begin."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tonari.bench.loader.peers.harness import PeerFeed, PeerTask, run
from tonari.bench.loader.peers.pixels import decode_one
from tonari.bench.loader.peers.torch_packed import sampled_feed
from tonari.bench.loader.sets import SampleSet, make_labels

Parts = tuple[int, int, torch.Tensor]
"""Id, label and payload of a sample."""

FILES_PER_FOLDER = 1000


def path_of(prepared: str, sample_id: int) -> Path:
    """Name a sample's file."""
    return Path(prepared) / f"{sample_id // FILES_PER_FOLDER:05}" / f"{sample_id:09}"


class Files(Dataset[Parts]):
    """Samples that are fetched one by one."""

    def __init__(self, prepared: str, spec: SampleSet) -> None:
        self.spec = spec
        self.paths = [str(path_of(prepared, i)) for i in range(spec.num_samples)]
        self.labels = make_labels(spec.num_samples).tolist()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Parts:
        data = np.fromfile(self.paths[index], np.uint8)
        payload = decode_one(data, self.spec.shape) if self.spec.is_jpeg else data
        return index, self.labels[index], torch.from_numpy(payload)


def prepare(task: PeerTask) -> None:
    """Write a file a sample."""
    packed = task.open_source()
    for sample_id in range(packed.spec.num_samples):
        path = path_of(task.prepared, sample_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed.sample(sample_id).data)


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    return sampled_feed(DataLoader, Files(task.prepared, task.open_source().spec), task)


if __name__ == "__main__":
    run(prepare, open_feed)
