"""What a quota gives to scores, rows and windows."""

import pytest

from dataio import (
    QuotaError,
)
from dataio.plan.history import COLUMNS, score_dtype
from dataio.rows.rows import FixedColumn, RowSchema
from dataio.store.files.store import HeapFile
from dataio.store.quota import SCORE_BYTES, Need, plan_budget, without_history


def test_a_heap_with_a_limit_never_grows_past_it(tmp_path):
    heap = HeapFile(tmp_path / "heap-0.bin", limit_bytes=100_000)
    heap.reserve(90_000)
    assert heap.path.stat().st_size == 100_000
    with pytest.raises(QuotaError, match="would grow to 100001 bytes, expected at most 100000"):
        heap.reserve(100_001)
    assert heap.path.stat().st_size == 100_000


def test_a_history_of_losses_is_counted_only_where_a_job_keeps_it():
    assert without_history(10**6, ("loss", "loss_mean"), 1000) == 10**6
    left = without_history(10**6, ("history",), 1000)
    assert 10**6 - left + 1000 * SCORE_BYTES == 1000 * score_dtype(COLUMNS).itemsize


def test_a_budget_gives_out_no_more_than_the_quota():
    schema = RowSchema((FixedColumn("x", "<f4", (100,)),), ("a", "b"))
    for quota in (6 * 10**6, 10**7, 10**8, 10**12):
        for guess in (0, 50, 5000):
            need = Need(schema, 10**6, 10**5, 2 * 10**4, 4, 16, True, guess, 0)
            budget = plan_budget(quota, need)
            given = budget.positions * schema.fixed_bytes + 4 * budget.heap_bytes
            resident = budget.resident_rows > 0
            seals = budget.num_seals if resident else 0
            other = need.other_bytes(num_seals=seals, resident=resident)
            assert given + other <= quota
            assert 0 <= budget.resident_rows <= budget.num_slots
            assert budget.resident_heap_bytes < budget.heap_bytes


@pytest.mark.parametrize("quota", [20 * 10**6, 50 * 10**6, 75 * 10**6])
def test_small_rows_get_the_windows_that_an_epoch_reads_least_with(quota):
    """Passes over what does not stay, times what that is, for any other split of the space."""

    def read(resident, room):
        return (num_slots - resident) ** 2 / ((room - resident) / 2)

    num_slots = 10**5
    schema = RowSchema((FixedColumn("x", "<u1", (1000,)),), ())
    budget = plan_budget(quota, Need(schema, 10**6, num_slots, 0, 1, 16, False, 0, 0))
    room = budget.positions
    chosen = read(budget.resident_rows, room)
    others = [read(share * room // 100, room) for share in range(13, 76)]
    assert chosen <= 1.02 * min(others)
