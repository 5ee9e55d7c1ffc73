import pytest

from tonari.trainer.config.optimizer import OptimizerConfig, ScheduleKind
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.pace import Pace, find_max_steps
from tonari.trainer.run.schedule import learning_rate


def test_the_cosine_starts_at_lr_and_falls_towards_zero() -> None:
    rates = [learning_rate(epoch, length=10, lr=0.5) for epoch in range(10)]
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.02


def test_the_warm_up_rises_linearly_and_then_reaches_lr() -> None:
    rates = [learning_rate(epoch, length=10, lr=0.4, warmup=3) for epoch in range(4)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_within_an_epoch_the_rate_lies_between_those_of_the_epochs() -> None:
    for first in range(9):
        rates = [
            learning_rate(first + part, length=10, lr=0.4, warmup=3)
            for part in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        rises = first < 3
        assert rates == sorted(rates, reverse=not rises)
        assert len(set(rates)) == 5, "it moves on at every step, and never jumps"


def test_steps_decay_at_each_milestone() -> None:
    rates = [
        learning_rate(epoch, length=6, lr=1, schedule="steps", milestones=(2, 4), decay=0.1)
        for epoch in range(6)
    ]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_lowest_rate_is_where_cosine_line_and_wsd_end() -> None:
    schedules: tuple[ScheduleKind, ...] = ("cosine", "linear", "wsd")
    for schedule in schedules:
        rates = [
            learning_rate(
                step,
                length=100,
                lr=0.5,
                schedule=schedule,
                min_lr=0.1,
                warmup=9,
                decay_fraction=0.2,
            )
            for step in range(101)
        ]
        assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
        assert rates[100] == pytest.approx(0.1)
        assert rates[9:] == sorted(rates[9:], reverse=True)
        middle = {"cosine": 0.3, "linear": 0.3, "wsd": 0.5}[schedule]
        assert learning_rate(
            54.5, length=100, lr=0.5, schedule=schedule, min_lr=0.1, warmup=9, decay_fraction=0.2
        ) == pytest.approx(middle)
    assert rates[:81][9:] == [0.5] * 72, "wsd stays"
    assert rates[90] == pytest.approx(0.3)
    falls = [
        learning_rate(step, length=9, lr=1, schedule="steps", min_lr=0.05, milestones=(2, 4))
        for step in (0, 3, 8)
    ]
    assert falls == pytest.approx([1, 0.1, 0.05])


def test_a_warm_up_of_a_part_of_an_epoch_rises_by_the_step() -> None:
    steps = OptimizerConfig(lr=0.4, schedule_by="step", warmup_steps=3)
    parts = OptimizerConfig(lr=0.4, schedule_by="step", warmup_epochs=0.3)
    for config in (steps, parts):
        pace = Pace(config, epochs=1, max_steps=None, epoch_steps=10)
        rates = [pace.rate(0, steps=n, done=n, epoch_batches=10) for n in range(10)]
        assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_run_of_steps_has_a_schedule_of_steps_and_ends_there() -> None:
    config = OptimizerConfig(lr=0.4, schedule="linear", warmup_steps=3)
    pace = Pace(config, epochs=4, max_steps=13, epoch_steps=4)
    rates = [pace.rate(n // 4, steps=n, done=n % 4, epoch_batches=4) for n in range(13)]
    assert rates == pytest.approx([0.1, 0.2, 0.3] + [0.4 * (10 - n) / 10 for n in range(10)])
    assert [pace.is_over(n) for n in (12, 13, 14)] == [False, True, True]
    with pytest.raises(ConfigError, match=r"run of 17 steps, .* are 16; give run.epochs=5 or more"):
        Pace(config, epochs=4, max_steps=17, epoch_steps=4)


def test_a_number_of_tokens_is_the_number_of_steps_that_reaches_it() -> None:
    assert find_max_steps(0, 0, step_tokens=64) is None
    assert find_max_steps(7, 0, step_tokens=64) == 7
    assert [find_max_steps(0, n, step_tokens=64) for n in (1, 64, 65)] == [1, 1, 2]
