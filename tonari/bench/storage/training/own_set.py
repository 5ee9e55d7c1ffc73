"""Shards to train on, the user's or of our own making, and directories that go afterwards."""

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from dataio import Array, Field, Int, World, open_source
from dataio.source import write_index
from dataio.source.listing import list_parts
from tonari.bench.errors import BenchError
from tonari.bench.storage.patterns.measure import files_below
from tonari.bench.storage.patterns.together import agree
from tonari.bench.storage.site.site import Site, describe_site
from tonari.cache.stage import along

SHARD_BYTES = 64 << 20
SHARDS_PER_RANK = 2


@dataclass(frozen=True)
class OwnShards:
    """The shards, what their samples hold, and where they lie.

    What has no shards is a folder, or files and stores of arrays: its parts are their files.
    """

    paths: list[str]
    fields: Mapping[str, Field]
    num_samples: int
    part_bytes: list[int]
    files: list[Path]
    site: Site
    axis: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.part_bytes)

    @property
    def sample_bytes(self) -> float:
        return self.num_bytes / self.num_samples


def open_shards(
    patterns: Sequence[str], fields: Mapping[str, Field], world: World, axis: str | None = None
) -> OwnShards:
    """Open whatever patterns name, as a loader does. Collective."""
    paths = list_parts(patterns)
    source = open_source(along(paths, axis), world=world)
    parts = [files_below(Path(path)) for path in paths]
    num_bytes = [sum(file.stat().st_size for file in files) for files in parts]
    site = describe_site(Path(paths[0]).parent)
    return OwnShards(paths, fields, source.num_samples, num_bytes, [*chain(*parts)], site, axis)


def own_fields(sample_bytes: int) -> Mapping[str, Field]:
    """Describe the samples: bytes as they are, and a label."""
    return {"data": Array("bin", (sample_bytes,), "uint8"), "label": Int("cls")}


@contextlib.contextmanager
def own_directory(directory: Path) -> Iterator[Path]:
    """Make a directory, and remove it with all that is in it, whatever happens.

    Several ranks may make the same one; the first to leave removes it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BenchError(
            f"{directory}: cannot be created ({error.strerror}); expected a directory that this "
            "user can write: give another one"
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_own_set(
    directory: Path, world: World, *, num_samples: int, sample_bytes: int, seed: int
) -> list[str]:
    """Write tar shards with their indexes, each rank some of them; durable. Collective.

    Returns:
        All shards, in their order.

    Raises:
        BenchError: If the filesystem does not take them.
    """
    wanted = max(num_samples * sample_bytes // SHARD_BYTES, SHARDS_PER_RANK * world.world_size)
    num_shards = int(min(wanted, num_samples))
    bounds = [num_samples * shard // num_shards for shard in range(num_shards + 1)]
    paths = [directory / f"train-{shard:06}.tar" for shard in range(num_shards)]

    def write() -> None:
        for shard in range(world.rank, num_shards, world.world_size):
            samples, rng = range(bounds[shard], bounds[shard + 1]), [seed, shard]
            try:
                _write_shard(paths[shard], samples, sample_bytes, np.random.default_rng(rng))
            except OSError as error:
                raise BenchError(
                    f"{paths[shard]}: cannot be written ({error.strerror}); expected room and "
                    f"permission for {num_samples * sample_bytes} bytes in all: make room, or let "
                    "the benchmark use fewer or smaller samples"
                ) from error

    # Who fails removes the directory: not before the others have left it too.
    agree(world, write, doing="write the benchmark's shards")
    return [str(path) for path in paths]


def _write_shard(path: Path, samples: range, sample_bytes: int, rng: np.random.Generator) -> None:
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in samples:
                _add(tar, f"{sample:09}.bin", rng.bytes(sample_bytes))
                _add(tar, f"{sample:09}.cls", b"%d" % (sample % 1000))
        file.flush()
        os.fsync(file.fileno())
    write_index(path)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
