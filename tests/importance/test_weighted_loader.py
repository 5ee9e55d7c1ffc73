"""A loader delivers each row as often as `Weighted` counts, in equal steps, however it goes on."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shuffle
from dataio import Loader, NodeCache, Reports, Staging, StateError, Workers
from dataio.base.atomic import parse_table
from dataio.base.seeding import key
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import RandomPrune, Weighted
from tests.cases import diagonal
from tests.dataio.loaders import jitter
from tests.importance.hidden import SHUFFLES
from tests.importance.rows import one_pool, reported
from tests.memory_source import FIELDS, MemorySource

NUM_SAMPLES, NUM_EPOCHS, SEED = 61, 3, 7
WEIGHTS = np.random.default_rng(4).lognormal(sigma=1.2, size=NUM_SAMPLES)
WORLDS = {"1 rank": [1], "2 ranks": [2], "2 nodes": [1, 1], "3 on 2": [2, 1], "4 nodes": [1] * 4}


def make(world: World, root: Path, policy: object = None, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": 4, "fields": FIELDS, "seed": SEED, "workers": Workers(threads=0),
        "reports": Reports(progress=False), "shuffle": shuffle.Partial(0.3), "cache": root,
        "importance": policy if policy is not None else Weighted(WEIGHTS),
    }  # fmt: skip
    return Loader(MemorySource(NUM_SAMPLES), world=world, **(settings | options))


@cache
def expected(epoch: int, policy: Weighted | None = None) -> dict[int, int]:
    """What one pool of all rows draws: times by sample."""
    rows = one_pool(reported(np.zeros(NUM_SAMPLES)), seed=SEED, epoch=epoch)
    assert rows.stream == key(SEED, "importance", epoch=epoch)
    counts = (policy or Weighted(WEIGHTS)).select(rows, epoch=epoch, num_epochs=None).counts
    assert counts is not None
    return {i: n for i, n in enumerate(counts.tolist()) if n}


def ids_of(batch: dict[str, Any]) -> list[int]:
    return batch["sample_id"][batch["slot"] >= 0].tolist()  # type: ignore[no-any-return]


def count(parts: list[list[int]]) -> dict[int, int]:
    return dict(Counter(i for part in parts for i in part))


@diagonal(world=WORLDS, shuffled=SHUFFLES)
def test_rows_come_as_often_as_drawn_in_equal_steps_on_any_world(
    tmp_path: Path, world: str, shuffled: str
) -> None:
    def run(its: World) -> list[tuple[int, int, list[int], float]]:
        with make(its, tmp_path, shuffle=SHUFFLES[shuffled]()) as loader:
            seen = []
            for _ in loader.epochs(NUM_EPOCHS):
                batches = [(ids_of(batch), batch["weight"].sum()) for batch in loader]
                ids = [i for part, _ in batches for i in part]
                weight = float(sum(total for _, total in batches))
                seen.append((len(loader), len(batches), ids, weight))
            return seen

    ranks = run_threads(thread_worlds(WORLDS[world], timeout_s=20), run)
    for epoch in range(NUM_EPOCHS):
        told = [rank[epoch] for rank in ranks]
        assert len({steps for steps, _, _, _ in told}) == 1
        assert len({steps for _, steps, _, _ in told}) == 1
        found = count([ids for _, _, ids, _ in told])
        assert found == expected(epoch)
        assert sum(found.values()) == NUM_SAMPLES
        # The mean over replicas of a step's weights is 1: they sum to steps x batch x replicas
        assert sum(weight for *_, weight in told) == pytest.approx(told[0][0] * 4 * len(ranks))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_counts_over_epochs_are_within_five_standard_errors(tmp_path: Path, replicas: int) -> None:
    epochs = 40

    def run(world: World) -> NDArray[np.int64]:
        found = np.zeros(NUM_SAMPLES, np.int64)
        with make(world, tmp_path, Weighted(WEIGHTS, num_samples=90)) as loader:
            for _ in loader.epochs(epochs):
                for batch in loader:
                    np.add.at(found, ids_of(batch), 1)
        return found

    found = np.sum(run_threads(thread_worlds([1] * replicas, timeout_s=20), run), axis=0)
    wanted = 90 * WEIGHTS / WEIGHTS.sum()
    share = wanted % 1
    assert found.sum() == epochs * 90
    assert (np.abs(found / epochs - wanted) < 5 * np.sqrt(share * (1 - share) / epochs)).all()


def test_a_state_without_a_save_does_not_go_on_elsewhere(tmp_path: Path) -> None:
    with make(single_world(), tmp_path) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        make(single_world(), tmp_path, batch_size=3) as loader,
        pytest.raises(StateError, match=r"use loader\.save and loader\.restore"),
    ):
        loader.load_state_dict(state)


def test_a_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    with make(single_world(), tmp_path) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(single_world(), tmp_path, Weighted(WEIGHTS**3)) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="make the loader as it was"):
            next(iter(loader))


@pytest.mark.parametrize("workers", [Workers(threads=0), Workers(threads=2), Workers(processes=1)])
def test_a_row_is_transformed_with_other_numbers_each_time(
    tmp_path: Path, workers: Workers
) -> None:
    policy = Weighted([1000.0] + [1.0] * (NUM_SAMPLES - 1))

    def noises(policy: Weighted | None) -> dict[int, list[tuple[float, ...]]]:
        found: dict[int, list[tuple[float, ...]]] = {}
        with make(
            single_world(), tmp_path, policy or Weighted(), transform=jitter, workers=workers
        ) as loader:
            for batch in loader:
                for sample, noise in zip(batch["sample_id"], batch["noise"], strict=True):
                    found.setdefault(int(sample), []).append(tuple(noise.tolist()))
        return {i: numbers for i, numbers in found.items() if i >= 0}

    repeated, once = noises(policy), noises(None)
    assert len(repeated[0]) > 50
    assert len(set(repeated[0])) == len(repeated[0])
    for sample, numbers in repeated.items():
        assert once[sample][0] in numbers, "the first time is as if it came once"


def test_rows_are_balanced_by_a_field_that_the_caches_hold(tmp_path: Path) -> None:
    policy = Weighted(balance="label", num_samples=83)

    def run(world: World) -> list[list[int]]:
        with make(world, tmp_path, policy, shuffle=shuffle.Local()) as loader:
            return [
                [int(i) for b in loader for i in b["label"][b["slot"] >= 0]]
                for _ in loader.epochs(NUM_EPOCHS)
            ]

    ranks = run_threads(thread_worlds([2, 1], timeout_s=20), run)
    for epoch in range(NUM_EPOCHS):
        labels = count([rank[epoch] for rank in ranks])
        assert sum(labels.values()) == 83
        assert set(labels.values()) <= {8, 9}
        assert len(labels) == 10


def test_weights_of_a_field_are_those_of_an_array(tmp_path: Path) -> None:
    labels = np.arange(NUM_SAMPLES) % 10

    def run(world: World) -> list[list[int]]:
        with make(world, tmp_path, Weighted("label")) as loader:
            return [[i for b in loader for i in ids_of(b)] for _ in loader.epochs(NUM_EPOCHS)]

    ranks = run_threads(thread_worlds([1, 1, 1], timeout_s=20), run)
    for epoch in range(NUM_EPOCHS):
        assert count([rank[epoch] for rank in ranks]) == expected(epoch, Weighted(labels))


UNEVEN = np.r_[np.full(6, 50.0), np.ones(NUM_SAMPLES - 6)]
"""Weights of which the first of two nodes holds nearly all."""


def two_nodes(root: Path, policy: Weighted) -> list[tuple[int, float, list[int], list[float]]]:
    def run(world: World) -> tuple[int, float, list[int], list[float]]:
        with make(world, root, policy, shuffle=shuffle.Local()) as loader:
            batches = list(loader)
            ids = [i for batch in batches for i in ids_of(batch)]
            weights = [w for b in batches for w in b["weight"][b["slot"] >= 0].tolist()]
            return len(loader), loader.stats()["padded_fraction"], ids, weights

    return run_threads(thread_worlds([1, 1], timeout_s=20), run)


def test_a_node_of_more_weight_takes_the_steps_it_needs_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Weighted(UNEVEN)
    ranks = two_nodes(tmp_path, policy)
    found = count([ids for _, _, ids, _ in ranks])
    assert found == expected(0, policy)
    steps, padded = ranks[0][0], ranks[0][1]
    assert steps == -(-len(ranks[0][2]) // 4)
    assert padded == pytest.approx(1 - NUM_SAMPLES / (2 * 4 * steps))
    assert padded > 0.3
    (said,) = [r.message for r in caplog.records if "padding" in r.message]
    assert f"rows for {steps} steps where an even share is 8" in said
    assert 'over="pool"' in said


def test_by_pool_steps_are_not_padded_and_weights_say_what_rows_stand_for(tmp_path: Path) -> None:
    ranks = two_nodes(tmp_path, Weighted(UNEVEN, over="pool"))
    assert [len(ids) for _, _, ids, _ in ranks] == [31, 30]
    assert {steps for steps, _, _, _ in ranks} == {8}
    share = UNEVEN[:31].sum() / UNEVEN.sum()
    # All but the last step, where padding scales them
    assert ranks[0][3][:28] == pytest.approx([share * 61 / 31] * 28)
    assert ranks[1][3][:28] == pytest.approx([(1 - share) * 61 / 30] * 28)


def test_rows_that_come_while_they_are_staged_come_as_often(tmp_path: Path) -> None:
    def run(world: World) -> list[int]:
        with make(world, tmp_path, staging=Staging(when="overlap")) as loader:
            return [i for batch in loader for i in ids_of(batch)]

    ranks = run_threads(thread_worlds([2, 1], timeout_s=20), run)
    assert count(ranks) == expected(0)


def test_the_length_of_a_loader_is_that_of_what_is_drawn(tmp_path: Path) -> None:
    with make(single_world(), tmp_path, Weighted(WEIGHTS, num_samples=200)) as loader:
        assert len(loader) == loader.max_steps(1) == 50
        assert len(list(loader)) == 50


class Forgetful:
    """A policy that lets rows come twice and keeps losses."""

    columns: tuple[ScoreColumn, ...] = ("loss",)

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        return Selection(counts=np.full(len(rows.sample_id), 2))

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        return hidden[:0]

    def __repr__(self) -> str:
        return "Forgetful()"


def test_a_policy_with_counts_and_score_columns_is_refused(tmp_path: Path) -> None:
    with (
        make(single_world(), tmp_path, Forgetful()) as loader,
        pytest.raises(ValueError, match=r"Forgetful\(\) lets rows come several times and has"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (Weighted([1.0, 2.0]), {}, "weights: 2 numbers for a dataset of 61 samples"),
        (Weighted("lable"), {}, "field 'lable', expected .* which this loader's are: label;"),
        (Weighted(balance="data"), {}, "goes by the field 'data', expected a field that is one"),
        (
            Weighted("label"),
            {"staging": Staging(when="overlap")},
            'all rows must be in the caches .* staging when="before"',
        ),
        (Weighted("label"), {"cache": "quota"}, "all rows must be in the caches .* no quota"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_staged(
    tmp_path: Path, policy: Weighted, options: dict[str, Any], message: str
) -> None:
    if "cache" in options:
        options = {"cache": NodeCache(tmp_path / "cache", quota="1 MiB")}
    with pytest.raises(ValueError, match=message):
        make(single_world(), tmp_path / "cache", policy, **options)
    assert not list(tmp_path.rglob("manifest*"))


def test_evaluation_is_of_every_sample_once_and_reports_are_taken(tmp_path: Path) -> None:
    with make(single_world(), tmp_path) as loader:
        for batch in loader:
            loader.report(batch, torch.ones(len(batch["slot"])))
        evaluation = loader.evaluation(MemorySource(NUM_SAMPLES, name="test"))
        assert sorted(i for b in evaluation for i in ids_of(b)) == list(range(NUM_SAMPLES))
        stats = loader.stats()
    assert stats["most_often"] == max(expected(0).values())
    assert stats["hidden_fraction"] == pytest.approx(1 - len(expected(0)) / NUM_SAMPLES)
    assert stats["padded_fraction"] == pytest.approx(1 - NUM_SAMPLES / 64)


@pytest.mark.parametrize("weighted", [False, True])
def test_only_saves_of_weighted_runs_have_columns_for_counts(
    tmp_path: Path, weighted: bool
) -> None:
    policy = Weighted(WEIGHTS) if weighted else RandomPrune(0.2, delta=1.0)
    with make(single_world(), tmp_path, policy) as loader:
        next(iter(loader))
        loader.save(tmp_path / "saved")
    path = tmp_path / "saved" / "node-0.arrow"
    table = parse_table(path, path.read_bytes())
    assert {"count", "before", "now"}.issubset(table.column_names) == weighted
    assert {"hidden_place", "weight", "trained"} <= set(table.column_names)
    assert table.column("trained").to_pylist().count(2) <= 4
