"""The arguments of a `Loader`: every part of it takes what it needs from here.

They are checked alone, then with the source that they name, then with those of all other ranks.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from dataio.base.errors import WorldError
from dataio.base.filesystem import check_path, is_named
from dataio.excluding import Exclude
from dataio.opening import Openable
from dataio.options import NodeCache, Reports, Staging, Workers
from dataio.plan.exclusion import Exclusion
from dataio.plan.history import ScoreColumn
from dataio.plan.layout import Layout
from dataio.plan.policies import ByFields, DrawsRows, Importance, Local, Shuffle
from dataio.rows import on_device
from dataio.rows.fields import Array, Field, row_schema
from dataio.rows.image import Image
from dataio.rows.samples import BatchTransform, Collate, OnError, Transform
from dataio.source import Source
from dataio.source.open import check_openable
from dataio.world import World


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a `Loader`, which says what they mean.

    Raises:
        TypeError: If the source only looks like one.
        ValueError: If one is out of range.
    """

    source: Openable
    batch_size: int
    fields: Mapping[str, Field]
    drop_last: bool = False
    cache: NodeCache = field(default_factory=NodeCache)
    shuffle: Shuffle | None = None
    importance: Importance | None = None
    transform: Transform | None = None
    batch_transform: BatchTransform | None = None
    collate: Collate | None = None
    device: torch.device | str | int | None = None
    seed: int = 0
    on_error: OnError = "raise"
    staging: Staging = field(default_factory=Staging)
    workers: Workers = field(default_factory=Workers)
    reports: Reports = field(default_factory=Reports)
    exclude: Exclude | None = None

    def __post_init__(self) -> None:
        check_openable(self.source)
        device = find_device(self.device)
        workers = self.workers
        if workers.feeders is not None:
            check_path(workers.feeders, "Workers: feeders")
            refused = {
                "processes": workers.processes > 0, "threads=0": workers.threads == 0,
                "prefetch=0": workers.prefetch == 0,
            }  # fmt: skip
            if found := next((what for what, is_given in refused.items() if is_given), None):
                raise ValueError(
                    f"Workers: feeders and {found} exclude one another, because feeders make what "
                    "threads have not begun of the batches that are made ahead; leave one out"
                )
        for name, kind in self.fields.items():
            if isinstance(kind, Image) and kind.decode == "device":
                self._check_decoding(name, device)
            if workers.feeders is not None and isinstance(kind, Array) and kind.patch:
                raise ValueError(
                    f"field {name!r}: patch and Workers(feeders=...) exclude one another, because "
                    "feeders would be sent whole samples; leave one out"
                )
        if self.cache.quota is not None and self.staging.when == "overlap":
            raise ValueError(
                'staging: when="overlap" and a quota exclude one another, because what fits is '
                'known only when all is staged; give when="before" or no quota'
            )

    def _check_decoding(self, name: str, device: torch.device | None) -> None:
        """Refuse to decode on a device what is then wanted on the host, or where there is none."""
        given = {
            "transform": self.transform, "collate": self.collate,
            "batch_transform": self.batch_transform,
            "Workers(processes=...)": self.workers.processes,
            "Workers(feeders=...)": self.workers.feeders,
        }  # fmt: skip
        found = next((what for what, value in given.items() if value), None)
        if found is not None:
            raise ValueError(
                f'field {name!r}: decode="device" and {found} exclude one another, because '
                "pixels are on the GPU before that sees them; change batches in the training loop, "
                'or give decode="host"'
            )
        try:
            on_device.find_decoder(device)
        except ValueError as error:
            raise ValueError(f"field {name!r}: {error}") from error

    @property
    def shuffle_or_local(self) -> Shuffle:
        """Which node holds which row."""
        return self.shuffle if self.shuffle is not None else Local()

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        """What is remembered of a row's reports."""
        return self.importance.columns if self.importance is not None else ()

    @property
    def foreign(self) -> bool:
        """Whether a whole cache of another user may be read."""
        return is_named(os.fspath(self.cache.path))


def find_device(
    device: torch.device | str | int | None, *, name: str = "Loader: device"
) -> torch.device | None:
    """Find the device that was named.

    Raises:
        ValueError: If torch knows none of that name, or sees no GPU for it.
    """
    try:
        found = torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise ValueError(
            f"{name} is {device!r}, expected one that torch knows ({error}); give for "
            'example "cuda:0" or "cpu"'
        ) from error
    if found is not None and found.type == "cuda" and not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ValueError(
            f"{name} is {device!r}, but torch {torch.__version__}, {build}, sees no GPU "
            'here; give "cpu", or look at nvidia-smi, CUDA_VISIBLE_DEVICES and the build of torch'
        )
    return found


def check_policy(arguments: Arguments, source: Source, fields: Mapping[str, Field]) -> None:
    """Refuse a policy that draws rows, or goes by fields, if the dataset does not fit it."""
    policy = arguments.importance
    if isinstance(policy, DrawsRows):
        policy.num_drawn(source.num_samples)
    if not isinstance(policy, ByFields):
        return
    numbers = {
        column.name: np.dtype(column.dtype).kind in "iufb" and column.shape == ()
        for column in row_schema(fields).fixed
    }
    for name in policy.by_fields:
        if not numbers.get(name):
            having = ", ".join(name for name, is_number in numbers.items() if is_number)
            raise ValueError(
                f"importance: {policy} goes by the field {name!r}, expected a field that is one "
                f"number a sample, which this loader's are: {having or 'none'}; name one of these, "
                "or declare it in fields; some policies take an array by sample id instead"
            )
        if arguments.cache.quota is not None or arguments.staging.when == "overlap":
            raise ValueError(
                f"importance: {policy} goes by the field {name!r}, so all rows must be in the "
                'caches before the first epoch, expected no quota and staging when="before"; some '
                "policies take an array of values by sample id instead"
            )


def check_growth(arguments: Arguments, source: Source) -> None:
    """Refuse what cannot go on with more samples, of a source that grows."""
    policy = arguments.importance
    found = cure = ""
    if arguments.staging.transform is not None:
        found, cure = "Staging(transform=...)", "give it as transform="
    elif isinstance(policy, DrawsRows) and not _draws_from(policy, source.num_samples + 1):
        found, cure = f"{policy}, which has one weight a sample", "name a field that is the weight"
    if found:
        raise ValueError(
            f"{source.name}: Shards(grows=True) and {found} exclude one another, expected what "
            f"goes on with more samples than now; {cure}, or give grows=False"
        )


def _draws_from(policy: DrawsRows, num_samples: int) -> bool:
    try:
        policy.num_drawn(num_samples)
    except ValueError:
        return False
    return True


def check_batch_size(batch_size: int, layout: Layout) -> None:
    """Refuse a batch that a replica could never fill."""
    rows = layout.num_samples // layout.num_replicas
    if batch_size > rows:
        raise ValueError(
            f"batch_size: {batch_size} is more than a replica's share of {rows} rows "
            f"({layout.num_samples} samples over {layout.num_replicas} replicas); choose "
            f"at most {rows}, or start fewer ranks"
        )


def agreed(
    arguments: Arguments, source: Source, fields: Mapping[str, Field], exclusion: Exclusion
) -> dict[str, object]:
    """Describe what must be the same on all ranks, for `check_agreement`.

    Raises:
        ValueError: If rows are to be compressed by what is not installed.
    """
    compress = getattr(arguments.shuffle_or_local, "compress", "none")
    if compress != "none":
        from dataio.exchange.compress import check_codec

        check_codec(compress)
    return {
        "quota": arguments.cache.quota_bytes,
        "copies": arguments.cache.copies,
        "source fingerprint": source.fingerprint,
        "batch_size": arguments.batch_size,
        "drop_last": arguments.drop_last,
        "staging.when": arguments.staging.when,
        "seed": arguments.seed,
        "fields": repr(dict(fields)),
        "shuffle": repr(arguments.shuffle_or_local),
        "shuffle.compress": compress,
        "importance": repr(arguments.importance),
        "exclude": f"{exclusion.num_excluded} samples ({exclusion.name})",
    }


def check_agreement(settings: Mapping[str, object], world: World) -> None:
    """Refuse settings that differ from another rank's. Collective; all ranks raise alike.

    Args:
        settings: By name, as JSON.
        world: All ranks.

    Raises:
        WorldError: It names the first rank and the first setting that differ from rank 0's.
    """
    everyone = world.allgather(json.dumps(settings).encode(), doing="compare settings")
    other = next((rank for rank, given in enumerate(everyone) if given != everyone[0]), None)
    if other is None:
        return
    first, theirs = json.loads(everyone[0]), json.loads(everyone[other])
    # A rank without tiles compares all its settings where one with tiles compares these first
    names = min(first, theirs, key=len)
    name = next(name for name in names if first.get(name) != theirs.get(name))
    raise WorldError(
        f"Loader: rank {other} was made with {name} {theirs.get(name)}, rank 0 with "
        f"{first.get(name)}; "
        f"every rank must be given the same arguments and see the same source",
        on_all_ranks=True,
    )
