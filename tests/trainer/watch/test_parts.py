"""Each second of an epoch is counted once, and put beside what was planned of it."""

import json

import pytest

from tests.stand_ins import SetClock
from tonari.trainer.watch import parts
from tonari.trainer.watch.parts import EpochParts, off_words
from tonari.trainer.watch.plan import PARTS, Plan


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    made = SetClock(100.0)
    monkeypatch.setattr(parts, "time", made)
    return made


def spend(clock: SetClock, timed: EpochParts, part: str, seconds: float) -> None:
    with timed.time(part):
        clock.now += seconds


def plan(*, checkpoint_every: int = 1, refresh_every: int = 0, **mean_s: float) -> Plan:
    return Plan(
        mean_s=dict.fromkeys(PARTS, 0.0) | mean_s, staging_s=4.0, refresh_every=refresh_every,
        checkpoint_every=checkpoint_every, steps=1, windows_s=0.0, late_rows_s=0.0, num_nodes=1,
    )  # fmt: skip


def test_each_second_is_counted_to_one_part(clock: SetClock) -> None:
    timed = EpochParts(None)
    clock.now += 1.0
    spend(clock, timed, "epoch_end_s", 3.0)
    with timed.time("train_s"):
        clock.now += 5.0
        spend(clock, timed, "evaluation_s", 7.0)
        clock.now += 5.0
    clock.now += 1.0
    line = timed.end_epoch(1, exchange_s=2.0)
    assert line == {
        "train_s": 10.0, "exchange_s": 2.0, "epoch_end_s": 1.0, "refresh_s": 0.0,
        "evaluation_s": 7.0, "checkpoint_s": 0.0, "other_s": 2.0, "measured_s": 22.0,
    }  # fmt: skip
    assert off_words(line) == ""
    spend(clock, timed, "checkpoint_s", 4.0)
    assert timed.end_epoch(2, exchange_s=0.0)["checkpoint_s"] == 4.0, "of the epoch that it opens"


def test_an_epoch_that_was_interrupted_has_the_parts_of_all_its_starts(clock: SetClock) -> None:
    first = EpochParts(None)
    with first.time("train_s"):
        clock.now += 5.0
        with first.time("checkpoint_s"):
            so_far = json.loads(json.dumps(first.so_far()))
    again = EpochParts(None)
    again.go_on(so_far)
    spend(clock, again, "train_s", 2.0)
    line = again.end_epoch(1, exchange_s=0.0)
    assert (line["train_s"], line["other_s"], line["measured_s"]) == (7.0, 0.0, 7.0)


def test_the_part_that_was_off_most_is_named(clock: SetClock) -> None:
    timed = EpochParts(plan(train_s=11.0, evaluation_s=1.5, epoch_end_s=0.3))
    spend(clock, timed, "train_s", 11.9)
    spend(clock, timed, "evaluation_s", 1.0)
    line = timed.end_epoch(3, exchange_s=0.0)
    assert line["planned_train_s"] == 11.0
    assert line["most_off"] == "train_s"
    words = off_words(line)
    assert "12.90 s, 12.80 s were planned; steps +0.90 s (+8%)" in words
    assert "staging" not in words
    spend(clock, timed, "train_s", 11.9)
    assert "evaluation -1.50 s (-100%)" in off_words(timed.end_epoch(4, exchange_s=0.0))
    spend(clock, timed, "train_s", 11.9)
    spend(clock, timed, "refresh_s", 2.0)
    words = off_words(timed.end_epoch(5, exchange_s=0.0))
    assert words.endswith("refresh +2.00 s"), "no share of nothing"


def test_the_first_epoch_has_no_turn_and_is_put_beside_staging(clock: SetClock) -> None:
    timed = EpochParts(plan(train_s=8.0, epoch_end_s=5.0, exchange_s=5.0, checkpoint_s=5.0))
    spend(clock, timed, "train_s", 10.0)
    line = timed.end_epoch(0, exchange_s=0.0)
    assert line["planned_s"] == 8.0
    words = off_words({**line, "staging_s": 6.0})
    assert words.endswith("steps +2.00 s (+25%); staging 6.00 s, 4.00 s were planned")


def test_what_comes_every_so_many_epochs_is_planned_where_it_comes() -> None:
    planned = plan(refresh_every=4, refresh_s=1.0, checkpoint_every=3, checkpoint_s=2.0)
    by_epoch = [planned.parts_of(epoch) for epoch in range(9)]
    assert [parts["refresh_s"] for parts in by_epoch] == [4, 0, 0, 0, 4, 0, 0, 0, 4]
    # Of the epoch before: each third one
    assert [parts["checkpoint_s"] for parts in by_epoch] == [0, 0, 0, 6, 0, 0, 6, 0, 0]
