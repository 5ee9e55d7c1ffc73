"""What follows samples to other ranks, and what a state says of them; see tests/test_resumes.py."""

import numpy as np
import pytest

import shuffle
from dataio import Loader, Reports, Staging, StateError, Workers
from dataio.plan.segment import Position, Segment
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from tests.memory_source import FIELDS, MemorySource

pytestmark = pytest.mark.thorough

NUM_SAMPLES = 211
KAKURENBO = Kakurenbo(0.5, drops=(), alphas=(1.0,), warmup_epochs=0)


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


@pytest.fixture
def unequal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = np.random.default_rng(4).integers(0, 256, NUM_SAMPLES).astype(np.uint8)
    monkeypatch.setattr(MemorySource, "costs", costs, raising=False)


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
