"""Every rank of a mesh runs the loop that a trainer runs, without a model; what each saw."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import shuffle
from dataio import Loader, Reports, Workers
from dataio.plan.policies import Importance
from dataio.rows.samples import Batch
from dataio.world import Request, World, run_threads, thread_worlds
from tests.memory_source import FIELDS, MemorySource
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.deliver.relay import DATA_TAG, NUM_TAGS
from tonari.trainer.mesh.place import Place, Schedule, Targets, place_of

NUM_SAMPLES, EPOCHS, ROWS_A_STEP = 107, 3, 12
TARGETS = ("label",)


@dataclass
class MeshRun:
    """What one rank saw.

    Attributes:
        steps: (epoch, kind, lr factor, sorted (sample, weight)) of each batch, where they are told.
        kept: Each batch, and a copy made when it came.
        columns: The sets of columns that batches had.
        rows_read: Of the source, by this rank.
        bytes_read: Likewise.
        sent: (receiver, bytes) of each message of this rank that has a batch's data.
        stats: Of the loader, at the end.
        delivered: Rows that the reader's loader delivered.
        held_bytes: Of a batch, got from the reader.
        mapped: Mappings of shared batches whose file has no name any more.
        losses: ``mean_loss`` where each epoch begins.
        evaluated: Valid samples of two evaluations.
        last_step: ``step`` and ``len`` after each epoch.
    """

    place: Place
    steps: list[tuple[int, str, float, list[tuple[int, float]]]] = field(default_factory=list)
    kept: list[tuple[Batch, Batch]] = field(default_factory=list)
    columns: set[tuple[str, ...]] = field(default_factory=set)
    rows_read: list[int] = field(default_factory=list)
    bytes_read: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    delivered: int = 0
    held_bytes: int = 0
    mapped: int = 0
    losses: list[float | None] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    last_step: tuple[int, int] = (0, 0)


def add_pixels(batch, rng):
    """Give a batch an image that says which sample it is, channels last as decoders leave it."""
    ids = batch["sample_id"]
    pixels = (ids[:, None, None, None] % 251).expand(-1, 4, 5, 3).to(torch.uint8)
    return {name: value for name, value in batch.items() if name != "data"} | {
        "pixels": pixels.contiguous().permute(0, 3, 1, 2)
    }


def score(ids, epoch):
    """A loss that differs by sample and epoch, in float64, and an outcome that hides about half."""
    loss = torch.sin(ids.double() * 12.9898 + epoch) + 1.1
    return loss, ids % 2 == 0, torch.full((len(ids),), 0.9)


def run_mesh(
    root: Path,
    sizes: tuple[int, int, int],
    *,
    nodes: tuple[int, ...] | None = None,
    importance: Importance | None = None,
    schedule: Schedule = "1f1b",
    at: Path | None = None,
    save: Path | None = None,
    stop: int | None = None,
    evaluates: bool = False,
    inputs: tuple[str, ...] = ("pixels",),
    timeout_s: float = 30.0,
    guard: bool = True,
    shared_memory: bool = True,
    targets_by: Targets = "send",
) -> list[MeshRun]:
    """Train a mesh of (pp, dp, tp) ranks as threads; each rank's view."""
    pp, dp, tp = sizes
    worlds = thread_worlds(nodes or (pp * dp * tp,), timeout_s=timeout_s)

    def rank(world: World) -> MeshRun:
        place = place_of(world.rank, (pp, dp, 1, 1, tp), schedule=schedule, virtual=1)
        return train(
            world, place, root, importance=importance, at=at, save=save, stop=stop,
            evaluates=evaluates, inputs=inputs, guard=guard, shared_memory=shared_memory,
            targets_by=targets_by,
        )  # fmt: skip

    return run_threads(worlds, rank)


def train(
    world: World,
    place: Place,
    root: Path,
    *,
    importance: Importance | None = None,
    at: Path | None = None,
    save: Path | None = None,
    stop: int | None = None,
    evaluates: bool = False,
    inputs: tuple[str, ...] = ("pixels",),
    guard: bool = True,
    shared_memory: bool = True,
    targets_by: Targets = "send",
) -> MeshRun:
    """Run the loop of a trainer on one rank."""
    run, source = MeshRun(place), MemorySource(NUM_SAMPLES)
    send = world.isend

    def note(data: np.ndarray, *, dest: int, tag: int) -> Request:
        if tag % NUM_TAGS == DATA_TAG:
            run.sent.append((dest, data.nbytes))
        return send(data, dest=dest, tag=tag)

    world.isend = note  # type: ignore[method-assign]

    def open_loader(
        readers: World, device: torch.device | None, columns: Collection[str]
    ) -> Loader:
        read = {"data" if column == "pixels" else column for column in columns}
        fields = {name: field for name, field in FIELDS.items() if name in read}
        return Loader(
            source, batch_size=ROWS_A_STEP // place.num_replicas, fields=fields, cache=root,
            shuffle=shuffle.Partial(0.3), importance=importance, world=readers, device=device,
            batch_transform=add_pixels, workers=Workers(threads=0), seed=3,
            reports=Reports(progress=False),
        )  # fmt: skip

    with ReplicaLoader(
        open_loader,
        world=world,
        place=place,
        inputs=inputs,
        targets=TARGETS,
        targets_by=targets_by,
        guard=guard,
        shared_memory=shared_memory,
    ) as loader:
        if at is not None:
            loader.restore(at)
        count = 0
        for epoch in loader.epochs(EPOCHS):
            # Asked for here, so that nothing but the turn itself has waited for the losses.
            run.losses.append(loader.mean_loss())
            for kind, batches in (("train", loader), ("refresh", loader.refresh())):
                for batch in batches:
                    count += 1
                    _see(run, loader, batch, epoch, kind)
                    if kind == "train" and count == stop:
                        assert save is not None
                        loader.save(save)
                        return run
            run.last_step = (loader.step, len(loader))
        if evaluates:
            _evaluate(run, loader)
        run.held_bytes = loader.held_bytes
        run.rows_read, run.bytes_read = source.rows_read, source.bytes_read
        run.stats = loader.stats()
        maps = Path("/proc/self/maps").read_text().splitlines()
        run.mapped = sum("tonari-batches" in m and m.endswith("(deleted)") for m in maps)
    return run


def _see(run: MeshRun, loader: ReplicaLoader, batch, epoch: int, kind: str) -> None:
    run.columns.add(tuple(sorted(batch)))
    run.kept.append((batch, {name: t.clone() for name, t in batch.items() if name != "data"}))
    if run.place.reads:
        run.delivered += ROWS_A_STEP // run.place.num_replicas
    if not run.place.has_target:
        return
    ids = batch["sample_id"]
    valid = ids >= 0
    assert torch.equal(batch["label"][valid], ids[valid] % 10)
    if "pixels" in batch:
        assert torch.equal(batch["pixels"][:, 2, 3, 4][valid].long(), ids[valid] % 251)
    rows = zip(ids[valid].tolist(), batch["weight"][valid].tolist(), strict=True)
    run.steps.append((epoch, kind, loader.lr_factor, sorted(rows)))
    loss, *outcome = score(ids, epoch)
    loader.report(batch, loss, *(outcome if loader.needs_outcome else ()))


def _evaluate(run: MeshRun, loader: ReplicaLoader) -> None:
    evaluation = loader.evaluation(MemorySource(37, name="test"))
    for _ in range(2):
        num_batches = 0
        for batch in evaluation:
            num_batches += 1
            if run.place.has_target:
                run.evaluated += batch["sample_id"][batch["valid"]].tolist()
        assert num_batches == len(evaluation)


def merged(runs: list[MeshRun]) -> list[tuple[int, str, float, list[tuple[int, float]]]]:
    """The rows of each step over all replicas, as their scorers saw them."""
    scorers = [run.steps for run in runs if run.place.rank == run.place.scorer]
    return [
        (*steps[0][:3], sorted((i, round(w, 5)) for *_, rows in steps for i, w in rows))
        for steps in zip(*scorers, strict=True)
    ]
