"""What a `Loader` is told, checked before anything happens: alone, then against all ranks."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dataio.base.errors import WorldError
from dataio.base.filesystem import is_named
from dataio.base.sizes import parse_bytes
from dataio.batch.values import BatchTransform, Collate, OnError, Transform
from dataio.batch.verify import Verify
from dataio.plan.layout import Layout
from dataio.plan.policies import Importance, Local, Shuffle
from dataio.rows.fields import Field
from dataio.source import Retry, Source, Throttle
from dataio.source.transformed import StageTransform
from dataio.world import World

LEAST = {
    "batch_size": 1, "prefetch": 0, "num_threads": 0, "num_processes": 0, "staging_readers": 1,
    "staging_bandwidth": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a `Loader`, which says what they mean.

    Raises:
        ValueError: If one is out of range.
    """

    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source
    batch_size: int
    fields: Mapping[str, Field]
    drop_last: bool
    cache: str | os.PathLike[str]
    shuffle: Shuffle | None
    importance: Importance | None
    transform: Transform | None
    batch_transform: BatchTransform | None
    device: torch.device | str | int | None
    seed: int
    num_threads: int | None
    num_processes: int
    prefetch: int
    stage: Literal["before", "overlap"]
    stage_transform: StageTransform | None
    staging_readers: int
    staging_bandwidth: float
    collate: Collate | None
    verify: Verify
    on_error: OnError
    retry: Retry | None
    throttle: Throttle | None
    quota: str | int | None
    metrics: str | os.PathLike[str] | None
    progress: bool

    def __post_init__(self) -> None:
        check_arguments(
            batch_size=self.batch_size,
            prefetch=self.prefetch,
            num_threads=self.num_threads,
            num_processes=self.num_processes,
            staging_readers=self.staging_readers,
            staging_bandwidth=self.staging_bandwidth,
        )
        find_device(self.device)
        _ = self.quota_bytes
        check_scores(self.shuffle, self.importance)

    @property
    def quota_bytes(self) -> int | None:
        """What the node's cache may take."""
        return parse_quota(self.quota, stage=self.stage)

    @property
    def shuffle_or_local(self) -> Shuffle:
        """Which node holds which row."""
        return self.shuffle if self.shuffle is not None else Local()

    @property
    def foreign(self) -> bool:
        """Whether a whole cache of another user may be read."""
        return is_named(os.fspath(self.cache))

    def threads(self, world: World) -> int:
        """Count the threads that decode and transform."""
        return (
            self.num_threads if self.num_threads is not None else share_of_cores(world.local_size)
        )

    def agreed(self, source: Source, fields: Mapping[str, Field]) -> dict[str, object]:
        """Tell what must be the same on all ranks."""
        return {
            "quota": self.quota_bytes,
            "source fingerprint": source.fingerprint,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "stage": self.stage,
            "seed": self.seed,
            "fields": repr(dict(fields)),
            "shuffle": repr(self.shuffle_or_local),
            "importance": repr(self.importance),
        }


def check_arguments(**numbers: float | None) -> None:
    """Refuse numbers that are out of range; None is in each that a signature lets be None."""
    for name, value in numbers.items():
        # Written so that nan fails too.
        if value is not None and not value >= LEAST[name]:
            raise ValueError(
                f"Loader: {name} is {value}, expected a number >= {LEAST[name]}; give one, or "
                "leave it out"
            )


def find_device(device: torch.device | str | int | None) -> torch.device | None:
    """Find the device that was named.

    Raises:
        ValueError: If torch knows none of that name.
    """
    try:
        return torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise ValueError(
            f"Loader: device is {device!r}, expected one that torch knows ({error}); give for "
            'example "cuda:0" or "cpu"'
        ) from error


def check_scores(shuffle: Shuffle | None, importance: Importance | None) -> None:
    """Refuse a shuffle that goes by scores where there are none."""
    if shuffle is None:
        return
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
