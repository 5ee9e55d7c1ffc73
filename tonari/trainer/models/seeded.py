"""The same first weights on every rank."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dataio.base.seeding import key
from dataio.batch.global_generators import globals_kept, seed_globals

Model = TypeVar("Model", bound=nn.Module)


def seeded(build: Callable[[], Model], *, seed: int) -> Model:
    """Build a model whose weights depend on the seed alone; leaves global generators as they were.

    Args:
        build: Draws by torch's generator, or by NumPy's or Python's global one.
        seed: Of the run.
    """
    stream = key(seed, "weights")
    # The weights are made on the CPU, so that its generator is the only one of torch's.
    with globals_kept(), torch.random.fork_rng(devices=[]):
        seed_globals(stream)
        torch.manual_seed(stream % 2**63)
        return build()
