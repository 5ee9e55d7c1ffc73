"""What all ranks must know alike: what rank 0 decided, and whether one of them failed.

By torch's own collectives, in a group that a background thread may have for itself.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tonari.trainer.errors import CheckpointError

Result = TypeVar("Result")
MOST_BYTES = 2000
"""Of one rank's message about its failure."""

DISK = timedelta(minutes=30)
"""Longest wait for the slowest rank's files, to be written or read."""


def from_rank_0(words: str, group: dist.ProcessGroup | None = None) -> str:
    """Send the words of rank 0 to every rank. Collective."""
    data = words.encode()
    num_bytes = torch.tensor([len(data)])
    dist.broadcast(num_bytes, src=0, group=group)
    buffer = torch.zeros(int(num_bytes), dtype=torch.uint8)
    if dist.get_rank() == 0 and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0, group=group)
    return bytes(buffer.tolist()).decode()


def together(act: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Act on every rank; where one fails, all do, rather than wait for it. Collective.

    Args:
        act: Calls no collective, or only such that fail on all ranks alike.
        group: Of all ranks.

    Raises:
        CheckpointError: On ranks that did not fail: with the first failure of another.
    """
    words, failure = b"", None
    try:
        result = act()
    except Exception as error:
        failure = error
        words = (str(error) or type(error).__name__).encode()[:MOST_BYTES]
    mine = torch.zeros(MOST_BYTES, dtype=torch.uint8)
    mine[: len(words)] = torch.tensor(list(words), dtype=torch.uint8)
    all_words = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_words, mine, group=group)
    if failure is not None:
        raise failure
    for rank, found in enumerate(all_words):
        text = bytes(found.tolist()).rstrip(b"\0").decode(errors="replace")
        if text:
            raise CheckpointError(f"rank {rank}: {text}")
    return result


def file_group() -> dist.ProcessGroup:
    """Make a group whose ranks wait for each other's files. Collective."""
    made = dist.new_group(backend="gloo", timeout=DISK)
    assert isinstance(made, dist.ProcessGroup), "every rank is in the group"
    return made
