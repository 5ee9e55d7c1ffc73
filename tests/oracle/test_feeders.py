"""What feeders save, as a plan says it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonari.oracle.feeders import fed_batch

POSITIVE = st.floats(1e-6, 1.0)


@given(
    make_s=POSITIVE, share=st.floats(0.01, 0.99), threads=st.integers(1, 8),
    cores=st.integers(1, 64), row_bytes=st.floats(1, 1e6), link=st.floats(1e6, 1e10),
)  # fmt: skip
def test_no_other_division_of_rows_is_faster(
    make_s: float, share: float, threads: int, cores: int, row_bytes: float, link: float
) -> None:
    trade_s = share * make_s
    found = fed_batch(
        64, make_s=make_s, trade_s=trade_s, threads=threads, cores=cores, sent_bytes=row_bytes,
        link_bytes_per_s=link,
    )  # fmt: skip
    fed = np.linspace(0, 1, 401)
    taken_s = np.max([
        ((1 - fed) * make_s + fed * trade_s) / threads,
        fed * (make_s + trade_s) / cores,
        fed * row_bytes / link,
    ], axis=0)  # fmt: skip
    assert found.batch_s <= 64 * taken_s.min() * (1 + 1e-9)
    assert found.batch_s <= 64 * make_s / threads
    assert 0 <= found.fraction <= 1


def test_what_batches_wait_for_is_named() -> None:
    row = {"make_s": 1e-3, "trade_s": 1e-4, "threads": 2.0, "sent_bytes": 1e5}
    assert fed_batch(64, **row, cores=0).bottleneck == "threads"
    assert fed_batch(64, **row, cores=1000).bottleneck == "threads"
    assert fed_batch(64, **row, cores=8).bottleneck == "feeders"
    assert fed_batch(64, **row, cores=8, link_bytes_per_s=1e7).bottleneck == "link"
    slow = fed_batch(64, make_s=1e-3, trade_s=2e-3, threads=2.0, cores=8)
    assert slow.fraction == 0
    assert slow.batch_s == pytest.approx(0.032)
