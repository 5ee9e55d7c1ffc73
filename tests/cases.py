"""Which cases of a test CI runs, and which are left to `make test-all`."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, TypeVar
from zlib import crc32

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


def diagonal(**axes: Iterable[Any]) -> Callable[[Test], Test]:
    """Parametrize by every combination of values, of which CI runs a diagonal.

    On the diagonal each value of each parameter comes once or more; other cases are ``nightly``.
    Where it begins depends on the test's name: the same two parameters meet with other values in
    another test.
    """
    values = {name: list(axis) for name, axis in axes.items()}

    def parametrize(test: Test) -> Test:
        kept = diagonal_of({name: len(axis) for name, axis in values.items()}, test.__name__)
        cases = [
            pytest.param(
                *(axis[at] for axis, at in zip(values.values(), places, strict=True)),
                marks=() if places in kept else pytest.mark.nightly,
            )
            for places in product(*(range(len(axis)) for axis in values.values()))
        ]
        decorated: Test = pytest.mark.parametrize(list(values), cases)(test)
        return decorated

    return parametrize


def diagonal_of(sizes: dict[str, int], test: str) -> set[tuple[int, ...]]:
    """Choose places on axes of these sizes, so that each place of each axis comes."""
    # Not `hash`, which differs from process to process.
    first = {name: crc32(f"{test}.{name}".encode()) % size for name, size in sizes.items()}
    steps = range(max(sizes.values()))
    return {tuple((first[name] + step) % size for name, size in sizes.items()) for step in steps}
