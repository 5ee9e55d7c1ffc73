"""Which memory is the same.

Why: tied weights, views, and what a recomputed block saves twice are told apart by their storage.
Public instead: `torch.UntypedStorage.data_ptr` is 0 for all storages without data, and of freed
memory it comes again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch


def storage_id(storage: torch.UntypedStorage) -> int:
    """Give a number that is this storage's alone as long as it is there."""
    return int(storage._cdata)


def resize_replaced(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[Any]:
    """Put what ``make`` makes of it in place of ``resize_`` of storages, while this is entered.

    FSDP frees what it gathered by cutting its storage to nothing, which is no operator.
    """
    resize = torch.UntypedStorage.resize_
    return mock.patch.object(torch.UntypedStorage, "resize_", make(resize))
