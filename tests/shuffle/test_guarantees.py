"""The guarantees of an exchange, on thread worlds: real pools, files and messages, no MPI."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.fields import row_schema
from dataio.layout import Layout
from dataio.policies import Turn
from dataio.pool import Pool
from dataio.rows import corrupt_rows, make_rows
from dataio.world import run_threads, thread_worlds
from shuffle import Partial
from shuffle.plan import num_leaving
from shuffle.schedule import plan_legs
from tests.memory_source import FIELDS, MemorySource, payload, placement_of

LAYOUTS = [(2, 2), (4, 3, 1), (1,), (3, 2, 2), (1, 1), (5, 1), (1, 1, 1)]


def run_epochs(world, root, *, num_samples, exchange, epochs, seed):
    """What the loader does at each turn, without batches; what every epoch looked like."""
    policy = Partial(exchange)
    layout = Layout(world.replicas_per_node, num_samples)
    leaving = policy.num_leaving(layout)
    pool = Pool(
        MemorySource(num_samples),
        FIELDS,
        world=world,
        root=root,
        num_slots=layout.pool_rows(world.node),
        num_leaving=leaving,
        progress=False,
        columns=("loss",),
    )
    pool.ensure(placement_of(policy, layout, node=world.node, epoch=0, seed=seed))
    share = slice(*layout.share_slots(world.replica))
    history = []
    for epoch in range(epochs + 1):
        ids = pool.cache.entries.sample_id
        rows = pool.cache.read_rows(np.arange(len(ids))[share])
        # A score that names its sample and epoch: it must be found with the same sample afterwards.
        pool.scores["loss"][share] = ids[share]
        history.append(
            {
                "ids": ids[share].tolist(),
                "corrupt": len(corrupt_rows(rows)),
                "data": [payload(int(i)) for i in rows.sample_id],
                "read": [
                    rows.variable[0][stop - length : stop].tobytes()
                    for length, stop in zip(
                        rows.lengths[:, 0].tolist(),
                        np.cumsum(rows.lengths[:, 0]).tolist(),
                        strict=True,
                    )
                ],
                "traced": policy.placement(layout, node=world.node, epoch=epoch, seed=seed)[
                    share
                ].tolist(),
            }
        )
        world.barrier(doing="score")
        if epoch == epochs or not leaving:
            continue
        steps = range(7)
        running = policy.begin(Turn(world, pool.cache, layout, epoch, seed, steps, 20, 0))
        assert running is not None
        for step in steps:
            running.progress(step)
        history[-1]["figures"] = running.finish(pool.scores)
        pool.commit(epoch + 1)
        history[-1]["scores_after"] = pool.scores["loss"][share].tolist()
    pool.close()
    return history, leaving


@given(
    st.sampled_from(LAYOUTS),
    st.integers(0, 60),
    st.sampled_from([0, 0.05, 0.1, 0.3, 0.7, 1.0]),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_sample_is_owned_once_with_its_own_bytes_and_score(
    replicas, extra, exchange, epochs, seed
):
    num_samples = sum(replicas) + extra
    worlds = thread_worlds(list(replicas), timeout_s=20)
    with tempfile.TemporaryDirectory(dir=shm()) as root:
        results = run_threads(
            worlds,
            lambda world: run_epochs(
                world,
                Path(root),
                num_samples=num_samples,
                exchange=exchange,
                epochs=epochs,
                seed=seed,
            ),
        )
    histories = [history for history, _ in results]
    assert len({leaving for _, leaving in results}) == 1, "k is equal on all replicas"
    leaving = results[0][1]
    for epoch in range(epochs + 1):
        now = [history[epoch] for history in histories]
        owned = [sample for rank in now for sample in rank["ids"]]
        assert sorted(owned) == list(range(num_samples))
        assert [len(rank["ids"]) for rank in now] == [len(h[0]["ids"]) for h in histories]
        for rank in now:
            assert rank["corrupt"] == 0
            assert rank["read"] == rank["data"]
            assert rank["traced"] == rank["ids"], "trace says what happened"
        if leaving and epoch < epochs:
            assert {rank["figures"]["rows"] for rank in now} == {leaving}
            for history, rank in zip(histories, now, strict=True):
                assert rank["scores_after"] == history[epoch + 1]["ids"]


def shm():
    """Memory, where there is one: these tests write many small files durably."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def test_storage_stays_within_one_plus_two_q(tmp_path):
    num_samples, exchange = 400, 0.3
    run_threads(
        thread_worlds([2, 2]),
        lambda world: run_epochs(
            world, tmp_path, num_samples=num_samples, exchange=exchange, epochs=6, seed=1
        ),
    )
    for file in tmp_path.rglob("fixed-0.npy"):
        rows = len(np.load(file, mmap_mode="r"))
        assert rows <= (1 + 2 * exchange) * (num_samples / 2)
    assert len(list(tmp_path.rglob("fixed-0.npy"))) == 2


@pytest.mark.parametrize("epochs", [20])
def test_long_runs_rewrite_their_manifest_and_leave_nothing_behind(tmp_path, epochs):
    run_threads(
        thread_worlds([1, 1]),
        lambda world: run_epochs(
            world, tmp_path, num_samples=40, exchange=0.2, epochs=epochs, seed=0
        ),
    )
    for node in tmp_path.rglob("node*"):
        names = [path.name for path in node.iterdir()]
        assert sum(name.startswith("base-") for name in names) == 1
        assert not [name for name in names if name.endswith(".partial")]
        assert sum(name.startswith("delta-") for name in names) <= 17


class UnevenSource(MemorySource):
    """Samples whose bytes are many and differ: from 0.2 to 8 KiB."""

    @staticmethod
    def length(sample_id):
        return 200 + 97 * sample_id * (sample_id + 5) % 7993

    def read(self, sample_ids, fields):
        for first in range(0, len(sample_ids), 64):
            ids = np.asarray(sample_ids[first : first + 64], np.int64)
            lengths = np.array([[self.length(i)] for i in ids.tolist()], np.int64)
            labels = (ids % 10).astype("<i8").view(np.uint8).reshape(len(ids), 8)
            data = np.repeat(ids % 251, lengths[:, 0]).astype(np.uint8)
            yield make_rows(row_schema(fields), ids, [labels], lengths, [data])


def exchange_epochs(world, root, source, *, exchange, epochs, look):
    """Exchange for some epochs, and what ``look`` sees of a node's pool after each commit."""
    policy, layout = Partial(exchange), Layout(world.replicas_per_node, source.num_samples)
    pool = Pool(
        source,
        FIELDS,
        world=world,
        root=root,
        num_slots=layout.pool_rows(world.node),
        num_leaving=policy.num_leaving(layout),
        progress=False,
        columns=("loss",),
    )
    pool.ensure(placement_of(policy, layout, node=world.node, epoch=0, seed=7))
    seen = []
    for epoch in range(epochs):
        mean_bytes = 4000 if isinstance(source, UnevenSource) else 20
        running = policy.begin(Turn(world, pool.cache, layout, epoch, 7, range(4), mean_bytes, 0))
        assert running is not None
        for step in range(4):
            running.progress(step)
        running.finish(pool.scores)
        pool.commit(epoch + 1)
        world.barrier(doing="look")
        seen.append(look(world, pool, layout, epoch + 1) if world.local_rank == 0 else None)
        world.barrier(doing="go on")
    pool.close()
    return [found for found in seen if found is not None]


def allocated_bytes(directory, pattern):
    """What files take up on the disk, holes and blocks begun counted as the disk does."""
    return sum(512 * path.stat().st_blocks for path in directory.glob(pattern))


def space(world, pool, layout, epoch):
    """Bytes of a node's heaps and of its fixed arrays on disk, and of its rows' varying part."""
    lengths, directory = pool.cache.lengths(np.arange(layout.pool_rows(world.node))), pool.cache
    heap = allocated_bytes(directory.directory, "heap-*.bin")
    return heap, allocated_bytes(directory.directory, "fixed-0.npy"), int(lengths.sum())


@pytest.mark.parametrize("exchange", [0.1, 0.3])
def test_disk_space_stays_within_one_plus_two_q_over_fifty_epochs(exchange):
    layout = Layout((2, 1, 2), 800)
    with tempfile.TemporaryDirectory(dir=shm()) as root:
        nodes = run_threads(
            thread_worlds([2, 1, 2], timeout_s=60),
            lambda world: exchange_epochs(
                world, Path(root), UnevenSource(800), exchange=exchange, epochs=50, look=space
            ),
        )
    for node, seen in enumerate(filter(None, nodes)):
        assert len(seen) == 50
        largest_heap, largest_fixed, payload_bytes = np.max(seen, axis=0)
        # A fragmented heap takes up to a quarter more, an eighth of which it has grown ahead
        assert payload_bytes < largest_heap <= 1.25 * (1 + 2 * exchange) * payload_bytes
        # 8 bytes a row, a header and the rest of a page
        rows = layout.pool_rows(node)
        assert 8 * rows < largest_fixed <= 8 * rows * (1 + 2 * exchange) + 2 * 4096


def traced(world, pool, layout, epoch):
    """What a node's pool holds, and what the trace says."""
    expected = Partial(0.3).placement(layout, node=world.node, epoch=epoch, seed=7)
    return pool.cache.entries.sample_id.tolist(), expected.tolist()


@pytest.mark.parametrize("replicas", [(3, 1, 2), (5, 1), (1, 4, 1, 1), (1, 1, 1)])
def test_the_trace_says_what_caches_hold_after_each_of_twenty_epochs(tmp_path, replicas):
    num_samples = 29 * sum(replicas) + 3
    nodes = run_threads(
        thread_worlds(list(replicas), timeout_s=60),
        lambda world: exchange_epochs(
            world, tmp_path, MemorySource(num_samples), exchange=0.3, epochs=20, look=traced
        ),
    )
    nodes = [seen for seen in nodes if seen]
    assert [len(seen) for seen in nodes] == [20] * len(replicas)
    for epoch in range(20):
        held = [seen[epoch][0] for seen in nodes]
        assert held == [seen[epoch][1] for seen in nodes]
        assert sorted(sample for pool in held for sample in pool) == list(range(num_samples))
    assert nodes[0][0][0] != nodes[0][-1][0], "rows moved"


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=6),
    st.integers(0, 500),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.integers(0, 50),
)
def test_messages_balance_and_leave_the_node_on_uneven_layouts(widths, extra, exchange, epoch):
    layout = Layout(tuple(widths), 20 * sum(widths) + extra)
    leaving, received = num_leaving(layout, exchange), np.zeros(layout.num_replicas, int)
    for replica in range(layout.num_replicas):
        legs = plan_legs(
            layout, replica=replica, num_leaving=leaving, seed=1, epoch=epoch, steps=range(9),
            mean_row_bytes=10**7, first_tag=0,
        )  # fmt: skip
        assert sum(leg.stop - leg.start for leg in legs) == leaving
        for leg in legs:
            received[leg.dest] += leg.stop - leg.start
            if 2 * max(widths) <= layout.num_replicas:
                assert layout.node_of(leg.dest) != layout.node_of(replica)
                assert layout.node_of(leg.source) != layout.node_of(replica)
            assert replica not in (leg.dest, leg.source)
    assert set(received.tolist()) == {leaving}
