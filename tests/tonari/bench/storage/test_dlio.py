"""The summaries that sites keep of DLIO, made of our results."""

import json

import pytest
from msgspec.structs import replace

from tests.tonari.bench.storage.fabricated import make_results
from tonari.bench.storage.results.dlio import dlio_summaries, utilisation_percent, write_summaries

METRICS = {
    f"train_{name}"
    for name in """au_percentage au_mean_percentage au_stdev_percentage au_meet_expectation
    throughput_samples_per_second throughput_mean_samples_per_second
    throughput_stdev_samples_per_second io_mean_MB_per_second io_stdev_MB_per_second""".split()
}
"""What DLIO 2.0.0 writes of a training without checkpoints."""


def trained():
    """Results, and their end to end."""
    results = make_results()
    assert results.end_to_end is not None
    return results, results.end_to_end


def test_each_way_has_a_summary_with_dlios_own_keys(tmp_path):
    results, found = trained()
    write_summaries(results, tmp_path)
    ways = [way.name for way in found.ways]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ways)
    for way in found.ways:
        summary = json.loads((tmp_path / way.name / "summary.json").read_text())
        assert set(summary["metric"]) == METRICS
        assert summary["epochs"] == len(summary["metric"]["train_au_percentage"])
        assert summary["num_accelerators"] == results.environment["ranks"]
        assert summary["tonari"]["utilisation_fraction"] == way.utilisation_fraction


def test_utilisation_is_compute_over_the_time_that_passed():
    _, found = trained()
    found = replace(found, step_s=0.5, batch_size=10)
    # 8 ranks: 100 samples each are 10 steps of half a second.
    way = replace(found.ways[0], samples_of_epoch=[800, 801], epoch_s=[5.0, 11.0])
    assert utilisation_percent(found, way, num_ranks=8) == pytest.approx([100.0, 50.0])


def test_whether_mlperfs_expectation_is_met_goes_by_the_mean():
    results, found = trained()
    found = replace(found, step_s=0.5, batch_size=10)
    ranks = results.environment["ranks"]

    def judged(epoch_s):
        way = replace(found.ways[0], samples_of_epoch=[100 * ranks] * 2, epoch_s=epoch_s)
        changed = replace(results, end_to_end=replace(found, ways=[way]))
        ((_, summary),) = dlio_summaries(changed)
        assert isinstance(summary["metric"], dict)
        return summary["metric"]["train_au_meet_expectation"]

    assert judged([5.0, 6.0]) == "success"
    assert judged([5.0, 6.5]) == "fail"


def test_without_training_there_is_none():
    assert not list(dlio_summaries(replace(make_results(), end_to_end=None)))
