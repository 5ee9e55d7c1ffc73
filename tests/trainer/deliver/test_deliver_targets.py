"""A last stage that reads its own targets sees the rows that it would have been sent."""

import math

import pytest

import shuffle
from dataio import Loader, Reports, Workers
from dataio.base.errors import WorldError
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from tests.memory_source import FIELDS, MemorySource, payload
from tests.trainer.mesh.meshes import NUM_SAMPLES, merged, run_mesh, score
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.errors import ConfigError, DeliveryError
from tonari.trainer.mesh.place import Targets, feed_of, last_stage_reads, place_of

KAKURENBO = Kakurenbo(0.4, drops=(), alphas=(1.0,), warmup_epochs=0)
MESHES: dict[str, tuple[tuple[int, int, int], tuple[int, ...]]] = {
    "pp2": ((2, 1, 1), (1, 1)),
    "pp2tp2": ((2, 1, 2), (2, 2)),
    "pp2dp2 two nodes": ((2, 2, 1), (2, 2)),
    "pp4": ((4, 1, 1), (2, 2)),
}  # fmt: skip
"""Ranks along pp, dp and tp, and on each node."""

TARGETS = ("label", "sample_id", "slot", "weight")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_mesh(tmp_path_factory.mktemp("one"), (1, 1, 1), importance=KAKURENBO)[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_weights_and_hidden_sets_are_those_of_one_process(tmp_path, one, mesh):
    sizes, nodes = MESHES[mesh]
    runs = run_mesh(tmp_path, sizes, nodes=nodes, importance=KAKURENBO, targets_by="read")
    assert merged(runs) == merged([one])
    assert any(kind == "refresh" for _, kind, *_ in one.steps)
    for run in runs:
        scorer = runs[run.place.scorer]
        assert run.steps == (scorer.steps if run.place.has_target else [])
        assert run.last_step == one.last_step
    readers = [run for run in runs if run.place.reads]
    if len(readers) == 1:
        assert readers[0].losses == one.losses
    assert all(set(run.losses) == {None} for run in runs if not run.place.reads)


def test_replicas_of_several_nodes_exchange_rows_as_when_targets_are_sent(tmp_path):
    sent, read = (
        run_mesh(
            tmp_path / targets_by, (2, 2, 1), nodes=(1, 1, 1, 1), importance=KAKURENBO,
            targets_by=targets_by,
        )
        for targets_by in ("send", "read")
    )  # fmt: skip
    assert merged(read) == merged(sent)
    assert [run.losses for run in read] == [run.losses for run in sent]
    assert sent[0].stats["exchanged_rows"] == read[0].stats["exchanged_rows"] > 0


def test_text_is_read_at_both_ends_and_every_sample_is_evaluated_once_and_again(tmp_path):
    # The same column is the input and the target; here both nodes keep it in one directory.
    runs = run_mesh(
        tmp_path, (2, 2, 1), nodes=(2, 2), inputs=("label",), evaluates=True, targets_by="read"
    )
    seen = [i for run in runs if run.place.rank == run.place.scorer for i in run.evaluated]
    assert sorted(seen) == sorted(2 * list(range(37)))
    assert sum(size for run in runs for _, size in run.sent) == 0


@pytest.mark.parametrize("shared", [True, False])
def test_each_end_reads_its_own_columns_and_no_batch_goes_from_one_to_the_other(tmp_path, shared):
    def run(targets_by):
        return run_mesh(
            tmp_path / targets_by, (2, 1, 2), nodes=(2, 2), targets_by=targets_by,
            shared_memory=shared,
        )  # fmt: skip

    def between(runs):
        ends = [(0, 1), (2, 3)]
        return sum(size for at in (0, 1) for rank in ends[at] for to, size in runs[rank].sent
                   if to in ends[1 - at])  # fmt: skip

    read, sent = run("read"), run("send")
    assert between(read) == 0
    assert between(sent) > 0
    image_bytes = sum(len(payload(i)) for i in range(NUM_SAMPLES))
    assert [each.bytes_read for each in read] == [image_bytes, 0, 8 * NUM_SAMPLES, 0]
    assert [each.bytes_read for each in sent] == [image_bytes + 8 * NUM_SAMPLES, 0, 0, 0]
    assert [each.columns for each in read] == [{("pixels",)}] * 2 + [{TARGETS}] * 2
    assert [each.held_bytes > 0 for each in read] == [False, True, False, True]
    # Bytes and times of both loaders, rows and shares of one.
    assert read[2].stats["source_bytes"] == 8 * NUM_SAMPLES
    assert not {"hidden_fraction", "exchanged_rows", "epoch"} & set(read[2].stats)
    assert read[1].stats == read[3].stats == {}


@pytest.mark.parametrize("mesh", ["pp2tp2", "pp2dp2 two nodes"])
def test_a_saved_run_goes_on_with_the_other_way(tmp_path, one, mesh):
    sizes, nodes = MESHES[mesh]
    legs: list[tuple[tuple[int, int, int], tuple[int, ...], Targets]] = [
        (sizes, nodes, "send"), (sizes, nodes, "read"), ((1, 1, 1), (1,), "send"),
        ((2, 1, 1), (1, 1), "read"), (sizes, nodes, "read"),
    ]  # fmt: skip
    steps, at = [], None
    for number, (ranks, on_nodes, targets_by) in enumerate(legs):
        last = number + 1 == len(legs)
        save = tmp_path / f"saved{number}"
        # Every second leg finds caches of an earlier one.
        runs = run_mesh(
            tmp_path / f"cache{number % 2}", ranks, nodes=on_nodes, importance=KAKURENBO, at=at,
            save=save, stop=None if last else 4, targets_by=targets_by,
        )  # fmt: skip
        steps += merged(runs)
        at = save
    assert steps == merged([one])


def open_pipeline(world, root, *, seed=3, batch_transform=None):
    """A loader on one rank of a pipeline of two nodes, which reads its targets."""

    def open_loader(readers, device, columns):
        return Loader(
            MemorySource(48), batch_size=8, fields={name: FIELDS[name] for name in columns},
            cache=root, world=readers, device=device, seed=seed, workers=Workers(threads=0),
            reports=Reports(progress=False),
            shuffle=shuffle.Local(), batch_transform=batch_transform,
        )  # fmt: skip

    place = place_of(world.rank, (2, 1, 1, 1, 1), schedule="1f1b", virtual=1)
    return ReplicaLoader(
        open_loader, world=world, place=place, inputs=("label",), targets=("label",),
        targets_by="read",
    )  # fmt: skip


def test_losses_of_other_rows_than_were_read_are_found(tmp_path):
    def other_rows(batch, rng):
        ids = batch["sample_id"]
        return batch | {"sample_id": ids.flip(0) if 17 in ids else ids}

    def rank(world):
        transform = other_rows if world.rank else None
        with open_pipeline(world, tmp_path, batch_transform=transform) as loader:
            for _ in loader.epochs(1):
                for batch in loader:
                    if world.rank:
                        loader.report(batch, *score(batch["sample_id"], 0))

    found = r"\[rank 0\] step [0-5]: the sample ids .* rank 1 scored .* remove the caches"
    with pytest.raises((DeliveryError, WorldError), match=found):
        run_threads(thread_worlds([1, 1], timeout_s=5), rank)


def test_loaders_of_two_runs_are_told_apart_before_the_first_step(tmp_path):
    def rank(world):
        with pytest.raises(DeliveryError, match=r"its loader stands at .* that of rank \d"):
            open_pipeline(world, tmp_path, seed=world.rank)

    run_threads(thread_worlds([1, 1], timeout_s=5), rank)


def test_who_has_staged_waits_for_the_other_without_limit(tmp_path):
    def rank(world):
        limits, wait = {}, world.wait

        def noted(requests, *, peers, doing, timeout_s=None):
            limits[doing] = timeout_s
            wait(requests, peers=peers, doing=doing, timeout_s=timeout_s)

        world.wait = noted
        open_pipeline(world, tmp_path).close()
        return limits["waiting for the rows of a replica's other stage"]

    assert run_threads(thread_worlds([1, 1]), rank) == [math.inf, math.inf]


def test_ends_that_lie_otherwise_on_their_nodes_are_refused(tmp_path):
    # The first stages on two nodes, the last ones on one.
    with pytest.raises((ConfigError, WorldError), match=r"nodes \(0, 1\) .* on \(1, 1\).*send"):
        run_mesh(tmp_path, (2, 2, 1), nodes=(1, 3), targets_by="read")


@pytest.mark.parametrize(
    ("sizes", "schedule", "nodes"),
    [
        ((1, 2, 1, 1, 2), "1f1b", (0, 0, 1, 1)),
        ((2, 1, 1, 1, 2), "zbv", (0, 0, 1, 1)),
        ((2, 2, 1, 1, 1), "1f1b", (0, 1, 0, 1)),
        ((2, 1, 1, 1, 2), "1f1b", (0, 0, 0, 0)),
    ],
    ids=["one stage", "the last stage on the first rank", "a node a replica", "one node"],
)
def test_where_the_first_stage_is_near_the_last_one_loader_reads_for_both(sizes, schedule, nodes):
    for rank in range(4):
        place = place_of(rank, sizes, schedule=schedule, virtual=1)
        assert not last_stage_reads(place, nodes, "read")
        assert feed_of(place, last_stage_reads=False) is place


def test_feeds_share_no_rank_and_miss_none():
    places = [place_of(rank, (3, 2, 1, 1, 2), schedule="1f1b", virtual=1) for rank in range(12)]
    assert last_stage_reads(places[0], [rank // 2 for rank in range(12)], "read")
    feeds = [feed_of(place, last_stage_reads=True) for place in places]
    for place, feed in zip(places, feeds, strict=True):
        assert place.rank in feed.ranks
        assert feed.reader in feed.ranks
        others = {rank for other in feeds if other.replica == feed.replica for rank in other.ranks}
        assert others == set(place.ranks)
        assert feed.reader == (place.scorer if place.has_target else place.reader)
        assert feed.ranks == feeds[feed.reader].ranks
        assert feed.readers[feed.replica] == feed.reader
