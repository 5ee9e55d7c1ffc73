"""What a plan takes from a run: factors of the parts that the run was planned to have."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tonari.oracle.epoch import PlannedEpoch
from tonari.oracle.errors import OracleError
from tonari.oracle.learned import learn
from tonari.trainer.watch.metrics import MetricsLog
from tonari.trainer.watch.parts import OTHER
from tonari.trainer.watch.plan import PARTS

PLAN = PlannedEpoch(
    steps=10, train_s=100.0, exchange_s=10.0, epoch_end_s=1.0, refresh_s=0.0, refresh_every=0,
    evaluation_s=20.0, checkpoint_s=5.0, checkpoint_every=1, spread=(0.5, 2.0), staging_s=50.0,
    unstaged_s=0.0, link_bytes=0.0, hidden_fraction=0.0, num_nodes=1,
)  # fmt: skip


def write_metrics(path: Path, epochs: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Write a run's lines as it would, of what was measured and planned of each part."""
    with MetricsLog(path) as log:
        for epoch, given in enumerate(epochs):
            both = dict.fromkeys((*PARTS, OTHER), (0.0, 0.0)) | dict(given)
            log.write({"kind": "step", "epoch": epoch, "step": 2 * epoch + 1})
            log.write({
                "kind": "epoch", "epoch": epoch, "step": 2 * epoch + 2,
                **{name: measured for name, (measured, _) in both.items()},
                **{f"planned_{name}": both[name][1] for name in PARTS},
                "measured_s": sum(measured for measured, _ in both.values()),
                "planned_s": sum(planned for _, planned in both.values()),
                "most_off": "train_s",
            })  # fmt: skip


def test_factors_are_medians_over_epochs_but_the_first(tmp_path: Path) -> None:
    steps = [(900.0, 100.0), (110.0, 100.0), (130.0, 100.0), (120.0, 100.0)]
    write_metrics(tmp_path / "metrics.jsonl", [{"train_s": each} for each in steps])
    factors = learn(tmp_path).factors
    assert [*factors] == ["train_s"]
    steps_factor = factors["train_s"]
    assert steps_factor.median == pytest.approx(1.2)
    assert steps_factor.num_epochs == 3
    assert 1.1 < steps_factor.low < 1.2 < steps_factor.high < 1.3
    assert learn(tmp_path / "metrics.jsonl").factors == factors


def test_a_plan_is_scaled_part_by_part_and_keeps_what_the_run_has_not(tmp_path: Path) -> None:
    run = {"train_s": (30.0, 20.0), "evaluation_s": (1.0, 2.0), "checkpoint_s": (6.0, 6.0)}
    write_metrics(tmp_path / "metrics.jsonl", [run, run])
    learned = learn(tmp_path)
    scaled = learned.scale(PLAN)
    assert (scaled.train_s, scaled.evaluation_s, scaled.checkpoint_s) == (150.0, 10.0, 5.0)
    assert (scaled.exchange_s, scaled.epoch_end_s, scaled.staging_s) == (10.0, 1.0, 50.0)
    assert scaled.epoch_s == 176.0
    # Steps and evaluation by the spread of steps; the others have none
    assert learned.range_s(PLAN) == (75 + 5 + 16, 300 + 20 + 16)


def test_the_spread_of_factors_widens_the_range(tmp_path: Path) -> None:
    steps = [(1.0, 1.0), (0.9, 1.0), (1.0, 1.0), (1.2, 1.0)]
    write_metrics(tmp_path / "metrics.jsonl", [{"train_s": each} for each in steps])
    learned = learn(tmp_path)
    assert learned.scale(PLAN) == PLAN
    (low_s, high_s), (alone_low_s, alone_high_s) = learned.range_s(PLAN), PLAN.range_s
    assert low_s < alone_low_s < alone_high_s < high_s


def test_what_was_hardly_planned_has_no_factor_and_is_shown_if_it_took_long(
    tmp_path: Path,
) -> None:
    run = {"train_s": (9.0, 9.0), "exchange_s": (3.0, 0.01), "epoch_end_s": (0.001, 0.00001)}
    write_metrics(tmp_path / "metrics.jsonl", [run, {**run, "other_s": (0.5, 0.0)}])
    learned = learn(tmp_path)
    assert [*learned.factors] == ["train_s"]
    assert learned.unplanned_s == {"exchange_s": 3.0, "other_s": 0.5}


def test_what_comes_every_so_many_epochs_counts_where_it_comes(tmp_path: Path) -> None:
    plain, saved = {"train_s": (1.0, 1.0)}, {"train_s": (1.0, 1.0), "checkpoint_s": (3.0, 1.0)}
    write_metrics(tmp_path / "metrics.jsonl", [plain, plain, plain, saved, plain, plain, saved])
    assert learn(tmp_path).factors["checkpoint_s"].median == 3.0


def test_a_run_under_way_is_read_until_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [{"train_s": (2.0, 1.0)}] * 2)
    with path.open("a") as file:
        file.write('{"kind": "epoch", "epo')
    assert learn(path).factors["train_s"].median == 2.0


def test_what_is_no_run_beside_a_plan_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(OracleError, match=r"cannot be read .*`tonari train --plan` trained"):
        learn(tmp_path)
    path.write_text("")
    with pytest.raises(OracleError, match="no epoch has ended; wait for two"):
        learn(path)
    with MetricsLog(path) as log:
        log.write({"kind": "epoch", "epoch": 0})
        log.write({"kind": "epoch", "epoch": 1})
    with pytest.raises(OracleError, match=r"has 2 epochs and none beside a plan; give .*--plan"):
        learn(path)
    write_metrics(path, [{"train_s": (1.0, 1.0)}])
    with pytest.raises(OracleError, match=r"only the first epoch .* wait for the second"):
        learn(path)
    other = path.read_text().replace('"train_s": 1.0', '"train_s": 9.0')
    for damaged in ("[1]\n", "{}\n", "words\n", other):
        path.write_text(damaged)
        with pytest.raises(OracleError, match="cannot be read as the metrics of a run"):
            learn(path)
