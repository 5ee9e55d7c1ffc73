"""Verify a mesh: a short run on it, the same steps by plain torch, and what differs."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dataio import Field, NodeCache
from dataio.job.launch import join
from dataio.world import single_world
from tonari.trainer.checkpoint.agree import from_rank_0
from tonari.trainer.config.config import Config
from tonari.trainer.config.importance import ImportanceConfig
from tonari.trainer.config.shuffle import ShuffleConfig
from tonari.trainer.mesh.mesh import num_microbatches
from tonari.trainer.run.build import lay_out
from tonari.trainer.run.images import with_keys
from tonari.trainer.run.loop import train_observed
from tonari.trainer.run.own import Loss, MakeOptimizer, Own, Transform, own_of
from tonari.trainer.run.step import EvaluationMeans
from tonari.trainer.run.tasks import Task
from tonari.trainer.run.tiled import uncut
from tonari.trainer.run.verify.compare import Compared, TensorDifference
from tonari.trainer.run.verify.double import InDouble
from tonari.trainer.run.verify.layers import Layers, choose_layers, with_layers
from tonari.trainer.run.verify.plain import Plain
from tonari.trainer.run.verify.recording import (
    Cut,
    Held,
    Ranks,
    Recorded,
    RecordedStep,
    StepRecorder,
)
from tonari.trainer.run.verify.rows import first_rows

STEPS = 4
"""Of the run, by default and at least: two epochs, in the second of which it stops and goes on."""

MICROBATCH_ROWS = 2
TOLERANCES = {"float64": (1e-8, 1e-5), "float32": (1e-3, 1e-3), "bfloat16": (0.1, 0.1)}
"""By the precision of the weights: where all is computed in it, and where parts are in less."""


@dataclass(frozen=True)
class Verdict:
    """What came out on a mesh.

    Attributes:
        mesh: Its sizes, in words.
        figures: Of each thing that was compared: equal, how many differ, or "-".
        differences: In the order of time and of the module; empty: the mesh trains what one
            process does.
        left_out: Of what was not compared, why.
        notes: What else is to be known, such as layers that were left out.
        tolerance: Differences up to this share of the largest number are rounding.
        compared: Tensors and figures.
        seconds: What it took.
        failed: ``"refused"`` or ``"failed"`` where the mesh did not train at all, for a reason
            among the notes; else empty.
    """

    mesh: str
    figures: Mapping[str, str]
    differences: tuple[TensorDifference, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tolerance: float = 0.0
    compared: int = 0
    seconds: float = 0.0
    failed: str = ""

    @property
    def equal(self) -> bool:
        """Whether the mesh trained, and nothing differs."""
        return not self.differences and not self.failed

    @property
    def line(self) -> str:
        """Say it in one line."""
        if self.failed:
            return f"{self.mesh}: {self.failed}"
        if self.equal:
            return (
                f"{self.mesh}: equal: {self.compared} tensors and figures to {self.tolerance:.0e} "
                "of the largest"
            )
        names = dict.fromkeys(each.figure for each in self.differences)
        return f"{self.mesh}: DIFFERS from one process of plain torch: {', '.join(names)}"


def verify(
    config: Config,
    *,
    model: Callable[[], nn.Module] | None = None,
    task: Task | None = None,
    fields: Mapping[str, Field] | None = None,
    evaluation_fields: Mapping[str, Field] | None = None,
    transform: Transform | None = None,
    evaluation_transform: Transform | None = None,
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    steps: int = STEPS,
) -> Verdict:
    """Train some steps on the mesh of this job, and the same in plain torch; compare. Collective.

    Takes what `trainer.train` takes, and leaves the run's directory and cache alone. Every rank
    sees the directory for temporary files (TMPDIR). The plain steps are rank 0's.

    Args:
        config: The run's settings; see `verified_config` for what is set otherwise.
        model: As of `trainer.train`, as all the others.
        task: What is learnt.
        fields: Of a sample.
        evaluation_fields: Of a sample that is evaluated on.
        transform: Of a sample.
        evaluation_transform: Of a sample that is evaluated on.
        optimizer: Makes it.
        loss: In place of the task's.
        steps: To train, at least 4; half of them are an epoch.

    Returns:
        What came out, the same on every rank.

    Raises:
        ValueError: If there are fewer steps.
        ConfigError: If the mesh refuses the model, or the settings do not fit.
    """
    own = Own(
        model=model, task=task, fields=fields, evaluation_fields=evaluation_fields,
        transform=transform, evaluation_transform=evaluation_transform, optimizer=optimizer,
        loss=loss,
    )  # fmt: skip
    own = own_of(config, own)
    if steps < STEPS:
        raise ValueError(f"steps is {steps}, expected at least {STEPS}: two epochs of two steps")
    started = time.monotonic()
    with join(device="cpu", timeout_s=config.run.timeout_s) as job:
        made = tempfile.mkdtemp(prefix="tonari-verify-") if job.world.rank == 0 else ""
        directory = Path(from_rank_0(made))
        replicate = lay_out(config, job.world.world_size).sizes[1]
        config = replace(config, mesh=replace(config.mesh, dp_replicate=replicate))
        try:
            layers = layers_of(config, own, steps=steps)
            run_on_mesh(config, own, directory, layers=layers.kept, steps=steps)
            dist.barrier()
            verdicts: list[Verdict | None] = [None]
            if job.world.rank == 0:
                verdicts = [compare_recorded(config, own, directory, layers, steps=steps)]
            dist.broadcast_object_list(verdicts)
        finally:
            if job.world.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
    (verdict,) = verdicts
    assert verdict is not None, "sent by rank 0"
    return replace(verdict, seconds=time.monotonic() - started)


def verified_config(config: Config, directory: Path, *, steps: int = STEPS) -> Config:
    """Make a short run of a run's settings, with its model, mesh, optimizer and loss.

    Few rows a batch, in double precision on the CPU, all of them trained in each epoch, at a
    learning rate that stays as it is; results, cache and checkpoints in a directory of their own.
    """
    mesh = config.mesh
    microbatches = num_microbatches(
        mesh.microbatches, pp=mesh.pp, schedule=mesh.schedule, virtual=mesh.virtual
    )
    return replace(
        config,
        data=replace(
            config.data, batch_size=MICROBATCH_ROWS * microbatches, exclude="",
            cache=NodeCache(str(directory / "cache")),
            workers=replace(config.data.workers, threads=0, processes=0, feeders=None),
        ),
        shuffle=ShuffleConfig(kind="local"),
        importance=ImportanceConfig(),
        optimizer=replace(
            config.optimizer, schedule="steps", milestones=(), schedule_by="epoch",
            min_lr=0.0, warmup_epochs=0, warmup_steps=0, warmup_tokens=0, compress_gradients="none",
        ),
        mesh=replace(config.mesh, swap_blocks=0),
        run=replace(
            config.run, epochs=steps, max_steps=steps, max_tokens=0, evaluate_steps=0,
            evaluate_tokens=0, evaluation="inline", checkpoint_epochs=steps, checkpoint_steps=0,
            checkpoint_tokens=0,
            directory=str(directory / "run"), log_steps=1, tensorboard=False, prometheus="",
            otel=False, wandb="", mlflow="", profile_steps=(), device="cpu",
            timeout_s=min(config.run.timeout_s, 60.0),
        ),
    )  # fmt: skip


def world_size_of(config: Config) -> int:
    """Count the ranks of the smallest job that a mesh fits."""
    mesh = config.mesh
    return mesh.pp * (mesh.dp_replicate or 1) * mesh.dp_shard * mesh.sharing * mesh.tp


def replicas_of(config: Config) -> int:
    """Count the replicas of that job."""
    return (config.mesh.dp_replicate or 1) * config.mesh.dp_shard


def layers_of(config: Config, own: Own, *, steps: int = STEPS) -> Layers:
    """Choose how many layers of the model are verified.

    Raises:
        ConfigError: If even the fewest are too many.
    """
    short = verified_config(config, Path())
    rows = steps * short.data.batch_size * short.optimizer.accumulate * replicas_of(short)
    return choose_layers(short, own, replicas=replicas_of(short), rows=rows)


def short_run(
    config: Config, own: Own, directory: Path, layers: int, *, steps: int = STEPS
) -> tuple[Config, Own]:
    """Make the short run, and its rows; the same on every rank."""
    config, own = with_layers(with_keys(config, own, single_world()), own, layers)
    short = verified_config(config, directory, steps=steps)
    step_rows = short.data.batch_size * replicas_of(short) * short.optimizer.accumulate
    rows = first_rows(config, own, _epoch_steps(steps) * step_rows)
    # What is evaluated on is not verified, but how.
    fields = own.evaluation_fields or own.fields
    # One process has whole samples, and so reads each replica's reader, who records them
    own = replace(
        own, sources=(rows, rows), evaluation_fields=fields and uncut(fields),
        fields=own.fields and uncut(own.fields),
    )  # fmt: skip
    if short.mesh.dtype == "float64" and own.task is not None:
        own = replace(own, task=InDouble(own.task))
    return short, own


def run_on_mesh(
    config: Config, own: Own, directory: Path, *, layers: int = 0, steps: int = STEPS
) -> None:
    """Train the short run, stop it, go on, and leave what this rank saw. Collective.

    Args:
        config: The run's settings.
        own: What its caller brings.
        directory: That all ranks see.
        layers: To keep of the model; 0: all.
        steps: To train.
    """
    short, own = short_run(config, own, directory, layers, steps=steps)
    for number, last in enumerate((_epoch_steps(steps) + 1, steps)):
        recorder = StepRecorder(keep=(0, steps - 1))
        part = replace(short, run=replace(short.run, max_steps=last))
        train_observed(part, own, observer=recorder)
        assert recorder.found is not None, "it has begun"
        torch.save(recorder.found, directory / f"{number}-{recorder.found.rank}.pt")


def compare_recorded(
    config: Config,
    own: Own,
    directory: Path,
    layers: Layers | None = None,
    *,
    steps: int = STEPS,
) -> Verdict:
    """Do in this process what the ranks did, and compare.

    Args:
        config: As `run_on_mesh` was given.
        own: Likewise.
        directory: Where the ranks left what they saw.
        layers: What they kept of the model; optional, defaults to all.
        steps: That they trained.
    """
    started = time.monotonic()
    layers = layers or Layers()
    short, own = short_run(config, own, directory, layers.kept, steps=steps)
    replicas = replicas_of(short)
    microbatches = lay_out(short, world_size_of(short)).microbatches
    plain = Plain(
        short, own, replicas=replicas, microbatches=microbatches, by_parts=bool(layers.kept)
    )
    compared = Compared(tolerance=TOLERANCES[short.mesh.dtype][0])
    for part in range(2):
        _compare_start(plain, _read(directory, part), compared)
    _conclude(plain, compared, pieces=replicas * microbatches)
    notes = [layers.note] if layers.note else []
    if plain.in_parts and compared.differences:
        compared = _with_tolerance(compared, TOLERANCES[short.mesh.dtype][1])
        notes.append("parts of it compute in less than double precision, which rounds more")
    return Verdict(
        mesh=mesh_words(config), figures=compared.verdicts(),
        differences=tuple(compared.differences), left_out=compared.left_out,
        tolerance=compared.tolerance, compared=compared.count,
        notes=tuple(notes),
        seconds=time.monotonic() - started,
    )  # fmt: skip


def mesh_words(config: Config) -> str:
    """Say a mesh in words: the axes that have several ranks, and the schedule of a pipeline."""
    mesh = config.mesh
    sizes = {
        name: getattr(mesh, name) or 1 for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    }
    named = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    named += [f"tiles={list(mesh.tiles)}"] * bool(mesh.tiles)
    return " ".join(named + [mesh.schedule] * (mesh.pp > 1)) or "one process"


def _epoch_steps(steps: int) -> int:
    return steps // 2


def _read(directory: Path, part: int) -> Ranks:
    with torch.serialization.safe_globals([Recorded, RecordedStep, Held, Cut, EvaluationMeans]):
        found: list[Recorded] = [torch.load(path) for path in directory.glob(f"{part}-*.pt")]
    return Ranks(sorted(found, key=lambda each: each.rank))


def _compare_start(plain: Plain, ranks: Ranks, compared: Compared) -> None:
    """Do the steps of one start of the run, and compare each with what the ranks saw of it."""
    replicas, first = range(ranks.num_replicas), ranks.first
    if first.goes_on and compared.differs("weights", "buffers", "optimizer", "average"):
        compared.leave_out("resume", "the state differed before it")
    elif first.goes_on:
        compared.state(
            "after the resume", ranks.states(None), [plain.state(each) for each in replicas],
            figure="resume",
        )  # fmt: skip
    for position, step in enumerate(first.steps):
        when = f"step {step.number + 1}"
        batches = ranks.step_batches(position)
        losses, norm = plain.step(batches, number=step.number, lr=step.lr, first=not step.number)
        for number, each in enumerate(losses):
            for replica, expected in enumerate(each):
                valid = batches[number][replica]["sample_id"] >= 0
                compared.tensor(
                    "losses", when, "the loss of each row",
                    ranks.losses(position, number, replica)[valid], expected[valid],
                    where=f"replica {replica}",
                )  # fmt: skip
        compared.value("gradient norms", when, "the norm of all gradients", step.norm, norm)
        if step.number in first.states:
            compared.state(
                when, ranks.states(step.number), [plain.state(each) for each in replicas]
            )
        if step.number in first.averaged:
            plain.average_buffers()
        for number, (after, _, found) in enumerate(first.evaluations):
            if after == step.number:
                rows = ranks.evaluation_batches(number)
                _compare_evaluation(compared, "its", after, found, plain.evaluate(rows))
                if first.average_evaluations:
                    averaged = plain.evaluate(rows, averaged=True)
                    its = "the averaged weights'"
                    _compare_evaluation(
                        compared, its, after, first.average_evaluations[number], averaged
                    )
    if plain.evaluation_draws:
        compared.leave_out("evaluation", "it draws, and nothing keys draws there")


def _compare_evaluation(
    compared: Compared, whose: str, after: int, found: EvaluationMeans, expected: EvaluationMeans
) -> None:
    when = f"the evaluation after step {after + 1}"
    for name in ("loss", "accuracy"):
        compared.value(
            "evaluation", when, f"{whose} {name}", getattr(found, name), getattr(expected, name)
        )


def _conclude(plain: Plain, compared: Compared, *, pieces: int) -> None:
    """Compare what one process alone shows: a batch in one pass, and draws that repeat."""
    if pieces == 1:
        compared.leave_out("whole batch", "a step is one pass")
    elif plain.apart is None:
        compared.leave_out("whole batch", plain.why or "the module cannot be copied")
    else:
        compared.value(
            "whole batch", "step 1", f"the losses of {pieces} parts of a batch, and of all its "
            "rows in one pass, apart", plain.apart, 0.0, scale=1.0,
        )  # fmt: skip
    if not plain.averages:
        compared.leave_out("average", "the run averages no weights (optimizer.ema)")
    if not plain.draws:
        compared.leave_out("draws", "it draws nothing")
    for name, number in plain.repeats.items():
        compared.value(
            "draws", "step 1", f"uses of block {name} that draw what an earlier one drew",
            float(number), 0.0, scale=1.0,
        )  # fmt: skip


def _with_tolerance(compared: Compared, tolerance: float) -> Compared:
    """Take differences for rounding up to another tolerance."""
    kept = [each for each in compared.differences if not each.apart <= tolerance]
    return replace(compared, tolerance=tolerance, differences=kept)
