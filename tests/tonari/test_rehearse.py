"""`tonari rehearse`: the model beside closed forms, and what the command says and refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.multirank import ROOT
from tonari.cli import main
from tonari.rehearse.model import BEGUN, CAUSES, DONE, FULL, LIMIT, LOST, LongRun, simulate
from tonari.trainer.config.config import load_config
from tonari.trainer.watch.plan import PARTS, plan_settings

NEVER_S = 1e30
JOB = str(ROOT / "examples" / "gpt_shakespeare.toml")
TIMES = "--epoch 6h --staging 20m --checkpoint-cost 60s".split()
COMMAND = ["rehearse", JOB, "run.epochs=9", "--days", "3", "--mtbf", "500h"]


def long_run(**changes: Any) -> LongRun:
    """A run of 100,000 s that nothing delays or ends."""
    return replace(
        LongRun(
            work_s={"steps": 1e5}, days=30, nodes=50, mtbf_s=NEVER_S, interval_s=1e4,
            checkpoint_s=0.0, reload_s=0.0, start_s=0.0, staging_s=0.0, keeps_caches=True,
            queue_s=0.0, ending_s=0.0, limit_s=math.inf, signal_s=0.0, full_fraction=0.0,
            live_s=0.0,
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("interval_s", "checkpoints"), [(1e4, 10), (3e4, 4), (1e5 / 7, 7), (math.inf, 1)]
)
def test_a_run_without_failures_takes_exactly_its_parts(interval_s, checkpoints) -> None:
    run = long_run(
        interval_s=interval_s, checkpoint_s=60, queue_s=600, start_s=50, staging_s=40, reload_s=30
    )
    found = simulate(run, runs=3, seed=0)
    assert found.ended_s == pytest.approx(1e5 + 60 * checkpoints + 600 + 50 + 40, rel=1e-12)
    assert not found.times[[LOST, LIMIT, FULL]].any()
    assert found.goodput(run) == pytest.approx(1e5 / (1e5 + 60 * checkpoints + 90))


@pytest.mark.parametrize(
    ("changes", "ended_s"),
    [
        # Five jobs are asked to end at 20,010 s, and save: each has trained since it was ready
        ({"keeps_caches": False}, 6 * (600 + 10 + 1000) + 1e5),
        ({}, 6 * (600 + 10) + 1000 + 1e5),
        # Killed at 21,010 s: three jobs train for 1,000 s behind their last checkpoint
        ({"signal_s": 0.0}, 5 * (600 + 10) + 1000 + 1e5 + 3 * 1000),
        # A checkpoint of 100 s is begun 50 s before the end, and lost with what it was to hold
        (
            {"signal_s": 50.0, "limit_s": 21060.0, "checkpoint_s": 100.0},
            6 * (600 + 10) + 1000 + 1e5 + 10 * 100 + 5 * 50 + 9900 + 4 * 800,
        ),
    ],
)
def test_a_time_limit_ends_jobs_which_go_on_from_a_checkpoint(changes, ended_s) -> None:
    run = long_run(
        limit_s=21010.0, signal_s=1000.0, queue_s=600, start_s=10, staging_s=1000, ending_s=7
    )
    found = simulate(replace(run, **changes), runs=2, seed=0)
    assert found.ended_s == pytest.approx(ended_s)
    assert found.cost_s[BEGUN] == pytest.approx(600 + 10 + 1000)


def test_a_failure_while_the_last_checkpoint_is_written_loses_it() -> None:
    run = long_run(limit_s=1e4, signal_s=5e3, interval_s=1e5, checkpoint_s=5e3, mtbf_s=50 * 1e4)
    found = simulate(run, runs=200, seed=5)
    # Each start trains 5,000 s and writes as long, and is for nothing if a node fails meanwhile
    assert found.times[LIMIT] + found.times[DONE] == pytest.approx(20)
    starts = found.times.sum()
    assert 20 * 200 / starts == pytest.approx(math.exp(-1), abs=4 * math.sqrt(0.25 / starts))


def test_a_full_disk_costs_a_start_which_is_named() -> None:
    run = long_run(queue_s=600, start_s=50, staging_s=40, full_fraction=0.25)
    found = simulate(run, runs=4000, seed=3)
    assert found.times[FULL].mean() == pytest.approx(1 / 3, abs=0.03)
    assert found.cost_s[FULL] == pytest.approx(found.times[FULL] * 690.0)
    assert found.ended_s == pytest.approx(1e5 + 690 + found.cost_s[FULL])


@pytest.mark.parametrize(
    ("start_s", "queue_s", "ending_s"), [(0, 0, 0), (500, 0, 0), (300, 900, 60)]
)
def test_failures_lengthen_a_run_as_daly_expects(start_s, queue_s, ending_s) -> None:
    mean_s = 2e4
    run = long_run(
        mtbf_s=mean_s * 50, checkpoint_s=300, start_s=start_s, queue_s=queue_s, ending_s=ending_s
    )
    found = simulate(run, runs=4000, seed=1)
    # Daly 2006: a piece is tried until no failure falls into it or the start before it. Here a
    # failure also costs time in which no node is held and nothing fails.
    per_failure_s, piece_s = mean_s + queue_s + ending_s, 1e4 + 300
    first = math.expm1((start_s + piece_s) / mean_s)
    others = 9 * math.exp(start_s / mean_s) * math.expm1(piece_s / mean_s)
    error_s = found.ended_s.std() / math.sqrt(4000)
    assert abs(found.ended_s.mean() - queue_s - per_failure_s * (first + others)) < 4 * error_s
    assert found.times[LOST].mean() == pytest.approx(first + others, rel=0.02)


@pytest.mark.parametrize(
    ("interval_s", "checkpoint_s", "copies"), [(math.inf, 0, 2), (1e4, 300, 2), (3e3, 300, 1)]
)
def test_a_run_that_goes_on_live_loses_its_pauses_alone(interval_s, checkpoint_s, copies) -> None:
    mean_s, staging_s = 2e3, 4900.0
    run = long_run(
        mtbf_s=mean_s * 50, interval_s=interval_s, checkpoint_s=checkpoint_s, start_s=500,
        staging_s=staging_s, queue_s=5000, ending_s=60, live_s=20, copies=copies,
    )  # fmt: skip
    found = simulate(run, runs=2000, seed=6)
    pause_s = 20 + 500 / 50 + (100 if copies == 1 else 0)
    # Closed form: a failure comes once in mean_s also in pauses; the queue of one node of 50 is
    # time in which the job lacks it. A start that fails before it trains is done again.
    written_s = checkpoint_s * math.ceil(1e5 / run.piece_s)
    going_on = (1e5 + written_s) / (mean_s - pause_s)
    retries = math.expm1((500 + staging_s) / mean_s)
    ready_s = retries * (mean_s + 5000 + 60) + 5000
    expected_s = 1e5 + written_s + going_on * (pause_s + 5000 / 50) + ready_s
    error_s = found.ended_s.std() / math.sqrt(2000)
    assert abs(found.ended_s.mean() - expected_s) < 4 * error_s
    assert found.times[LOST].mean() == pytest.approx(going_on + retries, rel=0.02)
    assert (found.spent_s[CAUSES.index("repeated")] == 0).all()


def test_a_time_limit_also_ends_a_job_that_goes_on_live() -> None:
    run = long_run(mtbf_s=2e3 * 50, limit_s=2e4, signal_s=100.0, interval_s=5e4, copies=2)
    found = simulate(run, runs=50, seed=7)
    assert (found.times[LIMIT] == 1e5 // 19_900).all()
    assert found.ended_s == pytest.approx(1e5)


def test_the_best_interval_is_near_that_of_young_and_daly() -> None:
    run = long_run(mtbf_s=2e4 * 50, checkpoint_s=50, work_s={"steps": 4e5})
    assert run.young_daly_s == pytest.approx(math.sqrt(2 * 50 * 2e4))
    factors = 2.0 ** np.arange(-3, 4)
    mean_s = [
        simulate(replace(run, interval_s=run.young_daly_s * each), runs=1000, seed=2).ended_s.mean()
        for each in factors
    ]
    assert 0.5 <= factors[np.argmin(mean_s)] <= 2
    assert min(mean_s[0], mean_s[-1]) > 1.05 * min(mean_s)


@given(
    run=st.builds(
        long_run,
        nodes=st.integers(1, 100), days=st.just(4), mtbf_s=st.floats(1e6, 1e8),
        interval_s=st.floats(1e3, 2e5), checkpoint_s=st.floats(0, 2e3), reload_s=st.floats(0, 2e3),
        start_s=st.floats(0, 2e3), staging_s=st.floats(0, 1e4), keeps_caches=st.booleans(),
        queue_s=st.floats(0, 1e4), ending_s=st.floats(0, 100),
        limit_s=st.sampled_from([1e4, 5e4, math.inf]), signal_s=st.floats(0, 3e3),
        full_fraction=st.floats(0, 0.5), copies=st.integers(0, 2), live_s=st.floats(0, 1e3),
    )
)  # fmt: skip
def test_what_happens_adds_up_to_the_time(run: LongRun) -> None:
    found = simulate(run, runs=5, seed=4, follow=2)
    has_ended, spent_s = np.isfinite(found.ended_s), dict(zip(CAUSES, found.spent_s, strict=True))
    assert (found.spent_s >= 0).all()
    assert found.ended_s[has_ended] == pytest.approx(found.spent_s.sum(axis=0)[has_ended])
    assert spent_s["trained"][has_ended] == pytest.approx(run.whole_s)
    assert (spent_s["trained"] < run.whole_s + 1e-6).all()
    kept_s = spent_s["trained"] + spent_s["checkpoint"]
    assert found.cost_s.sum(axis=0) + kept_s == pytest.approx(found.spent_s.sum(axis=0))
    assert found.cost_s[BEGUN].max() <= run.queue_s + run.start_s + run.staging_s + 1e-6
    starts = np.array([spent for spent, _ in found.followed])
    assert starts.sum(axis=0) == pytest.approx(found.spent_s[:, 2])
    assert (starts[:, 1:-1].sum(axis=1) <= run.limit_s * (1 + 1e-9)).all()


def test_a_seed_gives_the_same_figures_and_another_one_others(capsys) -> None:
    shown = []
    for seed in ("0", "0", "1"):
        assert main([*COMMAND, *TIMES, "--nodes", "64", "--json", "--seed", seed]) == 0
        shown.append(json.loads(capsys.readouterr().out) | {"seed": None})
    assert shown[0] == shown[1] != shown[2]
    assert 0 < shown[0]["in_time"] < 100 < shown[0]["runs"]
    half_day = shown[0]["end_days"]["median"]
    assert half_day > 3, "fewer than half are in time"
    followed_s = sum(each[cause] for each in shown[0]["followed"] for cause in CAUSES)
    assert followed_s / 86400 == pytest.approx(half_day)
    by_goodput = sorted(shown[0]["tried"], key=lambda each: each["goodput_fraction"])
    assert shown[0]["best_s"] in [each["interval_s"] for each in by_goodput[-2:]]
    assert shown[0]["run"]["work_s"] == {"steps": 9 * 6 * 3600}
    assert shown[0]["run"]["limit_s"] is None
    assert sum(shown[0]["hours"].values()) > 54
    assert shown[0]["tried"][-1]["interval_s"] == 6 * 3600, "the file saves after each epoch"


def test_times_and_nodes_come_from_a_plan(tmp_path: Path, capsys) -> None:
    config = load_config(Path(JOB), ["run.epochs=9", "run.checkpoint_steps=50"])
    epoch = dict.fromkeys(PARTS, 0.0) | {
        "train_s": 7200.0, "evaluation_s": 300.0, "checkpoint_s": 40.0, "staging_s": 500.0,
        "late_rows_s": 20.0, "windows_s": 900.0, "refresh_every": 0, "checkpoint_every": 1,
        "steps": 100, "num_nodes": 8,
    }  # fmt: skip
    path, page = tmp_path / "plan.json", tmp_path / "page.html"
    path.write_text(
        json.dumps({"epoch": epoch, "settings": plan_settings(config), "world_size": 32})
    )
    command = [*COMMAND, "run.checkpoint_steps=50", "--plan", str(path)]
    assert main([*command, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert [*run["work_s"].values()] == [9 * 6300.0, 9 * 900.0, 9 * 300.0]
    assert run["interval_s"] == 3750.0
    assert (run["nodes"], run["staging_s"], run["checkpoint_s"]) == (8, 520.0, 40.0)
    assert main([*command, "run.max_steps=50", "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The run ends within its 3 days: 200 of 200 rehearsals did.")
    assert shown.splitlines()[-1] == f"wrote {page}"
    hours = shown.partition("waits for rows beyond the quota")[2].split()[0]
    assert hours == "0.13", "half an epoch has 450 s of them"
    assert page.read_text().count("<svg ") == 2
    assert main([*command, "--nodes", "64"]) == 1
    assert "is a plan for 8; plan that many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        ("", 1, "--nodes, --epoch, --staging, --checkpoint-cost: not known; give them, or --plan"),
        ("--nodes 2 --epoch 1h --staging 0s", 1, "--checkpoint-cost: not known; give it, or"),
        ("--nodes 2 {} --time-limit 4m", 1, "is 4 min, expected more than --signal, 5 min; give"),
        ("--nodes 0", 2, "--nodes: expected more than 0"),
        ("--checkpoint 10m 0s", 2, "--checkpoint: expected more than 0"),
        ("--disk-full 1", 2, "--disk-full is 1, expected a chance in [0, 1)"),
        ("--queue 10", 2, "argument --queue: found '10', expected a number of s, m, h, d or w"),
        ("--nodes 2 {} run.max_steps=9", 1, "set run.max_steps=0 and give run.epochs"),
        ("--nodes 2 {} run.checkpoint_steps=9", 1, "run.checkpoint_steps=0 and give --checkpoint"),
    ],
)
def test_what_is_wrong_or_missing_is_named_with_the_cure(args, status, said, capsys) -> None:
    assert main([*COMMAND, *args.format(" ".join(TIMES)).split()]) == status
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_that_never_gets_ahead_is_given_up(capsys) -> None:
    args = ["--nodes", "64", "--time-limit", "20m", "--signal", "0s", "--runs", "3"]
    assert main([*COMMAND, *TIMES, *args]) == 0
    shown = capsys.readouterr().out
    assert "The run does not end within its 3 days: 0 of 3 rehearsals did." in shown
    assert "Given up were 3, after 12 days or 3,000 starts." in shown
    found = simulate(long_run(limit_s=9e3, days=3), runs=2, seed=0)
    assert np.isinf(found.ended_s).all()
    assert found.spent_s.sum(axis=0) == pytest.approx(12 * 86400, abs=9e3)
