"""What loaders do beside steps: where rows lie, how many steps, what travels."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dataio.store.files.reader import MEMORY_FRACTION
from tests.oracle.test_simulate import Bench
from tests.oracle.test_trace import load
from tonari.oracle.costs import TaskCost
from tonari.oracle.feeds import PAGE_BYTES, SourceRates, lay_rows, make_feeds, stage_beside
from tonari.oracle.probe.data import DataTimes

DATA = DataTimes(
    readers=2, num_rows=1000, evaluated_rows=0, row_bytes=100.0, source_row_bytes=125.0,
    batch_s=0.5, batch_cores=1.0, staging_bytes_per_s=1e4, epoch_end_s=0.0, write_bytes_per_s=0.0,
)  # fmt: skip

SOURCE = SourceRates(of_node=1e3, of_all=4e3)


def rows_of(config, num_readers=4, node_of=(0, 0, 1, 1)):
    return lay_rows(config, DATA, readers=range(num_readers), node_of=node_of)


def test_rows_are_dealt_out_to_nodes_and_a_tenth_of_them_travels(tmp_path):
    config = load(tmp_path, "shuffle.exchange=0.1")
    rows = rows_of(config)
    assert rows.layout.replicas == (2, 2)
    assert rows.pool_bytes == rows.staged_bytes == 500 * 100
    # A tenth of 250 rows; with two replicas a node all of them change node
    assert rows.leaving_bytes == 25 * 100
    assert rows_of(load(tmp_path, "shuffle.kind=local")).leaving_bytes == 0
    alone = rows_of(config, node_of=(0, 0, 0, 0))
    assert (alone.leaving_bytes, alone.pool_bytes) == (0, 1000 * 100)
    whole = rows_of(load(tmp_path, "shuffle.kind=global"))
    assert (whole.leaving_bytes, whole.pool_bytes) == (0, 1000 * 100)
    moved = rows_of(load(tmp_path, "shuffle.kind=global", "shuffle.moves=true"))
    assert moved.leaving_bytes == 125 * 100
    twice = rows_of(load(tmp_path, "shuffle.exchange=0.1", "data.cache.copies=2"))
    assert (twice.arriving_bytes, twice.pool_bytes) == (2 * 25 * 100, 2 * 500 * 100)
    assert twice.leaving_bytes == 0, "the other node has it all"
    assert twice.staged_bytes == rows.staged_bytes, "the source is read once"
    small = rows_of(load(tmp_path, "data.cache={path='auto', quota=200000}"))
    assert small.pool_bytes == 50_000
    assert small.quota.resident_rows * 100 == small.staged_bytes < 50_000


@pytest.mark.parametrize(
    ("overrides", "hidden", "steps"),
    [
        ((), 0.0, 32),  # 250 rows of each replica, 8 a batch
        (("data.drop_last=true",), 0.0, 31),
        ((), 0.5, 16),
        (("optimizer.accumulate=3",), 0.0, 11),
        ((), 0.9999, 1),
    ],
)
def test_steps_of_an_epoch(tmp_path, overrides, hidden, steps):
    config = load(tmp_path, *overrides)
    assert config.data.batch_size == 8
    assert rows_of(config).num_steps(config, hidden_fraction=hidden) == steps


def test_each_step_has_its_batches_and_its_part_of_what_leaves(tmp_path):
    config = load(tmp_path, "shuffle.exchange=0.1", "optimizer.accumulate=2")
    bench = Bench(num_cores=1)
    feeds = make_feeds(config, DATA, rows_of(config), bench, source=SOURCE)
    assert sorted(feeds) == [0, 1, 2, 3]
    # Two batches of half a second, which two readers on one core made in that time
    assert feeds[0].batch == TaskCost(0.5, ((("cores",), 1.0),), (1.0,))
    assert feeds[0].ahead == 1  # of two batches
    assert bench.asked == [("exchange", pair, 156) for pair in ((0, 2), (1, 3), (2, 0), (3, 1))]
    # As many leave beside half of the steps
    half = make_feeds(config, DATA, rows_of(config), bench, source=SOURCE, hidden_fraction=0.5)
    assert len(half[0].sends) == 1
    assert bench.asked[-1] == ("exchange", (3, 1), 312)
    quiet = make_feeds(config, DATA, rows_of(config), bench, source=SOURCE, exchanges=False)
    assert quiet[0].sends == ()
    alone = replace(DATA, readers=1)
    feeds = make_feeds(config, alone, rows_of(config), bench, source=SOURCE)
    assert feeds[0].batch.seconds == 1


@pytest.mark.parametrize("most", [200, 5_000, 100_000])
def test_a_disk_reads_the_whole_pages_that_rows_lie_on(tmp_path, most):
    ends = np.cumsum(np.random.default_rng(0).integers(1, most, 5000))
    pages = sum(
        -(-end // PAGE_BYTES) - start // PAGE_BYTES for start, end in itertools.pairwise(ends)
    )
    rows = replace(rows_of(load(tmp_path)), row_bytes=np.diff(ends).mean())
    assert rows.disk_row_bytes == pytest.approx(pages * PAGE_BYTES / 4999, rel=0.02)


@pytest.mark.parametrize("held", [0.1, 0.5, 0.9])
def test_a_disk_does_not_read_what_memory_still_has(tmp_path, held):
    laid = rows_of(load(tmp_path))
    share = laid.staged_bytes * held / MEMORY_FRACTION
    rows = replace(laid, memory_bytes=share)
    rng, num_rows = np.random.default_rng(0), 2000
    # Memory gives up first what was used the longest ago
    memory, missed = dict.fromkeys(rng.permutation(num_rows)[-int(held * num_rows) :].tolist()), 0
    for row in rng.permutation(num_rows).tolist():
        missed += row not in memory
        memory.pop(row, None)
        if len(memory) >= int(held * num_rows):
            del memory[next(iter(memory))]
        memory[row] = None
    assert rows.disk_row_bytes / laid.disk_row_bytes == pytest.approx(missed / num_rows, abs=0.02)
    assert replace(laid, memory_bytes=1.01 * share / held).disk_row_bytes == 0
    assert replace(laid, memory_bytes=1.0).disk_row_bytes == pytest.approx(laid.disk_row_bytes)


def test_nodes_that_share_processors_have_disks_of_their_own(tmp_path):
    config, bench = load(tmp_path), Bench(num_cores=4)
    feeds = make_feeds(config, DATA, rows_of(config), bench, source=SOURCE, disk_bytes_per_s=1e4)
    disks = [
        next(name for name, _ in feed.batch.demands if name[0] == "disk of node")
        for feed in feeds.values()
    ]
    assert disks[0] == disks[1] != disks[2] == disks[3]


def test_rows_that_are_not_staged_are_read_from_the_source_with_each_batch(tmp_path):
    bench = Bench(num_cores=4)

    def batch_of(*overrides, source=SOURCE, staged=True):
        config = load(tmp_path, *overrides)
        rows = rows_of(config)
        return make_feeds(config, DATA, rows, bench, source=source, staged=staged)[2].batch

    assert batch_of() == TaskCost(0.5, ((("cores",), 1.0),), (1.0,))
    # 1,000 bytes, at 1,000 a second that a node reads, and 4,000 that all do
    from_source = (("source of node",), 1.0), (("source",), 0.25)
    assert batch_of(staged=False) == TaskCost(
        1.0, ((("cores",), 0.5), *from_source), (0.5, 1.0, 0.25)
    )
    # What a quota leaves no room for comes in windows
    assert batch_of("data.cache={path='auto', quota=200000}") == batch_of()
    slow = batch_of(source=SourceRates(of_node=1e3, of_all=400.0), staged=False)
    assert slow.seconds == 2.5
    assert dict(slow.demands)["source",] == 1.0
    assert SourceRates(of_node=1e3).seconds(2000, 10) == 2.0
    assert SOURCE.seconds(2000, 10) == 5.0


def test_staging_beside_training_is_hidden_by_steps_but_for_the_first_group():
    assert stage_beside(16.0, steps_s=100.0) == (1.0, 0.0)
    first_s, late_s = stage_beside(160.0, steps_s=16.0)
    # The last group is there after 160 s, and a sixteenth of the steps is left then
    assert first_s + late_s + 16.0 == pytest.approx(160.0 + 1.0)
