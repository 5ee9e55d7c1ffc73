"""Excluded samples never come, whatever the policy; the others keep their order, once an epoch."""

import json
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shuffle
from dataio import Int, Mixture, NodeCache, NumpySource, Staging, StateError, Workers
from dataio.plan.exclusion import exclude_ids
from dataio.plan.layout import Layout
from dataio.world import run_threads, single_world, thread_worlds
from importance import KeepAgreed, Weighted
from tests.cases import diagonal
from tests.dataio.exclude_run import (
    BATCH,
    EPOCHS,
    NUM_SAMPLES,
    POLICIES,
    SeenByRank,
    make,
    some,
    trained,
    watch,
)
from tests.dataio.store.test_quota import KINDS, LargeShards
from tests.importance.hidden import SHUFFLES
from tests.memory_source import MemorySource
from tests.multirank import RunRanks

LAYOUTS = [(1,), (2,), (1, 1), (2, 1), (1, 1, 1), (2, 2)]
ALL_BUT_ONE_BATCH = sorted(set(range(NUM_SAMPLES)) - {3, 30, 60, 90})
FIRST_NODE = list(range(35))
LISTS = {
    "none": [], "1 %": some(0.01), "10 %": some(0.1), "all but one batch": ALL_BUT_ONE_BATCH,
    "a node": FIRST_NODE,
}  # fmt: skip


def run(root, layout, **options):
    def on_rank(world):
        with make(world, root, **options) as loader:
            return watch(loader)

    return run_threads(thread_worlds(list(layout), timeout_s=60), on_rank)


@given(st.lists(st.integers(0, 2000), max_size=60), st.integers(1, 2001))
def test_a_sample_is_left_out_if_its_id_was_given(ids, num_samples):
    wanted = {i for i in ids if i < num_samples}
    exclusion = exclude_ids([np.array(sorted(wanted, reverse=True), np.int64)], num_samples)
    every = np.arange(num_samples)
    assert set(every[exclusion.flags(every)].tolist()) == wanted
    left = every[~exclusion.flags(every)]
    assert exclusion.num_left == len(left)
    assert exclusion.numbers(left).tolist() == list(range(len(left)))
    assert exclusion.below(np.array([0, num_samples])).tolist() == [0, len(wanted)]


@given(st.sets(st.integers(0, 999), min_size=1), st.integers(1, 2000), st.integers(1, 2000))
def test_a_list_stays_itself_as_the_dataset_grows_and_is_cut(ids, first, second):
    exclusion = exclude_ids([np.array(sorted(ids))], 1000)
    cut = exclusion.of(first)
    assert cut.num_excluded == sum(i < first for i in ids)
    again = cut.of(second)
    assert again.num_excluded == sum(i < second for i in ids)
    assert {exclusion.name, cut.name, again.name} == {exclusion.name}
    every = np.arange(second)
    assert set(every[again.flags(every)].tolist()) == {i for i in ids if i < second}


@given(st.sets(st.integers(0, 96)), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_rows_left_are_counted_pool_by_pool(ids, replicas):
    layout = Layout(tuple(replicas), 97)
    left = exclude_ids([np.array(sorted(ids), np.int64)], 97).left_in_pools(layout)
    for node, count in enumerate(left.tolist()):
        first = layout.pool_start(node)
        assert count == sum(i not in ids for i in range(first, first + layout.pool_rows(node)))


PLACES = [
    ((1,), "local"), ((2, 1), "partial"), ((1, 1), "local"), ((2, 2), "all on every node"),
    ((1, 1, 1), "dealt anew"),
]  # fmt: skip


def every_pair():
    """Of each two of place, policy and list all pairs; what is left of the triples is slow."""
    for place, policy, name in product(range(len(PLACES)), range(len(POLICIES)), range(len(LISTS))):
        layout, shuffled = PLACES[place]
        chosen, (named, ids) = list(POLICIES)[policy], list(LISTS.items())[name]
        marks = [pytest.mark.slow if (place + policy + name) % 5 else pytest.mark.thorough]
        marks += [pytest.mark.smoke] if named == "10 %" else []
        yield pytest.param(
            layout, shuffled, chosen, ids, id=f"{layout}-{shuffled}-{chosen}-{named}", marks=marks
        )


@pytest.mark.parametrize(("layout", "shuffled", "policy", "excluded"), list(every_pair()))
def test_excluded_rows_never_come_and_every_other_does(
    tmp_path, layout, shuffled, policy, excluded
):
    everyone = run(
        tmp_path, layout, shuffle=SHUFFLES[shuffled](), importance=POLICIES[policy],
        exclude=excluded,
    )  # fmt: skip
    left = set(range(NUM_SAMPLES)) - set(excluded)
    assert len({tuple(seen.steps) for seen in everyone}) == 1, "equal steps"
    for epoch in range(EPOCHS):
        counted = Counter(trained(everyone, epoch))
        hidden = {i for seen in everyone for i in seen.hidden[epoch]}
        assert max(counted.values()) == 1
        assert set(counted) | hidden == left
        assert not set(counted) & hidden
        refreshed = {i for seen in everyone for i in seen.refreshed[epoch]}
        assert refreshed <= hidden
        for seen in everyone:
            assert seen.steps[epoch] == len(seen.batches[epoch])
        if policy in ("none", "full"):
            assert not hidden


@pytest.mark.thorough
@diagonal(layout=LAYOUTS, shuffled=SHUFFLES)
def test_the_others_keep_the_order_that_they_have_without_it(tmp_path, layout, shuffled):
    chosen = {"shuffle": SHUFFLES[shuffled]()}
    whole = run(tmp_path / "whole", layout, **chosen)
    groups = np.repeat(np.arange(len(layout)), layout)
    if shuffled == "all on every node":
        groups = np.zeros_like(groups)
    for name in ("10 %", "a node"):
        excluded = LISTS[name]
        part = run(tmp_path / name, layout, **chosen, exclude=excluded)
        for group in np.unique(groups):
            ranks = np.flatnonzero(groups == group)
            for epoch in range(EPOCHS):
                # The rows that a group's ranks train, in the order in which they are dealt out
                before, after = (
                    dealt([[i for b in seen[r].batches[epoch] for i in b] for r in ranks])
                    for seen in (whole, part)
                )
                assert after == [i for i in before if i not in set(excluded)], name


def dealt(runs):
    """Take one of each in turn."""
    return [run[place] for place in range(max(map(len, runs))) for run in runs if place < len(run)]


@pytest.mark.thorough
@diagonal(
    policy=["none", "infobatch", "random"], excluded=[some(0.1), FIRST_NODE, ALL_BUT_ONE_BATCH]
)
def test_the_mean_over_weighted_batches_is_the_mean_over_the_rows_left(tmp_path, policy, excluded):
    everyone = run(
        tmp_path, (2, 1), shuffle=shuffle.Partial(0.3), importance=POLICIES[policy],
        exclude=excluded,
    )  # fmt: skip
    for epoch in range(EPOCHS):
        for step in range(everyone[0].steps[epoch]):
            valid = sum(len(seen.batches[epoch][step]) for seen in everyone)
            mean = np.mean([seen.weights[epoch][step] for seen in everyone])
            if policy == "none":
                assert mean == pytest.approx(1)
            assert valid > 0
        # An unbiased policy's weights sum to the rows that are left
        total = sum(
            np.sum(seen.weights[epoch][step]) * sum(len(s.batches[epoch][step]) for s in everyone)
            for step in range(everyone[0].steps[epoch])
            for seen in everyone
        ) / (len(everyone) * BATCH)
        assert total == pytest.approx(NUM_SAMPLES - len(excluded), rel=1e-5)


def test_policies_count_the_rows_that_are_left_alone(tmp_path):
    excluded = some(0.5)
    everyone = run(tmp_path, (1, 1), importance=POLICIES["random"], exclude=excluded)
    for epoch in range(EPOCHS):
        hidden = [i for seen in everyone for i in seen.hidden[epoch]]
        assert len(hidden) == int(0.3 * (NUM_SAMPLES - len(excluded)))


def test_the_same_rows_are_hidden_on_any_ranks(tmp_path):
    found = []
    for number, layout in enumerate([(1,), (2, 1), (1, 1, 1)]):
        everyone = run(
            tmp_path / str(number), layout, importance=POLICIES["keep_agreed"], exclude=some(0.1)
        )
        found.append([sorted({i for s in everyone for i in s.hidden[e]}) for e in range(EPOCHS)])
    assert found[0] == found[1] == found[2]
    assert found[0][1]


def test_what_is_drawn_by_weight_is_drawn_from_the_rows_left(tmp_path):
    excluded = some(0.2)
    left = NUM_SAMPLES - len(excluded)
    everyone = run(
        tmp_path,
        (1, 1),
        importance=Weighted(),
        exclude=excluded,
        shuffle=SHUFFLES["all on every node"](),
    )
    for epoch in range(EPOCHS):
        assert trained(everyone, epoch) == sorted(set(range(NUM_SAMPLES)) - set(excluded))
    weights = np.arange(NUM_SAMPLES) % 3
    everyone = run(
        tmp_path / "b", (2, 1), importance=Weighted(weights, num_samples=150), exclude=excluded
    )
    for epoch in range(EPOCHS):
        counted = Counter(trained(everyone, epoch))
        assert sum(counted.values()) == 150
        assert not set(counted) & set(excluded)
    nothing = np.zeros(NUM_SAMPLES)
    nothing[excluded[0]] = 1
    with pytest.raises(
        ValueError, match=rf"all {left} samples that are not excluded have weight 0"
    ):
        run(tmp_path / "c", (1,), importance=Weighted(nothing), exclude=excluded)


def go_on_with(tmp_path, first, second, *, stop, by_save=True, policy="none"):
    """Train with one list up to a step, then with another: samples by leg and epoch."""

    def on_rank(world):
        options = {"shuffle": SHUFFLES["partial"](), "importance": POLICIES[policy]}
        with make(world, tmp_path / "cache", exclude=first, **options) as loader:
            before = watch(loader, stop=stop)
            loader.save(tmp_path / "saved")
            state = loader.state_dict()
        with make(world, tmp_path / "cache", exclude=second, **options) as loader:
            if by_save:
                loader.restore(tmp_path / "saved")
            else:
                loader.load_state_dict(state)
            after = watch(loader)
        return before, after

    everyone = run_threads(thread_worlds([2, 1], timeout_s=60), on_rank)
    return [one for one, _ in everyone], [one for _, one in everyone]


@pytest.mark.thorough
@diagonal(policy=["none", "kakurenbo", "keep_agreed"], stop=[1, 5, 9, 12])
def test_another_list_from_a_step_on_leaves_out_what_it_says(tmp_path, stop, policy):
    """Of the epoch under way each remaining sample of the new list comes once."""
    old, new = some(0.1), some(0.3, seed=1)
    before, after = go_on_with(tmp_path, old, new, stop=stop, policy=policy)
    assert len({tuple(seen.steps) for seen in after}) == 1
    last = len(before[0].batches) - 1
    left, whole = set(range(NUM_SAMPLES)) - set(new), set(range(NUM_SAMPLES))
    for epoch in range(len(after[0].batches)):
        now = Counter(trained(after, epoch))
        hidden = {i for seen in after for i in seen.hidden[epoch]}
        assert set(now) <= left
        assert max(now.values(), default=1) == 1
        if epoch == 0:
            earlier = set(trained(before, last))
            assert earlier <= whole - set(old)
            assert not set(now) & earlier
            assert set(now) | earlier | hidden >= left
        else:
            assert set(now) | hidden == left


def test_without_a_save_only_a_list_that_is_known_goes_on_amid_an_epoch(tmp_path):
    before, after = go_on_with(tmp_path / "a", None, some(0.2), stop=4, by_save=False)
    assert not set(trained(before, 0)) & set(trained(after, 0))
    assert set(trained(before, 0)) | set(trained(after, 0)) >= set(range(NUM_SAMPLES)) - set(
        some(0.2)
    )
    with pytest.raises(StateError, match=r"another list to exclude.*use loader.save and"):
        go_on_with(tmp_path / "b", some(0.1), some(0.2), stop=4, by_save=False)


def test_a_longer_list_at_an_epochs_end_changes_nothing_of_the_others_order(tmp_path):
    steps = len(
        run(tmp_path / "a", (2, 1), exclude=some(0.1), shuffle=SHUFFLES["partial"]())[0].batches[0]
    )
    wanted = run(tmp_path / "c", (2, 1), exclude=some(0.3), shuffle=SHUFFLES["partial"]())
    _, after = go_on_with(tmp_path, some(0.1), some(0.3), stop=steps)
    for mine, theirs in zip(after, wanted, strict=True):
        # Nothing is left of the interrupted epoch, and the next ones are those of the new list
        assert [epoch for epoch in mine.batches if epoch] == theirs.batches[1:]


@pytest.mark.parametrize("shuffled", ["local", "all on every node"])
def test_steps_and_figures_count_the_rows_left(tmp_path, shuffled):
    excluded = sorted({*FIRST_NODE, *range(35, NUM_SAMPLES, 2)})

    def on_rank(world):
        with make(world, tmp_path, exclude=excluded, shuffle=SHUFFLES[shuffled]()) as loader:
            told = [len(loader), loader.max_steps(3)]
            seen = watch(loader)
            return told, seen

    steps = {"local": 5, "all on every node": 3}[shuffled]
    for rank, (told, seen) in enumerate(run_threads(thread_worlds([1, 1, 1]), on_rank)):
        assert told == [seen.steps[0], sum(seen.steps)] == [steps, 3 * steps]
        share = seen.stats[0]["excluded_fraction"]
        local = 1.0 if rank == 0 else 0.5
        assert share == (local if shuffled == "local" else len(excluded) / NUM_SAMPLES)


def test_a_node_with_few_rows_left_is_warned_of_once(tmp_path, caplog):
    run(tmp_path / "a", (1, 1, 1), exclude=FIRST_NODE)
    (told,) = [record.message for record in caplog.records if "even share" in record.message]
    assert "one rank has rows for 9 steps where an even share is 6" in told
    assert "as other nodes' rows are excluded" in told
    assert "shuffle with Global(), or by one that moves rows" in told
    caplog.clear()
    run(tmp_path / "b", (1, 1, 1), exclude=some(0.1))
    assert not [record for record in caplog.records if "even share" in record.message]


def test_the_state_stays_small_and_names_the_list(tmp_path):
    with make(single_world(), tmp_path, exclude=some(0.1)) as loader:
        state: dict[str, Any] = loader.state_dict()
        assert len(repr(state)) < 600
        assert state["stretches"][0]["excluded"]
    with make(single_world(), tmp_path) as loader:
        plain: dict[str, Any] = loader.state_dict()
        assert "excluded" not in plain["stretches"][0]


def test_whole_batches_that_nobody_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"exclude: 4 samples .* drop_last .*lower the batch size"):
        run(tmp_path, (1, 1), exclude=ALL_BUT_ONE_BATCH, drop_last=True)
    everyone = run(tmp_path, (1,), exclude=ALL_BUT_ONE_BATCH, drop_last=True)
    assert trained(everyone, 0) == [3, 30, 60, 90]


@pytest.mark.parametrize("shuffled", ["local", "all on every node"])
def test_a_row_that_cannot_be_read_is_no_trouble_once_it_is_excluded(tmp_path, shuffled):
    """Not even as padding of a rank that has nothing to show, or to refresh."""
    left = [5, 15, 94]

    def refuse(sample, rng):
        assert int(sample["label"]) in {i % 10 for i in left}, "an excluded row was made a sample"
        return sample

    excluded = sorted(set(range(NUM_SAMPLES)) - set(left))
    # Of the rows left the first two are predicted wrong, and one of them is hidden and refreshed
    policy = KeepAgreed(0.6, label=None, begins=1)
    everyone = run(
        tmp_path, (2, 1), shuffle=SHUFFLES[shuffled](), transform=refuse, exclude=excluded,
        importance=policy,
    )  # fmt: skip
    assert trained(everyone, 0) == left
    assert len(trained(everyone, 1)) == 2
    assert sum(len(seen.refreshed[1]) for seen in everyone) == 1


def test_under_a_quota_no_excluded_row_is_asked_of_the_source_again(tmp_path):
    excluded = some(0.3, num_samples=LargeShards().num_samples)

    def on_rank(world):
        source = LargeShards()
        with make(
            world, tmp_path, source=source, exclude=excluded, fields=KINDS["fixed"], batch_size=6,
            cache=NodeCache(tmp_path, quota=400_000), workers=Workers(threads=1),
        ) as loader:  # fmt: skip
            resident = loader._session.pool.cache.entries.present
            assert not resident.all(), "the quota keeps some rows out"
            source.rows_read.clear()
            return watch(loader), list(source.rows_read)

    everyone = run_threads(thread_worlds([1, 1], timeout_s=60), on_rank)
    left = set(range(LargeShards().num_samples)) - set(excluded)
    for epoch in range(EPOCHS):
        assert trained([seen for seen, _ in everyone], epoch) == sorted(left)
    assert all(read and not set(read) & set(excluded) for _, read in everyone)


@pytest.mark.parametrize("unequal", [False, True])
def test_while_rows_are_staged_and_where_they_cost_differently(tmp_path, monkeypatch, unequal):
    if unequal:
        costs = np.random.default_rng(4).integers(0, 256, NUM_SAMPLES).astype(np.uint8)
        monkeypatch.setattr(MemorySource, "costs", costs, raising=False)
    options: dict[str, Any] = {
        "staging": Staging(when="overlap"), "shuffle": SHUFFLES["partial"]()
    }  # fmt: skip
    excluded = some(0.2)
    whole = run(tmp_path / "a", (1, 1), **options)
    part = run(tmp_path / "b", (1, 1), **options, exclude=excluded)
    for epoch in range(EPOCHS):
        assert trained(part, epoch) == sorted(set(range(NUM_SAMPLES)) - set(excluded))
        for before, after in zip(whole, part, strict=True):
            ids = [i for b in before.batches[epoch] for i in b if i not in set(excluded)]
            if not unequal:
                assert [i for b in after.batches[epoch] for i in b] == ids


def test_each_loader_of_a_mixture_takes_its_own_list(tmp_path):
    loaders = {
        name: make(single_world(), tmp_path / name, exclude=ids)
        for name, ids in (("a", [0, 1]), ("b", ALL_BUT_ONE_BATCH))
    }
    with Mixture(loaders, {"a": 26, "b": 1}, steps=27) as mixture:
        seen: dict[str, list[int]] = {"a": [], "b": []}
        for batch in mixture:
            seen[str(batch["dataset"])] += batch["sample_id"][batch["slot"] >= 0].tolist()
    assert sorted(seen["a"]) == list(range(2, NUM_SAMPLES))
    assert sorted(seen["b"]) == [3, 30, 60, 90]


def test_evaluation_is_of_every_sample_all_the_same(tmp_path):
    with make(single_world(), tmp_path, exclude=some(0.1)) as loader:
        evaluation = loader.evaluation(
            NumpySource({"cls": np.arange(20)}), fields={"label": Int("cls")}
        )
        seen = [i for b in evaluation for i in b["sample_id"][b["valid"]].tolist()]
    assert sorted(seen) == list(range(20))


@pytest.mark.multirank
@pytest.mark.parametrize(("n", "per_node"), [pytest.param(2, 1, marks=pytest.mark.nightly), (3, 2)])
def test_under_mpi_excluded_rows_never_come_and_a_longer_list_goes_on(
    run_ranks: RunRanks, tmp_path, n, per_node
):
    first, second = some(0.1), some(0.3, seed=1)
    ended = run_ranks(
        "exclude_rows", n, str(tmp_path), json.dumps(first), json.dumps(second), "5",
        env={"TONARI_RANKS_PER_NODE": str(per_node)},
    )  # fmt: skip
    told: list[Any] = ended.reports
    legs = [[SeenByRank(**report[leg]) for report in told] for leg in (0, 1)]
    early = set(trained(legs[0], 0))
    assert len(early) == 5 * BATCH * n
    assert not early & set(first)
    left = set(range(NUM_SAMPLES)) - set(second)
    assert len({tuple(seen.steps) for seen in legs[1]}) == 1
    for epoch in range(EPOCHS):
        counted = Counter(trained(legs[1], epoch))
        hidden = {i for seen in legs[1] for i in seen.hidden[epoch]}
        assert max(counted.values()) == 1
        assert set(counted) | hidden | (early & left if epoch == 0 else set()) == left
