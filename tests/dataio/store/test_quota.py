"""A quota: never exceeded, the same batches, a fixed part of the rows read from the source."""

import contextlib
import gc
import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shuffle
from dataio import (
    Array,
    Bytes,
    Int,
    Loader,
    NodeCache,
    QuotaError,
    Reports,
    SourceError,
    Staging,
    StallError,
    Workers,
)
from dataio.rows.fields import Field, row_schema
from dataio.rows.rows import FixedColumn, make_rows
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo, Weighted
from tests.cases import diagonal

pytestmark = pytest.mark.thorough

SAMPLES = 300
SHARD = 30
KINDS: dict[str, dict[str, Field]] = {
    "fixed": {"x": Array("x", (1000,), "int32"), "label": Int("cls")},
    "variable": {"data": Bytes("bin")},
    "both": {"x": Array("x", (300,), "int32"), "data": Bytes("bin")},
}
POLICY = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)


class LargeShards:
    """Samples of some kilobytes, functions of their ids, in shards; counts and reports reads."""

    made_as = "Shards"
    total_bytes = 0

    def __init__(self, *, counted=True, spread=3, shard=SHARD, gate=None):
        self.name = "shards"
        self.num_samples = SAMPLES
        self.fingerprint = f"shards-{spread}"
        self.shard_starts = np.arange(0, SAMPLES, shard)
        self.gate = gate
        self.bytes_read = 0
        self.rows_read = []
        self.spread = spread
        if counted:
            self.total_bytes = SAMPLES * 4000
        self.watch = lambda: None
        self.lock = threading.Lock()

    def read(self, sample_ids, fields):
        schema = row_schema(fields)
        for first in range(0, len(sample_ids), 8):
            ids = np.asarray(sample_ids[first : first + 8], np.int64)
            fixed = [self.fixed(ids, column) for column in schema.fixed]
            data = [i.to_bytes(4, "little") * (700 + 400 * (i % self.spread)) for i in ids.tolist()]
            sizes = np.array([[len(d)] for d in data], np.int64)
            column = np.frombuffer(b"".join(data), np.uint8)
            lengths = sizes if schema.variable else sizes[:, :0]
            with self.lock:
                self.rows_read += ids.tolist()
                self.bytes_read += 4000 * len(ids)
                self.watch()
            if self.gate is not None:
                self.gate(self)
            yield make_rows(schema, ids, fixed, lengths, [column] if schema.variable else [])

    def fixed(self, ids, column: FixedColumn):
        width = int(np.prod(column.shape, dtype=int))
        values = ids[:, None] * 7 + np.arange(width)
        return (
            np.ascontiguousarray(values.astype(column.dtype)).view(np.uint8).reshape(len(ids), -1)
        )


def held_bytes(root: Path) -> int:
    """What files below take on disk, those included that have lost their names."""
    files = {}
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
            status = path.lstat()
            files[status.st_ino] = status
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{root}/" in line and "(deleted)" in line:
            start, stop = line.split()[0].split("-")
            name = f"{start.lstrip('0')}-{stop.lstrip('0')}"
            status = Path("/proc/self/map_files", name).stat()
            files[status.st_ino] = status
    return sum(512 * status.st_blocks for status in files.values())


def digest(batch):
    seen = hashlib.sha256()
    for name, value in sorted(batch.items()):
        seen.update(name.encode())
        seen.update(
            value.numpy().tobytes() if isinstance(value, torch.Tensor) else b"|".join(value)
        )
    return seen.hexdigest()


def make(world, root, kind, source=None, *, quota=None, **options):
    chosen: dict[str, Any] = {"batch_size": 7, "seed": 5, "shuffle": shuffle.Partial(0.3)}
    chosen |= {"workers": Workers(threads=1), "reports": Reports(progress=False)}
    return Loader(
        source or LargeShards(),
        cache=NodeCache(root, quota=quota),
        world=world,
        fields=KINDS[kind],
        **(chosen | options),
    )


def train(loader, epochs=3):
    seen = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            ids = batch["sample_id"]
            loss = torch.sin(ids.float() * 12.9898 + epoch) + 1.1
            loader.report(batch, loss, ids % 2 == 0, torch.full((len(ids),), 0.9))
            seen.append((epoch, loader.step, digest(batch)))
        for batch in loader.refresh():
            ids = batch["sample_id"]
            loader.report(batch, torch.cos(ids.float()) + 1.1, ids % 2 == 0)
            seen.append((epoch, "refresh", digest(batch)))
    return seen


def run(nodes, root, kind, *, quota=None, source=None, then=train, **options):
    def rank(world):
        theirs = source() if source is not None else None
        with make(world, root, kind, theirs, quota=quota, **options) as loader:
            return then(loader), loader.stats()

    worlds = [single_world()] if nodes == [1] else thread_worlds(nodes)
    return run_threads(worlds, rank)


def batches(results):
    return [batches for batches, _ in results]


NODES = {"one rank": [1], "two ranks of a node": [2], "two nodes": [1, 1]}


@diagonal(quota=[700_000, 1_300_000, "2.5 MB", "1GB"], kind=KINDS, nodes=NODES)
def test_batches_are_those_of_a_run_without_a_quota(tmp_path, nodes, kind, quota):
    whole = run(NODES[nodes], tmp_path / "whole", kind)
    limited = run(NODES[nodes], tmp_path / "limited", kind, quota=quota)
    assert batches(limited) == batches(whole)
    assert all(stats["streamed_rows"] == 0 for _, stats in whole)
    streamed = sum(stats["streamed_rows"] for _, stats in limited)
    if quota == "1GB":
        assert streamed == 0
    if quota == 700_000:
        assert streamed > 0
        assert all(0 <= stats["resident_fraction"] < 1 for _, stats in limited)


@diagonal(nodes=NODES, kind=KINDS, counted=[True, False])
def test_batches_under_importance_are_the_same_and_hidden_rows_are_not_read(
    tmp_path, nodes, kind, counted
):
    options = {"importance": POLICY, "source": lambda: LargeShards(counted=counted)}
    options |= {"workers": Workers(threads=2)}
    whole = run(NODES[nodes], tmp_path / "whole", kind, **options)
    limited = run(NODES[nodes], tmp_path / "limited", kind, quota=750_000, **options)
    assert batches(limited) == batches(whole)
    assert sum(stats["streamed_rows"] for _, stats in limited) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_rows_that_come_several_times_are_the_same(tmp_path, kind):
    options = {"importance": Weighted(np.r_[np.full(9, 40.0), np.ones(SAMPLES - 9)])}
    whole = run([1, 1], tmp_path / "whole", kind, **options)
    limited = run([1, 1], tmp_path / "limited", kind, quota=750_000, **options)
    assert batches(limited) == batches(whole)
    assert sum(stats["streamed_rows"] for _, stats in limited) > 0
    assert all(stats["most_often"] > 5 for _, stats in whole)


@diagonal(nodes=["one rank", "two ranks of a node"], kind=KINDS, quota=[600_000, 1_500_000])
def test_files_never_take_more_than_the_quota(tmp_path, nodes, kind, quota):
    root = tmp_path / "cache"
    largest = [0]

    class WatchedShards(LargeShards):
        def __init__(self):
            super().__init__()
            self.watch = lambda: largest.append(held_bytes(root))

    seen = []

    def watched(loader):
        for _ in loader.epochs(2):
            for batch in loader:
                largest.append(held_bytes(root))
                seen.append(len(batch))
                loader.report(batch, batch["sample_id"].float())
        return []

    run(
        NODES[nodes], root, kind, quota=quota, source=WatchedShards, then=watched, importance=POLICY
    )
    assert seen
    assert max(largest) <= quota
    assert max(largest) > quota / 4


@pytest.mark.parametrize("kind", KINDS)
def test_one_shard_of_quota_finishes_and_less_is_an_error_before_anything_is_read(tmp_path, kind):
    schema = row_schema(KINDS[kind])
    row_bytes = 4000 if schema.variable else schema.fixed_bytes
    shard_bytes = 150 * row_bytes

    def shards():
        return LargeShards(counted=bool(schema.variable), shard=150)

    options = {"source": shards, "importance": POLICY}
    whole = run([1], tmp_path / "whole", kind, **options)
    limited = run([1], tmp_path / "limited", kind, quota=shard_bytes, **options)
    assert batches(limited) == batches(whole)
    source = shards()
    with pytest.raises(
        QuotaError,
        match=f"quota: {shard_bytes - 1} bytes .* at least {shard_bytes}: .* or write smaller",
    ):
        make(single_world(), tmp_path / "less", kind, source, quota=shard_bytes - 1)
    assert source.rows_read == []
    assert list((tmp_path / "less").iterdir()) == []


def test_bytes_are_told_only_where_a_row_that_stays_shows_them(tmp_path, caplog):
    for quota, told in (("200 kB", False), ("300 kB", True)):
        caplog.clear()
        run([1], tmp_path / quota, "variable", quota=quota)
        assert ("(about" in caplog.text) is told


def test_a_quota_without_room_for_two_batches_is_an_error_on_every_rank(tmp_path):
    def refused(world):
        with pytest.raises(QuotaError, match="two batches on each of 1 ranks; raise the quota"):
            make(world, tmp_path, "fixed", quota=150_000)
        return True

    assert run_threads(thread_worlds([1, 1]), refused) == [True, True]


def test_what_is_no_size_or_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ValueError, match="quota: found 'much'"):
        make(single_world(), tmp_path, "fixed", quota="much")
    with pytest.raises(ValueError, match='"overlap" and a quota exclude one another'):
        make(single_world(), tmp_path, "fixed", quota="1GB", staging=Staging(when="overlap"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_stages_nothing_again_and_an_epoch_reads_each_missing_row_once(tmp_path, kind):
    first = run([1], tmp_path, kind, quota=900_000)
    source = LargeShards()
    with make(single_world(), tmp_path, kind, source, quota=900_000) as loader:
        assert source.rows_read == []
        stats = loader.stats()
        missing = round((1 - stats["resident_fraction"]) * SAMPLES)
        assert 0 < missing < SAMPLES
        assert train(loader, 1) == first[0][0][: len(loader)]
        # The last batch is filled up with rows of the first.
        read = np.unique(source.rows_read)
        assert len(read) == missing
        assert len(source.rows_read) <= missing + 7
        assert loader.stats()["streamed_rows"] == len(source.rows_read)


def test_a_smaller_quota_empties_the_cache_and_a_larger_one_fills_it_up(tmp_path):
    whole, resident = batches(run([1], tmp_path, "both")), 0
    for quota, reads_less in ((700_000, False), (1_500_000, True), (900_000, False)):
        source = LargeShards()
        limited = run([1], tmp_path, "both", quota=quota, source=lambda source=source: source)
        assert batches(limited) == whole
        gc.collect()  # what earlier jobs had mapped
        assert held_bytes(tmp_path) <= quota
        staged = len(source.rows_read) - limited[0][1]["streamed_rows"]
        before, resident = resident, round(limited[0][1]["resident_fraction"] * SAMPLES)
        assert staged >= resident or reads_less
        assert not reads_less or staged <= SAMPLES - before, "what was there is not read again"


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_of_other_batch_sizes_and_exchanges_use_one_cache_under_one_quota(tmp_path, kind):
    for batch_size, exchange in ((2, 0.0), (20, 0.3), (7, 0.0), (2, 0.5)):
        options = {"batch_size": batch_size, "shuffle": shuffle.Partial(exchange)}
        whole = run([1, 1], tmp_path / f"whole{batch_size}{exchange}", kind, **options)
        limited = run([1, 1], tmp_path / "limited", kind, quota=850_000, **options)
        assert batches(limited) == batches(whole)
        gc.collect()  # what earlier jobs had mapped
        for node in (tmp_path / "limited").glob("*/*"):
            assert held_bytes(node) <= 850_000


def test_what_the_source_raises_while_training_is_raised_by_the_loader(tmp_path):
    def broken(source):
        if len(source.rows_read) > SAMPLES:
            raise SourceError("the source went away")

    with (
        pytest.raises(SourceError, match="went away"),
        make(single_world(), tmp_path, "both", LargeShards(gate=broken), quota=700_000) as loader,
    ):
        train(loader)


def test_a_source_that_hangs_while_training_is_an_error_that_names_the_cure(tmp_path):
    go_on = threading.Event()

    def hang(source):
        if len(source.rows_read) > SAMPLES:
            assert go_on.wait(20)

    (world,) = thread_worlds([1], timeout_s=1.0)
    loader = make(world, tmp_path, "both", LargeShards(gate=hang), quota=700_000)
    with pytest.raises(StallError, match=r"not read within 1 s.* raise the quota"):
        train(loader)
    go_on.set()
    loader.close()


def test_leaving_an_epoch_early_and_beginning_another_gives_its_batches(tmp_path):
    def hop(loader):
        found = []
        for epoch in (0, 1, 4, 4, 5):
            loader.set_epoch(epoch)
            for number, batch in enumerate(loader):
                found.append(digest(batch))
                if number == 5:
                    break
        return found

    whole = run([1, 1], tmp_path / "whole", "both", then=hop)
    assert batches(run([1, 1], tmp_path / "limited", "both", then=hop, quota=700_000)) == batches(
        whole
    )
