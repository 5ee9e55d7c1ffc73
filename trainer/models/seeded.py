"""The same first weights on every rank."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dataio.base.seeding import key

Model = TypeVar("Model", bound=nn.Module)


def seeded(build: Callable[[], Model], *, seed: int) -> Model:
    """Build a model whose weights depend on the seed alone; leaves torch's generator as it was."""
    # The weights are made on the CPU, so that its generator is the only one concerned.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "weights") % 2**63)
        return build()
