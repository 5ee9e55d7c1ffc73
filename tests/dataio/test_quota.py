"""A quota: never exceeded, the same batches, a fixed part of the rows read from the source."""

import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import shuffle
from dataio import Array, Bytes, Int, Loader, QuotaError
from dataio.fields import row_schema
from dataio.quota import Need, plan_budget
from dataio.rows import FixedColumn, RowSchema, make_rows
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo

SAMPLES = 300
SHARD = 30
KINDS = {
    "fixed": {"x": Array("x", (1000,), "int32"), "label": Int("cls")},
    "variable": {"data": Bytes("bin")},
    "both": {"x": Array("x", (300,), "int32"), "data": Bytes("bin")},
}
POLICY = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)


class Shards:
    """Samples of some kilobytes, functions of their ids, in shards; counts and reports reads."""

    def __init__(self, *, told=True, spread=3):
        self.name = "shards"
        self.num_samples = SAMPLES
        self.fingerprint = f"shards-{spread}"
        self.shard_starts = np.arange(0, SAMPLES, SHARD)
        self.bytes_read = 0
        self.rows_read = []
        self.spread = spread
        if told:
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
            yield make_rows(schema, ids, fixed, lengths, [column] if schema.variable else [])

    def fixed(self, ids, column: FixedColumn):
        width = int(np.prod(column.shape, dtype=int))
        values = ids[:, None] * 7 + np.arange(width)
        return np.ascontiguousarray(values.astype(column.dtype)).view(np.uint8).reshape(len(ids), -1)


def held_bytes(root: Path) -> int:
    """What files below take on disk, those included that have lost their names."""
    files = {}
    for path in root.rglob("*"):
        status = path.lstat()
        files[status.st_ino] = status
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{root}/" in line and "(deleted)" in line:
            start, stop = line.split()[0].split("-")
            status = os.stat(f"/proc/self/map_files/{start.lstrip('0')}-{stop.lstrip('0')}")
            files[status.st_ino] = status
    return sum(512 * status.st_blocks for status in files.values())


def digest(batch):
    seen = hashlib.sha256()
    for name, value in sorted(batch.items()):
        seen.update(name.encode())
        seen.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else b"|".join(value))
    return seen.hexdigest()


def make(world, root, kind, source=None, **options):
    chosen = {"batch_size": 7, "seed": 5, "progress": False, "num_threads": 1}
    chosen["shuffle"] = shuffle.Partial(0.3)
    return Loader(
        source or Shards(), cache=root, world=world, fields=KINDS[kind], **(chosen | options)
    )


def train(loader, epochs=3, *, save_at=None, path=None):
    seen = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            ids = batch["sample_id"]
            loss = torch.sin(ids.float() * 12.9898 + epoch) + 1.1
            loader.report(batch, loss, ids % 2 == 0, torch.full((len(ids),), 0.9))
            seen.append((epoch, loader.step, digest(batch)))
            if save_at == (epoch, loader.step):
                loader.save(path)
                return seen
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


@pytest.mark.parametrize("quota", [700_000, 900_000, 1_300_000, "2.5 MB", "1GB"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", NODES)
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


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("told", [True, False])
def test_batches_under_importance_are_the_same_and_hidden_rows_are_not_read(
    tmp_path, nodes, kind, told
):
    options = {"importance": POLICY, "source": lambda: Shards(told=told), "num_threads": 2}
    whole = run(NODES[nodes], tmp_path / "whole", kind, **options)
    limited = run(NODES[nodes], tmp_path / "limited", kind, quota=750_000, **options)
    assert batches(limited) == batches(whole)
    assert sum(stats["streamed_rows"] for _, stats in limited) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [None, POLICY])
def test_a_resumed_run_has_the_rest_of_the_batches(tmp_path, kind, policy):
    whole = batches(run([1, 1], tmp_path / "whole", kind, importance=policy))
    options = {"quota": 800_000, "importance": policy}
    for number, stop in enumerate([(0, 3), (1, 11), (2, 1)]):
        root, path = tmp_path / f"cache{number}", tmp_path / f"saved{number}"

        def first(loader, path=path, stop=stop):
            return train(loader, save_at=stop, path=path)

        def rest(loader, path=path):
            loader.restore(path)
            return train(loader)

        begun = batches(run([1, 1], root, kind, then=first, **options))
        ended = batches(run([1, 1], root, kind, then=rest, **options))
        assert [a + b for a, b in zip(begun, ended, strict=True)] == whole


@pytest.mark.parametrize("nodes", ["one rank", "two ranks of a node"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quota", [600_000, 900_000, 1_500_000])
def test_files_never_take_more_than_the_quota(tmp_path, nodes, kind, quota):
    root = tmp_path / "cache"
    largest = [0]

    class Watched(Shards):
        def __init__(self):
            super().__init__()
            self.watch = lambda: largest.append(held_bytes(root))

    seen = []

    def watched(loader):
        for _ in loader.epochs(2):
            for batch in loader:
                largest.append(held_bytes(root))
                seen.append(len(batch))
        return []

    run(NODES[nodes], root, kind, quota=quota, source=Watched, then=watched, importance=POLICY)
    assert seen
    assert max(largest) <= quota
    assert max(largest) > quota / 4
