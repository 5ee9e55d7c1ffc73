"""Samples that say who they are, trained by the shipped loader; and what a run of it trained."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dataio import Array, Bytes, Loader, NodeCache, Reports, Workers
from dataio.base.atomic import read_record
from dataio.plan.layout import Layout
from dataio.plan.placement import copy_holders
from dataio.rows.fields import Field, row_schema
from dataio.rows.rows import make_rows
from dataio.store.state import Head, judge, next_deltas
from dataio.store.tools.report import open_to_read
from dataio.store.tools.verify import verify_cache
from dataio.world import World, run_threads, thread_worlds

Step = tuple[int, int, int]
"""Epoch, step and rank."""
Trained = dict[Step, tuple[int, ...]]
"""The samples of each step; -1 is padding."""

SEED = 5
WIDTH = 6
WIDE = 1500


def fields_of(kind: str, width: int) -> dict[str, Field]:
    every: dict[str, Field] = {"x": Array("x", (width,), "int32"), "data": Bytes("bin")}
    return {
        "fixed": {"x": every["x"]},
        "variable": {"data": every["data"]},
        "both": every,
    }[kind]


def numbers(ids: np.ndarray, width: int) -> np.ndarray:
    """The fixed field of samples: int32[len(ids), width]."""
    return (ids[:, None] * 1009 + np.arange(width) * 7).astype("<i4")


def text(sample_id: int, width: int) -> bytes:
    """The variable field of a sample; of some samples nothing."""
    return sample_id.to_bytes(4, "little") * (sample_id % 5 * width)


class Samples:
    """A source whose samples are functions of their ids."""

    made_as = "Samples"
    total_bytes = 0

    def __init__(self, num_samples: int, width: int, name: str = "samples") -> None:
        self.name = name
        self.num_samples = num_samples
        self.fingerprint = f"samples-{num_samples}-{width}"
        self.shard_starts = np.arange(0, num_samples, 12)
        self.bytes_read = 0
        self.width = width

    def read(self, sample_ids, fields):
        schema = row_schema(fields)
        for first in range(0, len(sample_ids), 8):
            ids = np.asarray(sample_ids[first : first + 8], np.int64)
            fixed = [numbers(ids, self.width).view(np.uint8)] if schema.fixed else []
            data = [text(number, self.width) for number in ids.tolist()]
            lengths, variable = np.empty((len(ids), 0), np.int64), []
            if schema.variable:
                lengths = np.array([[len(part)] for part in data], np.int64)
                variable = [np.frombuffer(b"".join(data), np.uint8)]
            self.bytes_read += sum(column.size for column in (*fixed, *variable))
            yield make_rows(schema, ids, fixed, lengths, variable)


@dataclass(frozen=True)
class Job:
    """A run of the loader: all ranks with the same arguments.

    Attributes:
        nodes: Ranks of each node.
        kind: Which fields a row has.
        epochs: Length of the run.
        until: Epoch before which it ends; None: it goes on to the end.
        saves: After which steps of which epochs it saves, as (epoch, step).
        options: Of the loader.
        cache: Of its cache.
        name: Of the dataset.
        source: What is read; None: `Samples`.
    """

    nodes: Sequence[int]
    kind: str
    epochs: int = 3
    until: int | None = None
    saves: tuple[tuple[int, int], ...] = ()
    num_samples: int = 48
    width: int = WIDTH
    options: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    name: str = "samples"
    source: Any = None

    def make(self, world: World, root: Path) -> Loader:
        chosen: dict[str, Any] = {"batch_size": 5, "seed": SEED}
        chosen |= {"workers": Workers(threads=0), "reports": Reports(progress=False)} | self.options
        source = self.source or Samples(self.num_samples, self.width, self.name)
        return Loader(
            source, world=world,
            cache=NodeCache(root, **self.cache), fields=fields_of(self.kind, self.width), **chosen,
        )  # fmt: skip

    def check_row(self, batch: Any, row: int) -> None:
        """Compare a row's bytes with its sample's.

        Raises:
            AssertionError: If they are another's.
        """
        sample_id = int(batch["sample_id"][row])
        if "x" in batch:
            expected = numbers(np.array([sample_id]), self.width)[0]
            assert np.array_equal(batch["x"][row].numpy(), expected), f"bytes of {sample_id}"
        if "data" in batch:
            assert bytes(batch["data"][row]) == text(sample_id, self.width), f"bytes of {sample_id}"


def train(
    job: Job, root: Path, *, saves: Path, restored: Path | None = None,
    num_epochs: int | None = None, num_batches: int | None = None, saved=lambda path: None,
) -> Trained:  # fmt: skip
    """Run a job on all its ranks, and check the bytes of every row.

    Args:
        job: What to run.
        root: Of the caches.
        saves: Where it saves.
        restored: What it goes on from; None: it begins anew.
        num_epochs: End after so many.
        num_batches: End after so many of the first epoch.
        saved: Is told of each save, when it is whole.
    """

    def rank(world: World) -> Trained:
        seen: Trained = {}
        with job.make(world, root) as loader:
            if restored is not None:
                loader.restore(restored)
            for done, epoch in enumerate(loader.epochs(job.epochs)):
                if epoch == job.until or done == num_epochs:
                    break
                for batch in loader:
                    valid = batch["slot"].numpy() >= 0
                    for row in np.flatnonzero(valid).tolist():
                        job.check_row(batch, row)
                    ids = np.where(valid, batch["sample_id"].numpy(), -1)
                    seen[epoch, loader.step, world.rank] = tuple(ids.tolist())
                    if (epoch, loader.step) in job.saves:
                        loader.save(path := saves / f"{epoch}-{loader.step}")
                        if world.rank == 0:
                            saved(path)
                    if loader.step == num_batches:
                        return seen
        return seen

    trained: Trained = {}
    for seen in run_threads(thread_worlds(job.nodes), rank):
        trained |= seen
    return trained


def check_each_once(job: Job, trained: Trained) -> None:
    """Check that every sample of every epoch was trained once.

    Raises:
        AssertionError: If not.
    """
    for epoch in {epoch for epoch, _, _ in trained}:
        ids = [i for step, row in trained.items() if step[0] == epoch for i in row if i >= 0]
        assert sorted(ids) == list(range(job.num_samples)), f"epoch {epoch}: {sorted(ids)}"


def node_directory(root: Path, node: int) -> Path:
    (found,) = root.glob(f"samples-*/node{node}")
    return found


def check_files(job: Job, root: Path) -> None:
    """Check what a job that ended has left: no litter, and only rows that prove themselves.

    Raises:
        AssertionError: If there is more or less than its manifests name.
    """
    for node in range(len(job.nodes)):
        directory = node_directory(root, node)
        names = {path.name for path in directory.iterdir()}
        head = Head.from_record(read_record(directory / "manifest.json"))
        verdict = judge(names, head)
        assert not verdict.litter, f"{directory}: litter {verdict.litter}"
        assert not verdict.absent, f"{directory}: absent {verdict.absent}"
        fixed = [f"fixed-{number}.npy" for number in range(job.kind != "variable")]
        expected = {
            "lock",
            "meta.json",
            "manifest.json",
            "headers.npy",
            *fixed,
            *head.named,
            *verdict.staged,
        }
        expected |= next_deltas(head) & names
        if job.kind != "fixed":
            # Of each rank that has written anything, now or when there were more.
            expected |= {name for name in names if name.startswith("heap-")}
        assert names == expected, f"{directory}: {names ^ expected} too many or too few"
        for found in verify_cache(directory, dry_run=True):
            assert not len(found.corrupt), f"{directory}: corrupt {found.corrupt}"
            assert not found.num_headers, f"{directory}: {found.num_headers} headers"
    if job.cache.get("copies") == 2 and not job.options["shuffle"].holds_all:
        nodes = [node_directory(root, node) for node in range(len(job.nodes))]
        check_copies(nodes, Layout(tuple(job.nodes), job.num_samples), seed=SEED)


def check_copies(nodes: Sequence[Path], layout: Layout, *, seed: int) -> None:
    """Check that each node's rows lie on their holder too, in the order of its slots.

    Raises:
        AssertionError: If not.
    """
    ids = [open_to_read(directory).entries.sample_id[:] for directory in nodes]
    for node, holder in enumerate(copy_holders(layout, seed=seed).tolist()):
        owned, copied = ids[node][: layout.pool_rows(node)], ids[holder]
        copied = copied[layout.pool_rows(holder) :]
        assert np.array_equal(owned, copied), f"node {holder} copies {copied}, not {owned}"
