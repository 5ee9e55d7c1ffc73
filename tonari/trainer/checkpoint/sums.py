"""What the files of a checkpoint hold: the sum of each, so that a damaged one is known by name.

The manifest that lists them has its own.
"""

import re
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from dataio.base.atomic import read_record, write_record
from dataio.base.errors import DamagedFileError
from tonari.trainer.checkpoint.agree import from_rank_0, together
from tonari.trainer.errors import CheckpointError

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 24
BY_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def write_sums(directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write the manifest of a directory that is written whole. Collective.

    Each rank reads the files that it wrote itself, which are still in its memory.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    listed = "\n".join(_files(directory)) if rank == 0 else ""
    names = from_rank_0(listed, group).splitlines()

    def measure() -> torch.Tensor:
        found = torch.zeros(len(names), 2, dtype=torch.int64)
        for number, name in enumerate(names):
            if _writer(name, number) % num_ranks == rank:
                num_bytes, digest = _measure(directory / name)
                signed = int.from_bytes(bytes.fromhex(digest), "big", signed=True)
                found[number] = torch.tensor([num_bytes, signed])
        return found

    found = together(measure, group)
    # Each file has one rank that measured it: the others add zeros.
    dist.all_reduce(found, group=group)
    if rank == 0:
        files = {
            name: {"bytes": num_bytes, "xxh3_64": (signed & (2**64 - 1)).to_bytes(8, "big").hex()}
            for name, (num_bytes, signed) in zip(names, found.tolist(), strict=True)
        }
        write_record(directory / MANIFEST, {"files": files})


def check_sums(directory: Path, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Read this rank's part of a checkpoint's files, and compare them with the manifest.

    Raises:
        CheckpointError: Names the first file that is missing or not as it was written.
    """
    cure = "give an older checkpoint, or --resume auto for the newest that is sound"
    try:
        files = read_record(directory / MANIFEST)["files"]
        expected = {name: (its["bytes"], its["xxh3_64"]) for name, its in sorted(files.items())}
    except (OSError, DamagedFileError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: not a whole checkpoint: {MANIFEST} cannot be read "
            f"({type(error).__name__}: {error}); {cure}"
        ) from error
    for number, (name, wanted) in enumerate(expected.items()):
        if number % num_ranks != rank:
            continue
        try:
            found = _measure(directory / name)
        except OSError as error:
            raise CheckpointError(f"{directory}: {name} cannot be read: {error}; {cure}") from error
        if found != wanted:
            raise CheckpointError(
                f"{directory}: {name} is damaged: {found[0]} bytes with checksum {found[1]}, the "
                f"manifest says {wanted[0]} with {wanted[1]}; {cure}"
            )


def _files(directory: Path) -> list[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(directory)) for path in found)


def _writer(name: str, number: int) -> int:
    by_rank = BY_RANK.search(name)
    return int(by_rank[1]) if by_rank else number


def _measure(path: Path) -> tuple[int, str]:
    digest, num_bytes = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return num_bytes, digest.hexdigest()
