"""Which directory a pool uses, and when it is shared: several ranks and nodes in one process."""

import contextlib
import logging
import shutil

import numpy as np
import pytest

import dataio.store.prepare
from dataio.base.errors import CacheBusyError, CacheError
from dataio.base.filesystem import room_for
from dataio.plan.layout import Layout
from dataio.plan.placement import Placement
from dataio.plan.policies import Local
from dataio.rows.rows import corrupt_rows
from dataio.store.cache import Cache
from dataio.world import run_threads, single_world, thread_worlds
from tests.memory_source import FIELDS, MemorySource, placed, placement_of
from tests.opened import make_pool

SAMPLES = 60


def open_pool(world, root, *, num_leaving=0, **options):
    layout = Layout(world.replicas_per_node, SAMPLES)
    wanted = placement_of(Local(), layout, node=world.node, epoch=0, seed=0)
    pool = make_pool(
        MemorySource(SAMPLES), FIELDS, world=world, root=root, num_slots=wanted.num_slots,
        num_leaving=num_leaving, wanted=None if num_leaving else wanted, **options,
    )  # fmt: skip
    return pool, wanted


def staged(world, root, **options):
    pool, wanted = open_pool(world, root, **options)
    pool.ensure(wanted)
    return pool


def intact(pool, wanted):
    ids = wanted.sample_ids() if isinstance(wanted, Placement) else wanted
    rows = pool.cache.read_rows(np.arange(len(ids)))
    return rows.sample_id.tolist() == ids.tolist() and len(corrupt_rows(rows)) == 0


def names(root):
    return sorted(path.name for path in root.glob("*/node*"))


def test_all_local_ranks_use_the_directory_that_their_leader_chose(tmp_path):
    def run(world):
        with contextlib.closing(staged(world, tmp_path, num_leaving=2)) as first:
            world.barrier(doing="take the first")
            with contextlib.closing(staged(world, tmp_path, num_leaving=2)) as second:
                return first.cache.directory.name, second.cache.directory.name

    found = run_threads(thread_worlds([2, 3]), run)
    assert found == [("node0", "node0.1")] * 2 + [("node1", "node1.1")] * 3


def test_a_pool_that_is_shared_is_mapped_to_read_only(tmp_path):
    def run(world):
        with contextlib.closing(staged(world, tmp_path)) as first:
            with contextlib.closing(staged(world, tmp_path)) as second:
                one_place = first.cache.directory == second.cache.directory
                writable = second.cache.files.fixed[0].rows.flags.writeable
                read = second.source.rows_read
                return first.cache.hold.shared, second.cache.hold.shared, writable, read, one_place

    assert run_threads(thread_worlds([2, 1]), run) == [(True, True, False, [], True)] * 3


def test_a_node_that_is_whole_stays_shared_while_another_stages(tmp_path):
    def run(world):
        pool = staged(world, tmp_path)
        found = pool.cache.files.fixed[0].rows.flags.writeable, len(pool.source.rows_read)
        pool.close()
        return found

    worlds = [1, 2]
    run_threads(thread_worlds(worlds), run)
    shutil.rmtree(next(tmp_path.glob("*/node1")))
    found = run_threads(thread_worlds(worlds), run)
    assert found[0] == (False, 0)
    assert sum(read for _, read in found) == 40, "the other node's part"


def test_a_shared_pool_that_must_change_is_taken_back_when_nobody_else_reads(tmp_path):
    def run(world):
        pool = staged(world, tmp_path)
        assert pool.cache.hold.shared
        other = np.arange(len(pool.cache.entries))[::-1].copy()
        pool.ensure(placed(other))
        good = intact(pool, other)
        shared = pool.cache.hold.shared
        pool.close()
        return good, shared

    assert run_threads(thread_worlds([2]), run) == [(True, True)] * 2


def test_a_shared_pool_is_never_changed_under_another_reader(tmp_path):
    world = single_world()
    with contextlib.closing(staged(world, tmp_path)) as reader:
        with contextlib.closing(staged(world, tmp_path)) as pool:
            with pytest.raises(CacheBusyError, match=r"holds other rows .* in use by process"):
                pool.ensure(placed(np.arange(SAMPLES)[::-1].copy()))
        assert intact(reader, np.arange(SAMPLES))


def test_rows_that_never_leave_are_right_in_every_epoch(tmp_path):
    world = single_world()
    with contextlib.closing(staged(world, tmp_path)) as reader:
        with contextlib.closing(staged(world, tmp_path)) as pool:
            pool.ensure(placed(np.arange(SAMPLES), epoch=5))
            assert pool.cache.hold.shared
            assert pool.cache.directory == reader.cache.directory


def test_other_rows_than_a_reader_needs_are_left_to_those_who_read_them(tmp_path, caplog):
    first = staged(single_world(), tmp_path)
    with contextlib.closing(first), caplog.at_level(logging.WARNING):
        wanted = placed(np.arange(SAMPLES)[::-1].copy())
        pool = make_pool(
            MemorySource(SAMPLES), FIELDS, world=single_world(), root=tmp_path, num_slots=SAMPLES,
            num_leaving=0, wanted=wanted,
        )  # fmt: skip
        with contextlib.closing(pool):
            pool.ensure(wanted)
            assert intact(pool, wanted)
    assert names(tmp_path) == ["node0", "node0.1"]
    assert "holds other rows than this job needs and is in use by process" in caplog.text


def test_a_failed_opening_leaves_nothing_locked(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Cache, "load", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            staged(single_world(), tmp_path)
    with contextlib.closing(staged(single_world(), tmp_path, num_leaving=1)) as pool:
        assert pool.cache.directory.name == "node0"


def test_scores_are_the_jobs_own_and_shared_by_its_ranks(tmp_path):
    def run(world):
        with contextlib.closing(staged(world, tmp_path, columns=("loss",))) as pool:
            with contextlib.closing(staged(world, tmp_path, columns=("loss",))) as other:
                if world.local_rank == 1:
                    pool.scores["loss"][0] = 7
                world.barrier(doing="report")
                files = list(pool.cache.directory.glob("scores*"))
                return float(pool.scores["loss"][0]), float(other.scores["loss"][0]), files

    assert run_threads(thread_worlds([2]), run) == [(7.0, float("inf"), [])] * 2


def test_without_importance_scores_take_no_room_and_cannot_be_written(tmp_path):
    with contextlib.closing(staged(single_world(), tmp_path)) as pool:
        assert pool.scores.shape == (SAMPLES,)
        assert pool.scores.dtype.names == ("epoch",)
        assert (pool.scores["epoch"] == -1).all()
        assert pool.scores.strides == (0,)
        with pytest.raises(ValueError, match="read-only"):
            pool.scores["epoch"][0] = 1


def test_room_is_needed_once_even_if_a_staging_was_killed(tmp_path, monkeypatch):
    asked = []

    def count(directory, num_bytes):
        asked.append(num_bytes)
        return room_for(directory, num_bytes)

    monkeypatch.setattr(dataio.store.prepare, "room_for", count)
    open_pool(single_world(), tmp_path)[0].close()
    first, asked[:] = asked[0], []
    open_pool(single_world(), tmp_path)[0].close()
    assert first == (8 + 32) * SAMPLES, "a number, and the header"
    assert asked[0] == 0


def test_too_little_room_is_said_before_any_row_is_read(tmp_path, monkeypatch):
    def full(directory, num_bytes):
        raise CacheError(f"{directory}: needs {num_bytes}")

    monkeypatch.setattr(dataio.store.prepare, "room_for", full)
    source = MemorySource(SAMPLES)
    with pytest.raises(CacheError, match="needs 2400"):
        make_pool(
            source, FIELDS, world=single_world(), root=tmp_path, num_slots=SAMPLES, num_leaving=0
        )
    assert source.rows_read == []


class LargeSource(MemorySource):
    """Says how large its files are."""

    total_bytes = 20_000


def test_room_that_is_only_guessed_warns(tmp_path, monkeypatch, caplog):
    def scarce(directory, num_bytes):
        if num_bytes > 10_000:
            raise CacheError(f"{directory}: needs {num_bytes}")

    monkeypatch.setattr(dataio.store.prepare, "room_for", scarce)
    source = LargeSource(SAMPLES)
    make_pool(
        source, FIELDS, world=single_world(), root=tmp_path, num_slots=SAMPLES, num_leaving=0
    ).close()
    assert "staging may not fit, to judge by the size of the source" in caplog.text
