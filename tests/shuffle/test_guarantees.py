"""The guarantees of an exchange, on thread worlds: real pools, files and messages, no MPI."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.layout import Layout
from dataio.policies import Turn
from dataio.pool import Pool
from dataio.rows import corrupt_rows
from dataio.world import run_threads, thread_worlds
from shuffle import Partial
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
