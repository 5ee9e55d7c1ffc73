"""Messages between ranks that are operators, and what waits for them.

Why: attention over ``cp`` sends within autograd, and its results may not be there yet; a trace of a
step records who waits for which message, so it has to see every ``wait``. Public instead: none;
`torch.distributed` has collectives that are no operators. The stores are public, but torch's types
do not export them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed._functional_collectives as functional_collectives
from torch._C._distributed_c10d import FakeWork, HashStore, Store, TCPStore, Work
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor

__all__ = [
    "AsyncCollectiveTensor", "HashStore", "Store", "TCPStore",
    "functional_collectives", "limit_waits_of_groups", "resolve_process_group", "waits_replaced",
]  # fmt: skip


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
