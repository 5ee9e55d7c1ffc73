"""Rows that some node holds come from that node; the source is read only for the others."""

import contextlib
import shutil
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataio.store.pull
from dataio import Loader, Reports, Workers
from dataio.exchange.directory import all_to_all, find_holders
from dataio.plan.layout import Layout
from dataio.plan.policies import Local
from dataio.rows.rows import corrupt_rows
from dataio.store.cache import Cache
from dataio.store.pull import Pull
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from shuffle import Global, Partial
from tests.dataio.loaders import loss_of
from tests.memory_source import FIELDS, MemorySource, placed
from tests.opened import make_pool

SAMPLES = 83


def open_pool(world, root, source, num_slots, *, num_leaving, fields=FIELDS):
    return make_pool(
        source, fields, world=world, root=root, num_slots=num_slots, num_leaving=num_leaving,
    )  # fmt: skip


def whole(pool):
    """Whether every row lies where the manifest says, with its bytes."""
    return not len(corrupt_rows(pool.cache.read_rows(np.arange(len(pool.cache.entries)))))


def make(world, root, source, **options):
    return Loader(
        source, cache=root, world=world, batch_size=4, fields=FIELDS, workers=Workers(threads=0),
        seed=3,
        reports=Reports(progress=False), **options,
    )  # fmt: skip


def lose(root, node):
    for directory in root.glob(f"*/node{node}"):
        shutil.rmtree(directory)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_to_all_hands_every_rank_its_parts(size, monkeypatch):
    monkeypatch.setattr("dataio.exchange.directory.MESSAGE_BYTES", 16)

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
            world.barrier(doing="open before one rewrites")
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
        patch.setattr(dataio.store.pull, "ROUND_BYTES", round_rows * 40)
        patch.setattr(dataio.store.pull, "MESSAGE_BYTES", 80)
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


KAKURENBO = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)


def train(world, root, source, *, epochs, at=None, save=(), until=None, **options):
    """Train; returns each epoch's sample ids in order, and what came from where."""
    seen = {}
    with make(world, root, source, **options) as loader:
        if at is not None:
            loader.restore(at)
        for epoch in loader.epochs(epochs):
            batches = []
            for batch in loader:
                batches.append(batch["sample_id"].tolist())
                loader.report(batch, *loss_of(batch["sample_id"], epoch))
            for batch in loader.refresh():
                loader.report(batch, *loss_of(batch["sample_id"], epoch))
            seen[epoch] = batches
            if epoch in save:
                loader.save(save[epoch])
            if epoch == until:
                break
        stats = loader.stats()
    return seen, list(source.rows_read), stats


def test_a_checkpoint_three_epochs_older_than_the_caches_reads_nothing_from_the_source(tmp_path):
    options = {"shuffle": Partial(0.3), "importance": KAKURENBO, "epochs": 7}

    def first(world):
        save = {1: tmp_path / "saved"}
        return train(world, tmp_path / "a", MemorySource(SAMPLES), save=save, **options)

    def again(world):
        return train(
            world, tmp_path / "a", MemorySource(SAMPLES), at=tmp_path / "saved", until=3, **options
        )

    whole_run = run_threads(thread_worlds([2, 1, 2]), first)
    resumed = run_threads(thread_worlds([2, 1, 2]), again)
    for (expected, _, _), (found, read, _) in zip(whole_run, resumed, strict=True):
        assert read == []
        assert found.keys() >= {2, 3}
        assert all(found[epoch] == expected[epoch] for epoch in (2, 3))
    assert sum(stats["pulled_rows"] for _, _, stats in resumed) > 0
    assert all(stats["peer_bytes"] > 0 for _, _, stats in resumed)


def held_by(world, root, policy):
    """Every sample whose bytes lie on this rank's node."""
    layout = Layout(world.replicas_per_node, SAMPLES)
    pool = open_pool(
        world, root, MemorySource(SAMPLES), layout.pool_rows(world.node),
        num_leaving=policy.num_leaving(layout),
    )  # fmt: skip
    with contextlib.closing(pool):
        return set(pool.cache.log.held().sample_id.tolist())


def test_a_lost_cache_is_rebuilt_from_the_epoch_before_and_the_source(tmp_path):
    options = {"shuffle": Partial(0.3), "epochs": 4}

    def run(world, at=None, save=()):
        source = MemorySource(SAMPLES)
        return train(world, tmp_path / "a", source, at=at, save=save, until=2, **options)

    run_threads(thread_worlds([2, 1, 1]), lambda world: run(world, save={2: tmp_path / "saved"}))
    found = run_threads(
        thread_worlds([2, 1, 1]), lambda world: held_by(world, tmp_path / "a", Partial(0.3))
    )
    lose(tmp_path / "a", 1)
    held = {i for rank, ids in enumerate(found) if rank != 2 for i in ids}
    ended = run_threads(thread_worlds([2, 1, 1]), lambda world: run(world, at=tmp_path / "saved"))
    read = sorted(i for _, rows, _ in ended for i in rows)
    assert read == sorted(set(range(SAMPLES)) - held), "only what no node held"
    assert len(read) < SAMPLES // 4, "rows that left last still lay where they were"


@pytest.mark.parametrize("policy", [Local(), Partial(0.3)])
def test_a_smaller_job_and_back_reads_only_what_the_missing_node_held(tmp_path, policy):
    """Four nodes, then three, then four again, on caches that are left standing."""

    def run(nodes, number, at):
        def rank(world):
            source = MemorySource(SAMPLES)
            seen, read, _ = train(
                world, tmp_path / "a", source, epochs=6, at=at, until=2 * number + 1,
                shuffle=policy, save={2 * number + 1: tmp_path / f"saved{number}"},
            )  # fmt: skip
            return seen, read

        ended = run_threads(thread_worlds(nodes), rank)
        for epoch in range(2 * number, 2 * number + 2):
            ids = [i for seen, _ in ended for batch in seen[epoch] for i in batch if i >= 0]
            assert set(ids) == set(range(SAMPLES)), f"epoch {epoch}"
        return sorted(i for _, read in ended for i in read)

    assert run([1] * 4, 0, None) == list(range(SAMPLES))
    held = run_threads(thread_worlds([1] * 4), lambda world: held_by(world, tmp_path / "a", policy))
    fewer = run([1] * 3, 1, tmp_path / "saved0")
    assert fewer == sorted(held[3] - held[0] - held[1] - held[2])
    assert run([1] * 4, 2, tmp_path / "saved1") == [], "three nodes held all"


@pytest.mark.parametrize("policy", [Local(), Partial(0.3)])
def test_machines_that_are_numbered_anew_find_what_lies_on_their_disks(tmp_path, policy):
    """Of three machines the first is lost: the others are nodes 0 and 1 now."""

    def train(machines):
        source = MemorySource(SAMPLES)

        def run(world):
            world.topology = replace(world.topology, by_host=True)
            root = tmp_path / f"disk of {machines[world.node]}"
            with make(world, root, source, shuffle=policy) as loader:
                return len(list(loader))

        run_threads(thread_worlds([1] * len(machines), timeout_s=30), run)
        return len(set(source.rows_read))

    assert train([0, 1, 2]) == SAMPLES
    lost = train([1, 2])
    assert 0 < lost <= -(-SAMPLES // 3), "what the first machine held"
    assert train([2, 1]) == 0
    assert sorted(path.name for path in tmp_path.glob("disk of 1/*/node*")) == ["node1"]


def test_going_back_and_forth_between_epochs_reads_each_row_from_the_source_once(tmp_path):
    def run(world):
        source = MemorySource(SAMPLES)
        seen: dict[int, list[list[int]]] = {}
        with make(world, tmp_path, source, shuffle=Partial(0.4)) as loader:
            for epoch in (0, 5, 2, 3, 0, 5):
                loader.set_epoch(epoch)
                ids = [batch["sample_id"].tolist() for batch in loader]
                assert seen.setdefault(epoch, ids) == ids, f"epoch {epoch}"
        return source.rows_read

    read = [i for rows in run_threads(thread_worlds([1, 2, 1]), run) for i in rows]
    assert sorted(read) == list(range(SAMPLES))


def test_where_every_node_holds_all_a_lost_cache_comes_from_the_others_by_turns(tmp_path):
    def run(world):
        source = MemorySource(SAMPLES)
        with make(world, tmp_path, source, shuffle=Global()) as loader:
            return source.rows_read, loader.stats()["pulled_rows"]

    # Every node reads all of it at a first start.
    assert sum(len(read) for read, _ in run_threads(thread_worlds([1] * 3), run)) == 3 * SAMPLES
    lose(tmp_path, 1)
    assert run_threads(thread_worlds([1] * 3), run) == [([], 0), ([], SAMPLES), ([], 0)]


def test_a_damaged_row_is_not_pulled_but_read_from_the_source(tmp_path):
    damaged = [2, 30]

    def begin(world):
        pool = open_pool(world, tmp_path, MemorySource(40), 40, num_leaving=0)
        with contextlib.closing(pool):
            pool.ensure(placed(np.arange(40)))
            if world.rank == 0:
                pool.cache.begin_writing()
                pool.cache.load(writable=True)
                pool.cache.files.fixed[0].rows[damaged] ^= 1
                pool.cache.files.fixed[0].sync()

    def again(world):
        source = MemorySource(40)
        pool = open_pool(world, tmp_path, source, 40, num_leaving=0)
        with contextlib.closing(pool):
            pool.ensure(placed(np.arange(40)))
            return source.rows_read, pool.pulled_rows, whole(pool)

    run_threads(thread_worlds([1, 1]), begin)
    lose(tmp_path, 1)
    first, second = run_threads(thread_worlds([1, 1]), again)
    assert first[:2] == ([], 0)
    assert second == (damaged, 38, True)


@pytest.mark.parametrize("lap", range(4))
def test_a_pull_that_is_killed_goes_on_and_reads_nothing_from_the_source(
    tmp_path, monkeypatch, lap
):
    """Two nodes change all their rows for one another's; one falls in between."""
    monkeypatch.setattr(dataio.store.pull, "ROUND_BYTES", 4 * 40)
    rng = np.random.default_rng(lap)
    shuffled = rng.permutation(SAMPLES)
    half = SAMPLES // 2
    seal, calls = Cache.seal_staged, []

    def killed(self, **options):
        seal(self, **options)
        calls.append(self.local_rank)
        if len(calls) == 3 * lap + 2:
            raise SystemExit("killed")

    def run(world, ids):
        mine = ids[:half] if world.node == 0 else ids[half:]
        source = MemorySource(SAMPLES)
        pool = open_pool(world, tmp_path, source, len(mine), num_leaving=2)
        with contextlib.closing(pool):
            pool.ensure(placed(mine))
            found = pool.cache.entries.sample_id.tolist()
            names = [path.name for path in pool.cache.directory.iterdir()]
            world.barrier(doing="look")
            return source.rows_read, found == mine.tolist(), whole(pool), names

    run_threads(thread_worlds([2, 1]), lambda world: run(world, np.arange(SAMPLES)))
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "seal_staged", killed)
        with pytest.raises(SystemExit):
            run_threads(thread_worlds([2, 1]), lambda world: run(world, shuffled))
    for read, right, good, names in run_threads(
        thread_worlds([2, 1]), lambda world: run(world, shuffled)
    ):
        assert (read, right, good) == ([], True, True)
        assert not [name for name in names if name.startswith(("surplus", "given", "staged"))]


def test_no_rank_looks_for_room_before_all_of_its_node_have_let_go(tmp_path, monkeypatch):
    """Else two ranks of a node see different room, and take the same positions."""
    monkeypatch.setattr(dataio.store.pull, "ROUND_BYTES", 2 * 40)
    let_go, room, early = Pull._let_go, Cache.free_room, []
    done: Counter[tuple[str, int]] = Counter()
    last = threading.Event()

    def letting_go(self):
        if self._world.local_rank:
            # The other rank is let past first, should anything let it past.
            last.wait(0.02)
        let_go(self)
        done[self._cache.directory.name, self._world.local_rank] += 1

    def looking(self):
        mine, other = (done[self.directory.name, r] for r in (self.local_rank, 1 - self.local_rank))
        early.extend([(mine, other)] * (mine > other))
        return room(self)

    def run(world, ids):
        mine = ids[:40] if world.node == 0 else ids[40:]
        pool = open_pool(world, tmp_path, MemorySource(80), len(mine), num_leaving=2)
        with contextlib.closing(pool):
            pool.ensure(placed(mine))

    run_threads(thread_worlds([2, 2]), lambda world: run(world, np.arange(80)))
    monkeypatch.setattr(Pull, "_let_go", letting_go)
    monkeypatch.setattr(Cache, "free_room", looking)
    run_threads(thread_worlds([2, 2]), lambda world: run(world, np.arange(80)[::-1].copy()))
    assert min(done.values()) > 2, "several rounds"
    assert early == []
