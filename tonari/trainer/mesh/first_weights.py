"""Whether a model's first weights are the same on every rank."""

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.staged import StagedModel
from tonari.trainer.models.tape import digest_of


def check_first_weights(model: StagedModel) -> None:
    """Refuse a model that its constructor has made differently on some ranks. Collective.

    Reads each weight that is in memory once, and otherwise how it comes to be.

    Raises:
        ConfigError: On every rank; names a weight.
    """
    digests = _digests(model)
    names = xxhash.xxh3_64_intdigest("\n".join(digests).encode()) >> 1
    if not _same([len(digests), names]).all():
        raise ConfigError(
            "the model has other weights, or weights of other shapes, on some ranks than on this "
            f"one, which has {len(digests)}, expected one model on every rank; let what makes it "
            "depend neither on the rank nor on chance"
        )
    same = _same([*digests.values()])
    if not same.all():
        name = [*digests][int(same.logical_not().nonzero()[0])].rpartition(" ")[0]
        raise ConfigError(
            f"the weight {name.removeprefix('wrapped.')} is another on each rank as it was made, "
            "expected one model on every rank; draw it by torch's generator or by the global ones "
            "of numpy.random and random, which are seeded, not by a generator of your own without "
            "a seed"
        )


def _digests(model: StagedModel) -> dict[str, int]:
    """Sum up each parameter and buffer, by its name and shape."""
    made = {} if model.recording is None else model.recording.digests()
    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        digest = made[name] if value.is_meta and made else 0
        if not value.is_meta:
            digest = digest_of(value)
        found[f"{name} {list(value.shape)}"] = digest >> 1
    return found


def _same(values: list[int]) -> Tensor:
    """Say of each number whether all ranks have the same one, bool[len(values)]."""
    least = torch.from_numpy(np.array(values, np.int64))
    most = least.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return least == most
