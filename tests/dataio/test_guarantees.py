"""What the loader promises as a whole: training that overlaps staging, damage, size, cost."""

import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import shuffle
from benchmarks.studies.large_index import measure, open_loader, write_index
from dataio import (
    Bytes,
    CorruptRowError,
    Int,
    Loader,
    NodeCache,
    Reports,
    SourceError,
    Staging,
    StallError,
    Workers,
)
from dataio.batch.figures import Figures
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo
from tests.dataio.loaders import loss_of
from tests.dataio.source.shards import damage, numbered, write_tar
from tests.faults.refusals import mounted
from tests.memory_source import FIELDS, MemorySource

NUM_SAMPLES = 480
GROUP_ROWS = NUM_SAMPLES // 16
KAKURENBO = Kakurenbo(0.5, drops=(), alphas=(1.0,), warmup_epochs=0)


class HeldSource(MemorySource):
    """Gives so many rows to each rank; then waits to be told to go on, or fails.

    To be read by one thread, so that the rows it gives are of the first groups.
    """

    def __init__(self, num_rows, *, fails=False):
        super().__init__(NUM_SAMPLES, block_rows=4)
        self.shard_starts = np.arange(0, NUM_SAMPLES, 40)
        self.go_on = threading.Event()
        self._left = num_rows
        self._fails = fails

    def read(self, sample_ids, fields):
        for rows in super().read(sample_ids, fields):
            self._left -= len(rows)
            if self._left < 0 and self._fails:
                raise SourceError("memory: the server went away; look at the server")
            if self._left < 0:
                assert self.go_on.wait(20)
            yield rows


def make(world, root, source, **options):
    chosen: dict[str, Any] = {
        "batch_size": 4,
        "fields": FIELDS,
        "seed": 5,
        "cache": root,
        "workers": Workers(threads=1),
        "reports": Reports(progress=False),
    }
    return Loader(source, world=world, **(chosen | options))


def overlapped(world, root, source, **options):
    return make(
        world, root, source, staging=Staging(when="overlap", readers=1),
        shuffle=shuffle.Partial(0.3), importance=KAKURENBO,
        **options,
    )  # fmt: skip


def run_epochs(loader, *, first=None):
    """Train three epochs: ids of each batch by epoch; ``first`` is called after the first batch."""
    epochs = []
    for epoch in loader.epochs(3):
        batches = []
        for batch in loader:
            if first is not None:
                first()
                first = None
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            batches.append(batch["sample_id"].tolist())
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
        epochs.append(batches)
    return epochs


def assert_each_once(ranks):
    counted = Counter(i for rank in ranks for batch in rank[0] for i in batch if i >= 0)
    assert counted == Counter(range(NUM_SAMPLES))


@pytest.mark.parametrize("layout", [[1], [2], [1, 1]])
def test_training_begins_before_staging_ends_and_warm_batches_are_the_same(tmp_path, layout):
    """With exchange, whose rows then move at the end of epoch 0, and hidden rows from epoch 1."""

    def cold(world):
        source = HeldSource(3 * GROUP_ROWS)
        unread = []

        def first():
            unread.append(NUM_SAMPLES - len(source.rows_read))
            # Which rank reads what is its own affair: all have a first batch before any goes on.
            world.barrier(doing="have a first batch")
            source.go_on.set()

        with overlapped(world, tmp_path, source) as loader:
            return run_epochs(loader, first=first), unread[0]

    def warm(world):
        source = MemorySource(NUM_SAMPLES)
        with overlapped(world, tmp_path, source) as loader:
            return run_epochs(loader)

    ranks = run_threads(thread_worlds(layout), cold)
    assert min(unread for _, unread in ranks) > NUM_SAMPLES // 2
    assert run_threads(thread_worlds(layout), warm) == [rank for rank, _ in ranks]
    assert_each_once([rank for rank, _ in ranks])


@pytest.mark.parametrize("layout", [[1], [2], [1, 1]])
def test_a_source_that_fails_beside_training_ends_it_with_its_message(tmp_path, layout):
    """And the next job goes on from what was staged, with the same batches as any other."""

    def broken(world):
        with overlapped(world, tmp_path / "a", HeldSource(3 * GROUP_ROWS, fails=True)) as loader:
            return run_epochs(loader)

    def whole(world, root):
        source = MemorySource(NUM_SAMPLES)
        with overlapped(world, root, source) as loader:
            return run_epochs(loader), len(source.rows_read)

    with pytest.raises(SourceError, match="the server went away; look at the server"):
        run_threads(thread_worlds(layout, timeout_s=5.0), broken)
    again = run_threads(thread_worlds(layout), lambda world: whole(world, tmp_path / "a"))
    fresh = run_threads(thread_worlds(layout), lambda world: whole(world, tmp_path / "b"))
    assert [rank for rank, _ in again] == [rank for rank, _ in fresh]
    assert sum(rows for _, rows in again) < NUM_SAMPLES == sum(rows for _, rows in fresh)


@pytest.mark.parametrize("layout", [[1], [1, 1]])
def test_a_source_that_stalls_beside_training_is_a_stall_that_says_where(tmp_path, layout):
    def run(world):
        source = HeldSource(3 * GROUP_ROWS)
        with overlapped(world, tmp_path, source) as loader:
            try:
                for _ in loader.epochs(1):
                    for batch in loader:
                        assert len(batch["slot"]) == 4
            finally:
                source.go_on.set()  # so that its threads end

    with pytest.raises(StallError, match=r"of 4 rows of a batch were not staged within"):
        run_threads(thread_worlds(layout, timeout_s=1.0), run)


def test_every_epoch_is_shuffled_anew_and_far(tmp_path):
    with make(single_world(), tmp_path, MemorySource(NUM_SAMPLES)) as loader:
        orders = [[i for batch in loader for i in batch["sample_id"]] for _ in loader.epochs(6)]
    for before, order in pairwise(orders):
        moved = np.abs(np.argsort(before) - np.argsort(order)).mean()
        assert moved > NUM_SAMPLES / 4, "two independent shuffles move a sample by a third"
    for order in orders:
        assert np.abs(np.diff(order)).mean() > NUM_SAMPLES / 4


TAR_FIELDS = {"data": Bytes("bin"), "number": Int("cls")}
TAR_ROWS = 60


@pytest.fixture
def shard(tmp_path):
    return write_tar(tmp_path / "train.tar", numbered(TAR_ROWS, num_bytes=400))


def flip(paths, samples=(17,)):
    """Change a byte of samples in files that hold them as they are, as a bad disk does."""
    flipped = 0
    for path in paths:
        data = bytearray(path.read_bytes())
        for sample_id in samples:
            at = data.find((sample_id + 1).to_bytes(4, "little") * 8)
            if at >= 0:
                data[at + 5] ^= 1
                flipped += 1
        damage(path, data)
    assert flipped == len(samples)


def heaps(root):
    return root.glob("*/node*/heap-*.bin")


def train(root, shard, layout, **options):
    """Two epochs on an untouched or damaged cache: numbers, steps and stats of each rank."""

    def run(world):
        with make(world, root, str(shard), fields=TAR_FIELDS, **options) as loader:
            found, steps = [], []
            for _ in loader.epochs(2):
                for batch in loader:
                    keep = batch["slot"] >= 0
                    found += batch["number"][keep].tolist()
                    assert (batch["weight"][~keep] == 0).all()
                steps.append(loader.step)
            return found, steps, loader.stats()

    return run_threads(thread_worlds(layout), run)


@pytest.mark.parametrize("layout", [[1], [2], [1, 1]])
def test_a_flipped_byte_is_read_again_from_the_source_once(tmp_path, shard, layout):
    before = train(tmp_path / "cache", shard, layout)
    flip(heaps(tmp_path / "cache"))
    ranks = train(tmp_path / "cache", shard, layout)
    assert [rank[:2] for rank in ranks] == [rank[:2] for rank in before]
    assert sum(stats["source_bytes"] > before[0][2]["source_bytes"] / 4 for *_, stats in ranks) < 2
    assert sum(stats["skipped_rows"] for *_, stats in ranks) == 0
    repaired = train(
        tmp_path / "cache", shard, layout, cache=NodeCache(tmp_path / "cache", verify="always")
    )
    assert [rank[:2] for rank in repaired] == [rank[:2] for rank in before]


@pytest.mark.parametrize("layout", [[1], [2], [1, 1]])
def test_a_flipped_byte_that_the_source_has_too_is_one_error_or_padding(tmp_path, shard, layout):
    cache = tmp_path / "cache"
    before = train(cache, shard, layout)
    flip(heaps(cache), samples=(17, 40))
    flip([shard], samples=(17, 40))
    words = r"\(sample (17|40)\) is damaged; .*train\.tar now has .* the source was changed or is"
    with pytest.raises(CorruptRowError, match=words):
        train(cache, shard, layout)
    ranks = train(cache, shard, layout, on_error="skip")
    assert [steps for _, steps, _ in ranks] == [steps for _, steps, _ in before], "equal steps"
    counted = Counter(number for found, *_ in ranks for number in found)
    assert counted == Counter({i: 2 for i in range(TAR_ROWS) if i not in (17, 40)})
    assert sum(stats["skipped_rows"] for *_, stats in ranks) == 4, "two rows in each of two epochs"


def test_a_source_that_is_gone_does_not_matter_to_a_whole_cache(tmp_path, shard):
    before = train(tmp_path / "cache", shard, [1])
    with make(single_world(), tmp_path / "cache", str(shard), fields=TAR_FIELDS) as loader:
        shard.unlink()
        found = [i for _ in loader.epochs(2) for b in loader for i in b["number"][b["slot"] >= 0]]
    assert found == before[0][0]


def test_a_flipped_byte_without_its_source_names_row_and_cure(tmp_path, shard):
    train(tmp_path / "cache", shard, [1])
    flip(heaps(tmp_path / "cache"))
    with make(single_world(), tmp_path / "cache", str(shard), fields=TAR_FIELDS) as loader:
        shard.unlink()
        with pytest.raises(CorruptRowError, match=r"slots \[17\] .*train\.tar.*restore the source"):
            list(loader)


@pytest.mark.parametrize("layout", [[1], [2]])
def test_a_whole_cache_on_a_read_only_disk_trains_hides_and_saves(tmp_path, shard, layout):
    before = train(tmp_path / "cache", shard, layout)
    frozen = tmp_path / "frozen"
    with mounted(frozen, "-o", "bind,ro", str(tmp_path / "cache")):
        assert [rank[:2] for rank in train(frozen, shard, layout)] == [r[:2] for r in before]

        def run(world):
            options = {"fields": TAR_FIELDS, "importance": KAKURENBO}
            with make(world, frozen, str(shard), **options) as loader:
                for epoch in loader.epochs(3):
                    for batch in loader:
                        loader.report(batch, *loss_of(batch["sample_id"], epoch))
                loader.save(tmp_path / "saved")
                return loader.stats()["hidden_fraction"]

        assert min(run_threads(thread_worlds(layout), run)) > 0


def test_bytes_read_from_the_cache_are_counted(tmp_path, shard):
    ((_, _, stats),) = train(tmp_path / "cache", shard, [1])
    stored = sum(len(data) for name, data in numbered(TAR_ROWS, num_bytes=400) if "bin" in name)
    assert stats["page_cache_bytes"] + stats["disk_bytes"] >= 2 * (stored + 8 * TAR_ROWS)
    assert stats["page_cache_bytes"] <= 2 * (stored + 8 * TAR_ROWS)


def test_opening_and_resuming_a_large_index_allocates_nothing_by_the_row(tmp_path):
    num_rows = 1_000_000
    write_index(num_rows, tmp_path)
    tracemalloc.start()
    try:
        with open_loader(num_rows, tmp_path) as loader:
            loader.set_epoch(0)
            assert len(next(iter(loader))["label"]) == 256
            state = loader.state_dict()
            loader.set_epoch(1)
            loader._run.running.plan.order.block(loader._run.running.plan.order.steps - 1, 1)
            loader.load_state_dict(state)
            next(iter(loader))
            assert loader.step == 2
            loader.stats()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One byte a row remembers which rows were checked; one block of batches is looked up at once.
    assert peak < num_rows + (2 << 20)
    assert len(json.dumps(state)) < 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_100_million_rows_open_in_2_seconds_and_resume_in_50_milliseconds(tmp_path):
    num_rows = 100_000_000
    write_index(num_rows, tmp_path)
    runs = [measure(num_rows, tmp_path) for _ in range(3)]
    least = {name: min(run[name] for run in runs) for name in runs[0]}
    assert least["open_s"] < 2
    for name in ("begin_s", "cursor_s", "set_epoch_s", "state_dict_s", "resume_s"):
        assert least[name] < 0.05, name
    assert least["private_bytes"] < num_rows + (64 << 20)


def test_importing_takes_little_beyond_torch():
    code = (
        "import time; started = time.process_time(); import torch, numpy; ours = "
        "time.process_time(); import dataio, shuffle, importance; dataio.Loader; "
        "print((time.process_time() - ours) / (ours - started)); import sys; "
        "assert not {'mpi4py', 'pyarrow.compute', 'fsspec', 'webdataset'} & sys.modules.keys()"
    )
    done = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert min(float(run.stdout) for run in done) < 0.7, "of torch's own time, usually 0.45"


def count_s(*, calls=20_000):
    """Seconds that counting one batch takes: two looks at the clock, and the histogram."""
    figures, clock = Figures(), time.perf_counter
    started = clock()
    for _ in range(calls):
        before = clock()
        figures.add_batch(clock() - before, 256)
    return (clock() - started) / calls


def test_counting_a_batch_takes_microseconds():
    assert min(count_s() for _ in range(3)) < 20e-6
