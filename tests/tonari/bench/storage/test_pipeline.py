"""Every way runs, ends with nothing left behind, and costs about what was predicted."""

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio import Bytes, Int
from dataio.world import run_threads, thread_worlds
from tonari.bench.errors import BenchError
from tonari.bench.storage.patterns.files import PREFIX
from tonari.bench.storage.patterns.threads import Deadline
from tonari.bench.storage.results.results import Phase, Repeat, Results
from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import CacheVerdict
from tonari.bench.storage.site.site import describe_site
from tonari.bench.storage.training.own_set import own_directory
from tonari.bench.storage.training.pipeline import (
    MEMORY,
    PipelineOptions,
    cut_short,
    run_ways,
)  # fmt: skip

QUICK = PipelineOptions(
    step_s=0.002, batch_size=8, num_samples=200, sample_bytes=4096, workers=0, epochs=3,
    staging_readers=1, dataloader_epochs=2,
)  # fmt: skip


def measured(directory, scratch, *phases):
    site, local = describe_site(directory), describe_site(scratch)
    return Results(environment={}, site=site, local=local, phases=phases)


def run(
    layout, directory, scratch, options, *phases, on_epoch=lambda way, epochs: None, until=None
):
    for path in (directory, scratch):
        path.mkdir(exist_ok=True)
    results = measured(directory, scratch, *phases)

    def on_rank(world):
        return run_ways(
            world, directory, scratch, options, results, lambda _: None, on_epoch, until
        )

    return run_threads(thread_worlds(layout, timeout_s=60), on_rank)


def left_behind(*directories):
    return [path for directory in directories for path in directory.iterdir()] + [
        path for path in MEMORY.glob(f"{PREFIX}*") if path.stat().st_mtime > time.time() - 60
    ]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """One run of all ways on two nodes, and its directories."""
    base = tmp_path_factory.mktemp("ways")
    found = run((1, 1), base / "shared", base / "scratch", QUICK)
    return found, base


def test_every_way_trains_every_sample_in_every_epoch(two_nodes):
    [found, other], _ = two_nodes
    assert [way.name for way in found.ways] == [
        "null", "dataloader", "staged", "exchange", "hiding",
    ]  # fmt: skip
    for way in found.ways:
        visible = 140 if way.name == "hiding" else 200
        epochs = 2 if way.name == "dataloader" else 3
        assert way.samples_of_epoch == [visible] * epochs
        # 13 steps of 2 ms, 9 with what hiding leaves
        assert min(way.epoch_s) >= (9 if way.name == "hiding" else 13) * 0.002
    assert found == other


def test_bytes_are_told_by_tier(two_nodes):
    [found, _], _ = two_nodes
    ways = {way.name: way for way in found.ways}
    for name in ("staged", "exchange", "hiding"):
        assert ways[name].staging_bytes >= 200 * 4096
        assert ways[name].moved_bytes["shared"] == 0
    assert ways["staged"].moved_bytes["network"] == 0
    # two turns, a tenth of 100 rows from either node, 4096 bytes and a label each
    for name in ("exchange", "hiding"):
        assert ways[name].moved_bytes["network"] == pytest.approx(2 * 20 * 4104, rel=0.01)
    assert ways["dataloader"].moved_bytes["network"] is None
    assert len(ways["dataloader"].verdict_of_epoch) == 2
    assert ways["null"].utilisation_fraction == pytest.approx(1)


def test_nothing_is_left_behind(two_nodes):
    _, base = two_nodes
    assert left_behind(base / "shared", base / "scratch") == []


def test_a_users_shards_are_read_and_stay(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    for shard in range(2):
        rows = range(shard * 40, shard * 40 + 40)
        table = pa.table({"data": [b"%d" % n * (n % 5) for n in rows], "label": list(rows)})
        pq.write_table(table, shared / f"{shard}.parquet", row_group_size=8)
    options = replace(
        QUICK, dataset=[str(shared / "*.parquet")], ways=("dataloader", "staged"),
        fields={"data": Bytes("data"), "label": Int("label")},
    )  # fmt: skip
    [found] = run((1,), shared, tmp_path / "scratch", options)
    assert [way.name for way in found.ways] == ["null", "dataloader", "staged"]
    assert found.num_samples == 80
    assert found.sample_bytes == sum(p.stat().st_size for p in shared.iterdir()) / 80
    assert {path.name for path in shared.iterdir()} == {"0.parquet", "1.parquet"}


def test_each_way_tells_when_it_may_begin_and_of_each_epoch(tmp_path):
    told = []
    run((1,), tmp_path / "shared", tmp_path / "scratch", replace(QUICK, ways=("dataloader",)),
        on_epoch=lambda way, epochs: told.append((way, epochs)))  # fmt: skip
    assert told == [
        *(("null", epochs) for epochs in range(4)), *(("dataloader", epochs) for epochs in range(3))
    ]  # fmt: skip


def test_after_the_time_limit_no_way_is_begun_and_one_that_was_ends_its_second_epoch(tmp_path):
    for last, ways in (("null", ["null"]), ("staged", ["null", "staged"])):
        until = Deadline(1000)
        [found] = run(
            (1,), tmp_path / "shared", tmp_path / "scratch", QUICK, until=until,
            on_epoch=lambda way, done, until=until, last=last: way == last and until.stop(),
        )  # fmt: skip
        assert [way.name for way in found.ways] == ways
        assert len(found.ways[-1].epoch_s) == 2
    [line] = cut_short(found, QUICK)
    assert "dataloader 0 of 2, staged 2 of 3, exchange 0 of 3, hiding 0 of 3" in line
    assert not cut_short(found, replace(QUICK, ways=("staged",), epochs=2))


def test_a_step_can_come_from_a_script(tmp_path):
    script = tmp_path / "model.py"
    script.write_text("def make_step(batch_size):\n    return lambda: None\n")
    options = replace(QUICK, step_s=None, calibrate=script, ways=())
    [found] = run((1,), tmp_path / "shared", tmp_path / "scratch", options)
    assert found.step_from == str(script)
    assert 0 < found.step_s < 0.01


def test_a_directory_that_takes_no_file_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BenchError, match=r"No space left on device.*expected room.*make room"):
        run((1, 1), tmp_path / "shared", tmp_path / "scratch", QUICK)
    assert left_behind(tmp_path / "shared", tmp_path / "scratch") == []


@pytest.mark.multirank
def test_real_ranks_and_workers_find_the_same(tmp_path, run_ranks):
    shared, scratch = tmp_path / "shared", tmp_path / "scratch"
    shared.mkdir()
    scratch.mkdir()
    env = {"TONARI_RANKS_PER_NODE": "1"}
    ended = run_ranks("storage_ways", 2, str(shared), str(scratch), env=env, timeout_s=240)
    first, second = ended.reports
    assert first == second
    for way in first["ways"]:
        hides = way["name"] == "hiding"
        assert way["samples_of_epoch"] == [112 if hides else 160] * 2
    shards = 160 * 4096
    dataloader, staged = first["ways"][1:3]
    assert staged["staging_bytes"] >= shards
    if dataloader["verdict_of_epoch"][0]["state"] == "cold":  # of a block device: by its counter
        assert dataloader["moved_bytes"]["shared"] >= shards
    assert left_behind(shared, scratch) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step_s": None}, "step_s or calibrate"),
        ({"step_s": -1.0}, "step_s"),
        ({"epochs": 1}, "epochs is 1, must be >= 2"),
        ({"exchange": 1.0}, "exchange"),
        ({"dataset": ["x.tar"]}, "fields"),
    ],
)
def test_options_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        replace(QUICK, **wrong)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


BANDWIDTH = 40e6
SAMPLES, SAMPLE_BYTES = 256, 128 << 10


@pytest.mark.slow
def test_the_epoch_at_which_staging_has_paid_is_predicted_within_one(tmp_path, stack):
    slow = pytest.importorskip("tests.slowfs")
    if missing := slow.what_is_missing():
        pytest.skip(missing)
    # 34 MB at 40 MB/s: 0.84 s an epoch; staging, held back as a site may ask, above 5 s.
    options = replace(
        QUICK, num_samples=SAMPLES, sample_bytes=SAMPLE_BYTES, batch_size=16,
        staging_bandwidth=7e6, staging_readers=2, dataloader_epochs=4,
        ways=("dataloader", "staged"),
    )  # fmt: skip
    behind = tmp_path / "behind"
    behind.mkdir()
    # In memory, as others use the disk while the test runs, and no phase tells of it.
    scratch = stack.enter_context(own_directory(MEMORY / f"{tmp_path.name}-scratch"))
    with slow.slowfs(behind, bytes_per_s=BANDWIDTH, cache="direct_io") as mounted:
        phases = [
            read_phase(mounted.path, "random_record", SAMPLE_BYTES),
            read_phase(mounted.path, "sequential_shard", 1 << 20),
        ]
        before = mounted.counts()["read_bytes"]
        [found] = run((1,), mounted.path, scratch, options, *phases)
        read_bytes = mounted.counts()["read_bytes"] - before
    ways = {way.name: way for way in found.ways}
    staged, shared = ways["staged"], ways["dataloader"]
    assert 6 <= staged.paid_after <= 15
    assert abs(staged.paid_after - staged.predicted_paid_after) <= 1
    assert abs(shared.prediction_error_fraction) < 0.15
    assert staged.moved_bytes["shared"] == 0
    # The filesystem's own count: writing the indexes, two stagings, four epochs; no more.
    dataset = SAMPLES * SAMPLE_BYTES
    assert 6 * dataset <= read_bytes < 7.5 * dataset


def read_phase(directory: Path, pattern: str, request_bytes: int) -> Phase:
    """Measure one reader of a directory by requests of one size."""
    path, num_bytes = directory / "phase", 8 << 20
    path.write_bytes(np.random.default_rng(0).bytes(num_bytes))
    repeats = []
    for _ in range(3):
        descriptor = os.open(path, os.O_RDONLY)
        started = time.perf_counter()
        for offset in range(0, num_bytes, request_bytes):
            os.pread(descriptor, request_bytes, offset)
        took_s = time.perf_counter() - started
        os.close(descriptor)
        repeats.append(
            Repeat(
                seconds=took_s, bytes_of_client=[num_bytes], seconds_of_client=[took_s],
                verdict=CacheVerdict("cold", ""), verdict_of_node={}, moved=Moved(),
            )
        )  # fmt: skip
    path.unlink()
    return Phase(
        pattern=pattern, tier="shared", clients=1, nodes=1, threads=1, wanted="cold",
        request_bytes=request_bytes, direct=False, repeats=repeats, operations=[],
    )  # fmt: skip
