"""kill -9 anywhere, restart at once: every row owned once, with its bytes and its score."""

import json
import os

import numpy as np
import pytest

RANKS = 4
SAMPLES = 90
EPOCHS = 4
CALLS = {
    "staging": 4,
    "exchange": 10,
    "seal": 10,
    "commit": 6,
    "turn": 4,
    "replace": 4,
    "checkpoint": 4,
    "checkpoint renames": 4,
}
LEADS_ONLY = {"commit", "checkpoint", "checkpoint renames"}
SCHEDULES = 100 if os.environ.get("TONARI_LONG") else 5


def draw_plan(rng):
    """One kill: where, on which rank, at which call, before or after it."""
    point = str(rng.choice(list(CALLS)))
    ranks = {"checkpoint renames": [0]}.get(point, [0, 2] if point in LEADS_ONLY else range(RANKS))
    return {
        "point": point,
        "rank": int(rng.choice(list(ranks))),
        "call": int(rng.integers(1, CALLS[point] + 1)),
        "when": str(rng.choice(["before", "after"])),
    }


@pytest.mark.multirank
@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_kill_anywhere_restart_at_once_and_every_row_is_owned_once(run_ranks, tmp_path, schedule):
    rng = np.random.default_rng(schedule)
    environment = {"TONARI_RANKS_PER_NODE": "2"}

    def start(plan):
        return run_ranks(
            "run_epochs",
            RANKS,
            str(tmp_path),
            str(SAMPLES),
            "0.3",
            str(EPOCHS),
            "none" if plan is None else json.dumps(plan),
            env=environment,
            check=False,
            timeout_s=60,
        )

    killed = 0
    for _ in range(2):
        killed += start(draw_plan(rng)).returncode != 0
    assert killed >= 1, "no kill took place: the schedule tests nothing"
    result = start(None)
    assert result.returncode == 0, result.output
    reports = result.reports
    assert len(reports) == RANKS
    assert sorted(i for report in reports for i in report["ids"]) == list(range(SAMPLES))
    for report in reports:
        assert report["ids"] == report["expected"]
        assert report["corrupt"] == 0
        assert report["files"] == []
    # Every score is its own sample's, of the last epoch (whose owner wrote it before the row
    # moved).
    scores = sorted(s for report in reports for s in report["scores"])
    assert scores == [i + (EPOCHS - 1) * 1000.0 for i in range(SAMPLES)]
