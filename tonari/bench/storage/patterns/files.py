"""The benchmark's own files: a directory of its own, filled by each rank, removed at the end."""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataio.base.seeding import generator, key
from dataio.world import World
from tonari.bench.errors import BenchError
from tonari.bench.storage.patterns.together import explain

PREFIX = ".tonari-bench-io-"
LEAST_BYTES = 4096
"""What O_DIRECT wants reads to be a multiple of, everywhere."""
WRITE_BYTES = 1 << 20
MOST_BYTES, MOST_OF_RANK_BYTES = 1 << 30, 64 << 20
"""In all, and of a rank, unless another size is asked for."""


@dataclass(frozen=True)
class Footprint:
    """What a rank writes: half in a shard, a quarter in samples, as much for a checkpoint."""

    sample_bytes: int
    num_records: int
    num_samples: int

    @property
    def shard_bytes(self) -> int:
        return self.num_records * self.sample_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return self.num_samples * self.sample_bytes

    @property
    def total_bytes(self) -> int:
        return self.shard_bytes + 2 * self.checkpoint_bytes


def footprint(size_bytes: int | None, *, sample_bytes: int, world_size: int) -> Footprint:
    """Divide a rank's bytes into files.

    Args:
        size_bytes: Of a rank; None: 64 MiB, and 1 GiB in all at most.
        sample_bytes: A multiple of 4096.
        world_size: Ranks that write.

    Raises:
        ValueError: If they are too few, or samples are no multiple of 4096 bytes.
    """
    if sample_bytes < LEAST_BYTES or sample_bytes % LEAST_BYTES:
        raise ValueError(f"samples of {sample_bytes} bytes: must be a multiple of {LEAST_BYTES}")
    if size_bytes is None:
        size_bytes = max(min(MOST_OF_RANK_BYTES, MOST_BYTES // world_size), 4 * sample_bytes)
    if size_bytes < 4 * sample_bytes:
        raise ValueError(
            f"{size_bytes} bytes a rank: must be at least four samples of {sample_bytes} bytes"
        )
    quarter = size_bytes // (4 * sample_bytes)
    return Footprint(sample_bytes, 2 * quarter, quarter)


class OwnFiles:
    """Files of all ranks below one directory, as one rank sees them.

    Args:
        root: The benchmark's directory; made when this rank writes.
        rank: This one.
        theirs: The rank whose files this one reads: of another node, where there is one.
        footprint: Of every rank.
    """

    def __init__(self, root: Path, *, rank: int, theirs: int, footprint: Footprint) -> None:
        self.root = root
        self.rank = rank
        self.theirs = theirs
        self.footprint = footprint

    def shard(self, rank: int) -> Path:
        return self.root / f"shard-{rank}"

    def samples(self, rank: int) -> list[Path]:
        folder = self.root / f"samples-{rank}"
        return [folder / f"{number:06d}" for number in range(self.footprint.num_samples)]

    @property
    def checkpoint(self) -> Path:
        return self.root / f"checkpoint-{self.rank}"

    @property
    def storm(self) -> Path:
        """Where this rank makes and removes files."""
        return self.root / f"storm-{self.rank}"

    def write(self, seed: int) -> None:
        """Write this rank's files, of bytes that neither compress nor repeat, and sync them.

        Raises:
            BenchError: If the filesystem refuses.
        """
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
            self.storm.mkdir()
            self.samples(self.rank)[0].parent.mkdir()
            blocks = _noise(seed, self.rank)
            _write(self.shard(self.rank), self.footprint.shard_bytes, blocks)
            for path in self.samples(self.rank):
                _write(path, self.footprint.sample_bytes, blocks)
        except OSError as error:
            raise explain(self.root, "writing the files to be read", error) from error

    def remove_own(self) -> None:
        """Remove what this rank wrote; the ranks share that work."""
        for folder in (self.storm, self.samples(self.rank)[0].parent):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (self.shard(self.rank), self.checkpoint):
            path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove the directory with all in it; does nothing where it is gone."""
        # A rank that has not learned of the end may write meanwhile.
        for _ in range(3):
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                return


def _noise(seed: int, rank: int) -> Iterator[bytes]:
    rng = generator(key(seed, "bench-io", replica=rank))
    while True:
        yield rng.bytes(WRITE_BYTES)


def _write(path: Path, num_bytes: int, blocks: Iterator[bytes]) -> None:
    # By calls whose errors name the file; "x": never over what is there.
    with open(path, "xb", buffering=0) as file:
        left = num_bytes
        while left:
            block = memoryview(next(blocks))[:left]
            while block:
                block = block[write_some(file.fileno(), block, path) :]
            left -= min(left, WRITE_BYTES)
        os.fsync(file.fileno())


def write_some(descriptor: int, block: memoryview, path: Path) -> int:
    """Write the beginning of a block, or all; an error names the file."""
    try:
        return os.write(descriptor, block)
    except OSError as error:
        error.filename = str(path)
        raise


def check_directory(directory: Path) -> None:
    """Refuse what is no directory.

    Raises:
        BenchError: If it is absent, or a file.
    """
    if not directory.exists():
        raise BenchError(
            f"{directory}: found nothing there, expected a directory to measure; check the name, "
            "and that this node has it mounted"
        )
    if not directory.is_dir():
        raise BenchError(f"{directory}: is no directory, expected one to measure; name its parent")


def check_room(directory: Path, num_bytes: int) -> None:
    """Refuse a directory with too little space; quotas are not known here.

    Raises:
        BenchError: If the bytes would not fit.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and num_bytes > free:
        raise BenchError(
            f"{directory}: no space: {free >> 20} MiB are free, {num_bytes / 2**20:.0f} MiB are to "
            "be written and read by all ranks together; give a smaller --size, or free some space"
        )


def leftovers(directory: Path) -> Sequence[Path]:
    """List what runs have left that were killed, and what runs under way have written."""
    return sorted(directory.glob(f"{PREFIX}*"))


def agree_name(world: World) -> str:
    """Draw a directory's name that no other run has. Collective."""
    mine = secrets.token_hex(6).encode()
    return PREFIX + world.allgather(mine, doing="naming files")[0].decode()
