"""Bits are counted alike with NumPy's own function and without it."""

import numpy as np
import pytest

from dataio.base.bits import count_ones


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_as_many_ones_are_counted_as_python_counts(
    own: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    most = np.iinfo(dtype).max
    values = np.random.default_rng(0).integers(0, most, (4, 300), dtype, endpoint=True)
    values[0, :2] = 0, most
    expected = [[int(value).bit_count() for value in row] for row in values]
    assert count_ones(values).tolist() == expected
    assert count_ones(values[:, ::3]).tolist() == [row[::3] for row in expected]
    assert int(count_ones(values[0, 1])) == expected[0][1]
