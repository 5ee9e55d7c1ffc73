"""The generators that a whole process shares: torch's of the CPU, NumPy's and Python's.

Libraries of transforms draw from them. All of a process's threads do, so whoever seeds them must be
the only one to draw: a process of its own, or the thread that would draw otherwise.
"""

import random  # noqa: TID251
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from dataio.base.seeding import Key


class _Shared(NamedTuple):
    """How one of them is read, set and seeded; a state can be compared."""

    state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[Key], object]


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return (name, np.asarray(keys).tobytes(), *rest)


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002


_CPU = torch.default_generator
_SHARED: Mapping[str, _Shared] = {
    "torch": _Shared(
        lambda: _CPU.get_state().numpy().tobytes(),
        lambda state: _CPU.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        # The CPU's own: torch.manual_seed would queue work for devices too.
        lambda stream: _CPU.manual_seed(stream & (2**63 - 1)),
    ),
    "numpy": _Shared(
        _numpy_state,
        _set_numpy_state,
        lambda stream: np.random.seed(stream & (2**32 - 1)),  # noqa: NPY002
    ),
    "random": _Shared(random.getstate, random.setstate, lambda stream: random.seed(int(stream))),
}


def global_states() -> dict[str, object]:
    """Read the state of each, by the name of its library; they can be compared."""
    return {name: shared.state() for name, shared in _SHARED.items()}


def seed_globals(stream: Key) -> None:
    """Seed all of them: same key, same numbers."""
    for shared in _SHARED.values():
        shared.seed(stream)


@contextmanager
def globals_kept() -> Iterator[None]:
    """Put all of them back as they were, whatever is drawn in between."""
    before = global_states()
    try:
        yield
    finally:
        for name, shared in _SHARED.items():
            shared.set_state(before[name])
