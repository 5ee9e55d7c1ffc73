"""Which of the measured figures a prediction starts from."""

from dataclasses import replace

import pytest

from tonari.bench.storage.results.results import MeasuredLink, Phase, Repeat, Results
from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import CacheVerdict
from tonari.bench.storage.site.site import Mount, Site
from tonari.bench.storage.training.predict import Workload
from tonari.bench.storage.training.rates import at_readers, choose_rates

SITE = Site(
    path="/", name="fuse", magic=0,
    mount=Mount(point="/", fstype="fuse", source="", server=None, options=()),
    total_bytes=1, free_bytes=1, free_files=1, block_bytes=4096, is_shared=True,
    client_cache="unknown", layout=None, notes=(),
)  # fmt: skip
WORKLOAD = Workload(num_samples=100, sample_bytes=1e5, batch_size=10, ranks_of_node=(2, 2))


def phase(pattern, rates, *, clients=1, threads=1, tier="shared", wanted="cold", request=1 << 17):
    repeats = [
        Repeat(
            seconds=2.0, bytes_of_client=[round(2 * rate)], seconds_of_client=[2.0],
            verdict=CacheVerdict("cold", ""), verdict_of_node={}, moved=Moved(),
        )
        for rate in rates
    ]  # fmt: skip
    return Phase(
        pattern=pattern, tier=tier, clients=clients, nodes=2, threads=threads, wanted=wanted,
        request_bytes=request, direct=False, repeats=repeats, operations=[],
    )  # fmt: skip


def results(*phases, links=()):
    return Results(environment={}, site=SITE, local=SITE, phases=phases, links=links)


def chosen(found, workload=WORKLOAD, **options):
    return choose_rates(
        found, workload, step_s=1.0, dataloader_sample_s=0.1, staging_readers=8, **options
    )


def test_bandwidth_is_that_of_as_many_readers():
    phases = [
        phase("random_record", [90, 100, 400]), phase("random_record", [300], clients=2, threads=2),
        phase("random_record", [500], clients=4, threads=2),
    ]  # fmt: skip
    assert [at_readers(phases, n) for n in (1, 4, 6, 8, 64)] == [100, 300, 400, 500, 500]
    found = chosen(results(*phases))
    assert found.random_bytes_per_s == 300
    found = chosen(results(*phases), replace(WORKLOAD, workers=2))
    assert found.random_bytes_per_s == 500


def test_reads_are_compared_with_reads_of_about_their_size():
    found = chosen(
        results(
            phase("random_record", [1.0], request=4096), phase("random_record", [2.0]),
            phase("random_record", [3.0], request=1 << 20),
            phase("sequential_shard", [4.0], request=1 << 20),
            phase("sequential_shard", [5.0], request=1 << 24),
        )
    )  # fmt: skip
    assert found.random_bytes_per_s == 2
    assert found.staging_bytes_per_s == 5


def test_cold_warm_and_local_phases_are_kept_apart():
    found = chosen(
        results(
            phase("random_record", [1.0]), phase("random_record", [20.0], wanted="warm"),
            phase("random_record", [6.0], tier="local"),
            phase("checkpoint_burst", [8.0], tier="local"),
            links=[
                MeasuredLink(nodes=("a", "b"), bytes_per_s=9.0, round_trip_s=1.0, repeats=[9.0]),
                MeasuredLink(nodes=("a", "c"), bytes_per_s=5.0, round_trip_s=1.0, repeats=[5.0]),
            ],
        )
    )  # fmt: skip
    assert (found.random_bytes_per_s, found.random_warm_bytes_per_s) == (1, 20)
    assert (found.local_read_bytes_per_s, found.local_write_bytes_per_s) == (3, 4)  # of two nodes
    assert found.link_bytes_per_s == 5


def test_a_loaders_start_is_what_null_storage_took_beyond_reading():
    phases = results(phase("sequential_shard", [100.0]))
    found = chosen(phases, null_staging_s=3.0, null_staging_bytes=200.0)
    assert found.start_s == pytest.approx(1.0)
    assert chosen(phases, null_staging_s=1.0, null_staging_bytes=200.0).start_s == 0


def test_nothing_is_made_up_where_nothing_was_measured():
    found = chosen(results())
    assert found.random_bytes_per_s is None
    assert found.staging_bytes_per_s is None
    assert found.link_bytes_per_s is None
