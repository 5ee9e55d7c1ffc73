"""A report goes to the rows it is of, whatever their slots hold by then, or is said to be lost."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

import shuffle
from dataio import Loader, Reports, StateError, Workers
from dataio.world import run_threads, single_world, thread_worlds
from importance import Full, Kakurenbo, RandomPrune
from tests.memory_source import FIELDS, MemorySource

SAMPLES, BATCH = 160, 16
LATE = 1000.0
KEPT = Full(columns=("loss", "loss_mean"))
MOVES = {"all": shuffle.Global(moves=True), "some": shuffle.Partial(0.5)}


def make(world, root, **options):
    chosen: dict[str, Any] = {
        "batch_size": BATCH, "fields": FIELDS, "importance": KEPT, "seed": 3,
        "workers": Workers(threads=0), "reports": Reports(progress=False),
    }  # fmt: skip
    return Loader(MemorySource(SAMPLES), cache=root, world=world, **(chosen | options))


def loss_of(ids):
    return ids.float() + 0.5


def train(loader):
    """Train an epoch, and keep its last batch, which is not reported."""
    batches = list(loader)
    for batch in batches[:-1]:
        loader.report(batch, loss_of(batch["sample_id"]))
    return batches[-1]


@pytest.mark.parametrize("move", MOVES)
def test_a_late_report_reaches_its_rows_or_none(tmp_path, caplog, move):
    def run(world):
        with make(world, tmp_path, shuffle=MOVES[move]) as loader:
            late = train(loader)
            next(iter(loader))
            loader.report(late, LATE + loss_of(late["sample_id"]))
            loader.flush()
            ids = loader._session.pool.sample_ids
            losses = loader._session.pool.scores["loss"].copy()
            here = np.isin(late["sample_id"].numpy(), ids)
            return ids, losses, late["sample_id"].numpy(), here, loader.stats()

    with caplog.at_level(logging.WARNING):
        ranks = run_threads(thread_worlds([1, 1]), run)
    for ids, losses, late, here, stats in ranks:
        known = np.isfinite(losses)
        is_late = known & (losses >= LATE)
        assert np.isin(ids[is_late], late).all(), "no other row was written"
        assert set(ids[is_late]) == set(late[here])
        assert (losses[is_late] == LATE + ids[is_late] + 0.5).all()
        assert (losses[known & ~is_late] == ids[known & ~is_late] + 0.5).all()
        assert 0 < here.sum() < len(late)
        assert stats["lost_reports"] == (~here).sum()
    said = [line for line in caplog.messages if "lie on another node now" in line]
    assert len(said) == 2, "each rank says it once"
    assert "report each batch before the epoch ends" in said[0]


def test_a_late_report_does_not_go_over_a_newer_one(tmp_path):
    with make(single_world(), tmp_path) as loader:
        late = train(loader)
        for batch in loader:
            loader.report(batch, loss_of(batch["sample_id"]))
        # As if another row had had its slot: the row is found by its id.
        moved = late | {"slot": (late["slot"] + 1) % SAMPLES}
        loader.report(moved, LATE + loss_of(late["sample_id"]))
        loader.flush()
        assert (loader._session.pool.scores["loss"] < LATE).all()
        assert loader.stats()["lost_reports"] == 0


def test_a_late_report_where_rows_stay_is_as_any_other(tmp_path):
    with make(single_world(), tmp_path) as loader:
        late = train(loader)
        next(iter(loader))
        loader.report(late, LATE + loss_of(late["sample_id"]))
        loader.flush()
        slots = late["slot"].numpy()
        assert (
            loader._session.pool.scores["loss"][slots] == LATE + late["sample_id"].numpy() + 0.5
        ).all()


def test_padding_is_passed_over_late_too(tmp_path):
    def run(world):
        with make(world, tmp_path, shuffle=MOVES["all"], batch_size=17) as loader:
            late = train(loader)
            next(iter(loader))
            before = loader._session.pool.scores["loss"].copy()
            loader.report(late, torch.full((17,), LATE))
            loader.flush()
            changed = loader._session.pool.sample_ids[loader._session.pool.scores["loss"] != before]
            return (late["slot"] < 0).sum(), set(changed) - set(late["sample_id"].tolist())

    for padding, others in run_threads(thread_worlds([1, 1]), run):
        assert padding > 0
        assert others == set()


def test_a_batch_without_its_ids_is_refused(tmp_path):
    with make(single_world(), tmp_path) as loader:
        batch = next(iter(loader))
        del batch["sample_id"]
        with pytest.raises(
            ValueError, match=r"report: the batch has no 'sample_id', expected .* as delivered"
        ):
            loader.report(batch, torch.ones(BATCH))


@pytest.mark.parametrize("policy", [Kakurenbo(0.3, drops=(), alphas=(1.0,)), KEPT])
def test_reporting_nothing_is_an_error_at_the_epochs_end_on_all_ranks(tmp_path, policy):
    def run(world):
        with make(world, tmp_path, shuffle=MOVES["some"], importance=policy) as loader:
            turns = loader.epochs(3)
            next(turns)
            list(loader)
            with pytest.raises(StateError, match=r"epoch 0.*no row was reported.*loader\.report"):
                next(turns)
            return True

    assert run_threads(thread_worlds([1, 1]), run) == [True, True]


@pytest.mark.parametrize("policy", [None, Full(), RandomPrune(0.2, delta=1.0)])
def test_who_needs_no_reports_hears_nothing(tmp_path, caplog, policy):
    with (
        caplog.at_level(logging.WARNING),
        make(single_world(), tmp_path, importance=policy) as loader,
    ):
        assert sum(len(list(loader)) for _ in loader.epochs(3)) > 0
    assert caplog.messages == []


def test_reporting_too_little_is_told_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), make(single_world(), tmp_path) as loader:
        for epoch in loader.epochs(4):
            for step, batch in enumerate(loader):
                if epoch == 0 or step % 2:
                    loader.report(batch, loss_of(batch["sample_id"]))
    (said,) = caplog.messages
    assert "epoch 1: 80 of 160 rows that were trained were reported" in said
