"""What a pool does with what it finds on disk."""

import contextlib
import dataclasses
import errno
import json
import shutil
import threading

import numpy as np
import pytest

from dataio.base.errors import CacheError, ExchangeError, StallError
from dataio.plan.layout import Layout
from dataio.plan.policies import ExchangeContext
from dataio.rows.rows import corrupt_rows
from dataio.store.cache import Cache
from dataio.store.commit_log import CommitLog
from dataio.store.epoch_end import commit_arrivals
from dataio.world import run_threads, single_world, thread_worlds
from shuffle import Partial
from tests.memory_source import FIELDS, MemorySource, placement_of
from tests.opened import make_pool

POLICY = Partial(0.4)
SAMPLES = 60


def open_pool(world, root, source=None):
    layout = Layout(world.replicas_per_node, SAMPLES)
    pool = make_pool(
        source or MemorySource(SAMPLES), FIELDS, world=world, root=root,
        num_slots=layout.pool_rows(world.node), num_leaving=POLICY.num_leaving(layout),
        columns=("loss",),
    )  # fmt: skip
    return pool, layout


def placement(layout, world, epoch):
    return placement_of(POLICY, layout, node=world.node, epoch=epoch, seed=0)


def exchange(world, pool, layout, epoch):
    running = POLICY.begin(ExchangeContext(world, pool.cache, layout, epoch, 0, range(3), 20, 0))
    assert running is not None
    for step in range(3):
        running.progress(step)
    running.finish(pool.scores)


def intact(pool, entries):
    """Whether all rows lie where these entries say."""
    rows = pool.cache.files.read(entries, np.arange(len(entries)))
    return len(corrupt_rows(rows)) == 0


def test_the_epoch_before_stays_readable_until_the_next_commit(tmp_path):
    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        found = []
        for epoch in range(5):
            exchange(world, pool, layout, epoch)
            world.barrier(doing="write all arrivals")
            kept = [pool.cache.entries]
            if pool.cache.log.can_step_back:
                kept.append(pool.cache.log.before())
            found += [intact(pool, entries) for entries in kept]
            commit_arrivals(pool, epoch + 1)
        pool.close()
        return found

    for found in run_threads(thread_worlds([2, 1, 1]), run):
        assert len(found) == 9
        assert all(found)


def begin(world, root):
    """Exchange rows at the ends of two epochs."""
    pool, layout = open_pool(world, root)
    with contextlib.closing(pool):
        pool.ensure(placement(layout, world, 0))
        for epoch in range(2):
            exchange(world, pool, layout, epoch)
            commit_arrivals(pool, epoch + 1)


def test_a_kill_between_two_commits_is_stepped_back_without_the_source(tmp_path, monkeypatch):
    """Node 0 has committed epoch 2, node 1 has not: both go on from epoch 1."""
    commit = Cache.commit

    def killed(self):
        if self.log.epoch == 2 and "node1" in str(self.directory):
            raise SystemExit("killed")
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "commit", killed)
        worlds = thread_worlds([1, 1])
        with pytest.raises(SystemExit):
            run_threads(worlds, lambda world: begin(world, tmp_path))

    def again(world):
        source = MemorySource(SAMPLES)
        pool, layout = open_pool(world, tmp_path, source)
        found = pool.cache.log.epoch
        pool.ensure(placement(layout, world, 1))
        ids = pool.cache.entries.sample_id.tolist()
        whole = intact(pool, pool.cache.entries)
        pool.close()
        return found, source.rows_read, ids, whole

    first, second = run_threads(thread_worlds([1, 1]), again)
    assert (first[0], second[0]) == (2, 1), "the two were an epoch apart"
    assert first[1] == second[1] == [], "nothing was read from the source"
    assert sorted(first[2] + second[2]) == list(range(SAMPLES))
    assert first[3]
    assert second[3]


def head_of(cache):
    return json.loads((cache.directory / "manifest.json").read_text())


def test_the_next_epoch_begins_before_the_manifest_of_this_one_is_on_disk(tmp_path, monkeypatch):
    """It is awaited before the next commit, and wherever it is asked for."""
    write_head, written = CommitLog.write_head, threading.Event()

    def held(self, head, **options):
        if head.epoch == 1:
            assert written.wait(10)
        write_head(self, head, **options)

    monkeypatch.setattr(CommitLog, "write_head", held)

    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        exchange(world, pool, layout, 0)
        commit_arrivals(pool, 1)
        found = [head_of(pool.cache)["epoch"], pool.cache.log.epoch]
        exchange(world, pool, layout, 1)
        world.barrier(doing="look at the manifests")
        written.set()
        commit_arrivals(pool, 2)
        found.append(head_of(pool.cache)["epoch"])
        pool.cache.await_commit()
        world.barrier(doing="await all nodes' commits")
        found.append(head_of(pool.cache)["epoch"])
        pool.close()
        return found

    for before, running, after, settled in run_threads(thread_worlds([2, 1]), run):
        assert (before, running, settled) == (0, 1, 2)
        assert after >= 1


def test_nothing_is_committed_before_all_ranks_agree_that_arrivals_are_durable(tmp_path):
    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        found = []

        def agree(doing):
            cache = pool.cache
            sealed = cache.directory / f"delta-{cache.log.epoch + 1}-{world.local_rank}.arrow"
            found.append([sealed.exists(), head_of(cache)["epoch"], cache.log.epoch])
            world.barrier(doing=doing)

        for epoch in range(3):
            exchange(world, pool, layout, epoch)
            commit_arrivals(pool, epoch + 1, agree=agree)
        pool.close()
        return found

    expected = [[True, epoch, epoch] for epoch in range(3)]
    seen = run_threads(thread_worlds([2, 1]), run)
    assert [seen[0], seen[2]] == [expected] * 2, "what leaders see"
    # Another rank does not wait for its leader's manifest before it seals.
    assert [[sealed, epoch] for sealed, _, epoch in seen[1]] == [[True, e] for e in range(3)]


def test_an_epoch_is_sealed_with_the_last_row_that_arrives(tmp_path):
    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        found = []
        for epoch in range(3):
            exchange(world, pool, layout, epoch)
            pool.cache.background.seals[-1].result()
            delta = pool.cache.directory / f"delta-{epoch + 1}-{world.local_rank}.arrow"
            before = delta.stat().st_mtime_ns
            commit_arrivals(pool, epoch + 1)
            found.append(delta.stat().st_mtime_ns == before)
        pool.close()
        return found

    assert run_threads(thread_worlds([2, 1]), run) == [[True] * 3] * 3


def test_a_manifest_that_could_not_be_replaced_is_told_and_no_lost_row_is_taken_for_whole(
    tmp_path, monkeypatch
):
    """Node 1 stays at epoch 1; what arrives in epoch 2 overwrites rows that epoch 0 had there."""
    write_head = CommitLog.write_head

    def failing(self, head, **options):
        if head.epoch == 2 and "node1" in str(self.tables.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_head(self, head, **options)

    def begin(world):
        pool, layout = open_pool(world, tmp_path)
        with contextlib.closing(pool):
            pool.ensure(placement(layout, world, 0))
            for epoch in range(3):
                exchange(world, pool, layout, epoch)
                commit_arrivals(pool, epoch + 1)

    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "write_head", failing)
        with pytest.raises(CacheError, match=r"node1.*could not commit: .*No space.*free some"):
            run_threads(thread_worlds([1, 1]), begin)

    def again(world):
        pool, layout = open_pool(world, tmp_path)
        found = pool.cache.log.epoch
        pool.ensure(placement(layout, world, 0))
        ids = pool.cache.entries.sample_id.tolist()
        whole = intact(pool, pool.cache.entries)
        pool.close()
        return found, ids, whole

    first, second = run_threads(thread_worlds([1, 1]), again)
    assert (first[0], second[0]) == (2, 1)
    assert first[1] + second[1] == list(range(SAMPLES))
    assert (first[2], second[2]) == (True, True)


def test_an_older_epoch_reads_only_the_rows_that_left(tmp_path):
    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        for epoch in range(3):
            exchange(world, pool, layout, epoch)
            commit_arrivals(pool, epoch + 1)
        here = set(pool.cache.entries.sample_id.tolist())
        source = pool.source
        before = len(source.rows_read)
        wanted = placement(layout, world, 0)
        pool.ensure(wanted)
        read = source.rows_read[before:]
        whole = intact(pool, pool.cache.entries)
        pool.close()
        return sorted(read), sorted(set(wanted.sample_ids().tolist()) - here), whole

    for read, gone, whole in run_threads(thread_worlds([2, 1]), run):
        assert set(read) <= set(gone), "local ranks share the reading"
        assert whole
    reads = [i for read, _, _ in run_threads(thread_worlds([2, 1]), run) for i in read]
    assert len(set(reads)) == len(reads)


def test_a_node_that_comes_back_empty_leaves_the_others_epoch_before_readable(tmp_path):
    def again(world):
        pool, layout = open_pool(world, tmp_path)
        with contextlib.closing(pool):
            pool.ensure(placement(layout, world, 2))
            found = [pool.cache.log.can_step_back == (world.rank == 0)]
            for epoch in range(2, 5):
                exchange(world, pool, layout, epoch)
                if pool.cache.log.can_step_back:
                    found.append(intact(pool, pool.cache.log.before()))
                commit_arrivals(pool, epoch + 1)
                found.append(intact(pool, pool.cache.entries))
            return found

    run_threads(thread_worlds([1, 1]), lambda world: begin(world, tmp_path))
    (directory,) = tmp_path.glob("*/node1")
    shutil.rmtree(directory)
    for found in run_threads(thread_worlds([1, 1]), again):
        assert all(found)


def test_other_numbers_of_ranks_find_the_rows_that_are_here(tmp_path):
    def run(world):
        source = MemorySource(SAMPLES)
        pool, layout = open_pool(world, tmp_path, source)
        pool.ensure(placement(layout, world, 0))
        good = intact(pool, pool.cache.entries)
        pool.close()
        return len(source.rows_read), good, pool.cache.entries.sample_id.tolist()

    assert run_threads(thread_worlds([2, 2]), run)[0][0] > 0
    again = run_threads(thread_worlds([1, 1]), run)
    assert [read for read, _, _ in again] == [0, 0], "two ranks a node left it for one"
    wider = run_threads(thread_worlds([3]), run)
    assert sum(read for read, _, _ in wider) == SAMPLES // 2, "the other node's half"
    assert all(good for _, good, _ in again + wider)
    assert wider[0][2] == list(range(SAMPLES))


def test_a_row_that_was_damaged_on_disk_is_found_where_it_arrives(tmp_path):
    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        if world.rank == 1:
            pool.cache.files.fixed[0].rows[...] ^= 1
        world.barrier(doing="damage")
        exchange(world, pool, layout, 0)

    with pytest.raises(
        ExchangeError, match=r"\[rank 0\].*from rank 1 do not match.*cache verify. there"
    ):
        run_threads(thread_worlds([1, 1]), run)


def test_a_partner_that_never_sends_is_named(tmp_path):
    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        if world.rank == 0:
            exchange(world, pool, layout, 0)

    with pytest.raises(StallError, match=r"rank 0: waited .* s for rank 1 while exchanging rows"):
        run_threads(thread_worlds([1, 1], timeout_s=2), run)


def test_one_rank_alone_exchanges_nothing(tmp_path):
    pool, layout = open_pool(single_world(), tmp_path)
    pool.ensure(placement(layout, single_world(), 3))
    assert POLICY.num_leaving(layout) == 0
    assert pool.cache.entries.sample_id.tolist() == list(range(SAMPLES))
    pool.close()


def test_the_same_rows_under_another_name_are_read_no_more_and_carry_the_name(tmp_path):
    pool, layout = open_pool(single_world(), tmp_path)
    first = placement(layout, single_world(), 0)
    pool.ensure(first)
    num_read = len(pool.source.rows_read)
    pool.ensure(dataclasses.replace(first, name="another"))
    assert (pool.cache.log.placement, len(pool.source.rows_read)) == ("another", num_read)
    pool.close()


def test_directories_are_private_and_only_files_of_the_cache_are_touched(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "mine.txt").write_text("kept")

    def run(world):
        pool, layout = open_pool(world, tmp_path)
        pool.ensure(placement(layout, world, 0))
        exchange(world, pool, layout, 0)
        commit_arrivals(pool, 1)
        pool.ensure(placement(layout, world, 0))
        pool.close()

    run_threads(thread_worlds([1, 1]), run)
    directories = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(directories) == 3
    assert {oct(path.stat().st_mode & 0o777) for path in directories} == {"0o700"}
    assert (tmp_path / "mine.txt").read_text() == "kept"
