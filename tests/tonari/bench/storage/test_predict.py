"""Predictions against cases worked out by hand, and what must hold of any of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonari.bench.storage.training.predict import (
    Rates,
    Workload,
    cached_fraction,
    paid_after,
    predict,
)

ALONE = Workload(num_samples=1000, sample_bytes=1e5, batch_size=10, ranks_of_node=(1,))
"""100 MB in 100 steps."""
FOUR = Workload(
    num_samples=4000, sample_bytes=1e5, batch_size=10, ranks_of_node=(1, 1, 1, 1),
    exchange_fraction=0.25, hidden_fraction=0.3,
)  # fmt: skip
"""400 MB, 100 MB a node, in 100 steps."""
SLOW = Rates(
    step_s=0.05, dataloader_sample_s=0.001, random_bytes_per_s=20e6, staging_bytes_per_s=50e6
)


def test_without_workers_the_dataloader_reads_works_and_computes_one_after_another():
    # 100 steps x 50 ms, 100 MB at 20 MB/s, 1000 samples x 1 ms
    assert predict(ALONE, SLOW)["dataloader"].epoch_s[0] == pytest.approx(5 + 5 + 1)


@pytest.mark.parametrize(
    ("step_s", "expected_s"),
    [
        # storage limits: 100 MB at 20 MB/s, a half of 1000 x 1 ms, and the last step
        (0.05, 5 + 0.5 + 0.05),
        # compute limits: a first batch (1 MB at 10 MB/s for each of two, 10 x 1 ms), then 100 steps
        (0.2, 0.1 + 0.01 + 20),
    ],
)
def test_workers_hide_the_shorter_of_reading_and_computing(step_s, expected_s):
    rates = replace(SLOW, step_s=step_s)
    epochs = predict(replace(ALONE, workers=2), rates)["dataloader"].epoch_s
    assert epochs[0] == pytest.approx(expected_s)


def test_all_ranks_share_the_bandwidth_of_all_readers():
    # 100 steps x 50 ms, 400 MB at 20 MB/s, 1000 samples of a rank x 1 ms
    assert predict(FOUR, SLOW)["dataloader"].epoch_s[0] == pytest.approx(5 + 20 + 1)


def test_what_memory_holds_is_read_from_there_in_later_epochs():
    warm = replace(SLOW, random_warm_bytes_per_s=1e9)
    assert predict(ALONE, warm)["dataloader"].epoch_s[1] == pytest.approx(11)
    fits = replace(ALONE, fits_in_memory=True)
    epochs = predict(fits, warm)["dataloader"].epoch_s
    assert epochs[:2] == pytest.approx([11, 5 + 0.1 + 1])
    # Of four nodes each has read a quarter: 300 MB at 20 MB/s, 100 MB at 1 GB/s
    epochs = predict(replace(FOUR, fits_in_memory=True), warm)["dataloader"].epoch_s
    assert epochs[1] == pytest.approx(5 + 15 + 0.1 + 1)


@pytest.mark.parametrize(
    ("limits", "expected_s"),
    [
        ({}, 400e6 / 50e6),
        # two blocks of 8 MiB of a pool of 100 MB come before anything is held back
        ({"staging_limit_bytes_per_s": 5e6}, 100e6 / 5e6 + 8 * 2 * (8 << 20) / 100e6),
        ({"staging_limit_bytes_per_s": 5e6, "staging_readers": 1}, 100e6 / 5e6 + 400e6 / 50e6),
        # all is sealed at the end, being less than is sealed at once
        ({"local_write_bytes_per_s": 10e6}, 400e6 / 50e6 + 100e6 / 10e6),
        ({"start_s": 2.0}, 2 + 8),
    ],
)
def test_staging_takes_as_long_as_its_slowest_part(limits, expected_s):
    of_work = {name: value for name, value in limits.items() if name.startswith("staging")}
    of_rates = {name: value for name, value in limits.items() if name not in of_work}
    ways = predict(replace(FOUR, **of_work), replace(SLOW, **of_rates))
    assert ways["staged"].staging_s == pytest.approx(expected_s)
    assert ways["dataloader"].staging_s == ways["null"].staging_s == 0


@pytest.mark.parametrize(
    ("limits", "staged_s", "exchange_s", "hiding_s"),
    [
        # hiding leaves 2800 samples, 70 steps a rank
        ({}, 5, 5, 3.5),
        # a quarter of 100 MB over 2.5 MB/s
        ({"link_bytes_per_s": 2.5e6}, 5, 10, 10),
        # 100 MB of a node at 10 MB/s; 70 MB of them
        ({"local_read_bytes_per_s": 10e6}, 10, 10, 7),
    ],
)
def test_a_staged_epoch_takes_as_long_as_its_slowest_part(limits, staged_s, exchange_s, hiding_s):
    ways = predict(FOUR, replace(SLOW, **limits))
    found = [ways[name].epoch_s[0] for name in ("staged", "exchange", "hiding")]
    assert found == pytest.approx([staged_s, exchange_s, hiding_s])
    assert ways["null"].epoch_s[0] == pytest.approx(5)


def test_a_slow_disk_limits_staging_beyond_what_is_sealed_at_once():
    large = replace(ALONE, num_samples=100_000)  # 10 GB: 200 s to read, 500 s to write
    rates = replace(SLOW, local_write_bytes_per_s=20e6)
    assert predict(large, rates)["staged"].staging_s == pytest.approx(500)


def test_one_node_has_nobody_to_exchange_with():
    slow_link = replace(SLOW, link_bytes_per_s=1.0)
    alone = replace(ALONE, exchange_fraction=0.5)
    assert predict(alone, slow_link)["exchange"].epoch_s[0] == pytest.approx(5)


def test_what_was_not_measured_is_not_predicted():
    unknown = Rates(step_s=0.05, dataloader_sample_s=0.0, random_bytes_per_s=None)
    ways = predict(ALONE, unknown)
    assert not ways["dataloader"].epoch_s
    assert ways["staged"].staging_s is None
    assert ways["staged"].paid_after is None
    assert ways["staged"].epoch_s[0] == pytest.approx(5)


@pytest.mark.parametrize(
    ("staging_s", "own", "other", "expected"),
    [
        (10.0, [1, 1], [3, 3], 6),  # 10 + n < 3n first at 6: at 5 they are even
        (10.0, [1, 1], [8, 2], 5),  # 10 + n < 8 + 2 (n - 1) first at 5
        (0.5, [1, 1], [2, 1], 1),  # paid by the first epoch alone
        (0.5, [1, 1], [1, 1], None),
        (10.0, [2, 2], [9, 1], None),  # gains in the cold epoch, then loses
        (0.0, [1, 1, 1, 1], [1, 1.5], 2),
    ],
)
def test_staging_has_paid_at_the_first_epoch_with_less_time_in_all(staging_s, own, other, expected):
    found = paid_after(staging_s, own, other, later=own[-1], other_later=other[-1])
    assert found == expected


@given(
    st.floats(0, 1e4), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3),
    st.integers(1, 5), st.integers(1, 5),
)  # fmt: skip
def test_the_epoch_at_which_staging_has_paid_is_the_first(staging_s, own_s, cold_s, later_s, n, m):
    own, other = [own_s] * n, [cold_s] + [later_s] * (m - 1)
    paid = paid_after(staging_s, own, other, later=own_s, other_later=later_s)

    def ahead(epochs):
        return staging_s + own_s * epochs - (cold_s + later_s * (epochs - 1))

    slack = 1e-6 * (staging_s + own_s + cold_s + later_s) * (paid or 1)
    if paid is None:
        assert ahead(1) >= -slack
        assert own_s >= later_s
    else:
        assert ahead(paid) < slack
        assert paid == 1 or ahead(paid - 1) > -slack


def test_a_node_keeps_what_it_has_read():
    assert [cached_fraction(epoch, 1) for epoch in (0, 1, 2)] == [0, 1, 1]
    assert [cached_fraction(epoch, 2) for epoch in (0, 1, 2)] == [0, 0.5, 0.75]
