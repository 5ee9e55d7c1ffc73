"""Rows that some node holds come from that node; the source is read only for the others."""

import contextlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataio.pull
from dataio import Loader
from dataio.cache import Cache
from dataio.directory import all_to_all, find_holders
from dataio.layout import Layout
from dataio.policies import Local
from dataio.pool import Pool
from dataio.rows import corrupt_rows
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from shuffle import Global, Partial
from tests.dataio.test_loader import loss_of
from tests.memory_source import FIELDS, MemorySource, placed, placement_of

SAMPLES = 83


def open_pool(world, root, source, num_slots, *, num_leaving, fields=FIELDS):
    return Pool(
        source, fields, world=world, root=root, num_slots=num_slots, num_leaving=num_leaving,
        progress=False,
    )  # fmt: skip


def whole(pool):
    """Whether every row lies where the manifest says, with its bytes."""
    return not len(corrupt_rows(pool.cache.read_rows(np.arange(len(pool.cache.entries)))))


def make(world, root, source, **options):
    given = {"batch_size": 4, "num_threads": 0, "seed": 3, "progress": False, "fields": FIELDS}
    return Loader(source, cache=root, world=world, **(given | options))


def lose(root, node):
    for directory in root.glob(f"*/node{node}"):
        shutil.rmtree(directory)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_to_all_hands_every_rank_its_parts(size, monkeypatch):
    monkeypatch.setattr("dataio.directory.MESSAGE_BYTES", 16)

    def run(world):
        parts = [np.arange(3 * world.rank + peer) + 100 * peer for peer in range(size)]
        return all_to_all(world, parts, tag=0, doing="try")

    for rank, parts in enumerate(run_threads(thread_worlds([1] * size), run)):
        for peer, part in enumerate(parts):
            assert part.tolist() == (np.arange(3 * peer + rank) + 100 * rank).tolist()


def test_a_holder_whose_row_stays_is_chosen_and_others_take_turns():
    held = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5), (), (9,))
    stays = ((False,) * 6, (True, True, False, False, False, False), (), (True,))

    def run(world):
        missing = np.array([5, 0, 7, 4, 1, 2, 3] if world.rank == 2 else [], np.int64)
        return find_holders(
            world, held=np.array(held[world.rank], np.int64),
            stays=np.array(stays[world.rank], np.bool_), missing=missing, num_samples=10, tag=5,
        ).tolist()  # fmt: skip

    found = run_threads(thread_worlds([1] * 4), run)[2]
    assert [found[1], found[4], found[2]] == [1, 1, -1], "0, 1 where they stay; nobody has 7"
    assert sorted({found[0], found[3], found[5], found[6]}) == [0, 1], "2 to 5 by turns"


@st.composite
def lost_rows(draw):
    replicas = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    num_samples = draw(st.integers(sum(replicas), 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    leaving = draw(st.sampled_from([0.0, 0.1, 0.5]))
    lost = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4))
    return replicas, num_samples, rng.permutation(num_samples), rng, leaving, lost


@given(lost_rows(), st.sampled_from([1, 3, 1000]))
@settings(max_examples=25)
def test_every_node_gets_its_placement_and_the_source_is_read_for_what_nobody_held(
    tmp_path_factory, case, round_rows
):
    replicas, num_samples, shuffled, rng, fraction, lost = case
    root = tmp_path_factory.mktemp("pull")
    layout = Layout(tuple(replicas), num_samples)
    starts = [layout.pool_start(node) for node in range(layout.num_nodes + 1)]
    keep = rng.random(num_samples)
    rows_leaving = int(fraction * (num_samples // layout.num_replicas))

    def run(world, ids, lose=False):
        mine = ids[starts[world.node] : starts[world.node + 1]]
        source = MemorySource(num_samples)
        pool = open_pool(world, root, source, len(mine), num_leaving=rows_leaving)
        with contextlib.closing(pool):
            if not lose:
                pool.ensure(placed(mine))
            elif world.local_rank == 0:
                gone = np.flatnonzero(keep[mine] < lost[world.node])
                pool.cache.begin_writing()
                entries = pool.cache.entries.copy()
                entries.forget(gone)
                pool.cache.rewrite(entries, epoch=0, placement="holes")
            return (
                pool.cache.entries.sample_id.tolist(),
                mine.tolist(),
                whole(pool),
                source.rows_read,
                pool.pulled_rows,
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataio.pull, "ROUND_BYTES", round_rows * 40)
        patch.setattr(dataio.pull, "MESSAGE_BYTES", 80)
        worlds = thread_worlds(replicas)
        run_threads(worlds, lambda world: run(world, np.arange(num_samples)))
        run_threads(worlds, lambda world: run(world, np.arange(num_samples), lose=True))
        ended = run_threads(worlds, lambda world: run(world, shuffled))
    read = sorted(i for rank in ended for i in rank[3])
    nowhere = [
        i for i in range(num_samples)
        if keep[i] < lost[int(np.searchsorted(starts, i, side="right")) - 1]
    ]  # fmt: skip
    assert all(ids == wanted for ids, wanted, *_ in ended)
    assert all(good for _, _, good, *_ in ended)
    moved = 0
    for node in range(layout.num_nodes):
        wanted = set(shuffled[starts[node] : starts[node + 1]].tolist())
        moved += len(wanted - set(range(starts[node], starts[node + 1])) - set(nowhere))
    if rows_leaving:
        assert read == nowhere, "the source is read for rows that nobody held, once"
        assert sum(rank[4] for rank in ended) == moved, "every row moves once"
    else:
        # Without spare positions, nodes that wait for one another in a circle read the source.
        assert set(nowhere) <= set(read)
        assert len(read) == len(set(read)) == len(nowhere) + moved - sum(r[4] for r in ended)
