"""Which cases of a test CI runs, and which are left to `make test-all`."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations, islice, product
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


def pairs(
    excluding: Callable[..., bool] = lambda **_: False, **axes: Iterable[Any]
) -> Callable[[Test], Test]:
    """Parametrize so that every two values of two parameters meet, of which CI runs a part.

    In CI each value of each parameter comes once or more; other cases are ``nightly``.

    Args:
        excluding: Says by name of the parameters what cannot be combined.
        axes: Values by parameter: names, which are parts of the cases' names.
    """
    values = {name: list(axis) for name, axis in axes.items()}

    def parametrize(test: Test) -> Test:
        cases = pairs_of(values, test.__name__, excluding)
        kept = each_value_of(cases)
        marked = [
            pytest.param(*case, marks=() if case in kept else pytest.mark.nightly) for case in cases
        ]
        decorated: Test = pytest.mark.parametrize(list(values), marked)(test)
        return decorated

    return parametrize


def pairs_of(
    axes: dict[str, list[Any]], test: str, excluding: Callable[..., bool] = lambda **_: False
) -> list[tuple[Any, ...]]:
    """Choose cases, few of them, in which every two values of two axes meet."""
    every = [
        case for case in product(*axes.values())
        if not excluding(**dict(zip(axes, case, strict=True)))
    ]  # fmt: skip
    # Which of equally good ones is taken differs from test to test.
    every.sort(key=lambda case: crc32(f"{test}.{case}".encode()))
    left = {pair for case in every for pair in combinations(enumerate(case), 2)}
    chosen = []
    while left:
        (one, first), (other, second) = min(left, key=str)
        having = (case for case in every if case[one] == first and case[other] == second)
        chosen.append(max(islice(having, 40), key=lambda case: len(left & _pairs_in(case))))
        left -= _pairs_in(chosen[-1])
    return chosen


def _pairs_in(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return set(combinations(enumerate(case), 2))


def each_value_of(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose of cases few in which each value comes that comes in any, and about equally often."""
    left, chosen = {one for case in cases for one in enumerate(case)}, list[tuple[Any, ...]]()
    taken: Counter[tuple[int, Any]] = Counter()

    def worth(case: tuple[Any, ...]) -> tuple[int, int]:
        return len(left.intersection(enumerate(case))), -sum(taken[one] for one in enumerate(case))

    while left:
        chosen.append(max(cases, key=worth))
        left -= set(enumerate(chosen[-1]))
        taken.update(enumerate(chosen[-1]))
    return chosen
