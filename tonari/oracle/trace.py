"""One training step of any rank of any world, in this process, on tensors without data."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import dataio
from dataio.rows.samples import Batch
from tonari.oracle.record import Event, Recorder
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.place import Place
from tonari.trainer.mesh.swap import NO_COPIES, Swap
from tonari.trainer.models.fake import fake_tensors
from tonari.trainer.private.fakes import (
    FakeStore,
    FakeTensor,
    norms_taken_together,
    unset_fake_temporarily,
)
from tonari.trainer.private.trees import tree_leaves
from tonari.trainer.run.build import (
    build_place,
    lay_out,
    make_fields,
    make_pipeline,
    make_task,
    make_without_data,
    spread,
    take_tiles,
)
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own, own_of
from tonari.trainer.run.step import train_step
from tonari.trainer.run.tasks import Task
from tonari.trainer.run.tiled import of_tile

WARM_UP_STEPS = 2
"""Steps before the recorded one: an optimizer makes its state, a pipeline its buffers."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A training step as one rank makes it.

    Attributes:
        rank: Which.
        events: Operators, messages and waits, in the order in which they are issued; of tensors
            without data torch waits for some messages at once, and of others at their first use.
        kept_bytes: Of tensors that outlive the step: parameters, the optimizer's state, buffers.
        peak_bytes: The most bytes of tensors at a time in the step, ``kept_bytes`` included; what
            an operator allocates inside, and libraries keep for messages, is not counted.
    """

    rank: int
    events: tuple[Event, ...]
    kept_bytes: int
    peak_bytes: int


def trace_step(config: Config, *, world_size: int, rank: int, own: Own | None = None) -> Trace:
    """Make a step of a run as one of its ranks, with what trains it, on nothing.

    Nothing is read or sent. The process must not be part of a job, and leaves no process group.

    Args:
        config: The settings; ``mesh.compile`` is left aside, and blocks that swap keep what they
            have: the host is no other place here.
        world_size: Ranks of the job.
        rank: Which of them to be.
        own: What the caller of `trainer.train` would bring.

    Raises:
        ConfigError: If the settings do not fit such a world, or the step cannot be made without
            data.
    """
    own, config = own_of(config, own), warmed_up(config)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}")
    layout = lay_out(config, world_size)
    model = make_without_data(config, layout, own)
    if config.mesh.dtype == "float64" and not config.model.is_own:
        model = model.double()
    place = build_place(config, layout, rank)
    with alone(rank, world_size):
        mesh = make_mesh(layout.sizes, device_type="cpu")
        task = make_task(config, own, mesh=mesh, replica=place.replica)
        device = torch.device("cpu")
        swap = Swap(config.mesh.swap_blocks, device, least_bytes=NO_COPIES)
        tile = None
        if place.tiles:
            task, tile = take_tiles(config, own, task, mesh=mesh)
        parts = spread(config, model, mesh, place, swap=swap, tile=tile)
        recorder = Imagined()
        try:
            with fake_tensors(), recorder:
                for part in parts:
                    part.to_empty(device=device)
                pipeline = make_pipeline(
                    config, layout, parts, place=place, mesh=mesh, task=task, device=device
                )
                make = own.optimizer or (lambda given: build_optimizer(config.optimizer, given))
                optimizer = make(pipeline.parameters())
                batches = [
                    make_batch(config, own, task, place) for _ in range(config.optimizer.accumulate)
                ]
                batch_bytes = sum(value.nbytes for batch in batches for value in batch.values())
                for number in range(WARM_UP_STEPS + 1):
                    recorder.mark()
                    train_step(
                        pipeline, optimizer, NoReports(), batches, clip=config.optimizer.clip,
                        step=number,
                    )  # fmt: skip
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"a step of {config.model.kind} as rank {rank} of {world_size} cannot be made on "
                f"tensors without data: {type(error).__name__}: {error}; let its forward make "
                "tensors on its input's device, register constants as buffers, and not decide by "
                "values"
            ) from error
        return Trace(
            rank=rank,
            events=tuple(recorder.events),
            kept_bytes=recorder.live_bytes - batch_bytes,
            peak_bytes=recorder.peak_bytes - batch_bytes,
        )


def warmed_up(config: Config) -> Config:
    """Have the first step be as those that follow a warm-up."""
    return replace(config, optimizer=replace(config.optimizer, compress_warmup_steps=0))


class Imagined(Recorder):  # type: ignore[no-untyped-call]
    """A recorder on tensors without data, which stands in for the numbers that are read of them."""

    def call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Answer as a step that goes well: all is finite, and rows begin at 0."""
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if given and not any(isinstance(leaf, FakeTensor) for leaf in given):
            with unset_fake_temporarily():  # such as the numbers of a mesh's ranks
                return func(*args, **named)
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            if kind == torch.bool:
                return True
            if kind == torch.int32:  # torch's stages agree so that shapes are known
                return 1
            return 1.0 if kind.is_floating_point else 0
        return func(*args, **named)


class NoReports:
    """A loader that takes reports and keeps none."""

    needs_outcome = False

    def report(self, *_: object) -> None:
        """Take them."""


def make_batch(config: Config, own: Own, task: Task, place: Place) -> Batch:
    """Make a batch as the loader delivers it, of the columns that a rank takes."""
    rows = config.data.batch_size
    wanted = {*(task.columns.input if place.has_input else ())}
    wanted |= {*(task.columns.target if place.has_target else ())}
    batch = {
        name: _column(name, field, rows)
        for name, field in of_tile(make_fields(config, own), place.tile).items()
        if name in wanted
    }
    batch |= {
        "weight": torch.ones(rows),
        "sample_id": torch.zeros(rows, dtype=torch.int64),
        "slot": torch.zeros(rows, dtype=torch.int64),
    }
    return batch


def _column(name: str, field: dataio.Field, rows: int) -> Tensor:
    if isinstance(field, dataio.Image):
        height, width = _image_size(name, field)
        pixels = torch.zeros(rows, height, width, field.channels, dtype=torch.uint8)
        return pixels.permute(0, 3, 1, 2)
    stored = field.column(name)
    if stored is None:
        raise ConfigError(
            f"field {name!r} is {field}, whose shape follows from the data, so that no step can be "
            "made without it; give it one shape"
        )
    dtype = np.dtype(stored.dtype).newbyteorder("=")
    return torch.from_numpy(np.zeros((rows, *stored.shape), dtype))


def _image_size(name: str, field: dataio.Image) -> tuple[int, int]:
    for step in (field.crop, field.resize):
        size = getattr(step, "size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, tuple):
            return int(size[0]), int(size[1])
    raise ConfigError(
        f"field {name!r}: its images are of any size, so that no step can be made without "
        "data; give data.image_size"
    )


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a job whose messages go nowhere."""
    if dist.is_initialized():
        raise ConfigError(
            "this process is part of a job already, and a trace pretends to be one of another; "
            "start it alone, without mpiexec or torchrun"
        )
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with norms_taken_together(), warnings.catch_warnings():
            # torch hides it too as it copies a tensor, but not where warnings are errors
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch has it name the rank
