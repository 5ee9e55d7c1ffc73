"""What a `Loader` is told, checked before anything happens: alone, then against all ranks."""

import json
import os
from collections.abc import Mapping

from dataio.errors import WorldError
from dataio.layout import Layout
from dataio.policies import Importance, Shuffle
from dataio.sizes import parse_bytes
from dataio.world import World


def check_arguments(*, batch_size: int, prefetch: int, num_threads: int | None, stage: str) -> None:
    """Refuse numbers and words that are out of range."""
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size}; give a number >= 1")
    if prefetch < 0:
        raise ValueError(f"prefetch: {prefetch}; give a number >= 0")
    if stage not in ("before", "overlap"):
        raise ValueError(f'stage: {stage!r}; give "before" or "overlap"')
    if num_threads is not None and num_threads < 0:
        raise ValueError(
            f"num_threads: {num_threads}; give a number >= 0, or None for all this rank's cores"
        )


def check_scores(shuffle: Shuffle | None, importance: Importance | None) -> None:
    """Refuse a shuffle that goes by scores, or by hidden rows, where there are none."""
    if shuffle is None or shuffle.traced:
        return
    if importance is None and not shuffle.by_losses:
        raise ValueError(
            f"shuffle: {shuffle} goes by the rows that a policy hides, and importance is None, "
            'which hides none; give one that does, such as Kakurenbo(0.3), or rows="uniform"'
        )
    keeps_losses = importance is not None and "loss" in importance.columns
    if shuffle.by_losses and not keeps_losses:
        raise ValueError(
            f"shuffle: {shuffle} goes by losses, and importance is {importance}, which keeps none; "
            'give a policy that does, such as Full(columns=("loss",)), or rows="uniform", '
            'partners="uniform"'
        )


def parse_quota(quota: str | int | None, *, stage: str) -> int | None:
    """Read a quota in bytes, and refuse it where staging is to overlap with training."""
    if quota is None:
        return None
    if stage == "overlap":
        raise ValueError(
            'stage: "overlap" and a quota exclude one another, because what fits is known only '
            'when all is staged; give stage="before" or no quota'
        )
    try:
        return parse_bytes(str(quota))
    except ValueError as error:
        raise ValueError(f"quota: {error}") from None


def share_of_cores(local_size: int) -> int:
    """Count the cores that each of a node's ranks may keep busy."""
    return max(len(os.sched_getaffinity(0)) // local_size, 1)


def check_batch_size(batch_size: int, layout: Layout) -> None:
    """Refuse a batch that a replica could never fill."""
    rows = layout.num_samples // layout.num_replicas
    if batch_size > rows:
        raise ValueError(
            f"batch_size: {batch_size} is more than a replica's share of {rows} rows "
            f"({layout.num_samples} samples over {layout.num_replicas} replicas); choose "
            f"at most {rows}, or start fewer ranks"
        )


def check_agreement(settings: Mapping[str, object], world: World) -> None:
    """Refuse settings that differ from another rank's. Collective; all ranks raise alike.

    Args:
        settings: By name, as JSON.
        world: All ranks.

    Raises:
        WorldError: It names the first rank and the first setting that differ from rank 0's.
    """
    everyone = world.allgather(json.dumps(settings).encode(), doing="compare settings")
    other = next((rank for rank, told in enumerate(everyone) if told != everyone[0]), None)
    if other is None:
        return
    first, theirs = json.loads(everyone[0]), json.loads(everyone[other])
    name = next(name for name in first if first[name] != theirs[name])
    error = WorldError(
        f"Loader: rank {other} was made with {name} {theirs[name]}, rank 0 with {first[name]}; "
        f"every rank must be given the same arguments and see the same source"
    )
    error.all_ranks = True
    raise error
