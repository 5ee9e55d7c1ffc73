"""The set as tar shards in WebDataset's conventions: what both tar readers start from."""

import io
import tarfile
from pathlib import Path

from tonari.bench.loader.sets import PackedSet

NUM_SHARDS = 16
"""Two workers on each of four ranks have two shards each."""


def write_tars(packed: PackedSet, directory: Path) -> None:
    """Write the shards; a sample's name is its id."""
    directory.mkdir(parents=True, exist_ok=True)
    num_samples = packed.spec.num_samples
    extension = "jpg" if packed.spec.is_jpeg else "bin"
    bounds = [num_samples * shard // NUM_SHARDS for shard in range(NUM_SHARDS + 1)]
    for shard in range(NUM_SHARDS):
        with tarfile.open(tar_path(directory, shard), "w", format=tarfile.USTAR_FORMAT) as tar:
            for sample_id in range(bounds[shard], bounds[shard + 1]):
                _add(tar, f"{sample_id:09}.{extension}", packed.sample(sample_id).tobytes())
                _add(tar, f"{sample_id:09}.cls", str(packed.labels[sample_id]).encode())


def tar_path(directory: Path, shard: int) -> Path:
    """Name a shard."""
    return directory / f"train-{shard:06}.tar"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
