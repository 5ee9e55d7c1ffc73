"""Copies next door: each row lies on two nodes, and outlives the end of one."""

import shutil
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio import Loader, NodeCache, Reports, Staging, Workers
from dataio.plan.layout import Layout
from dataio.plan.placement import copy_holders
from dataio.rows.rows import corrupt_rows
from dataio.store.tools.verify import verify_cache
from dataio.world import run_threads, thread_worlds
from importance import Full
from shuffle import Global, Local, Partial
from tests.faults.samples import check_copies
from tests.memory_source import FIELDS, MemorySource
from tests.resumes import ResumedRun, RunJob
from tests.test_resumes import DATASETS, EPOCHS

SAMPLES = 101
SHUFFLES = [Local(), Partial(0.3), Global(moves=True)]


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        owned: Samples of the node's slots, by epoch; ``copied``: of the slots behind them.
        trained: Every batch's samples.
        read_bytes: From the source.
        stats: Of the loader, in the end.
    """

    owned: list[list[int]]
    copied: list[list[int]]
    trained: list[list[int]]
    read_bytes: int
    stats: dict[str, float]


def train(
    root, nodes, policy, *, copies=2, epochs=3, restored=None, saved=None, threaded=True, **options
):
    """Train on thread worlds; every row that lies in a cache must have its own bytes."""
    racks = options.pop("racks", ())

    def run(world):
        world.threaded, source = threaded, MemorySource(SAMPLES)
        world.topology = replace(world.topology, racks=racks)
        seen = Seen([], [], [], 0, {})
        options_of_all: dict[str, Any] = {"importance": Full(columns=("loss",))} | options
        with Loader(
            source, batch_size=3, fields=FIELDS, cache=NodeCache(root, copies=copies),
            shuffle=policy, seed=3, world=world, workers=Workers(threads=0),
            reports=Reports(progress=False), **options_of_all,
        ) as loader:  # fmt: skip
            assert not loader._session.pool.cache.log.num_missing or "staging" in options
            if restored is not None:
                loader.restore(restored)
            for epoch in loader.epochs(epochs):
                for batch in loader:
                    seen.trained.append(batch["sample_id"].tolist())
                    loader.report(batch, batch["sample_id"] + 1000.0 * epoch)
                pool, entries = loader._session.pool, loader._session.pool.cache.entries
                assert not len(corrupt_rows(pool.cache.read_rows(np.flatnonzero(entries.present))))
                seen.owned.append(pool.sample_ids.tolist())
                seen.copied.append(entries.sample_id[pool.num_slots :].tolist())
                if saved is not None and epoch == 1:
                    loader.save(saved)
                    break
            seen.read_bytes, seen.stats = source.bytes_read, loader.stats()
        return seen

    return run_threads(thread_worlds(nodes, timeout_s=20), run)


def lose(root, node):
    (directory,) = root.glob(f"*/node{node}")
    shutil.rmtree(directory)


@given(st.lists(st.sampled_from("aabcd"), min_size=2, max_size=60), st.integers(0, 5))
def test_each_node_copies_one_other_node_of_another_rack_wherever_that_can_be(racks, seed):
    layout = Layout((2,) * len(racks), 1000)
    holders = copy_holders(layout, seed=seed, racks=racks)
    assert sorted(holders) == list(range(len(racks)))
    assert (holders != np.arange(len(racks))).all()
    inside = sum(racks[node] == racks[holder] for node, holder in enumerate(holders))
    assert inside == max(2 * max(map(racks.count, racks)) - len(racks), 0)
    if len(set(racks)) == 1:
        assert np.array_equal(holders, copy_holders(layout, seed=seed))


@pytest.mark.parametrize("policy", SHUFFLES, ids=str)
@pytest.mark.parametrize("nodes", [[1, 1], [2, 2, 2]])
def test_every_row_lies_on_its_owner_and_its_holder_in_every_epoch(tmp_path, nodes, policy):
    ranks = train(tmp_path, nodes, policy, epochs=5, threaded=nodes == [2, 2, 2])
    holders = copy_holders(Layout(tuple(nodes), SAMPLES), seed=3)
    leaders = [ranks[node * nodes[0]] for node in range(len(nodes))]
    for epoch in range(5):
        for node, holder in enumerate(holders.tolist()):
            assert leaders[node].owned[epoch] == leaders[holder].copied[epoch]
        every = [i for leader in leaders for i in leader.owned[epoch]]
        assert sorted(every) == list(range(SAMPLES))
    once = sum(8 + len(MemorySource.payload(i)) for i in range(SAMPLES))
    assert sum(rank.read_bytes for rank in ranks) == once, "the source is read once"
    alone = train(tmp_path / "alone", nodes, policy, copies=1, epochs=5)
    assert [rank.trained for rank in alone] == [rank.trained for rank in ranks]
    rows, num_bytes, sent_bytes = (
        sum(rank.stats[name] for rank in these)
        for these, name in
        [(alone, "exchanged_rows"), (alone, "exchanged_bytes"), (ranks, "exchanged_bytes")]
    )  # fmt: skip
    # On three nodes one of a row's two receivers has it already; on two nodes both.
    assert sent_bytes == (num_bytes + 8 * rows if len(nodes) == 3 else 2 * 8 * rows)


def test_copies_lie_in_the_other_rack(tmp_path):
    ranks = train(tmp_path, [1] * 4, Local(), epochs=1, racks=("a", "a", "b", "b"))
    owners = [[other.owned[0] for other in ranks].index(rank.copied[0]) for rank in ranks]
    assert [owner < 2 for owner in owners] == [False, False, True, True]


def test_data_that_grows_is_copied_too(tmp_path):
    runs = {
        copies: ResumedRun(
            tmp_path / f"{copies}", replace(DATASETS["grows"], cache={"copies": copies}),
            {"shuffle": Partial(0.3)}, EPOCHS,
        )
        for copies in (1, 2)
    }  # fmt: skip
    alone, copied = (run.start(RunJob((1, 1))).batches for run in runs.values())
    assert copied == alone
    nodes = [next(runs[2].root.glob(f"cache/*/node{node}")) for node in range(2)]
    check_copies(nodes, Layout((1, 1), DATASETS["grows"].num_samples[-1]), seed=7)


def test_storage_is_twice_one_plus_two_q(tmp_path):
    train(tmp_path, [2, 2], Partial(0.2), epochs=6)
    files = list(tmp_path.rglob("fixed-0.npy"))
    for file in files:
        assert len(np.load(file, mmap_mode="r")) <= 2 * (1 + 2 * 0.2) * (SAMPLES + 1) / 2
    assert len(files) == 2


@pytest.mark.parametrize("policy", SHUFFLES, ids=str)
def test_a_lost_cache_is_made_of_copies_and_the_source_is_not_read(tmp_path, policy):
    save = tmp_path / "save"
    train(tmp_path / "cache", [1, 1, 1], policy, epochs=4, saved=save, drop_last=True)
    lose(tmp_path / "cache", 1)
    ranks = train(tmp_path / "cache", [1, 1, 1], policy, epochs=4, restored=save)
    assert [rank.read_bytes for rank in ranks] == [0, 0, 0]
    assert ranks[1].stats["pulled_rows"] >= len(ranks[1].owned[0]) + len(ranks[1].copied[0])


@pytest.mark.parametrize("policy", SHUFFLES[1:], ids=str)
@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [2, 1]])
def test_the_nodes_that_are_left_go_on_without_the_source(tmp_path, nodes, policy):
    save = tmp_path / "save"
    train(tmp_path / "cache", [nodes[0]] * 3, policy, epochs=4, saved=save, drop_last=True)
    lose(tmp_path / "cache", 2)
    ranks = train(tmp_path / "cache", nodes, policy, epochs=4, restored=save, drop_last=True)
    assert sum(rank.read_bytes for rank in ranks) == 0
    last = [i for first in np.cumsum([0, *nodes[:-1]]) for i in ranks[first].owned[-1]]
    assert sorted(last) == list(range(SAMPLES))


def test_a_row_that_verify_finds_damaged_comes_from_its_copy(tmp_path):
    train(tmp_path, [1, 1], Local())
    (file,) = tmp_path.glob("*/node1/fixed-0.npy")
    data = bytearray(file.read_bytes())
    data[128] ^= 1
    file.write_bytes(data)
    assert sum(len(each.corrupt) for each in verify_cache(file.parent, dry_run=False)) == 1
    ranks = train(tmp_path, [1, 1], Local())
    assert [rank.read_bytes for rank in ranks] == [0, 0]
    assert ranks[1].stats["pulled_rows"] == 1


def test_copies_come_and_go_with_the_setting_and_the_source_is_not_read(tmp_path):
    for copies in (1, 2, 1, 2):
        ranks = train(tmp_path, [1, 1], Partial(0.3), copies=copies)
        assert {len(copied) > 0 for rank in ranks for copied in rank.copied} == {copies == 2}
        assert [rank.read_bytes > 0 for rank in ranks] == [not (tmp_path / "seen").exists()] * 2
        (tmp_path / "seen").touch()


@pytest.mark.parametrize("policy", SHUFFLES, ids=str)
def test_rows_staged_beside_training_are_copied_when_they_are_there(tmp_path, policy):
    ranks = train(tmp_path, [1, 1], policy, staging=Staging(when="overlap"))
    for rank, other in zip(ranks, ranks[::-1], strict=True):
        assert rank.copied[0] == [-1] * len(other.owned[0])
        assert rank.copied[1:] == other.owned[1:]


def test_what_cannot_be_copied_is_said(tmp_path, caplog):
    with pytest.raises(ValueError, match="copies=2 and a quota exclude one another"):
        NodeCache(tmp_path, copies=2, quota="1GB")
    with pytest.raises(TypeError, match="copies is 3, expected 1 or 2"):
        NodeCache(tmp_path, copies=3)  # type: ignore[arg-type]
    for nodes, words in (([2], "1 nodes of 2 to 2"), ([2, 1], "2 nodes of 1 to 2")):
        once = train(tmp_path / words, nodes, Partial(0.3))
        assert f"copies=2 on {words} ranks, expected two nodes or more" in caplog.text
        assert {len(rows) for rank in once for rows in rank.copied} == {0}
    everywhere = train(tmp_path / "all", [1, 1], Global())
    assert [rank.copied[0] for rank in everywhere] == [[], []]
