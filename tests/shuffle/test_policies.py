"""Partial shuffling, and the global shuffle by moving rows: on real pools, no MPI."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.layout import Layout
from dataio.world import run_threads, thread_worlds
from shuffle import Global, Partial
from shuffle.homes import deal, plan_moves
from tests.memory_source import MemorySource
from tests.shuffle.epochs import check_epochs, open_loader, run_epochs, train_epoch

LAYOUTS = [(2, 2), (4, 3, 1), (1,), (3, 2, 2), (1, 1), (5, 1), (1, 1, 1)]
POLICIES = [
    Global(moves=True),
    Partial(0.3),
    Partial(1.0),
]


def shm():
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


HIDDEN = 0.4
"""Of a node's rows, which policies by hidden rows send first."""


def room(loader):
    """Positions of a node's cache, and those of them that are free."""
    cache = loader._session.pool.cache
    (fixed,) = cache.directory.glob("fixed-0.npy")
    return len(np.load(fixed, mmap_mode="r")), len(cache.log.space.positions)


def run(policy, replicas, *, num_samples, epochs, seed):
    with tempfile.TemporaryDirectory(dir=shm()) as root:
        return run_threads(
            thread_worlds(list(replicas), timeout_s=20),
            lambda world: run_epochs(
                world, Path(root), policy, MemorySource(num_samples), epochs=epochs + 1, seed=seed,
                hidden_fraction=HIDDEN, look=room,
            ),
        )  # fmt: skip


@given(
    st.sampled_from(POLICIES),
    st.sampled_from(LAYOUTS),
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_sample_is_owned_once_with_its_own_bytes_and_score(
    policy, replicas, extra, epochs, seed
):
    num_samples = sum(replicas) + extra
    histories = run(policy, replicas, num_samples=num_samples, epochs=epochs, seed=seed)
    check_epochs(histories, replicas, num_samples=num_samples, hidden_fraction=HIDDEN)


@pytest.mark.parametrize("replicas", [(2, 2), (3, 2, 2), (5, 1)])
def test_a_moving_global_shuffle_is_where_it_is_traced_after_twenty_epochs(replicas):
    histories = run(Global(moves=True), replicas, num_samples=150, epochs=20, seed=1)
    check_epochs(histories, replicas, num_samples=150, hidden_fraction=HIDDEN)
    for history in histories:
        assert history[20]["ids"] == history[20]["traced"]
        assert history[20]["ids"] != history[19]["ids"]
        (positions, free), pool = history[20]["seen"], len(history[20]["ids"])
        assert positions <= 3 * pool + 2 * max(replicas)
        assert free >= positions - 2 * pool, "what left is given back"


@pytest.mark.parametrize(("replicas", "told"), [((5, 1), 1), ((3, 3), 0), ((4, 3, 1), 0)])
def test_an_exchange_that_partly_stays_inside_a_node_says_so_once(replicas, told, caplog):
    run(Partial(0.3), replicas, num_samples=120, epochs=3, seed=0)
    found = [record.message for record in caplog.records if "in effect" in record.message]
    assert len(found) == told
    # Of 30 ordered pairs of replicas 20 stand on one node: 0.3 x 10 / 30
    assert all("one node holds 5 of 6 replicas, so 67 %" in text for text in found)
    assert all("in effect the exchange is 0.1:" in text for text in found)


def test_rows_that_stay_on_their_node_do_not_travel():
    num_samples = 400
    histories = run(Global(moves=True), (2, 2), num_samples=num_samples, epochs=3, seed=0)
    for epoch in range(3):
        nodes = [set(histories[rank][epoch]["ids"]) for rank in (0, 2)]
        then = [set(histories[rank][epoch + 1]["ids"]) for rank in (0, 2)]
        crossed = len(nodes[0] & then[1]) + len(nodes[1] & then[0])
        sent = [h[epoch + 1]["exchanged"] - h[epoch]["exchanged"] for h in histories]
        assert sum(sent) == crossed
        # Half of the samples, as two nodes have it: 400 fair coins fall within 60 of 200.
        assert abs(crossed - 200) < 60


def test_a_global_shuffle_reaches_every_node_alike():
    layout = Layout((1, 1, 1, 1), 8000)
    slots = deal(layout, seed=5, epoch=1).samples(np.arange(2000))
    counts = np.bincount(slots // 2000, minlength=4)
    assert counts.sum() == 2000
    assert np.all(np.abs(counts - 500) < 100), counts


@given(st.sampled_from(LAYOUTS[:2] + LAYOUTS[3:]), st.integers(0, 90), st.integers(0, 9))
def test_sender_and_receiver_plan_the_same_rows_in_the_same_order(replicas, extra, epoch):
    layout = Layout(replicas, sum(replicas) + extra)
    before, after = (deal(layout, seed=3, epoch=e) for e in (epoch, epoch + 1))
    plans = [plan_moves(layout, r, before=before, after=after) for r in range(sum(replicas))]
    starts = [layout.pool_start(layout.node_of(r)) for r in range(sum(replicas))]
    for giver, gives in enumerate(plans):
        for taker, takes in enumerate(plans):
            left = gives.leaving[gives.receivers == taker] + starts[giver]
            came = takes.arriving[takes.senders == giver] + starts[taker]
            assert before.samples(left).tolist() == after.samples(came).tolist()
            if layout.node_of(giver) == layout.node_of(taker):
                assert len(left) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_moves_on_one_node(policy):
    layout = Layout((3,), 40)
    assert policy.num_leaving(layout) == 0
    assert policy.placement(layout, node=0, epoch=3, seed=0).tolist() == list(range(40))


@pytest.mark.parametrize("policy", [Global(moves=True), Partial(0.5)])
def test_a_pool_steps_back_one_epoch_after_a_kill(tmp_path, policy):
    """As after a kill between two nodes' commits; then it goes on over what became free again."""
    replicas, num_samples, epochs = (2, 2), 120, 6

    def session(world):
        source = MemorySource(num_samples)
        loader, watching = open_loader(
            world, tmp_path / "cache", policy, source, seed=0, hidden_fraction=HIDDEN
        )
        began, trained = {}, {}
        with loader:
            for epoch in loader.epochs(epochs):
                began[epoch] = watching.shown[epoch]
                if epoch == 2:
                    loader.save(tmp_path / "saved")
                if epoch == 3:
                    break
                trained[epoch] = train_epoch(loader, source)
            source.rows_read.clear()
            assert loader._session.pool.cache.log.epoch == 3
            loader.restore(tmp_path / "saved")
            assert loader._session.pool.cache.log.epoch == 2, "one epoch back"
            again = {}
            for epoch in loader.epochs(epochs):
                again[epoch] = train_epoch(loader, source)
            return {
                "read": source.rows_read,
                "same_batches": again[2] == trained[2],
                "same_rows": watching.shown[3] == began[3],
                "wrong": [i for found in again.values() for i in found["wrong"]],
                "ids": watching.shown[epochs - 1][0],
            }

    results = run_threads(thread_worlds(list(replicas), timeout_s=20), session)
    for found in results:
        assert found["read"] == found["wrong"] == []
        assert found["same_batches"]
        assert found["same_rows"]
    assert sorted(results[0]["ids"] + results[2]["ids"]) == list(range(num_samples))


def test_another_layout_begins_with_rows_where_a_first_layout_puts_them():
    layout, homes = Layout((2, 1), 60), np.arange(60)
    assert deal(layout, seed=1, epoch=5, first_epoch=5).samples(homes).tolist() == homes.tolist()
    assert deal(layout, seed=1, epoch=6, first_epoch=5).samples(homes).tolist() != homes.tolist()
