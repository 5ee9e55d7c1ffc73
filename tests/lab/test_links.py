"""Slow links to the shared filesystem: what staging saves, when it has paid, and what is read."""

from pathlib import Path

import pytest

from benchmarks.lab.links import TRAINING, LinkCase, measure
from tests.lab import cluster, parallel_fs

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _needs_lab() -> None:
    if reason := cluster.what_is_missing() or parallel_fs.what_is_missing():
        pytest.skip(reason)


def check_counted(found: LinkCase) -> None:
    """The filesystem's clients saw every sample read by DataLoaders, and none once staged."""
    assert all(reads >= TRAINING["num_samples"] for reads in found.reads["dataloader"])
    for way in ("staged", "exchange"):
        assert set(found.reads[way]) == {0}, found.reads


def test_a_link_of_a_fifth_of_what_steps_consume_costs_a_fifth_as_much_or_less(
    tmp_path: Path,
) -> None:
    found = measure(tmp_path / "lab", 0.2, {**TRAINING, "epochs": 3, "dataloader_epochs": 2})
    check_counted(found)
    for way in ("staged", "exchange"):
        assert found.beyond_s("dataloader") > 5 * found.beyond_s(way), found.end_to_end


def test_the_epoch_after_which_staging_has_paid_is_predicted(tmp_path: Path) -> None:
    compute_s = TRAINING["num_samples"] / 4 / TRAINING["batch_size"] * TRAINING["step_s"]
    node_bytes = TRAINING["num_samples"] / 4 * TRAINING["sample_bytes"]
    # The DataLoader's epochs take about twice the compute, staging nine times, on a site that
    # lets a job read slowly.
    training = {
        **TRAINING, "epochs": 12, "dataloader_epochs": 12, "ways": ["dataloader", "staged"],
        "staging_bandwidth": node_bytes / (9 * compute_s),
    }  # fmt: skip
    found = measure(tmp_path / "lab", 0.5, training)
    staged = found.ways["staged"]
    assert staged.paid_after is not None
    assert staged.predicted_paid_after is not None
    assert 6 <= staged.paid_after <= 15
    assert abs(staged.paid_after - staged.predicted_paid_after) <= 1
    assert set(found.reads["staged"]) == {0}
