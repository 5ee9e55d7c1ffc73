"""Whether the arguments of a `Loader` fit its source, and those of all other ranks."""

import json
from collections.abc import Mapping

import numpy as np

from dataio.arguments import Arguments
from dataio.base.errors import WorldError
from dataio.plan.exclusion import Exclusion
from dataio.plan.layout import Layout
from dataio.plan.policies import ByFields, Drawing
from dataio.rows.fields import Field, row_schema
from dataio.source import Shards, Source
from dataio.world import World


def check_policy(arguments: Arguments, source: Source, fields: Mapping[str, Field]) -> None:
    """Refuse a policy that draws rows, or goes by fields, if the dataset does not fit it."""
    policy = arguments.importance
    if isinstance(policy, Drawing):
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
    """Refuse what cannot go on with more samples, if the source grows."""
    given, policy = arguments.source, arguments.importance
    if not isinstance(given, Shards) or not given.grows:
        return
    found = cure = ""
    if arguments.staging.transform is not None:
        found, cure = "Staging(transform=...)", "give it as transform="
    elif isinstance(policy, Drawing) and not _draws_from(policy, source.num_samples + 1):
        found, cure = f"{policy}, which has one weight a sample", "name a field that is the weight"
    if found:
        raise ValueError(
            f"{source.name}: Shards(grows=True) and {found} exclude one another, expected what "
            f"goes on with more samples than now; {cure}, or give grows=False"
        )


def _draws_from(policy: Drawing, num_samples: int) -> bool:
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
    """Describe what must be the same on all ranks, for `check_agreement`."""
    return {
        "quota": arguments.cache.quota_bytes,
        "source fingerprint": source.fingerprint,
        "batch_size": arguments.batch_size,
        "drop_last": arguments.drop_last,
        "staging.when": arguments.staging.when,
        "seed": arguments.seed,
        "fields": repr(dict(fields)),
        "shuffle": repr(arguments.shuffle_or_local),
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
    name = next(name for name in first if first[name] != theirs[name])
    raise WorldError(
        f"Loader: rank {other} was made with {name} {theirs[name]}, rank 0 with {first[name]}; "
        f"every rank must be given the same arguments and see the same source",
        on_all_ranks=True,
    )
