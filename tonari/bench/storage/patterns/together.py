"""What ranks do together: work that fails on all if it fails on one, and arrays for rank 0."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import DataioError
from dataio.world import World
from tonari.bench.errors import BenchError

T = TypeVar("T")

CURES = {
    errno.ENOENT: (
        "an existing directory, and files that stay until the benchmark ends",
        "check the name, that this node has it mounted, and that nothing cleans it up meanwhile",
    ),
    errno.ESTALE: (
        "files that stay until the benchmark ends", "see that nothing removes or moves them"
    ),
    errno.ENOTDIR: ("a directory", "name one"),
    errno.EACCES: ("a directory that you may write into", "name one of your own"),
    errno.EPERM: ("a directory that files can be made in", "name another"),
    errno.EROFS: ("a directory that can be written", "it is mounted read-only: name another"),
    errno.ENOSPC: ("room for the files read", "give a smaller --size, or free some space"),
    errno.EDQUOT: (
        "room within your quota for the files read",
        "give a smaller --size, or remove files of yours (quota -s, lfs quota, mmlsquota show it)",
    ),
}  # fmt: skip


class TogetherError(BenchError):
    """An error that every rank raises with the same message, so that one can report it for all."""


def explain(path: Path | str, doing: str, error: OSError) -> BenchError:
    """Make an error of what the system refused, with what to do about it."""
    name = error.filename if isinstance(error.filename, str) else path
    expected, cure = CURES.get(
        error.errno or 0, ("a filesystem that answers", "look at it, then start again")
    )
    return BenchError(f"{name}: {doing} failed: {error.strerror}; expected {expected}: {cure}")


def agree(world: World, work: Callable[[], T], *, doing: str) -> T:
    """Do work on every rank; if one fails, all raise its error instead of waiting for it.

    Collective.

    Raises:
        TogetherError: The first rank's that failed, by its number where there are several.
    """
    result: T | None = None
    failed = b""
    try:
        result = work()
    except (BenchError, DataioError) as error:
        failed = str(error).encode(errors="replace") or b"unknown"
    except OSError as error:
        failed = str(explain("?", doing, error)).encode(errors="replace")
    received = world.allgather(failed, doing=doing)
    for rank, words in enumerate(received):
        if words:
            where = f" (rank {rank})" if world.world_size > 1 else ""
            raise TogetherError(words.decode(errors="replace") + where)
    return result  # type: ignore[return-value]


def gather(world: World, data: NDArray[np.uint8], *, doing: str, tag: int) -> list[bytes]:
    """Bring bytes of all ranks to rank 0. Collective.

    Returns:
        The bytes, in rank order; an empty list on other ranks.
    """
    sizes = world.allgather_array(np.array([data.size]), doing=doing)[:, 0].tolist()
    if world.rank:
        if data.size:
            world.wait([world.isend(data, dest=0, tag=tag)], peers=[0], doing=doing)
        return []
    parts = [np.empty(size, np.uint8) for size in sizes]
    parts[0] = data
    peers = [rank for rank in range(1, world.world_size) if sizes[rank]]
    requests = [world.irecv(parts[rank], source=rank, tag=tag) for rank in peers]
    world.wait(requests, peers=peers, doing=doing)
    return [part.tobytes() for part in parts]
