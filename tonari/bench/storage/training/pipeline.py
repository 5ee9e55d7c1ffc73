"""Train with an emulated step, fed in each way, and hold what was predicted against it.

Null storage is run first; then all is predicted, and only then are the other ways run.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataio import Field, World
from dataio.base.cgroup import memory_room
from importance import RandomPrune
from shuffle import Partial
from tonari.bench.errors import BenchError
from tonari.bench.notify import Notify
from tonari.bench.storage.patterns.files import agree_name
from tonari.bench.storage.patterns.threads import Deadline
from tonari.bench.storage.results.results import EndToEnd, Results
from tonari.bench.storage.training.baseline import sample_work_s
from tonari.bench.storage.training.calibrate import calibrate
from tonari.bench.storage.training.own_set import (
    OwnShards,
    open_shards,
    own_directory,
    own_fields,
    write_own_set,
)
from tonari.bench.storage.training.predict import Predicted, WayName, Workload, predict
from tonari.bench.storage.training.rates import choose_rates
from tonari.bench.storage.training.training import OnEpoch, TrainingRates
from tonari.bench.storage.training.ways import Ran, later_s, make_way

WAYS: tuple[WayName, ...] = ("null", "dataloader", "staged", "exchange", "hiding")
MEMORY = Path("/dev/shm")
MEMORY_FRACTION = 0.25
"""Of what a node could still hold in memory, null storage takes no more."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What is trained, and how long.

    Attributes:
        step_s: Of compute; None: measured by ``calibrate``.
        calibrate: The user's script, see `calibrate.calibrate`.
        batch_size: Of a rank.
        num_samples: Of the dataset of our own making.
        sample_bytes: Likewise.
        dataset: The user's shards instead: patterns.
        fields: What to keep of their samples.
        axis: Of array files; see `along`.
        exchange: Of a rank's rows, an epoch.
        hidden_fraction: Of the rows, an epoch.
        epochs: Of null storage and of what is staged, >= 2.
        dataloader_epochs: >= 2.
        workers: Processes of each rank's DataLoader.
        staging_readers: Shards that each rank reads at once while staging.
        staging_bandwidth: Bytes/s that a node may read while staging; 0: no limit.
        ways: Which to run besides null storage.
        seed: Of content and order.
    """

    step_s: float | None = 0.05
    calibrate: Path | None = None
    batch_size: int = 32
    num_samples: int = 2048
    sample_bytes: int = 112 << 10
    dataset: Sequence[str] | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    axis: str | None = None
    exchange: float = 0.1
    hidden_fraction: float = 0.3
    epochs: int = 4
    dataloader_epochs: int = 4
    workers: int = 2
    staging_readers: int = 2
    staging_bandwidth: float = 0.0
    ways: Sequence[WayName] = WAYS
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.step_s is None) == (self.calibrate is None):
            raise ValueError("give either step_s or calibrate: the time of a step, or its script")
        if self.step_s is not None and not self.step_s >= 0:
            raise ValueError(f"step_s is {self.step_s}, must be >= 0")
        for name, count, least in (
            ("batch_size", self.batch_size, 1), ("num_samples", self.num_samples, 1),
            ("sample_bytes", self.sample_bytes, 1), ("epochs", self.epochs, 2),
            ("dataloader_epochs", self.dataloader_epochs, 2), ("workers", self.workers, 0),
            ("staging_readers", self.staging_readers, 1),
        ):  # fmt: skip
            if count < least:
                raise ValueError(f"{name} is {count}, must be >= {least}")
        for name, part in (("exchange", self.exchange), ("hidden_fraction", self.hidden_fraction)):
            if not 0 <= part < 1:
                raise ValueError(f"{name} is {part}, must be in [0, 1)")
        if self.dataset is not None and not self.fields:
            raise ValueError("dataset: give the fields of its samples, too")


def run_ways(
    world: World,
    directory: Path,
    scratch: Path,
    options: PipelineOptions,
    phases: Results,
    notify: Notify,
    on_epoch: OnEpoch = lambda way, epochs: None,
    until: Deadline | None = None,
) -> EndToEnd:
    """Run every way and return what it cost, on every rank. Collective.

    The DataLoader is run for a few epochs only: the epoch at which staging has paid counts the
    others as the median of those after its first, which is cold.

    Args:
        world: All ranks.
        directory: In the shared filesystem.
        scratch: On this node's own disk.
        options: What to run.
        phases: What was measured of storage and network: the predictions start from it.
        notify: Receives progress, on rank 0.
        on_epoch: Called on every rank with the number of epochs that a way has completed; with 0
            when it may begin.
        until: After which no way is begun, and no epoch but the second of one that was.

    Raises:
        BenchError: If the samples cannot be written, are too few, or the script has no step.
        DataioError: If the dataset cannot be read, or staged.
    """
    name = agree_name(world)
    notify = notify if world.rank == 0 else lambda _: None
    with ExitStack() as stack:
        paths, fields = list(options.dataset or ()), options.fields
        if options.dataset is None:
            notify(f"end to end: writing {options.num_samples} samples into {directory}")
            shards = stack.enter_context(own_directory(directory / f"{name}-set"))
            fields = own_fields(options.sample_bytes)
            paths = write_own_set(
                shards, world, num_samples=options.num_samples,
                sample_bytes=options.sample_bytes, seed=options.seed,
            )  # fmt: skip
        own = stack.enter_context(own_directory(scratch / name))
        root = MEMORY if MEMORY.is_dir() else own
        memory = stack.enter_context(own_directory(root / f"{name}-null"))
        data = open_shards(paths, fields, world, options.axis)
        _check_enough(data, options.batch_size, world)
        job = TrainingRates(
            world=world, data=data, step_s=_step_s(options, world, notify), workers=options.workers,
            batch_size=options.batch_size, staging_readers=options.staging_readers,
            seed=options.seed, on_epoch=on_epoch, until=until or Deadline(math.inf),
        )  # fmt: skip
        notify("end to end: null storage")
        ran: dict[WayName, Ran] = {"null": _run_null(job, memory, options.epochs)}
        notify("end to end: the DataLoader's own work for a sample, for the predictions")
        predicted = _predict(job, options, ran["null"], phases)
        # Staged comes early: a DataLoader that takes all the time has something to be held against.
        for way in ("staged", "dataloader", *WAYS[3:]):
            if way in options.ways and not job.over():
                notify(f"end to end: {way}")
                ran[way] = _run_way(job, options, way, own)
        world.barrier(doing="end the benchmark's training")
    return EndToEnd(
        step_s=job.step_s,
        step_from="given" if options.calibrate is None else str(options.calibrate),
        batch_size=options.batch_size,
        num_samples=data.num_samples,
        sample_bytes=data.sample_bytes,
        exchange_fraction=options.exchange,
        hidden_fraction=options.hidden_fraction,
        ways=[
            make_way(way, one, ran, predicted[way])
            for way, one in sorted(ran.items(), key=lambda it: WAYS.index(it[0]))
        ],
    )


def cut_short(run: EndToEnd, options: PipelineOptions) -> list[str]:
    """Name the ways that had less time than they were to have: a line, or none. Pure."""
    trained = {way.name: len(way.epoch_s) for way in run.ways}
    short = []
    for way in ("null", *(way for way in WAYS[1:] if way in options.ways)):
        wanted = options.dataloader_epochs if way == "dataloader" else options.epochs
        if trained.get(way, 0) < wanted:
            short.append(f"{way} {trained.get(way, 0)} of {wanted}")
    if not short:
        return []
    return [f"the time limit came first: epochs trained {', '.join(short)}; raise --time-limit"]


def _check_enough(data: OwnShards, batch_size: int, world: World) -> None:
    least = batch_size * world.world_size
    if data.num_samples < least:
        raise BenchError(
            f"{data.paths[0]} and {len(data.paths) - 1} more: {data.num_samples} samples, expected "
            f"a batch of {batch_size} for each of {world.world_size} ranks, {least} at least: give "
            "more samples, a smaller batch or fewer ranks"
        )


def _step_s(options: PipelineOptions, world: World, notify: Notify) -> float:
    if options.calibrate is None:
        assert options.step_s is not None
        return options.step_s
    notify(f"end to end: measuring the step of {options.calibrate}")
    return calibrate(options.calibrate, options.batch_size, world=world)


def _run_null(job: TrainingRates, memory: Path, epochs: int) -> Ran:
    """Train on as many of the samples as memory may take."""
    status = os.statvfs(memory)
    room = min(memory_room() or 0, status.f_bavail * status.f_frsize) * MEMORY_FRACTION
    room = _least(room, job.world)
    sizes = job.data.part_bytes
    held = max(int(np.searchsorted(np.cumsum(sizes), room, side="right")), 1)
    # A rank has to have steps, whatever the room.
    least = 2 * job.batch_size * job.world.world_size
    while held < len(sizes) and held * job.data.num_samples < least * len(sizes):
        held += 1
    return job.run_loader("null", paths=job.data.paths[:held], cache=memory, epochs=epochs)


def _run_way(job: TrainingRates, options: PipelineOptions, way: WayName, own: Path) -> Ran:
    if way == "dataloader":
        return job.run_dataloader(options.dataloader_epochs)
    shuffle = Partial(options.exchange) if way in ("exchange", "hiding") else None
    hiding = RandomPrune(options.hidden_fraction, delta=1.0) if way == "hiding" else None
    with own_directory(own / way) as cache:
        return job.run_loader(
            way, paths=job.data.paths, cache=cache, epochs=options.epochs, shuffle=shuffle,
            importance=hiding, bandwidth=options.staging_bandwidth,
        )  # fmt: skip


def _predict(
    job: TrainingRates, options: PipelineOptions, null: Ran, phases: Results
) -> dict[WayName, Predicted]:
    world, data = job.world, job.data
    workload = Workload(
        num_samples=data.num_samples, sample_bytes=data.sample_bytes,
        batch_size=job.batch_size, ranks_of_node=world.topology.layout, workers=job.workers,
        exchange_fraction=options.exchange, hidden_fraction=options.hidden_fraction,
        staging_readers=job.staging_readers, staging_limit_bytes_per_s=options.staging_bandwidth,
        fits_in_memory=bool(_least(data.num_bytes < (memory_room() or 0) / 2, world)),
    )  # fmt: skip
    samples = job.shared_samples()
    own_s = sample_work_s(samples, job.batch_size, world=world)
    samples.close()
    # Null storage may have had fewer samples: what counts is a step.
    steps = math.ceil(math.ceil(null.samples[-1] / world.world_size) / job.batch_size)
    rates = choose_rates(
        phases, workload, step_s=later_s(null.epoch_s) / steps, dataloader_sample_s=own_s,
        staging_readers=min(world.world_size * job.staging_readers, len(data.paths)),
        null_staging_s=null.staging_s, null_staging_bytes=float(null.staging_bytes or 0),
    )  # fmt: skip
    return predict(workload, rates)


def _least(value: float, world: World) -> float:
    least = world.allreduce(np.array([float(value)]), op="min", doing="compare nodes")
    return float(least[0])
