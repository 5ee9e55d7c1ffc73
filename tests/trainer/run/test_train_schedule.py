"""The learning rate of whole runs."""

from pathlib import Path

import pytest

from tests.trainer.run.runs import KAKURENBO, lines, run, stop_after
from tonari.trainer.run.schedule import learning_rate


def test_the_learning_rate_does_not_grow_while_it_warms_up(config: Path) -> None:
    run(config, "run", *KAKURENBO, "optimizer.warmup_epochs=2", "run.epochs=4")
    epochs = [line for line in lines(config.parent / "run") if line["kind"] == "epoch"]
    rates = [learning_rate(epoch, length=4, lr=0.05, warmup=2) for epoch in range(4)]
    assert epochs[1]["hidden_fraction"] > 0.1
    assert [line["lr"] for line in epochs[:2]] == pytest.approx(rates[:2])
    # 1 / (1 - 0.5 * alpha): of alphas 1, 0.8, 0.6, 0.4 the second, then the third
    grown = [rates[2] / (1 - 0.5 * 0.8), rates[3] / (1 - 0.5 * 0.6)]
    assert [line["lr"] for line in epochs[2:]] == pytest.approx(grown)


@pytest.mark.parametrize("policy", ["random", "infobatch"])
def test_by_step_the_schedule_ends_where_it_should_however_many_rows_are_hidden(
    config: Path, policy: str
) -> None:
    chosen = (f"importance.kind={policy}", "importance.fraction=0.5", "importance.delta=1")
    run(config, "run", *chosen, "optimizer.schedule_by=step")
    told = [line for line in lines(config.parent / "run") if line["kind"] == "step"]
    assert len(told) < 21, "hidden rows make epochs shorter"
    by_epoch = [[line["lr"] for line in told if line["epoch"] == epoch] for epoch in range(3)]
    for epoch, rates in enumerate(by_epoch):
        expected = [
            learning_rate(epoch + step / len(rates), length=3, lr=0.05)
            for step in range(len(rates))
        ]
        assert rates == pytest.approx(expected)


def test_by_step_the_schedule_goes_on_where_an_epoch_goes_on_in_other_batches(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_step = ("optimizer.schedule_by=step", "run.epochs=2")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        run(config, "run", *by_step)
    run(config, "run", *by_step, "data.batch_size=8")
    told = [line for line in lines(config.parent / "run") if line["kind"] == "step"]
    # 64 of 100 rows in batches of 16; then 36 in batches of 8: 104 with the last one's padding.
    done = [step * 16 / 112 for step in range(4)] + [(64 + step * 8) / 104 for step in range(5)]
    expected = [learning_rate(epoch, length=2, lr=0.05) for epoch in done]
    assert [line["lr"] for line in told if line["epoch"] == 0] == pytest.approx(expected)
