"""Tensors without data, and process groups whose messages go nowhere.

Why: `--dry-run`, `tonari plan` and the cut of a model into stages run the trainer's own step on
nothing. Public instead: the ``meta`` device is one, but it forgets on which device a tensor would
lie; for process groups there is none. A trace of a step has what is computed: torch finds out
shapes of a `DTensor` on tensors without data, at each call of some operators.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils

from tonari.trainer.private.dispatch import disable_current_modes
from tonari.trainer.private.pipelining import TORCH

__all__ = [
    "LOGGER", "FakeStore", "FakeTensor", "FakeTensorMode", "norms_taken_together",
    "shapes_found_unseen", "unset_fake_temporarily",
]  # fmt: skip

LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch reports operators that it cannot run without data."""


@contextmanager
def norms_taken_together() -> Iterator[None]:
    """Let the norms of tensors without data be computed by one operator, as those of others are."""
    together = _foreach_utils._foreach_supported_types
    together.append(FakeTensor)
    try:
        yield
    finally:
        together.remove(FakeTensor)


def shapes_found_unseen() -> list[Any]:
    """Make patches that hide from modes how a `DTensor` finds the whole shape of a result.

    Torch 2.13 and later do so once for each operator.
    """
    if TORCH >= (2, 13):
        return []
    name = "_propagate_tensor_meta_non_cached"
    find = getattr(ShardingPropagator, name)

    def unseen(*given: Any) -> Any:
        with disable_current_modes():
            return find(*given)

    return [mock.patch.object(ShardingPropagator, name, unseen)]
