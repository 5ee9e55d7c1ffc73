import pytest

from trainer.run.schedule import learning_rate


def test_the_cosine_starts_at_lr_and_falls_towards_zero() -> None:
    rates = [learning_rate(epoch, num_epochs=10, lr=0.5) for epoch in range(10)]
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.02


def test_the_warm_up_rises_linearly_and_then_reaches_lr() -> None:
    rates = [learning_rate(epoch, num_epochs=10, lr=0.4, warmup_epochs=3) for epoch in range(4)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_within_an_epoch_the_rate_lies_between_those_of_the_epochs() -> None:
    for first in range(9):
        rates = [
            learning_rate(first + part, num_epochs=10, lr=0.4, warmup_epochs=3)
            for part in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        rises = first < 3
        assert rates == sorted(rates, reverse=not rises)
        assert len(set(rates)) == 5, "it moves on at every step, and never jumps"


def test_steps_decay_at_each_milestone() -> None:
    rates = [
        learning_rate(epoch, num_epochs=6, lr=1, schedule="steps", milestones=(2, 4), decay=0.1)
        for epoch in range(6)
    ]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
