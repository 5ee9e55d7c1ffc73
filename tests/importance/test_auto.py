"""Auto hides what is called wrong where labels follow no second guess, and decides once."""

import logging
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dataio import Loader, Reports, Workers
from dataio.plan.history import Candidates, Scores
from dataio.plan.policies import Selection
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import Auto, KeepAgreed
from tests.cases import diagonal
from tests.importance.hidden import NUM_SAMPLES, Watched, losses
from tests.importance.rows import SCORE_DTYPE, field_of, one_pool, scattered, select_in_pools
from tests.memory_source import FIELDS, MemorySource

NUM_CLASSES = 10
EPOCHS = 7
MEASURED = {2: 0.791, 3: 0.489, 4: 0.658, 5: 0.612, 6: 0.847}
"""The second guess before each epoch of a run whose losses are those of `losses`."""


def predicted(
    num_rows: int, *, wrong_labels: float, num_classes: int = NUM_CLASSES, seed: int = 0
) -> Scores:
    """What a model says of rows that it was trained on, some with a label drawn at random.

    It is as often right as it thinks, and it knows that labels may be any: so are its predictions.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (num_rows, num_classes))
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    odds = (1 - wrong_labels) * odds + wrong_labels / num_classes
    classes = np.array([rng.choice(num_classes, p=row) for row in odds])
    scores = np.zeros(num_rows, SCORE_DTYPE)
    scores["loss"] = -np.log(odds[np.arange(num_rows), classes])
    scores["confidence"] = odds.max(axis=1)
    scores["correct"] = odds.argmax(axis=1) == classes
    return scores


def chosen(policy: Auto, rows: Candidates, epoch: int = 5) -> Selection:
    return policy.select(rows, epoch=epoch, num_epochs=None)


@pytest.mark.parametrize("wrong_labels", [0.15, 0.4, 0.7])
def test_where_labels_are_wrong_it_hides_what_keep_agreed_hides(wrong_labels: float) -> None:
    rows = one_pool(predicted(3000, wrong_labels=wrong_labels))
    selection = chosen(Auto(0.4, begins=2), rows)
    wanted = KeepAgreed(0.4).select(rows, epoch=5, num_epochs=None)
    assert selection.hidden.tolist() == wanted.hidden.tolist()
    assert len(selection.hidden) > 0
    assert selection.figures["keeps_agreed"] == 1.0
    assert selection.figures["second_guess"] < 0.36
    assert selection.figures["called_wrong"] == wanted.figures["called_wrong"]
    assert "labels are not trusted, as the second guess is 0." in selection.note


def test_where_labels_are_right_all_rows_stay_however_often_the_model_fails() -> None:
    scores = predicted(3000, wrong_labels=0.0)
    assert scores["correct"].mean() < 0.6
    selection = chosen(Auto(begins=2), one_pool(scores))
    assert len(selection.hidden) == 0
    assert selection.figures["keeps_agreed"] == 0.0
    assert "labels are trusted" in selection.note


def test_the_more_labels_are_wrong_the_less_they_follow_a_second_guess() -> None:
    seen = [
        chosen(Auto(begins=2), one_pool(predicted(4000, wrong_labels=share))).figures
        for share in (0.0, 0.1, 0.2, 0.4, 1.0)
    ]
    guesses = [figures["second_guess"] for figures in seen]
    assert guesses == sorted(guesses, reverse=True)
    assert guesses[0] > 0.36
    assert guesses[3] < 0.15


def test_a_class_weighs_as_much_however_many_rows_it_has() -> None:
    """Labels of rare classes are seldom guessed at all, and hardly count where rows are counted."""
    scores, labels = predicted(2000, wrong_labels=0.2), np.arange(2000) % NUM_CLASSES
    scores["correct"][labels == 3] = False  # a class that is seldom guessed
    repeated = np.concatenate([np.arange(2000), *[np.flatnonzero(labels == 3)] * 9])

    def measured(slots: NDArray[np.int64]) -> float:
        stream, ids = one_pool(scores[slots]).stream, np.arange(len(slots))
        rows = Candidates(
            scores[slots], ids, len(slots), stream, by_field=lambda name: labels[slots]
        )
        return chosen(Auto(begins=2), rows).figures["second_guess"]

    assert measured(repeated) == pytest.approx(measured(np.arange(2000)), rel=1e-12)


def test_what_it_chose_stays_whatever_is_reported_later() -> None:
    wrong, right = (one_pool(predicted(2000, wrong_labels=share)) for share in (0.4, 0.0))
    policy = Auto(begins=2)
    for first, then in ((wrong, right), (right, wrong)):
        decided = chosen(policy, first, 2)
        later = Candidates(
            then.scores, then.sample_id, then.num_samples, then.stream,
            by_field=then.by_field, before=decided.figures,
        )  # fmt: skip
        after = chosen(policy, later, 3)
        for name in ("second_guess", "keeps_agreed"):
            assert after.figures[name] == decided.figures[name]
        assert (len(after.hidden) > 0) == (len(decided.hidden) > 0)
        assert after.note == "", "it is said once"


def test_pools_that_see_other_rows_decide_alike() -> None:
    scores = predicted(900, wrong_labels=0.25)
    # All that is wrong lies in the first pools
    order = np.argsort(scores["correct"], kind="stable")
    pools = [np.sort(part) for part in np.array_split(order, 3)]
    (whole,) = select_in_pools(Auto(begins=2), scores, [np.arange(900)], epoch=3, num_epochs=None)
    for dealt in (pools, scattered(900, 4)):
        parts = select_in_pools(Auto(begins=2), scores, dealt, epoch=3, num_epochs=None)
        assert {part.figures["second_guess"] for part in parts} == {whole.figures["second_guess"]}
        hidden: list[NDArray[np.int64]] = [
            pool[part.hidden] for pool, part in zip(dealt, parts, strict=True)
        ]
        assert sorted(np.concatenate(hidden).tolist()) == sorted(whole.hidden.tolist())
        assert len(whole.hidden) > 0


def test_two_classes_have_no_second_guess_and_all_rows_stay() -> None:
    scores = predicted(500, wrong_labels=0.9, num_classes=2)
    rows = Candidates(
        scores, np.arange(500), 500, one_pool(scores).stream,
        by_field=lambda name: np.arange(500) % 2,
    )  # fmt: skip
    assert chosen(Auto(begins=2), rows).figures == {"second_guess": 1.0, "keeps_agreed": 0.0}


def test_without_a_report_it_does_not_decide() -> None:
    scores = predicted(50, wrong_labels=0.4)
    scores["epoch"] = -1
    assert chosen(Auto(begins=2), one_pool(scores)).figures == {}


@pytest.mark.parametrize("broken", [0.0, np.inf])
def test_losses_that_broke_down_hide_nothing_by_mistake(broken: float) -> None:
    """All right, or all wrong: there is nothing to compare."""
    scores = predicted(50, wrong_labels=0.0)
    scores["loss"], scores["confidence"], scores["correct"] = broken, 0.0, broken == 0.0
    selection = chosen(Auto(begins=2), one_pool(scores))
    assert len(selection.hidden) == 0


def test_by_itself_it_decides_after_two_fifths_of_the_run() -> None:
    rows = one_pool(predicted(500, wrong_labels=0.5))
    told = [Auto().select(rows, epoch=epoch, num_epochs=20).figures for epoch in range(20)]
    assert [bool(figures) for figures in told] == [epoch >= 8 for epoch in range(20)]
    assert not Auto().select(rows, epoch=0, num_epochs=1).figures
    with pytest.raises(ValueError, match=r"length of the run is not known.*Auto\(begins=\.\.\.\)"):
        Auto().select(rows, epoch=3, num_epochs=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, r"Auto: fraction is 1.0, expected a number in \[0, 1\); 0.3 stands"),
        ({"begins": 0}, "Auto: begins is 0, expected a whole number >= 1 or None"),
        (
            {"second_guess": 1.5},
            r"Auto: second_guess is 1.5, expected a number in \[0, 1\]; 0.3 stands",
        ),
        ({"refresh_every": 0}, "Auto: refresh_every is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Auto(**settings)


def loader(world: World, root: Path, policy: Watched) -> Loader:
    return Loader(
        MemorySource(NUM_SAMPLES), cache=root, world=world, batch_size=4, fields=FIELDS, seed=3,
        workers=Workers(threads=0), reports=Reports(progress=False), importance=policy,
    )  # fmt: skip


def go_on(opened: Loader, *, stop: tuple[int, int | None] | None = None) -> dict[int, float]:
    """Train to the end, or up to some steps of an epoch (None: all), and tell the decisions."""
    decided: dict[int, float] = {}
    for epoch in opened.epochs(EPOCHS):
        for number, batch in enumerate(opened, start=1):
            opened.report(batch, *losses(batch["sample_id"], epoch))
            if stop == (epoch, number):
                return decided
        for batch in opened.refresh():
            opened.report(batch, *losses(batch["sample_id"], epoch))
        decided[epoch] = opened.stats().get("keeps_agreed", -1.0)
        if stop == (epoch, None):
            return decided
    return decided


@pytest.mark.parametrize(
    ("policy", "hides_from"),
    [(Auto(begins=2, second_guess=0.6), EPOCHS), (Auto(begins=3, second_guess=0.6), 3)],
    ids=["trusted", "not trusted"],
)
@diagonal(stop=[(3, 2), (3, None), (4, 1)], after=[[2, 1], [1, 1, 1]])
def test_a_decision_survives_a_save_on_any_ranks(tmp_path, policy, hides_from, stop, after) -> None:
    """Measured again in epoch 3, or 4, it would be another: see MEASURED."""
    again = hides_from == 3
    assert (MEASURED[2] < 0.6, MEASURED[3] < 0.6, MEASURED[4] < 0.6) == (False, True, False)

    def before(world: World) -> None:
        with loader(world, tmp_path / "before", Watched(policy)) as opened:
            go_on(opened, stop=stop)
            opened.save(tmp_path / "saved")

    def later(world: World) -> tuple[dict[int, float], dict[int, list[int]]]:
        watched = Watched(policy)
        with loader(world, tmp_path / f"after {len(after)}", watched) as opened:
            opened.restore(tmp_path / "saved")
            return go_on(opened), watched.hidden

    run_threads(thread_worlds([2, 1], timeout_s=20), before)
    for decided, hidden in run_threads(thread_worlds(after, timeout_s=20), later):
        assert set(decided.values()) == {float(again)}
        assert {epoch for epoch, rows in hidden.items() if rows} <= set(range(hides_from, EPOCHS))
        assert any(hidden.values()) == again


def test_where_scores_begin_anew_it_decides_anew(tmp_path) -> None:
    policy = Auto(begins=3, second_guess=0.65)
    with loader(single_world(), tmp_path, Watched(policy)) as opened:
        go_on(opened, stop=(3, None))
        assert opened.stats()["second_guess"] == pytest.approx(MEASURED[3], abs=1e-3)
        state = opened.state_dict()
    with loader(single_world(), tmp_path, watched := Watched(policy)) as opened:
        opened.load_state_dict(state)
        decided = go_on(opened)
        assert opened.stats()["second_guess"] == pytest.approx(MEASURED[5], abs=1e-3)
    assert [decided.get(epoch) for epoch in (4, 5, 6)] == [-1.0, 1.0, 1.0]
    assert not watched.hidden.get(4)


def test_the_log_says_once_what_it_saw(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    with loader(single_world(), tmp_path, Watched(Auto(begins=3, second_guess=0.6))) as opened:
        go_on(opened)
    said = [record.getMessage() for record in caplog.records if "guess" in record.getMessage()]
    assert said == [
        "[rank 0] epoch 3: importance: labels are not trusted, as the second guess is 0.49 "
        "(trusted from 0.6): what is called wrong is hidden"
    ]


def test_the_field_is_asked_of_the_loader() -> None:
    assert Auto(label="kind").by_fields == ("kind",)
    assert field_of(3)("label").tolist() == [0, 1, 2]
