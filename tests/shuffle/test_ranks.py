"""The guarantees of an exchange, on real MPI ranks for ten epochs."""

import pytest

EPOCHS = 10
SAMPLES = 83


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node"), [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (4, 3)]
)
@pytest.mark.parametrize("exchange", [0.3, 1.0])
def test_every_sample_is_owned_once_on_real_ranks(
    run_ranks, tmp_path, ranks, ranks_per_node, exchange
):
    reports = run_ranks(
        "run_epochs",
        ranks,
        str(tmp_path),
        str(SAMPLES),
        str(exchange),
        str(EPOCHS),
        "none",
        env={"TONARI_RANKS_PER_NODE": str(ranks_per_node)},
        timeout_s=90,
    ).reports
    assert sorted(i for report in reports for i in report["ids"]) == list(range(SAMPLES))
    sizes = sorted(len(report["ids"]) for report in reports)
    assert sizes[-1] - sizes[0] <= 1, "pool sizes did not change"
    for report in reports:
        assert report["ids"] == report["expected"], "trace says what happened"
        assert report["corrupt"] == 0
    scores = sorted(score for report in reports for score in report["scores"])
    assert scores == [i + (EPOCHS - 1) * 1000.0 for i in range(SAMPLES)]
    if exchange and ranks > ranks_per_node:
        everyone = [tuple(report["rows"]) for report in reports]
        assert len(set(everyone)) == 1, "sent == received, k equal on all replicas"
        assert everyone[0][0] == everyone[0][1] > 0


@pytest.mark.multirank
def test_torch_and_mpi_worlds_come_to_hold_the_same_rows(run_ranks, tmp_path):
    held = {}
    for launcher, program in (("mpiexec", "run_epochs"), ("torchrun", "run_epochs_torch")):
        (tmp_path / launcher).mkdir()
        reports = run_ranks(
            program, 3, str(tmp_path / launcher), str(SAMPLES), "0.3", str(EPOCHS), "none",
            launcher=launcher, env={"TONARI_RANKS_PER_NODE": "2"}, timeout_s=90,
        ).reports  # fmt: skip
        held[launcher] = [report["ids"] for report in reports]
        assert held[launcher] == [report["expected"] for report in reports]
    assert held["torchrun"] == held["mpiexec"]
