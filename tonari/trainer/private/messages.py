"""Messages between ranks that are operators, and what waits for them.

Why: attention over ``cp`` sends within autograd, and its results may not be there yet; a trace of a
step records who waits for which message, so it has to see every ``wait``. Public instead: none;
`torch.distributed` has collectives that are no operators.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import ScriptObject
from torch._C._distributed_c10d import FakeWork, Work, _resolve_process_group
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor

__all__ = [
    "AsyncCollectiveTensor", "all_gather", "functional_collectives", "groups_of",
    "limit_waits_of_groups", "reduce_scatter", "waits_replaced",
]  # fmt: skip


all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Gather parts into one tensor, and add up and cut one: by the names of torch 2.13, or before."""


def limit_waits_of_groups(limit: timedelta) -> None:
    """Set how long operations wait in groups made later, such as those of a mesh's axes.

    These do not take over the limit of the group of all ranks, and a mesh has no argument for it.
    """
    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit  # type: ignore[attr-defined]


def waits_replaced(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> list[AbstractContextManager[Any]]:
    """Put what ``make`` makes of it in place of ``wait`` of messages, while these are entered."""
    return [mock.patch.object(kind, "wait", make(kind.wait)) for kind in (Work, FakeWork)]


def groups_of(args: tuple[Any, ...]) -> Iterator[ProcessGroup]:
    """Find the groups among the arguments of an operator that sends a message."""
    for arg in args:
        if isinstance(arg, ScriptObject) and "ProcessGroup" in str(arg._type()):
            yield ProcessGroup.unbox(arg)
    for arg in args:
        if isinstance(arg, str):
            try:
                yield _resolve_process_group(arg)  # type: ignore[arg-type]
            except (LookupError, RuntimeError, ValueError):  # the name of how to reduce
                continue
