"""What is remembered of a row: only what is asked for, and wherever the row goes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shuffle
from dataio import Loader, Reports, Workers
from dataio.plan.history import (
    COLUMNS,
    EARLIER,
    HISTORY_EPOCHS,
    QUANTUM,
    losses_in,
    record,
    score_dtype,
    unscored,
)
from dataio.plan.policies import Importance
from dataio.world import run_threads, single_world, thread_worlds
from importance import Full, InfoBatch, Kakurenbo, RandomPrune
from tests.memory_source import FIELDS, MemorySource

NUM_SAMPLES = 61
COLUMN_SETS = st.sets(st.sampled_from(COLUMNS))


def report(scores, slots, loss, correct=None, confidence=None, *, epoch=0):
    record(
        scores,
        np.array(slots, np.int64),
        loss=np.array(loss, np.float32),
        correct=None if correct is None else np.array(correct, np.bool_),
        confidence=None if confidence is None else np.array(confidence, np.float32),
        epoch=epoch,
    )


@given(COLUMN_SETS)
def test_a_column_is_kept_only_where_it_is_asked_for_or_needed(columns):
    kept = set(score_dtype(columns).names or ())
    needed = {"epoch"} | ({"correct"} if "forgotten" in columns else set())
    needed |= {"loss"} if "history" in columns else set()
    oldest = max((ago for ago, name in enumerate(EARLIER) if name in columns), default=0)
    assert kept == columns | needed | set(EARLIER[:oldest])


@given(COLUMN_SETS, st.integers(0, 2**32))
def test_a_column_holds_the_same_whichever_others_are_kept(columns, seed):
    some, every = unscored(9, score_dtype(columns)), unscored(9, score_dtype(COLUMNS))
    rng = np.random.default_rng(seed)
    for epoch in range(6):
        slots = rng.permutation(9)[:5]
        told = rng.exponential(size=5), rng.random(5) < 0.5, rng.random(5)
        for scores in (some, every):
            report(scores, slots, *told, epoch=epoch)
    for name in some.dtype.names or ():
        assert some[name].tobytes() == every[name].tobytes(), name


def test_no_such_column_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no column 'los'; expected some of loss, loss_1, "):
        score_dtype(["los"])  # type: ignore[list-item]


def test_integers_stay_integers_and_a_row_is_small():
    dtype = score_dtype(COLUMNS)
    kinds = {name: dtype[name].str for name in dtype.names or ()}
    counts = ("forgotten", "wrong")
    assert (kinds["epoch"], *(kinds[name] for name in counts)) == ("<i4", "<u2", "<u2")
    assert kinds["correct"] == "|b1"
    assert kinds["bytes"] == "<u4"
    assert dtype.itemsize == 5 * 4 + 4 + 4 + 4 + 1 + 2 + 2 + 4 + 4 + 2 * HISTORY_EPOCHS
    assert score_dtype(["history"]).itemsize - score_dtype(["loss"]).itemsize == 64


def test_before_its_first_report_a_row_is_unknown():
    (row,) = unscored(1, score_dtype(COLUMNS))
    assert (row["loss"], row["loss_mean"], row["epoch"]) == (np.inf, np.inf, -1)
    assert (row["confidence"], row["correct"], row["forgotten"]) == (0, False, 0)


@given(st.floats(-100, 100, width=32), st.floats(0, 1, width=32))
def test_losses_and_confidences_are_multiples_of_the_quantum_and_near(loss, confidence):
    scores = unscored(1, score_dtype(COLUMNS))
    for _ in range(2):
        report(scores, [0], [loss], [True], [confidence])
        for name, told in (("loss", loss), ("loss_mean", loss), ("confidence", confidence)):
            value = float(scores[name][0])
            assert (value / QUANTUM).is_integer(), name
            assert abs(value - told) <= QUANTUM, name


def test_a_last_bit_of_difference_leaves_no_trace():
    one, other = (unscored(1, score_dtype(COLUMNS)) for _ in range(2))
    loss = np.float32(1.2345)
    report(one, [0], [loss], [True], [np.float32(0.9)])
    report(other, [0], [np.nextafter(loss, np.float32(2))], [True], [np.nextafter(0.9, 1)])
    assert one.tobytes() == other.tobytes()


def test_the_mean_begins_with_the_first_loss_and_moves_a_fifth_of_the_way():
    scores = unscored(2, score_dtype(["loss_mean"]))
    report(scores, [1], [2.0])
    assert scores["loss_mean"].tolist() == [np.inf, 2.0]
    report(scores, [1], [7.0])
    assert scores["loss_mean"][1] == 3.0
    report(scores, [1], [3.0])
    assert scores["loss_mean"][1] == 3.0


def test_a_mean_that_became_infinite_begins_anew_with_the_next_loss():
    scores = unscored(1, score_dtype(["loss_mean"]))
    for loss, mean in ((1.0, 1.0), (np.inf, np.inf), (2.0, 2.0)):
        report(scores, [0], [loss])
        assert scores["loss_mean"][0] == mean


def test_the_second_loss_is_that_of_the_second_epoch_that_reports_the_row_and_stays():
    scores = unscored(2, score_dtype(["loss_second"]))
    seen = []
    for epoch, loss in ((0, 5.0), (0, 4.0), (2, 3.0), (2, 2.5), (5, 1.0)):
        report(scores, [0], [loss], epoch=epoch)
        seen.append(float(scores["loss_second"][0]))
    assert seen == [np.inf, np.inf, 3.0, 3.0, 3.0]
    assert scores["loss_second"][1] == np.inf


def test_a_second_loss_that_is_infinite_leaves_its_place_to_the_next():
    scores = unscored(1, score_dtype(["loss_second"]))
    for epoch, loss in enumerate((5.0, np.inf, 3.0, 2.0)):
        report(scores, [0], [loss], epoch=epoch)
    assert scores["loss_second"][0] == 3.0


def test_forgotten_counts_right_then_wrong_and_nothing_else():
    scores = unscored(1, score_dtype(["forgotten"]))
    counts = []
    for right in (False, False, True, True, False, False, True, False, True):
        report(scores, [0], [1.0], [right])
        counts.append(int(scores["forgotten"][0]))
    assert counts == [0, 0, 0, 0, 1, 1, 1, 2, 2]


def test_forgotten_stays_at_its_largest_number():
    scores = unscored(2, score_dtype(["forgotten"]))
    scores["forgotten"], scores["correct"] = [2**16 - 2, 2**16 - 1], True
    for right in (False, True, False):
        report(scores, [0, 1], [1.0, 1.0], [right, right])
    assert scores["forgotten"].tolist() == [2**16 - 1, 2**16 - 1]


def test_wrong_counts_every_wrong_report_and_never_falls():
    scores = unscored(2, score_dtype(["wrong"]))
    counts = []
    for right in (False, False, True, False, True):
        report(scores, [0], [1.0], [right])
        counts.append(int(scores["wrong"][0]))
    assert counts == [1, 2, 2, 3, 3]
    report(scores, [0], [1.0])
    assert scores["wrong"].tolist() == [4, 0], "a missing outcome counts as wrong"


def test_wrong_stays_at_its_largest_number():
    scores = unscored(2, score_dtype(["wrong"]))
    scores["wrong"] = [2**16 - 2, 2**16 - 1]
    for _ in range(2):
        report(scores, [0, 1], [1.0, 1.0], [False, False])
    assert scores["wrong"].tolist() == [2**16 - 1, 2**16 - 1]


def test_earlier_losses_are_those_of_the_last_five_reports_of_each_row():
    scores = unscored(2, score_dtype(["loss_4"]))
    for number in range(1, 7):
        report(scores, [1], [float(number)])
        if number == 2:
            report(scores, [0], [0.5])
    assert scores[list(EARLIER)].tolist() == [(0.5, *[np.inf] * 4), (6.0, 5.0, 4.0, 3.0, 2.0)]


@given(st.integers(0, 2**32), st.floats(0.02, 1))
def test_the_history_holds_each_loss_of_the_last_epochs_and_nothing_older(seed, share):
    rng = np.random.default_rng(seed)
    scores = unscored(5, score_dtype(["history"]))
    losses: dict[tuple[int, int], float] = {}
    for epoch in range(3 * HISTORY_EPOCHS):
        slots = np.flatnonzero(rng.random(5) < share)
        loss = rng.exponential(size=len(slots)).astype(np.float16)
        report(scores, slots, loss, epoch=epoch)
        losses |= {
            (epoch, slot): float(one)
            for slot, one in zip(slots.tolist(), loss.tolist(), strict=True)
        }
    for slot, last in enumerate(scores["epoch"].tolist()):
        for epoch in range(-1, 3 * HISTORY_EPOCHS + 1):
            (found,) = losses_in(scores[slot : slot + 1], np.array([epoch]))
            is_kept = last - HISTORY_EPOCHS < epoch <= last
            expected = losses.get((epoch, slot), np.nan) if is_kept else np.nan
            assert found == expected or np.isnan([found, expected]).all()


def test_a_loss_beyond_float16_is_infinite_in_the_history_and_a_second_report_replaces_it():
    scores = unscored(1, score_dtype(["history"]))
    report(scores, [0], [1e6], epoch=2)
    assert losses_in(scores, np.array([[1], [2], [3]])).ravel().tolist()[1] == np.inf
    report(scores, [0], [1.5], epoch=2)
    assert losses_in(scores, np.array([2])) == 1.5


def test_a_report_changes_its_rows_alone_each_by_its_own_values():
    scores = unscored(6, score_dtype(COLUMNS))
    before = scores.copy()
    report(scores, [4, 1], [0.5, 1.5], [True, False], [0.75, 0.25], epoch=3)
    untouched = [0, 2, 3, 5]
    assert scores[untouched].tobytes() == before[untouched].tobytes()
    assert scores[["loss", "confidence", "correct", "epoch"]][[4, 1]].tolist() == [
        (0.5, 0.75, True, 3),
        (1.5, 0.25, False, 3),
    ]


# A history that tells every sample, and every epoch of it, from all others


def told(ids, epoch):
    loss = ids.float() / 8 + epoch
    return loss, (ids + epoch) % 3 != 0, ((ids * 7 + epoch) % 64).float() / 64


def expected(num_epochs, columns=COLUMNS):
    """Scores by sample after some epochs in which every row was reported once."""
    scores = unscored(NUM_SAMPLES, score_dtype(columns))
    ids = torch.arange(NUM_SAMPLES)
    for epoch in range(num_epochs):
        loss, correct, confidence = (value.numpy() for value in told(ids, epoch))
        report(scores, ids.numpy(), loss, correct, confidence, epoch=epoch)
    return scores


def make(root, world, importance, policy=None):
    return Loader(
        MemorySource(NUM_SAMPLES),
        batch_size=4,
        fields=FIELDS,
        cache=root,
        shuffle=policy,
        importance=importance,
        world=world,
        workers=Workers(threads=0),
        seed=3,
        reports=Reports(progress=False),
    )


def held(loader):
    """Sample ids of a pool, and their scores."""
    return loader._session.pool.sample_ids.copy(), loader._session.pool.scores.copy()


def train(loader, num_epochs):
    """Report every row of some epochs; end in the middle of the last."""
    for epoch in loader.epochs(num_epochs + 1):
        if epoch == num_epochs:
            return
        for batch in loader:
            loader.report(batch, *told(batch["sample_id"], epoch))


@pytest.mark.parametrize("column", COLUMNS)
def test_a_policy_that_goes_by_outcomes_says_so(tmp_path, column):
    """Else a trainer would report losses alone, and each row would count as wrong."""
    by_loss = {*EARLIER, "loss_second", "loss_mean", "epoch", "bytes", "history"}
    with make(tmp_path, single_world(), Full(columns=(column,))) as loader:
        assert loader.needs_outcome == (column not in by_loss)


def check(pools, scores):
    """Every sample is held once by a node, with its own scores."""
    by_node = {tuple(ids.tolist()): found for ids, found in pools}
    ids = np.concatenate([np.array(node) for node in by_node])
    assert sorted(ids.tolist()) == list(range(NUM_SAMPLES))
    found = np.concatenate(list(by_node.values()))
    assert found.dtype == scores.dtype
    assert found.tobytes() == scores[ids].tobytes()


POLICIES = {
    "partial": shuffle.Partial(0.4),
    "homes": shuffle.Global(),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_all_columns_travel_with_their_rows(tmp_path, policy):
    def job(world):
        with make(tmp_path, world, Full(columns=COLUMNS), POLICIES[policy]) as loader:
            before = held(loader)[0]
            train(loader, 3)
            return *held(loader), len(np.setdiff1d(held(loader)[0], before))

    found = run_threads(thread_worlds([2, 1, 2]), job)
    assert policy == "homes" or min(moved for *_, moved in found) > 0, "rows moved"
    check([(ids, scores) for ids, scores, _ in found], expected(3))


@pytest.mark.parametrize("layout", [[1], [2, 2], [1, 1, 1], [3, 1]])
def test_all_columns_come_back_from_a_checkpoint_on_other_nodes(tmp_path, layout):
    def save(world):
        with make(tmp_path / "a", world, Full(columns=COLUMNS), shuffle.Partial(0.4)) as loader:
            train(loader, 3)
            loader.save(tmp_path / "saved")

    def restore(world):
        with make(tmp_path / "b", world, Full(columns=COLUMNS), shuffle.Partial(0.4)) as loader:
            loader.restore(tmp_path / "saved")
            return held(loader)

    run_threads(thread_worlds([2, 2]), save)
    check(run_threads(thread_worlds(layout), restore), expected(3))


CHANGES: dict[str, tuple[Importance, Importance]] = {
    "fewer": (Full(columns=COLUMNS), Kakurenbo(0.3)),
    "more": (InfoBatch(0.3), Full(columns=COLUMNS)),
    "others": (Full(columns=("forgotten", "loss_mean")), Full(columns=("loss", "confidence"))),
    "none before": (RandomPrune(0.0), Full(columns=COLUMNS)),
    "none after": (Full(columns=COLUMNS), RandomPrune(0.3)),
}


@pytest.mark.parametrize("layout", [[2], [1, 1, 1]])
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_policy_what_was_not_kept_is_as_never_reported(tmp_path, change, layout):
    before, after = CHANGES[change]
    shared = set(before.columns) & set(after.columns)
    if before.columns and after.columns:
        shared.add("epoch")

    def save(world):
        with make(tmp_path / "a", world, before) as loader:
            for epoch in loader.epochs(2):
                for batch in loader:
                    loader.report(batch, *told(batch["sample_id"], epoch))
                if epoch == 1:
                    loader.save(tmp_path / "saved")

    def restore(world):
        with make(tmp_path / "b", world, after) as loader:
            loader.restore(tmp_path / "saved")
            return held(loader)

    run_threads(thread_worlds([2]), save)
    scores = unscored(NUM_SAMPLES, score_dtype(after.columns))
    # InfoBatch hides rows, which keep their report of the epoch before
    saved = held_by_sample(tmp_path, before)
    for name in shared:
        scores[name] = saved[name]
    check(run_threads(thread_worlds(layout), restore), scores)


def held_by_sample(tmp_path, policy):
    """What a loader of the same policy has, from what was saved."""
    with make(tmp_path / "c", single_world(), policy) as loader:
        loader.restore(tmp_path / "saved")
        ids, scores = held(loader)
    return scores[np.argsort(ids)]
