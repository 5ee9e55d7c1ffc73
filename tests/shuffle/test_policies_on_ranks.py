"""Rows placed by scores, or dealt anew, on real MPI ranks: owned once, killed, resumed."""

import json

import pytest

from tests.dataio.source.shards import numbered, write_tar

pytestmark = pytest.mark.multirank

SAMPLES = 83
EPOCHS = 4


@pytest.fixture
def shards(tmp_path):
    write_tar(tmp_path / "0.tar", numbered(SAMPLES, first=0, num_bytes=300))
    return str(tmp_path / "0.tar")


@pytest.mark.parametrize(
    ("by", "ranks", "ranks_per_node"), [("scores", 2, 1), ("scores", 4, 2), ("dealing", 3, 2)]
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    run_ranks, shards, tmp_path, by, ranks, ranks_per_node
):
    """Saved in epoch 1, killed in epoch 3: the caches are two epochs ahead, or between two."""
    environment = {"TONARI_RANKS_PER_NODE": str(ranks_per_node)}
    usual = {"source": shards, "by": by, "hides": True, "epochs": EPOCHS, "timeout_s": 20}
    usual |= {"cache": str(tmp_path / "cache")}

    def start(check=True, **options):
        return run_ranks(
            "loader_job", ranks, json.dumps(usual | options), env=environment, check=check
        ).reports

    whole = start(cache=str(tmp_path / "whole"))
    saved = str(tmp_path / "saved")
    steps = whole[0]["steps"][0][1]
    first = start(stop=steps + 2, save=saved)
    start(check=False, at=saved, killed=ranks - 1, fall_epoch=3)
    rest = start(at=saved)
    for before, after, uninterrupted in zip(first, rest, whole, strict=True):
        assert before["trained"] + after["trained"] == uninterrupted["trained"]
        assert after["wrong"] == uninterrupted["wrong"] == 0
    trained = sorted(i for report in whole for epoch, i in report["trained"] if epoch == 0)
    assert trained == list(range(SAMPLES))


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(1, 1), (3, 1), (4, 3)])
def test_every_dealt_row_is_owned_once_where_it_is_traced(
    run_ranks, tmp_path, ranks, ranks_per_node
):
    environment = {"TONARI_RANKS_PER_NODE": str(ranks_per_node)}
    arguments = ["run_epochs", ranks, str(tmp_path), str(SAMPLES), "-1", "10", "none"]
    reports = run_ranks(*arguments, env=environment, timeout_s=90).reports
    assert sorted(i for report in reports for i in report["ids"]) == list(range(SAMPLES))
    for report in reports:
        assert report["ids"] == report["expected"], "trace says what happened"
        assert report["corrupt"] == 0
    scores = sorted(score for report in reports for score in report["scores"])
    assert scores == [i + 9 * 1000.0 for i in range(SAMPLES)]


@pytest.mark.parametrize(
    "plan",
    [
        {"point": "exchange", "rank": 1, "call": 3, "when": "after"},
        {"point": "seal", "rank": 3, "call": 7, "when": "before"},
        {"point": "commit", "rank": 2, "call": 4, "when": "after"},
        {"point": "turn", "rank": 0, "call": 2, "when": "before"},
    ],
)
def test_dealt_rows_survive_a_kill_anywhere(run_ranks, tmp_path, plan):
    environment = {"TONARI_RANKS_PER_NODE": "2"}

    def start(plan, *, check):
        arguments = ["run_epochs", 4, str(tmp_path), str(SAMPLES), "-1", "4", plan]
        return run_ranks(*arguments, env=environment, check=check, timeout_s=60)

    assert start(json.dumps(plan), check=False).returncode != 0
    # Staging seals too, as often as its threads' blocks happen to come
    staged = len(list(tmp_path.glob("staged-*"))) == 4
    reports = start("none", check=True).reports
    assert sorted(i for report in reports for i in report["ids"]) == list(range(SAMPLES))
    for report in reports:
        assert report["ids"] == report["expected"]
        assert report["corrupt"] == 0
        assert report["read_from_source"] == 0 or plan["point"] == "exchange" or not staged
