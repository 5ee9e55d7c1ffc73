"""On other ranks, threads and batch sizes: each sample of an epoch still comes exactly once."""

from collections import Counter

import numpy as np
import pytest

import shuffle
from dataio import Loader, Reports, Staging, StateError, Workers
from dataio.plan.segment import Position, Segment
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo, RandomPrune
from tests.cases import diagonal
from tests.dataio.loaders import loss_of
from tests.memory_source import FIELDS, MemorySource

pytestmark = pytest.mark.thorough

NUM_SAMPLES = 211
EPOCHS = 3
KAKURENBO = Kakurenbo(0.5, drops=(), alphas=(1.0,), warmup_epochs=0)
LEGS = (
    # replicas of each node, batch size, threads, batches until the job ends
    ((2, 2), 4, 0, 8),
    ((1, 2), 5, 4, 2),
    ((1,), 7, 2, 20),
    ((1,), 3, 0, 2),
    ((2, 2), 3, 1, 2),
    ((1, 1, 1), 4, 0, 9),
    ((4,), 6, 0, None),
)


def make(world, root, *, batch_size, num_threads, policy, importance, stage):
    return Loader(
        MemorySource(NUM_SAMPLES),
        batch_size=batch_size,
        fields=FIELDS,
        cache=root,
        shuffle=policy,
        importance=importance,
        world=world,
        workers=Workers(threads=num_threads),
        seed=3,
        reports=Reports(progress=False),
        staging=Staging(when=stage),
    )


def run_legs(root, *, by_save, policy, importance=None, stage="before", legs=LEGS, caches=(0, 1)):
    """Train leg by leg, each on other ranks: trained and refreshed samples by epoch, and states."""
    trained: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    refreshed: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    state = None
    for number, (layout, batch_size, threads, stop) in enumerate(legs):

        def leg(world, number=number, batch_size=batch_size, threads=threads, stop=stop, at=state):
            seen: list[tuple[int, str, list[int]]] = []
            steps: list[tuple[int, int]] = []
            loader = make(
                world,
                root / f"cache{caches[number % len(caches)]}",
                batch_size=batch_size,
                num_threads=threads,
                policy=policy,
                importance=importance,
                stage=stage,
            )
            with loader:
                if at is not None:
                    (loader.restore if by_save else loader.load_state_dict)(at)
                left = stop
                for epoch in loader.epochs(EPOCHS):
                    for batch in loader:
                        valid = batch["slot"] >= 0
                        seen.append((epoch, "trained", batch["sample_id"][valid].tolist()))
                        loader.report(batch, *loss_of(batch["sample_id"], epoch))
                        if left is not None:
                            left -= 1
                            if left == 0:
                                if not by_save:
                                    return seen, loader.state_dict(), steps
                                loader.save(root / f"saved{number}")
                                return seen, root / f"saved{number}", steps
                    steps.append((epoch, len(loader)))
                    for batch in loader.refresh():
                        valid = batch["slot"] >= 0
                        seen.append((epoch, "refreshed", batch["sample_id"][valid].tolist()))
                        loader.report(batch, *loss_of(batch["sample_id"], epoch))
            return seen, None, steps

        everyone = run_threads(thread_worlds(list(layout)), leg)
        assert len({repr(steps) for _, _, steps in everyone}) == 1, "equal steps"
        states = [at for _, at, _ in everyone]
        assert all(at == states[0] for at in states), "every rank stands at the same place"
        state = states[0]
        for seen, _, _ in everyone:
            for epoch, kind, ids in seen:
                {"trained": trained, "refreshed": refreshed}[kind][epoch].update(ids)
    return trained, refreshed


@diagonal(
    by_save=[True, False],
    policy=[shuffle.Partial(0.3), shuffle.Global()],
    stage=["before", "overlap"],
)
def test_each_sample_of_each_epoch_comes_once_on_changing_ranks(tmp_path, by_save, policy, stage):
    trained, _ = run_legs(tmp_path, by_save=by_save, policy=policy, stage=stage)
    once = Counter(range(NUM_SAMPLES))
    for epoch, counted in enumerate(trained):
        assert counted == once, f"epoch {epoch}"


@pytest.fixture
def unequal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = np.random.default_rng(4).integers(0, 256, NUM_SAMPLES).astype(np.uint8)
    monkeypatch.setattr(MemorySource, "costs", costs, raising=False)


@pytest.mark.usefixtures("unequal_rows")
@diagonal(
    by_save=[True, False],
    policy=[shuffle.Partial(0.3), shuffle.Global()],
    stage=["before", "overlap"],
)
def test_so_does_each_sample_where_batches_are_made_to_cost_alike(tmp_path, by_save, policy, stage):
    trained, _ = run_legs(tmp_path, by_save=by_save, policy=policy, stage=stage)
    assert trained == [Counter(range(NUM_SAMPLES))] * EPOCHS


@pytest.mark.usefixtures("unequal_rows")
def test_and_what_a_policy_hides_stays_hidden_there(tmp_path):
    trained, refreshed = run_legs(
        tmp_path, by_save=True, policy=shuffle.Partial(0.3), importance=KAKURENBO
    )
    for epoch, counted in enumerate(trained):
        assert max(counted.values()) == 1, f"epoch {epoch}"
        assert set(counted) | set(refreshed[epoch]) == set(range(NUM_SAMPLES))


@pytest.mark.usefixtures("unequal_rows")
def test_each_batch_of_every_node_has_rows_of_every_level_of_cost(tmp_path):
    def run(world):
        with make(
            world, tmp_path, batch_size=4, num_threads=0, policy=shuffle.Partial(0.3),
            importance=None, stage="before",
        ) as loader:  # fmt: skip
            return [
                [np.asarray(batch["sample_id"][batch["slot"] >= 0]) for batch in loader]
                for _ in loader.epochs(2)
            ]

    costs = MemorySource.costs  # type: ignore[attr-defined]
    first, second = run_threads(thread_worlds([1, 1]), run)
    for epochs in (first, second):
        for batches in epochs:
            whole = np.array([np.sort(costs[ids]) for ids in batches if len(ids) == 4])
            assert len(whole) >= 20
            assert (whole[:, :-1].max(axis=0) <= whole[:, 1:].min(axis=0)).all()


def test_a_cache_of_the_same_ranks_before_they_changed_is_not_taken_for_theirs(tmp_path):
    """It is of this layout and epoch too, but its rows have moved for longer."""
    legs = (((1, 1), 4, 0, 30), ((1,), 4, 0, 3), ((1, 1), 4, 0, 5), ((1,), 4, 0, None))
    trained, _ = run_legs(
        tmp_path, by_save=False, policy=shuffle.Partial(0.5), legs=legs, caches=("a", "b", "a", "b")
    )
    assert trained == [Counter(range(NUM_SAMPLES))] * EPOCHS


@diagonal(
    importance=[KAKURENBO, RandomPrune(0.25, delta=0.9)],
    policy=[shuffle.Partial(0.3), shuffle.Global()],
)
def test_no_sample_is_trained_twice_and_hidden_ones_stay_hidden(tmp_path, importance, policy):
    trained, refreshed = run_legs(tmp_path, by_save=True, policy=policy, importance=importance)
    for epoch, counted in enumerate(trained):
        assert max(counted.values()) == 1, f"epoch {epoch}"
        if importance is KAKURENBO:
            assert set(counted) | set(refreshed[epoch]) == set(range(NUM_SAMPLES))
    assert sum(map(len, trained)) < EPOCHS * NUM_SAMPLES, "something was hidden"


def test_scores_follow_their_samples_to_other_ranks(tmp_path):
    def before(world):
        with make(
            world, tmp_path / "a", batch_size=4, num_threads=0, policy=shuffle.Partial(0.3),
            importance=KAKURENBO, stage="before",
        ) as loader:  # fmt: skip
            for _ in loader.epochs(2):
                for batch in loader:
                    ids = batch["sample_id"]
                    loader.report(batch, ids.float(), ids >= 0, ids.float())
            loader.save(tmp_path / "saved")

    def after(world):
        with make(
            world, tmp_path / "b", batch_size=4, num_threads=0, policy=shuffle.Partial(0.3),
            importance=KAKURENBO, stage="before",
        ) as loader:  # fmt: skip
            loader.restore(tmp_path / "saved")
            scores = loader._session.pool.scores
            ids = loader._session.pool.cache.entries.sample_id[np.arange(len(scores))]
            return list(zip(ids.tolist(), scores["loss"].tolist(), strict=True))

    run_threads(thread_worlds([2, 1]), before)
    everyone = run_threads(thread_worlds([1, 1, 1]), after)
    pairs = [pair for rank in everyone for pair in rank]
    assert sorted(i for i, _ in pairs) == list(range(NUM_SAMPLES))
    assert all(loss == i for i, loss in pairs)


def test_where_every_node_holds_all_the_report_of_whoever_trained_a_sample_counts(tmp_path):
    options = {"batch_size": 4, "num_threads": 0, "policy": shuffle.Global(), "stage": "before"}

    def before(world):
        with make(world, tmp_path / "a", importance=KAKURENBO, **options) as loader:
            loader.set_epoch(0)
            reported = []
            for _, batch in zip(range(6), loader, strict=False):
                ids = batch["sample_id"]
                loader.report(batch, ids.float(), ids >= 0, ids.float())
                reported += ids.tolist()
            loader.save(tmp_path / "saved")
            return reported

    def after(world):
        with make(world, tmp_path / "b", importance=KAKURENBO, **options) as loader:
            loader.restore(tmp_path / "saved")
            return loader._session.pool.scores.copy()

    trained = sorted(i for rank in run_threads(thread_worlds([2, 1]), before) for i in rank)
    (scores,) = run_threads(thread_worlds([1]), after)
    assert np.flatnonzero(scores["epoch"] == 0).tolist() == trained
    assert scores["loss"][trained].tolist() == trained


def test_the_state_stays_small_on_many_nodes():
    many = Segment((4,) * 4000 + (3,), 256, 0, 17)
    position = Position(5, (many, many, many), 2)
    stored = position.to_json()
    assert len(repr(stored)) < 800
    assert Position.from_json(stored) == position


def test_a_state_within_an_epoch_that_hides_needs_what_save_wrote(tmp_path):
    def run(world):
        options = {"num_threads": 0, "policy": shuffle.Local(), "stage": "before"}
        with make(world, tmp_path, batch_size=4, importance=KAKURENBO, **options) as loader:
            loader.set_epoch(0)
            next(iter(loader))
            state = loader.state_dict()
        with make(world, tmp_path, batch_size=5, importance=KAKURENBO, **options) as loader:
            with pytest.raises(StateError, match=r"epoch 0 was begun.*use loader.save and"):
                loader.load_state_dict(state)

    run_threads(thread_worlds([1]), run)


def test_another_layout_begins_in_its_epoch_and_another_batch_size_does_not():
    saved = Position(7, (Segment((2, 2), 4, 3, 9),), 1)
    assert saved.resumed((2, 2), 4) is saved
    smaller = saved.resumed((2, 2), 3)
    assert (smaller.running.first_epoch, smaller.ended) == (3, saved.segments)
    elsewhere = saved.resumed((1,), 4)
    assert (elsewhere.running.first_epoch, elsewhere.ended) == (7, saved.segments)
    assert elsewhere.running.steps == elsewhere.refresh_step == 0
    assert saved.at(steps=0, refresh_step=0).resumed((1,), 4).ended == ()
