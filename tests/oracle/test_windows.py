"""Rows beyond a quota: what the plan takes the loader to read, and what the loader reads."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio import Bytes, Field, Int, Loader, NodeCache, Reports, Workers
from dataio.base.errors import QuotaError
from dataio.cache.quota import DENSE_ROW_BYTES, Need
from dataio.pool.streaming import Streaming
from dataio.rows.fields import row_schema
from oracle.windows import Quota, share_quota, wait_for_windows

FIELDS: dict[str, Field] = {"label": Int("cls"), "data": Bytes("bin")}
NUM_ROWS, ROW_BYTES = 2000, 1500


def share(quota_bytes):
    need = Need(
        row_schema(FIELDS), NUM_ROWS, NUM_ROWS, 0, 1, 16, scored=True,
        variable_bytes=ROW_BYTES, shard_bytes=0,
    )  # fmt: skip
    return share_quota(quota_bytes, need, row_bytes=ROW_BYTES + 66, source_row_bytes=ROW_BYTES)


@pytest.mark.parametrize("quota_bytes", [1_000_000, 2_000_000, 3_000_000, 6_000_000])
def test_the_loader_keeps_and_reads_what_was_planned(tmp_path, monkeypatch, quota_bytes):
    windows = []
    read = Streaming._read

    def counted(self, needed, half, window):
        windows.append(len(needed.slots))
        return read(self, needed, half, window)

    monkeypatch.setattr(Streaming, "_read", counted)
    rng = np.random.default_rng(0)
    table = pa.table(
        {"cls": np.arange(NUM_ROWS) % 10, "bin": [rng.bytes(ROW_BYTES) for _ in range(NUM_ROWS)]}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    cache = NodeCache(tmp_path / "cache", quota=quota_bytes)
    with Loader(
        str(tmp_path / "rows.parquet"), fields=FIELDS, batch_size=16, cache=cache,
        workers=Workers(threads=0), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        kept = loader.stats()["resident_fraction"]
        for _ in loader.epochs(1):
            assert sum(1 for _ in loader) == NUM_ROWS / 16
    planned = share(quota_bytes)
    assert planned.resident_rows / NUM_ROWS == pytest.approx(kept, abs=0.02)
    assert len(list(planned.windows())) == pytest.approx(len(windows), abs=1)
    assert bool(windows) == (quota_bytes < 6_000_000)


@given(quota_bytes=st.integers(600_000, 6_000_000), visible=st.floats(0.1, 1.0))
def test_windows_hold_each_missing_row_once(quota_bytes, visible):
    quota = share(quota_bytes)
    assert quota.resident_rows + quota.missing_rows == NUM_ROWS
    windows = list(quota.windows(visible_fraction=visible))
    assert sum(part for part, _ in windows) == pytest.approx(1.0 if quota.missing_rows else 0.0)
    # Small rows are read with their neighbours: each window is a pass over all that are missing
    assert {num_bytes for _, num_bytes in windows} <= {quota.missing_rows * ROW_BYTES}


def test_large_rows_are_read_alone_and_once():
    quota = Quota(
        resident_rows=10,
        missing_rows=90,
        window_rows=40,
        row_bytes=DENSE_ROW_BYTES,
        source_row_bytes=DENSE_ROW_BYTES,
        local_size=1,
    )
    windows = list(quota.windows())
    assert [part for part, _ in windows] == pytest.approx([4 / 9, 4 / 9, 1 / 9])
    assert sum(num_bytes for _, num_bytes in windows) == 90 * DENSE_ROW_BYTES


def test_a_quota_without_room_for_two_batches_is_refused():
    with pytest.raises(QuotaError, match="raise the quota"):
        share(10_000)


def test_steps_wait_for_the_first_window_and_for_what_a_slow_source_is_behind():
    halves = [0.5, 0.5]
    assert wait_for_windows([], [], steps_s=10.0) == 0
    # The second is read while the first one's five seconds are trained
    assert wait_for_windows(halves, [3.0, 3.0], steps_s=10.0) == 3.0
    assert wait_for_windows(halves, [8.0, 8.0], steps_s=10.0) == 8.0 + 3.0
    # A source that is infinitely slow leaves reading alone, but for the last steps
    assert wait_for_windows(halves, [1e6, 1e6], steps_s=10.0) + 10 == pytest.approx(2e6 + 5)
