"""The same samples are hidden on every world; what is not hidden is trained, once, in equal steps.

Scores are injected: a function of sample and epoch.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo, SelectiveBackprop, policies
from tests.cases import diagonal
from tests.importance.hidden import (
    NUM_EPOCHS,
    NUM_SAMPLES,
    POLICIES,
    SHUFFLES,
    Seen,
    hidden_of_all,
    train,
)
from tests.importance.rows import reported, scattered, select_in_pools
from tests.multirank import RunRanks

WORLDS = {"2 ranks": [2], "2 nodes": [1, 1], "uneven nodes": [3, 1], "4 nodes": [1] * 4}
HIDING = [name for name in POLICIES if name != "full"]
LOSSES = st.lists(st.sampled_from([0.0, 0.5, 0.5, 2.0, np.inf]), min_size=1, max_size=80)


def run(nodes: list[int], root: Path, policy: str, shuffled: str) -> list[Seen]:
    def on_rank(world):
        return train(world, root, POLICIES[policy], SHUFFLES[shuffled]())

    return run_threads(thread_worlds(nodes, timeout_s=20), on_rank)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """What one process hides, by policy: a list of sample ids an epoch."""

    @cache
    def hidden(policy: str) -> list[list[int]]:
        root = tmp_path_factory.mktemp("alone")
        seen = train(single_world(), root, POLICIES[policy], SHUFFLES["local"]())
        return hidden_of_all([seen.watched.hidden])

    return hidden


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """What the ranks of a world see of a run with exchange."""

    @cache
    def seen(policy: str, world: str) -> list[Seen]:
        return run(WORLDS[world], tmp_path_factory.mktemp("trained"), policy, "partial")

    return seen


def test_every_policy_is_tried_here() -> None:
    assert POLICIES.keys() == policies().keys()


@pytest.mark.parametrize("policy", HIDING)
@given(LOSSES, st.integers(2, 5), st.integers(0, 999))
def test_pools_hide_what_one_pool_hides(
    policy: str, losses: list[float], num_pools: int, seed: int
) -> None:
    scores = reported(losses)
    scores["correct"][::3] = False
    scores["epoch"][::7] = -1
    scores["forgotten"][::4], scores["loss_2"][::5] = 2, 9.0
    whole, parts = (
        select_in_pools(POLICIES[policy], scores, pools, epoch=2, num_epochs=NUM_EPOCHS, seed=seed)
        for pools in ([np.arange(len(losses))], scattered(len(losses), num_pools, seed=seed))
    )
    pools = scattered(len(losses), num_pools, seed=seed)
    ids = [i for pool, s in zip(pools, parts, strict=True) for i in pool[s.hidden].tolist()]
    assert sorted(ids) == sorted(whole[0].hidden.tolist())
    assert {selection.lr_factor for selection in parts} == {whole[0].lr_factor}
    for pool, selection in zip(pools, parts, strict=True):
        if whole[0].weights is not None:
            assert selection.weights is not None
            assert selection.weights.tolist() == whole[0].weights[pool].tolist()


@diagonal(shuffled=SHUFFLES, policy=HIDING)
def test_loaders_of_any_world_hide_what_one_process_hides(tmp_path, alone, policy, shuffled):
    assert sum(len(ids) for ids in alone(policy)) > NUM_SAMPLES // 4
    # Where rows go is another matter than what hides them: one world for the costlier shuffle
    names = ["uneven nodes"] if shuffled == "dealt anew" else list(WORLDS)
    for name in names:
        seen = run(WORLDS[name], tmp_path / name, policy, shuffled)
        assert hidden_of_all([rank.watched.hidden for rank in seen]) == alone(policy), name
        assert len({tuple(rank.watched.lr_factors) for rank in seen}) == 1, name


@diagonal(world=WORLDS, policy=POLICIES)
def test_hidden_and_trained_rows_are_all_rows_in_equal_steps(trained, policy, world):
    seen = trained(policy, world)
    chosen = hidden_of_all([rank.watched.hidden for rank in seen])
    for epoch in range(NUM_EPOCHS):
        ids = [i for rank in seen for ids, _ in rank.batches[epoch] for i in ids if i >= 0]
        assert len(ids) == len(set(ids)), "no row is trained twice"
        left_out = set(range(NUM_SAMPLES)) - set(ids)
        assert left_out <= set(chosen[epoch])
        if not isinstance(POLICIES[policy], Kakurenbo | SelectiveBackprop):
            assert left_out == set(chosen[epoch]), "only hidden rows of these two top steps up"
        # As many steps as the replica with the most visible rows needs
        sharers = [size for size in WORLDS[world] for _ in range(size)]
        visible = [len(rank.watched.weights[epoch]) for rank in seen]
        needed = max(-(-rows // (4 * k)) for rows, k in zip(visible, sharers, strict=True))
        assert {rank.steps[epoch] for rank in seen} == {needed}
        assert {len(rank.batches[epoch]) for rank in seen} == {needed}
        refreshed = [i for rank in seen for i in rank.refreshed[epoch]]
        again = policy not in ("cost_aware", "full", "infobatch", "random", "seta", "weighted")
        assert sorted(refreshed) == (sorted(left_out) if again else [])


@diagonal(world=WORLDS, policy=POLICIES)
def test_the_global_mean_of_a_step_is_the_policys_weighted_mean(trained, policy, world):
    """Padding included; and the weights of an unbiased policy sum to the number of rows."""
    seen = trained(policy, world)
    for epoch in range(NUM_EPOCHS):
        wanted = {i: w for rank in seen for i, w in rank.watched.weights[epoch].items()}
        total = 0.0
        for step in range(seen[0].steps[epoch]):
            parts = [rank.batches[epoch][step] for rank in seen]
            mean = np.mean([np.mean(weights) for _, weights in parts])
            # A row that topped up weighs 1
            valid = [wanted.get(i, 1.0) for ids, _ in parts for i in ids if i >= 0]
            assert mean == pytest.approx(np.mean(valid), rel=1e-5)
            padded = [w for ids, ws in parts for i, w in zip(ids, ws, strict=True) if i < 0]
            assert set(padded) <= {0.0}
            total += float(mean) * len(valid)
        if policy in ("full", "infobatch", "random"):
            assert total == pytest.approx(NUM_SAMPLES, rel=1e-5)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("n", "per_node"),
    [
        pytest.param(2, 1, marks=pytest.mark.nightly),
        (3, 2),
        pytest.param(4, 4, marks=pytest.mark.nightly),
    ],
)
def test_ranks_under_mpi_hide_what_one_process_hides(
    run_ranks: RunRanks, tmp_path, alone, n, per_node
):
    ended = run_ranks(
        "hide_rows", n, str(tmp_path), json.dumps(HIDING),
        env={"TONARI_RANKS_PER_NODE": str(per_node)},
    )  # fmt: skip
    for policy in HIDING:
        told = [
            {int(epoch): ids for epoch, ids in report["hidden"][policy].items()}
            for report in ended.reports
        ]
        assert hidden_of_all(told) == alone(policy)
        assert len({tuple(report["steps"][policy]) for report in ended.reports}) == 1
