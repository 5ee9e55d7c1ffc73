"""What shuffles, pulls, quotas and staging do together: the same batches, and rows from peers."""

from collections import Counter

import numpy as np
import pytest

import dataio.state.snapshot
from dataio import Loader, NodeCache, Reports, Staging, Workers
from dataio.world import World, run_threads, thread_worlds
from importance import Kakurenbo
from shuffle import Global, Partial
from tests.cases import diagonal
from tests.dataio.loaders import loss_of
from tests.dataio.store.test_pull import KAKURENBO, SAMPLES, held_by, lose, train
from tests.dataio.store.test_quota import KINDS, LargeShards
from tests.memory_source import FIELDS, MemorySource

pytestmark = pytest.mark.thorough

SHUFFLES = [
    Partial(0.3),
    Global(moves=True),
]
NODES = [2, 1, 2]


def on_all(nodes, function):
    return run_threads(thread_worlds(nodes, timeout_s=20), function)


def run(root, policy, *, source=MemorySource, **options):
    """A function of the world that trains, hiding rows."""

    def on_rank(world):
        return train(
            world, root, source(SAMPLES), shuffle=policy, importance=KAKURENBO, **options
        )  # fmt: skip

    return on_rank


@pytest.mark.parametrize("policy", SHUFFLES)
def test_a_save_three_epochs_older_than_the_caches_needs_its_peers_and_no_source(tmp_path, policy):
    save = {2: tmp_path / "saved"}
    whole = on_all(NODES, run(tmp_path / "a", policy, epochs=6, save=save))
    rest = on_all(NODES, run(tmp_path / "a", policy, epochs=6, at=tmp_path / "saved"))
    for (expected, _, _), (found, read, stats) in zip(whole, rest, strict=True):
        assert read == []
        assert [found[epoch] for epoch in (3, 4, 5)] == [expected[epoch] for epoch in (3, 4, 5)]
        assert stats["peer_bytes"] > 0
    assert sum(stats["pulled_rows"] for _, _, stats in rest) > 0


@diagonal(policy=SHUFFLES, late=[False, True])
def test_a_lost_cache_costs_the_source_what_no_other_node_held(tmp_path, policy, late):
    """The save is of the last epoch, or of one that lies three before what the caches hold."""
    epoch = 2 if late else 5
    save = {epoch: tmp_path / "saved"}
    whole = on_all(NODES, run(tmp_path / "a", policy, epochs=7, save=save, until=5))
    held = on_all(NODES, lambda world: held_by(world, tmp_path / "a", policy))
    lose(tmp_path / "a", 1)
    rest = on_all(NODES, run(tmp_path / "a", policy, epochs=7, at=tmp_path / "saved"))
    elsewhere = held[0] | held[3]
    read = [i for _, rows, _ in rest for i in rows]
    assert sorted(read) == sorted(set(range(SAMPLES)) - elsewhere)
    for (expected, _, _), (found, _, _) in zip(whole, rest, strict=True):
        both = expected.keys() & found.keys() - {epoch}
        assert len(both) == 5 - epoch
        assert all(found[epoch] == expected[epoch] for epoch in both)


@pytest.mark.parametrize("policy", SHUFFLES)
def test_a_cache_lost_under_overlapped_staging_comes_from_peers_in_the_same_order(tmp_path, policy):
    """Rows that peers hold are there before the first group is."""
    options = {"epochs": 3, "staging": Staging(when="overlap")}
    whole = on_all(NODES, run(tmp_path / "a", policy, **options))
    held = on_all(NODES, lambda world: held_by(world, tmp_path / "a", policy))
    lose(tmp_path / "a", 2)
    again = on_all(NODES, run(tmp_path / "a", policy, **options))
    assert [seen for seen, _, _ in again] == [seen for seen, _, _ in whole]
    read = sorted(i for _, rows, _ in again for i in rows)
    assert read == sorted(set(range(SAMPLES)) - held[0] - held[2])


@diagonal(kind=KINDS, quota=[800_000, 4_000_000])
def test_a_pull_under_a_quota_changes_no_batch(tmp_path, kind, quota):
    """A cache is lost, and the others are two epochs ahead; with room for arrivals and without."""

    def on_rank(world, root, *, at=None, quota=quota):
        seen: dict[int, list[list[object]]] = {}
        source = LargeShards()
        with Loader(
            source, cache=NodeCache(tmp_path / root, quota=quota), world=world, batch_size=6,
            fields=KINDS[kind], seed=3,
            workers=Workers(threads=0), shuffle=Partial(0.2), importance=KAKURENBO,
            reports=Reports(progress=False),
        ) as loader:  # fmt: skip
            if at is not None:
                loader.restore(at)
            for epoch in loader.epochs(5):
                seen[epoch] = []
                for batch in loader:
                    seen[epoch].append([batch["sample_id"].tolist(), repr(batch.get("data"))])
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                for batch in loader.refresh():
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                if epoch == 1 and at is None:
                    loader.save(tmp_path / "saved")
            return seen, loader.stats()["pulled_rows"], source.rows_read

    plain = on_all([2, 1], lambda world: on_rank(world, "plain", quota=None))
    whole = on_all([2, 1], lambda world: on_rank(world, "a"))
    lose(tmp_path / "a", 1)
    rest = on_all([2, 1], lambda world: on_rank(world, "a", at=tmp_path / "saved"))
    for (expected, *_), (without, *_), (found, *_) in zip(whole, plain, rest, strict=True):
        assert expected == without
        assert [found[epoch] for epoch in (2, 3, 4)] == [expected[epoch] for epoch in (2, 3, 4)]
    if quota > 2_000_000:
        # Which rows stay under the other is a matter of time: perhaps none that is wanted elsewhere
        assert sum(pulled for _, pulled, _ in rest) > 0


KEEPS = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)


@pytest.mark.parametrize("policy", SHUFFLES)
def test_scores_stay_with_their_samples_over_epochs_and_resizes(tmp_path, policy):
    """Every row's loss names its sample and epoch, whoever reported it."""

    def leg(number, at):
        def on_rank(world):
            wrong = []
            with Loader(
                MemorySource(SAMPLES), cache=tmp_path / "a", world=world, batch_size=4,
                fields=FIELDS, seed=3, workers=Workers(threads=0), shuffle=policy, importance=KEEPS,
                reports=Reports(progress=False),
            ) as loader:  # fmt: skip
                if at is not None:
                    loader.restore(at)
                for epoch in loader.epochs(9):
                    scores = loader._session.pool.scores
                    known = np.isfinite(scores["loss"])
                    held = np.array(loader._session.pool.sample_ids)
                    wrong += held[known][scores["loss"][known] != held[known]].tolist()
                    wrong += held[~known].tolist() if epoch else []
                    world.barrier(doing="look")
                    for pass_ in (loader, loader.refresh()):
                        for batch in pass_:
                            ids = batch["sample_id"]
                            loader.report(batch, ids.float(), ids % 2 == 0, ids * 0 + 0.9)
                    if epoch == 3 * number + 2:
                        loader.save(tmp_path / f"saved{number}")
                        return wrong, tmp_path / f"saved{number}"
                raise AssertionError("the last leg ends in its last epoch")

        return on_rank

    at = None
    for number, nodes in enumerate(([1, 1, 1], [2, 1], [1, 2, 2])):
        ends = on_all(nodes, leg(number, at))
        at = ends[0][1]
        for wrong, _ in ends:
            assert wrong == []


@pytest.mark.parametrize(("before", "after"), [([1] * 5, [2, 1]), ([2, 1], [1] * 5)])
def test_a_resize_reads_each_saved_file_once(tmp_path, monkeypatch, before, after):
    read: Counter[int] = Counter()
    original = dataio.state.snapshot._read_rows

    def counted(path, node, dtype):
        read[node] += 1
        return original(path, node, dtype)

    options = {"epochs": 4, "save": {1: tmp_path / "saved"}, "until": 1}
    on_all(before, run(tmp_path / "a", Partial(0.3), **options))
    monkeypatch.setattr(dataio.state.snapshot, "_read_rows", counted)
    on_all(after, run(tmp_path / "a", Partial(0.3), epochs=4, at=tmp_path / "saved", until=2))
    assert read == Counter(range(len(before)))


@pytest.mark.parametrize("policy", SHUFFLES)
def test_starts_that_miss_nothing_send_no_row_and_ask_for_none(tmp_path, monkeypatch, policy):
    sent = []
    original = World.isend

    def counted(self, data, *, dest, tag):
        sent.append(tag)
        return original(self, data, dest=dest, tag=tag)

    monkeypatch.setattr(World, "isend", counted)
    for epochs, expected in ((1, SAMPLES), (1, 0)):  # the last epoch exchanges nothing
        ends = on_all(NODES, run(tmp_path, policy, epochs=epochs))
        assert sum(len(read) for _, read, _ in ends) == expected
        assert sent == [], "all that ranks say at a start goes by collectives"


@diagonal(policy=[Partial(1.0), Global(moves=True)], nodes=[[1, 3], [2, 1, 1]])
def test_a_node_of_one_row_is_staged_beside_training_as_the_larger_ones_are(
    tmp_path, policy, nodes
):
    def on_rank(world):
        with Loader(
            MemorySource(sum(nodes)), cache=tmp_path, world=world, batch_size=1, fields=FIELDS,
            workers=Workers(threads=0), staging=Staging(when="overlap"), shuffle=policy,
            reports=Reports(progress=False),
        ) as loader:  # fmt: skip
            return [[batch["sample_id"].item() for batch in loader] for _ in loader.epochs(3)]

    ends = on_all(nodes, on_rank)
    for epoch in range(3):
        assert sorted(i for rank in ends for i in rank[epoch]) == list(range(sum(nodes)))
