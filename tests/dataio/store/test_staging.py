"""Staging: goes on after a kill, in groups while others already use the rows, never too fast."""

import contextlib
import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import dataio.store.staging
from dataio import CacheError
from dataio.base.errors import CorruptRowError, SourceError, StallError
from dataio.plan.layout import Layout
from dataio.plan.policies import ExchangeContext
from dataio.rows.rows import corrupt_rows
from dataio.source.storage.throttle import Throttle
from dataio.store.cache import Cache
from dataio.store.epoch_end import commit_arrivals
from dataio.world import run_threads, single_world, thread_worlds
from shuffle import Partial
from tests.memory_source import FIELDS, MemorySource, placement_of
from tests.opened import make_pool

SAMPLES = 240
POLICY = Partial(0.3)


def open_pool(world, root, source=None, **options):
    layout = Layout(world.replicas_per_node, SAMPLES)
    pool = make_pool(
        source or MemorySource(SAMPLES), FIELDS, world=world, root=root,
        num_slots=layout.pool_rows(world.node), num_leaving=POLICY.num_leaving(layout),
        columns=("loss",), **options,
    )  # fmt: skip
    return pool, layout


def placement(layout, world, epoch=0):
    return placement_of(POLICY, layout, node=world.node, epoch=epoch, seed=0)


def intact(pool):
    rows = pool.cache.read_rows(np.arange(len(pool.cache.entries)))
    return len(corrupt_rows(rows)) == 0


class FragileSource(MemorySource):
    """Ends the reader at a sample, or holds it up until it is told to go on."""

    def __init__(self, num_rows, *, hold=False, **options):
        super().__init__(SAMPLES, block_rows=8, **options)
        self.num_rows = num_rows
        self.go_on = threading.Event()
        self.hold = hold
        self.shard_starts = np.arange(0, SAMPLES, 40)

    def read(self, sample_ids, fields):
        for rows in super().read(sample_ids, fields):
            if rows.sample_id[-1] >= self.num_rows:
                if not self.hold:
                    raise SourceError("the source went away")
                assert self.go_on.wait(20)
            yield rows


def test_a_staging_that_was_cut_short_reads_only_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(dataio.store.staging, "SEAL_BYTES", 100)

    def cut_short(world):
        pool, layout = open_pool(world, tmp_path, FragileSource(60), readers=1)
        with contextlib.closing(pool):
            with pytest.raises(SourceError, match="went away"):
                pool.ensure(placement(layout, world))

    def again(world):
        source = MemorySource(SAMPLES)
        pool, layout = open_pool(world, tmp_path, source)
        with contextlib.closing(pool):
            held = len(pool.cache.entries) - pool.cache.log.num_missing
            pool.ensure(placement(layout, world))
            ids = pool.cache.entries.sample_id.tolist()
            return held, source.rows_read, ids, intact(pool)

    cut_short(single_world())
    (directory,) = tmp_path.glob("*/node0")
    assert list(directory.glob("staged-*"))
    (directory / "staged-1-0-77.arrow.partial").write_bytes(b"half a delta")
    held, read, ids, whole = again(single_world())
    assert held >= 48
    assert len(read) == SAMPLES - held
    assert len(set(read)) == len(read)
    assert ids == list(range(SAMPLES))
    assert whole
    assert not list(directory.glob("staged-*")), "they became part of the base"
    assert again(single_world())[1] == []


def test_sealed_rows_are_not_lost_when_the_next_job_has_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(dataio.store.staging, "SEAL_BYTES", 100)
    pool, layout = open_pool(single_world(), tmp_path, FragileSource(60), readers=1)
    with contextlib.closing(pool), pytest.raises(SourceError):
        pool.ensure(placement(layout, single_world()))

    def again(world):
        source = MemorySource(SAMPLES)
        pool, layout = open_pool(world, tmp_path, source)
        pool.ensure(placement(layout, world))
        whole = intact(pool)
        pool.close()
        return source.rows_read, whole, pool.cache.entries.sample_id.tolist()

    results = run_threads(thread_worlds([3]), again)
    read = [row for rows, _, _ in results for row in rows]
    assert len(set(read)) == len(read) <= SAMPLES - 48
    assert all(whole and ids == list(range(SAMPLES)) for _, whole, ids in results)


def test_each_shard_is_read_by_one_rank_of_the_node(tmp_path):
    def run(world):
        source = FragileSource(SAMPLES)
        pool, layout = open_pool(world, tmp_path, source)
        pool.ensure(placement(layout, world))
        pool.close()
        return {row // 40 for row in source.rows_read}

    first, second, third = run_threads(thread_worlds([3]), run)
    assert first | second | third == set(range(6))
    assert len(first) + len(second) + len(third) == 6


def test_a_rank_that_opens_late_stages_its_own_part_all_the_same(tmp_path, monkeypatch):
    load, seal, sealed = Cache.load, Cache.seal_staged, threading.Event()

    def late(self, **options):
        if self.local_rank == 1:
            sealed.wait(0.3)  # what rank 0 does if it does not wait for this one
        load(self, **options)

    def told(self):
        seal(self)
        sealed.set()

    def run(world):
        pool, layout = open_pool(world, tmp_path)
        monkeypatch.setattr(Cache, "load", late)
        monkeypatch.setattr(Cache, "seal_staged", told)
        pool.ensure(placement(layout, world))
        pool.close()
        return pool.cache.entries.sample_id.tolist()

    assert run_threads(thread_worlds([2]), run) == [list(range(SAMPLES))] * 2


def test_training_starts_on_the_first_group_while_the_rest_is_staged(tmp_path):
    def run(world):
        source = FragileSource(80, hold=True)
        pool, layout = open_pool(world, tmp_path, source)
        pool.ensure(placement(layout, world), groups=[(0, 80), (80, 160), (160, SAMPLES)])
        first, rest = np.arange(80), np.arange(80, SAMPLES)
        pool.await_rows(first)
        ids = pool.cache.entries.sample_id[first].tolist()
        early = len(corrupt_rows(pool.cache.read_rows(first)))
        missed = pool.cache.log.num_missing
        source.go_on.set()
        pool.await_rows(rest)
        late = len(corrupt_rows(pool.cache.read_rows(rest)))
        pool.finish_staging()
        pool.finish_staging()
        done = pool.cache.log.num_missing, intact(pool), pool.cache.entries.sample_id.tolist()
        pool.close()
        return ids, early, missed, late, done

    for ids, early, missed, late, done in run_threads(thread_worlds([2]), run):
        assert ids == list(range(80))
        assert missed > 0, "the rest was still to come"
        assert early == late == 0
        assert done == (0, True, list(range(SAMPLES)))
    pool, layout = open_pool(single_world(), tmp_path, FragileSource(0))
    pool.ensure(placement(layout, single_world()))
    pool.close()


def test_rows_that_do_not_come_are_a_stall_with_a_cure(tmp_path):
    source = FragileSource(48, hold=True)
    world = thread_worlds([1], timeout_s=0.3)[0]
    pool, layout = open_pool(world, tmp_path, source)
    with contextlib.closing(pool):
        pool.ensure(placement(layout, world), groups=[(0, 40), (40, SAMPLES)])
        with pytest.raises(StallError, match=r"8 of 8 rows .* waited for rank 0, .* look at"):
            pool.await_rows(np.arange(200, 208))
        source.go_on.set()


def test_a_rank_whose_rows_do_not_come_is_named(tmp_path):
    source, said = FragileSource(48, hold=True), []

    def run(world):
        own = source if world.rank == 1 else MemorySource(SAMPLES)
        pool, layout = open_pool(world, tmp_path, own)
        pool.ensure(placement(layout, world), groups=[(0, 40), (40, 140), (140, SAMPLES)])
        if world.rank == 0:
            with pytest.raises(StallError) as error:
                pool.await_rows(np.arange(40, SAMPLES))
            said.append(str(error.value))
            source.go_on.set()
        pool.finish_staging()
        pool.close()

    run_threads(thread_worlds([2], timeout_s=1.0), run)
    assert "waited for rank 1, which stages them" in said[0]


def test_a_process_that_was_stopped_meanwhile_goes_on_waiting(tmp_path, monkeypatch):
    source = FragileSource(48, hold=True)
    world = thread_worlds([1], timeout_s=5.0)[0]
    pool, layout = open_pool(world, tmp_path, source)
    with contextlib.closing(pool):
        pool.ensure(placement(layout, world), groups=[(0, 40), (40, SAMPLES)])
        stopped_s = itertools.chain([0.0], itertools.repeat(3600.0))
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(stopped_s))
        monkeypatch.setattr(dataio.store.staging, "time", clock)
        threading.Timer(0.3, source.go_on.set).start()
        pool.await_rows(np.arange(SAMPLES))


def test_what_stops_the_staging_thread_reaches_whoever_waits(tmp_path):
    source = FragileSource(48)
    pool, layout = open_pool(single_world(), tmp_path, source, readers=1)
    with contextlib.closing(pool):
        pool.ensure(placement(layout, single_world()), groups=[(0, 40), (40, SAMPLES)])
        with pytest.raises(SourceError, match="went away"):
            pool.await_rows(np.arange(SAMPLES))
        with pytest.raises(SourceError, match="went away"):
            pool.finish_staging()


def test_rows_that_arrive_while_others_are_staged_keep_apart(tmp_path):
    def run(world):
        source = MemorySource(SAMPLES, block_rows=4)
        pool, layout = open_pool(world, tmp_path, source)
        half = layout.pool_rows(world.node) // 2
        pool.ensure(placement(layout, world), groups=[(0, half), (half, 2 * half)])
        pool.make_room()
        running = POLICY.begin(ExchangeContext(world, pool.cache, layout, 0, 0, range(3), 20, 0))
        assert running is not None
        pool.await_rows(np.arange(2 * half))
        running.progress(0)
        running.finish(pool.scores)
        pool.finish_staging()
        before = intact(pool)
        commit_arrivals(pool, 1)
        wanted = placement(layout, world, 1).sample_ids().tolist()
        found = pool.cache.entries.sample_id.tolist() == wanted, before, intact(pool)
        pool.close()
        return found

    assert run_threads(thread_worlds([2, 1]), run) == [(True, True, True)] * 3


def test_a_warm_start_computes_no_ids(tmp_path):
    pool, layout = open_pool(single_world(), tmp_path)
    wanted = placement(layout, single_world())
    pool.ensure(wanted)
    pool.close()
    pool, _ = open_pool(single_world(), tmp_path, FragileSource(0))
    with contextlib.closing(pool):
        pool.ensure(dataclasses.replace(wanted, sample_ids=lambda: 1 / 0))
        pool.ensure(dataclasses.replace(wanted, name="the same rows by another name"))
        with pytest.raises(ZeroDivisionError):
            pool.ensure(dataclasses.replace(wanted, name="other", sample_ids=lambda: 1 / 0))


def test_reading_keeps_to_the_nodes_bandwidth(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(Throttle, "take", lambda self, num_bytes: taken.append(num_bytes))
    source = MemorySource(SAMPLES)
    pool, layout = open_pool(single_world(), tmp_path, source, bandwidth=1e6)
    pool.ensure(placement(layout, single_world()))
    pool.close()
    assert sum(taken) == source.bytes_read


def test_a_damaged_row_is_fetched_again(tmp_path):
    pool, layout = open_pool(single_world(), tmp_path)
    with contextlib.closing(pool):
        pool.ensure(placement(layout, single_world()))
        pool.cache.files.fixed[0].rows[[5, 200]] ^= 1
        (heap,) = tmp_path.glob("*/node0/heap-0.bin")
        with open(heap, "r+b") as file:
            file.seek(int(pool.cache.entries.offset[np.array([13])][0]))
            file.write(b"\xff\xff")
        bad = corrupt_rows(pool.cache.read_rows(np.arange(SAMPLES)))
        assert bad.tolist() == [5, 13, 200]
        pool.repair(bad[::-1])
        assert intact(pool)


def test_a_row_that_its_source_no_longer_has_is_named(tmp_path):
    pool, layout = open_pool(single_world(), tmp_path)
    with contextlib.closing(pool):
        pool.ensure(placement(layout, single_world()))
        pool.cache.entries.checksum.put(np.array([9]), np.array([1], np.uint64))
        words = r"row 9 \(sample 9\) is damaged; memory now has .*0x0{15}1; the source was changed"
        with pytest.raises(CorruptRowError, match=words):
            pool.repair(np.array([9]))


def test_a_full_disk_is_said_before_rows_move(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    def run(world):
        pool, layout = open_pool(world, tmp_path)
        with contextlib.closing(pool):
            pool.ensure(placement(layout, world))
            before = sum(len(file.rows) for file in pool.cache.files.fixed)
            world.barrier(doing="fill the disk")
            monkeypatch.setattr("dataio.store.files.store.os.posix_fallocate", full)
            with pytest.raises(CacheError, match=r"make room for arrivals.*free some space"):
                pool.make_room()
            return before

    assert run_threads(thread_worlds([1, 1]), run) == [SAMPLES // 2] * 2
