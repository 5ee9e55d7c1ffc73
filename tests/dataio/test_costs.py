"""A loader prices its rows by what it measured: those beyond a quota cost what their bytes take."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shuffle
from dataio import Bytes, Loader, NodeCache, Reports, Workers
from dataio.batch.meter import CostsMeter
from dataio.plan.costs import FIGURES, SpentCosts
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection, Shuffle
from dataio.rows.fields import Field
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import CostAware, Kakurenbo
from tests.cases import diagonal
from tests.dataio.store.test_quota import SAMPLES, LargeShards

FIELDS: dict[str, Field] = {"data": Bytes("bin")}
QUOTA, BATCH = 1_000_000, 6
MEASURED = SpentCosts(5.0, 50_000_000, 1.0, 100_000_000, 0.006, 3.0, 4.0)


@dataclass(frozen=True)
class Priced:
    """CostAware, and what it was told: by epoch, costs and sizes by sample id."""

    policy: CostAware
    costs: dict[int, dict[int, float]] = field(default_factory=dict, repr=False)
    hidden: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        return self.policy.columns

    @property
    def by_cost(self) -> bool:
        return self.policy.by_cost

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        if rows.cost_s is not None:
            ids, costs = rows.sample_id.tolist(), rows.cost_s.tolist()
            self.costs[epoch] = dict(zip(ids, costs, strict=True))
        chosen = self.policy.select(rows, epoch=epoch, num_epochs=num_epochs)
        self.hidden[epoch] = sorted(rows.sample_id[chosen.hidden].tolist())
        return chosen

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        return hidden[:0]


def open_loader(
    root: Path, policy: Any, *, world: World | None = None, quota: int | None = QUOTA,
    shuffled: Shuffle | None = None, metrics: Path | None = None,
) -> Loader:  # fmt: skip
    return Loader(
        LargeShards(), cache=NodeCache(root, quota=quota), world=world or single_world(),
        batch_size=BATCH, fields=FIELDS, workers=Workers(threads=0), importance=policy,
        shuffle=shuffled, reports=Reports(progress=False, metrics=metrics),
    )  # fmt: skip


def train(loader: Loader, *, steps: int | None = None) -> list[int]:
    """Train what is left of an epoch, or some steps; returns the samples."""
    given: list[int] = []
    for number, batch in enumerate(loader):
        ids = batch["sample_id"]
        loader.report(batch, (ids % 9).float() + 1)
        given += ids[batch["slot"] >= 0].tolist()
        if number + 1 == steps:
            break
    return given


def missing_of(loader: Loader) -> set[int]:
    pool = loader._session.pool
    return set(pool.sample_ids[~pool.cache.entries.present].tolist())


def size_of(sample_id: int) -> int:
    """Of a row, as `Shards` makes it."""
    return 4 * (700 + 400 * (sample_id % 3))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank have measured the same."""
    monkeypatch.setattr(CostsMeter, "spent", lambda self: MEASURED)


def test_rows_beyond_a_quota_cost_what_was_measured_of_the_source(tmp_path: Path) -> None:
    policy = Priced(CostAware(0.5))
    with open_loader(tmp_path, policy) as loader:
        for _ in loader.epochs(3):
            train(loader)
        missing, stats = missing_of(loader), loader.stats()
    assert 0 < len(missing) < SAMPLES
    assert set(policy.costs[0].values()) == {1.0}, "nothing was measured yet"
    costs = policy.costs[2]
    dear = [costs[i] / size_of(i) for i in missing]
    cheap = [costs[i] / size_of(i) for i in range(SAMPLES) if i not in missing]
    assert min(dear) > max(stats["source_s_per_mb"] * 0.99e-6, 0.0)
    assert np.mean(dear) > np.mean(cheap)
    assert stats["streamed_s"] > 0
    assert stats["source_s_per_mb"] > 0


@pytest.mark.usefixtures("measured")
def test_sizes_of_rows_that_do_not_stay_are_those_of_their_bytes(tmp_path: Path) -> None:
    policy = Priced(CostAware(0.5))
    with open_loader(tmp_path, policy) as loader:
        trained: set[int] = set()
        for _ in loader.epochs(4):
            last = trained.copy()
            trained |= set(train(loader))
        missing = missing_of(loader)
    costs = policy.costs[3]
    seen = [i for i in missing if i in last]
    assert len({i % 3 for i in seen}) == 3
    by_size = [{round(costs[i], 6) for i in seen if i % 3 == part} for part in range(3)]
    assert [len(found) for found in by_size] == [1, 1, 1], "one cost for one size"
    assert max(by_size[0]) < max(by_size[1]) < max(by_size[2])


@pytest.mark.usefixtures("measured")
def test_rows_that_cost_more_are_hidden_more_often(tmp_path: Path) -> None:
    policy = Priced(CostAware(0.4, value="rows"))
    with open_loader(tmp_path, policy) as loader:
        for _ in loader.epochs(6):
            train(loader)
        missing = missing_of(loader)
    hidden = [set(policy.hidden[epoch]) for epoch in range(2, 6)]
    of_missing = np.mean([len(h & missing) / len(missing) for h in hidden])
    of_others = np.mean([len(h - missing) / (SAMPLES - len(missing)) for h in hidden])
    assert of_missing > of_others + 0.2


@pytest.mark.usefixtures("measured")
@diagonal(
    nodes=[[2], [1, 1], [2, 1]], shuffled=[shuffle.Local(), shuffle.Global(), shuffle.Partial(0.2)]
)
def test_all_ranks_price_a_row_alike_and_train_equal_steps(
    tmp_path: Path, nodes: list[int], shuffled: Shuffle
) -> None:
    def run(world: World) -> tuple[dict[int, dict[int, float]], list[list[int]]]:
        policy = Priced(CostAware(0.5))
        quota = QUOTA if shuffled.holds_all else QUOTA // len(nodes) + 100_000
        with open_loader(tmp_path, policy, world=world, quota=quota, shuffled=shuffled) as loader:
            given = [train(loader) for _ in loader.epochs(3)]
        return policy.costs, given

    ended = run_threads(thread_worlds(nodes, timeout_s=30), run)
    for epoch in range(3):
        merged: dict[int, float] = {}
        for costs, _ in ended:
            for sample_id, cost in costs[epoch].items():
                assert merged.setdefault(sample_id, cost) == cost
        assert len(merged) == SAMPLES
        trained = [i for _, given in ended for i in given[epoch]]
        assert len(trained) == len(set(trained))


def test_ranks_that_measure_otherwise_agree_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CostsMeter, "spent",
        lambda self: replace(MEASURED, source_s=MEASURED.source_s * (1 + self._pool.world.rank)),
    )  # fmt: skip

    def run(world: World) -> dict[str, float]:
        with open_loader(tmp_path, CostAware(0.5), world=world) as loader:
            for _ in loader.epochs(2):
                train(loader)
            return {name: loader.stats()[name] for name in FIGURES}

    one, other = run_threads(thread_worlds([1, 1], timeout_s=30), run)
    assert one == other
    assert one["source_s_per_mb"] > 0.1


def test_policies_that_do_not_ask_cost_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: CostsMeter) -> SpentCosts:
        raise AssertionError("nobody asked what rows cost")

    monkeypatch.setattr(CostsMeter, "spent", refuse)
    for number, policy in enumerate([CostAware(0.5, by_cost=False), Kakurenbo(0.3)]):
        with open_loader(tmp_path / str(number), policy) as loader:
            for _ in loader.epochs(2):
                train(loader)


def test_a_restored_epoch_hides_what_was_saved_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Priced(CostAware(0.4))
    with open_loader(tmp_path / "cache", policy) as loader:
        for epoch in loader.epochs(3):
            before = train(loader, steps=2 if epoch == 1 else None)
            if epoch == 1:
                loader.save(tmp_path / "saved")
                figures = {name: loader.stats()[name] for name in FIGURES}
                rest = train(loader)
                break
    hidden = policy.hidden[1]
    asked: list[int] = []
    real = CostsMeter.spent

    def spent(self: CostsMeter) -> SpentCosts:
        asked.append(1)
        return real(self)

    monkeypatch.setattr(CostsMeter, "spent", spent)
    again = Priced(CostAware(0.4))
    with open_loader(tmp_path / "cache", again) as loader:
        loader.restore(tmp_path / "saved")
        asked.clear()
        for epoch in loader.epochs(3):
            if epoch == 1:
                assert asked == []
                assert 1 not in again.hidden, "the policy was not asked"
                assert {name: loader.stats()[name] for name in FIGURES} == figures
                assert train(loader) == rest
            else:
                train(loader)
    assert sorted({*before, *rest, *hidden}) == list(range(SAMPLES))
    assert set(again.costs) == {2}
    assert again.costs[2] != {i: 1.0 for i in range(SAMPLES)}


@pytest.mark.usefixtures("measured")
def test_a_run_restored_at_an_epochs_end_prices_by_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Priced(CostAware(0.4))
    with open_loader(tmp_path / "cache", whole) as loader:
        for epoch in loader.epochs(3):
            train(loader)
            if epoch == 1:
                loader.save(tmp_path / "saved")
    # A new process has measured nothing yet
    monkeypatch.setattr(CostsMeter, "spent", lambda self: SpentCosts(0.0, 0, 0.0, 0, 0.0, 0.0, 0.0))
    again = Priced(CostAware(0.4))
    with open_loader(tmp_path / "cache", again) as loader:
        loader.restore(tmp_path / "saved")
        for _ in loader.epochs(3):
            train(loader)
    assert again.costs[2] == whole.costs[2]
    assert again.hidden[2] == whole.hidden[2]


def test_metrics_say_how_many_bytes_came_from_the_source(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with open_loader(tmp_path / "cache", CostAware(0.3), metrics=metrics) as loader:
        before = loader.stats()["source_bytes"]
        read = []
        for _ in loader.epochs(3):
            train(loader)
            read.append(loader.stats()["source_bytes"] - before)
    lines: list[Mapping[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    told = np.cumsum([line["source_bytes"] for line in lines])
    assert (told - told[0] == np.array(read) - read[0]).all()
    for line in lines[1:]:
        assert set(FIGURES) < set(line["rank_0"])
        assert 0 < line["source_bytes"] < 4000 * SAMPLES


def test_a_report_changes_no_size(tmp_path: Path) -> None:
    with open_loader(tmp_path, CostAware(0.5)) as loader:
        for _ in loader.epochs(2):
            train(loader)
        num_bytes, is_missing = loader._session.pool.row_bytes()
        ids = loader._session.pool.sample_ids
    known = num_bytes > 0
    assert known[~is_missing].all()
    here = num_bytes[known] - num_bytes[known][ids[known] % 3 == 0].min()
    assert here.tolist() == (1600 * (ids[known] % 3)).tolist()
