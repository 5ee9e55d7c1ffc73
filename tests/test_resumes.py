"""The table of resumes: whatever is combined, a run that was stopped goes on as if it had not been.

Rows are policies, shuffles, datasets and features by name; a test takes cases in which every two of
them meet. `tests/resumes.py` runs them.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import shuffle
from dataio import Int, Shards, Staging, Workers
from importance import Weighted
from tests.cases import pairs
from tests.dataio.growing.shards import Directory, write_shard
from tests.dataio.loaders import jitter, scramble
from tests.dataio.store.test_quota import KINDS, LargeShards
from tests.importance.hidden import POLICIES as HIDING
from tests.importance.hidden import SHUFFLES
from tests.memory_source import MemorySource
from tests.resumes import ResumedRun, RunData, RunJob, counted, in_memory, joined

pytestmark = pytest.mark.thorough

EPOCHS = 4
NUM_SAMPLES = 97
GROWTH = {0: 13, 1: 0, 2: 22}
"""Samples that come while an epoch runs."""
NODES = [(1,), (1, 1), (2, 1), (1, 2)]


class UnequalCosts(MemorySource):
    """Rows of which some cost more than others: batches are made to cost alike."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples, name="costs")
        self.costs = np.random.default_rng(4).integers(0, 256, num_samples).astype(np.uint8)


def first_shards(root: Path) -> None:
    Directory(root / "shards", (40, 21))


def add_shard(root: Path, epoch: int) -> None:
    path = root / "shards" / f"shard-{10 + epoch}.tar"
    if GROWTH.get(epoch) and not path.exists():
        write_shard(path, 61 + sum(GROWTH[before] for before in range(epoch)), GROWTH[epoch])


POLICIES = {"none": None, **HIDING, "weighted by label": Weighted("label", num_samples=70)}
UNSCORED = {"none", "random", "weighted", "weighted by label"}
"""Need no scores: a small state is enough to go on with."""
BY_FIELD = {"auto", "keep_agreed", "weighted by label"}
"""Need all rows in the caches before the first epoch."""
DATASETS = {
    "memory": in_memory(NUM_SAMPLES, EPOCHS),
    "costs": in_memory(NUM_SAMPLES, EPOCHS, UnequalCosts),
    "grows": RunData(
        [61, 74, 74, 96], lambda root: Shards(str(root / "shards" / "*.tar"), grows=True),
        begin=first_shards, grow=add_shard,
    ),
    "quota": RunData(
        [300] * EPOCHS, lambda root: LargeShards(), {"label": Int("cls"), **KINDS["both"]},
        cache={"quota": 800_000},
    ),
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "transforms": {"transform": jitter, "batch_transform": scramble},
    "overlap": {"staging": Staging(when="overlap")},
    "exclude": {"exclude": list(range(0, 60, 7))},
    "drop last": {"drop_last": True},
    "state_dict": {},
    "saved again": {},
    "threads": {},
}
CACHES = {"its own": ("a", "a", "a"), "none": ("a", "b", "c"), "one epochs old": ("a", "b", "a")}


def make(
    place: Path, policy: str, shuffled: str, dataset: str, feature: str, **options: Any
) -> ResumedRun:
    """A run of these rows of the tables."""
    chosen = {"importance": POLICIES[policy], "shuffle": SHUFFLES[shuffled]()}
    if dataset == "quota":
        options["batch_size"] = 11
    return ResumedRun(place, DATASETS[dataset], chosen | FEATURES[feature] | options, EPOCHS)


def excluding(policy: str, dataset: str, feature: str, **_: str) -> bool:
    """What cannot be combined; and what rows under a quota cost is measured anew."""
    is_late = dataset == "quota" or feature == "overlap"
    return (
        (policy in BY_FIELD and is_late)
        or (feature == "state_dict" and policy not in UNSCORED)
        or (dataset == "quota" and (feature == "overlap" or policy == "cost_aware"))
    )


def draw(*case: Any) -> np.random.Generator:
    return np.random.default_rng(crc32(repr(case).encode()))


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"none", "full", "stopped_learning"}))
def test_policies_of_the_table_hide_or_repeat_rows(tmp_path, policy):
    """Otherwise what follows would prove nothing of hidden rows."""
    whole = make(tmp_path, policy, "partial", "memory", "plain").start(RunJob((2, 1)))
    once = set(range(NUM_SAMPLES))
    assert any(counted([whole], epoch).keys() < once for epoch in range(EPOCHS))


@pairs(
    excluding, policy=POLICIES, shuffled=SHUFFLES, dataset=DATASETS, feature=FEATURES,
    caches=CACHES,
)  # fmt: skip
def test_on_the_same_ranks_every_byte_and_score_is_the_same(
    tmp_path, policy, shuffled, dataset, feature, caches
):
    """Stopped twice, at drawn places, between batches that train or refresh."""
    case = (policy, shuffled, dataset, feature, caches)
    rng, run = draw(*case), partial(make, policy=policy, shuffled=shuffled, dataset=dataset)
    nodes = NODES[rng.integers(len(NODES))]
    whole = run(tmp_path / "whole", feature=feature).start(RunJob(nodes))
    places = sorted(rng.choice(np.arange(1, len(whole.batches[0])), 2, replace=False).tolist())
    parts = run(tmp_path / "parts", feature=feature).start_all(
        [
            RunJob(
                nodes, stop, cache, by_save=feature != "state_dict",
                save_again=feature == "saved again",
                options={"workers": Workers(threads=(0, 3, 1)[number] * (feature == "threads"))},
            )
            for number, (stop, cache) in enumerate(
                zip([places[0], places[1] - places[0], None], CACHES[caches], strict=True)
            )
        ]
    )  # fmt: skip
    assert joined(parts).batches == whole.batches, f"stopped after {places}"
    assert parts[-1].scores == whole.scores, f"stopped after {places}"


@pairs(
    excluding, policy=["none", "kakurenbo", "random", "weighted"], shuffled=SHUFFLES,
    dataset=["memory", "grows", "quota"], feature=["transforms", "exclude"],
)  # fmt: skip
def test_from_a_save_at_any_step_every_byte_and_score_is_the_same(
    tmp_path, policy, shuffled, dataset, feature
):
    """From caches that are epochs ahead, and from none; and to save changes nothing."""
    run = make(tmp_path / "whole", policy, shuffled, dataset, feature)
    whole = run.start(RunJob((1, 1)))
    run = make(tmp_path / "run", policy, shuffled, dataset, feature)
    saved = run.start(RunJob((1, 1), save_each=True))
    assert (saved.batches, saved.scores) == (whole.batches, whole.scores)
    assert len(whole.batches[0]) > 3 * EPOCHS
    last = [batch.epoch for batch in whole.batches[0]].index(EPOCHS - 1)
    # What has grown is there already.
    for number in range(last if dataset == "grows" else 1, len(whole.batches[0])):
        cache = "cache" if number % 2 else f"new-{number}"
        workers = Workers(threads=number % 3)
        rest = run.start(
            RunJob((1, 1), cache=cache, options={"workers": workers}), run.root / f"at-{number}"
        )
        assert rest.batches == [seen[number:] for seen in whole.batches], f"from save {number}"
        assert rest.scores == whole.scores, f"from save {number}"


LAYOUTS = {
    "local": ((1, 1), (2, 2), (1, 1)),
    "partial": ((2,), (1,), (4,), (3,), (2,)),
    "all on every node": ((2, 1), (1,), (1, 2, 1), (2,)),
}


def dealt_otherwise(shuffled: str, dataset: str, **others: str) -> bool:
    """Which of several nodes has which of the new rows depends on when it is begun."""
    return (shuffled, dataset) == ("local", "grows") or excluding(dataset=dataset, **others)


@pairs(
    dealt_otherwise, policy=POLICIES, shuffled=LAYOUTS, dataset=["memory", "grows"],
    feature=["plain", "overlap", "exclude", "threads"],
)  # fmt: skip
def test_on_other_ranks_a_step_of_as_many_rows_has_the_same_rows(
    tmp_path, policy, shuffled, dataset, feature
):
    """Samples, weights and bytes, step by step, and the scores at the end."""
    run = make(tmp_path / "run", policy, shuffled, dataset, feature)
    layouts, rng = LAYOUTS[shuffled], draw(policy, shuffled, dataset, feature)

    def job(number: int, stop: int | None = None, **options: Any) -> RunJob:
        options["batch_size"] = 12 // sum(layouts[number])
        return RunJob(layouts[number], stop, f"cache{number}", options=options)

    whole = make(tmp_path / "whole", policy, shuffled, dataset, feature).start(job(0))
    num_stops = len(layouts) - 1
    places = sorted(rng.choice(np.arange(1, len(whole.batches[0])), num_stops, replace=False))
    stops = [int(after - before) for before, after in pairwise([0, *places])]
    parts = run.start_all([job(number, stop) for number, stop in enumerate([*stops, None])])
    assert [step for part in parts for step in part.steps()] == whole.steps(), f"at {places}"


@pytest.mark.parametrize(
    ("shuffled", "nodes", "gone_on", "anew"),
    [
        ("all on every node", (1, 1, 1, 1), "1111", "1111"), ("local", (2, 2), "1111", "1111"),
        ("local", (1, 1, 1, 1), "0000", "0000"), ("partial", (2, 2), "0000", "1000"),
        ("partial", (1, 1, 1, 1), "0000", "0000"), ("dealt anew", (2, 2), "0111", "1111"),
        ("dealt anew", (1, 1, 1, 1), "0000", "0000"), ("dealt anew", (4,), "0000", "0000"),
    ],
)  # fmt: skip
def test_on_several_nodes_shuffle_and_nodes_say_in_which_epochs_steps_have_the_same_rows(
    tmp_path, shuffled, nodes, gone_on, anew
):
    """Of a run that goes on in epoch 0 from two nodes of a rank, and of one that begins anew."""
    run, fresh = (make(tmp_path / name, "none", shuffled, "memory", "plain") for name in "ab")
    first, then = (
        RunJob(layout, stop, str(layout), options={"batch_size": 12 // sum(layout)})
        for layout, stop in (((1, 1), 3), (nodes, None))
    )
    whole = fresh.start(replace(first, stop=None)).steps()
    for steps, same in (
        (run.start_all([first, then])[1].steps(), gone_on),
        (fresh.start(then).steps(), anew),
    ):
        pairs = zip(reversed(steps), reversed(whole), strict=False)
        found = {(now[0], now == other) for now, other in pairs if len(now[2]) == 12}
        assert found == {(epoch, is_same == "1") for epoch, is_same in enumerate(same)}


def is_untold(policy: str, feature: str, **others: str) -> bool:
    """On other ranks a small state does not say which rows its epoch hid or drew."""
    unknown = feature == "state_dict" and policy != "none"
    return unknown or excluding(policy, feature=feature, **others)


LEGS = (
    # ranks of each node, batch size, threads, batches until the job ends
    ((2, 2), 4, 0, 3),
    ((1, 2), 5, 4, 2),
    ((1,), 7, 2, 5),
    ((1,), 3, 0, 2),
    ((2, 2), 3, 1, 1),
    ((1, 1, 1), 4, 0, 3),
    ((4,), 6, 0, None),
)


@pairs(
    is_untold,
    policy=["none", "kakurenbo", "random", "keep_agreed", "weighted", "weighted by label"],
    shuffled=SHUFFLES, dataset=["memory", "costs", "grows"],
    feature=["plain", "overlap", "exclude", "state_dict"],
)  # fmt: skip
def test_on_any_ranks_and_batch_sizes_each_sample_of_an_epoch_comes_as_often(
    tmp_path, policy, shuffled, dataset, feature
):
    """Once, as often as it was drawn, or not at all where it was hidden; then it is refreshed."""
    run = make(tmp_path / "run", policy, shuffled, dataset, feature)
    parts = run.start_all(
        [
            RunJob(
                nodes, stop, f"cache{number % 2}", by_save=feature != "state_dict",
                options={"batch_size": batch_size, "workers": Workers(threads=threads)},
            )
            for number, (nodes, batch_size, threads, stop) in enumerate(LEGS)
        ]
    )  # fmt: skip
    whole = make(tmp_path / "whole", policy, shuffled, dataset, feature).start(RunJob((1,)))
    hidden = 0
    for epoch, num_samples in enumerate(DATASETS[dataset].num_samples):
        there = set(range(num_samples)) - set(FEATURES[feature].get("exclude", ()))
        trained, refreshed = (counted(parts, epoch, kind) for kind in ("train", "refresh"))
        assert set(trained) | set(refreshed) <= there, f"epoch {epoch}"
        if policy.startswith("weighted"):
            assert trained == counted([whole], epoch), f"epoch {epoch}"
            continue
        assert max(trained.values()) == 1, f"epoch {epoch}"
        hidden += len(there - set(trained))
        if policy == "none":
            assert set(trained) == there, f"epoch {epoch}"
        if policy == "kakurenbo":
            assert set(trained) | set(refreshed) == there, f"epoch {epoch}"
    assert (hidden > 0) == (policy != "none" and not policy.startswith("weighted"))


def test_a_cache_of_the_same_ranks_before_they_changed_is_not_taken_for_theirs(tmp_path):
    """It is of this layout and epoch too, but its rows have moved for longer."""
    epochs, num_samples = 3, 211
    options = {"shuffle": shuffle.Partial(0.5), "batch_size": 4}
    run = ResumedRun(tmp_path / "run", in_memory(num_samples, epochs), options, epochs)
    legs = (((1, 1), 30, "a"), ((1,), 3, "b"), ((1, 1), 5, "a"), ((1,), None, "b"))
    jobs = [RunJob(nodes, stop, cache, by_save=False) for nodes, stop, cache in legs]
    parts = run.start_all(jobs)
    for epoch in range(epochs):
        assert counted(parts, epoch) == dict.fromkeys(range(num_samples), 1)


@pytest.mark.parametrize("dataset", ["even", "grows"])
def test_with_as_many_rows_a_step_of_other_pools_each_sample_comes_once(tmp_path, dataset):
    """Two ranks of a node have as many rows a step as one, and yet one row more or less in all."""
    chosen = {"even": in_memory(98, EPOCHS), "grows": DATASETS["grows"]}[dataset]
    run = ResumedRun(tmp_path / "run", chosen, {"shuffle": shuffle.Local()}, EPOCHS)
    legs = (((1, 1), 9, 6), ((2, 2), 10, 3), ((1, 1), None, 6))
    jobs = [RunJob(nodes, stop, options={"batch_size": rows}) for nodes, stop, rows in legs]
    parts = run.start_all(jobs)
    for epoch, num_samples in enumerate(chosen.num_samples):
        assert counted(parts, epoch) == dict.fromkeys(range(num_samples), 1), f"epoch {epoch}"
