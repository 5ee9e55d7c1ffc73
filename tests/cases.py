"""Which cases of a test CI runs, and which are left to `make test-all`."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def diagonal(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by every combination of values, of which CI runs a diagonal.

    On the diagonal each value of each parameter comes once or more; other cases are ``nightly``.
    """
    values = [list(axis) for axis in axes.values()]
    steps = range(max(map(len, values)))
    kept = {tuple(step % len(axis) for axis in values) for step in steps}
    cases = [
        pytest.param(
            *(axis[at] for axis, at in zip(values, places, strict=True)),
            marks=() if places in kept else pytest.mark.nightly,
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(list(axes), cases)
