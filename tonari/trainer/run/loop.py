"""The loop: epochs of steps, new scores, evaluation, metrics and checkpoints."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from dataio import Field
from dataio.job.launch import LATER_S, Job
from dataio.rows.samples import Batch
from tonari.terminal import show
from tonari.trainer.checkpoint.agree import together
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress, read_progress, set_aside_later
from tonari.trainer.checkpoint.restore import find, restore
from tonari.trainer.checkpoint.state import check_finite
from tonari.trainer.config.config import Config
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.deliver.evaluation import ReplicaEvaluation
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import name_roles
from tonari.trainer.mesh.parallelize import average_buffers
from tonari.trainer.mesh.randomness import deterministic
from tonari.trainer.private.messages import limit_waits_of_groups
from tonari.trainer.run.build import (
    Parallel,
    build_loader,
    build_pace,
    build_parallel,
    check_device,
    make_evaluation_fields,
    warn_of_padding,
)
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.images import with_keys
from tonari.trainer.run.live import Live, finish_step, train_on, written_at
from tonari.trainer.run.mixing import mark_draws
from tonari.trainer.run.observed import Begun, Observer
from tonari.trainer.run.optimizers import find_lr_shares, make_optimizer
from tonari.trainer.run.outputs import Log, claim_directory, note_start, open_logs
from tonari.trainer.run.own import Loss, MakeOptimizer, Own, Transform, own_of
from tonari.trainer.run.pace import in_steps
from tonari.trainer.run.pretrained import start_from_weights
from tonari.trainer.run.skips import Skips
from tonari.trainer.run.step import evaluate, grouped, rescore, train_step
from tonari.trainer.run.tasks import Task
from tonari.trainer.run.verify.first_step import FirstStep
from tonari.trainer.run.words import Summary, begin_words, epoch_words, summary_words
from tonari.trainer.watch.meter import Figures, Meter, combine_order_hashes
from tonari.trainer.watch.metrics import Line, ProgressLine, progress_words
from tonari.trainer.watch.parts import EpochParts
from tonari.trainer.watch.peak import rates
from tonari.trainer.watch.plan import read_plan
from tonari.trainer.watch.profile import StepTrace
from tonari.trainer.watch.record import COMPLETE
from tonari.trainer.watch.stop import AT_ONCE, StopRequest
from tonari.trainer.watch.totals import Totals

if TYPE_CHECKING:
    from tonari.trainer.run.beside.evaluations import Evaluations

Listener = Callable[[Line], None]

NOT_EVALUATED: Figures = {"accuracy": None, "evaluation_loss": None, "evaluation_s": 0.0}
"""Of an epoch at whose end nothing is evaluated."""

logger = logging.getLogger(__name__)


def train(
    config: Config,
    *,
    model: Callable[[], nn.Module] | None = None,
    task: Task | None = None,
    fields: Mapping[str, Field] | None = None,
    transform: Transform | None = None,
    evaluation_fields: Mapping[str, Field] | None = None,
    evaluation_transform: Transform | None = None,
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    resume: str = "auto",
    metrics_path: Path | None = None,
    plan: Path | None = None,
    skip_steps: Sequence[range] = (),
    on_epoch: Listener | None = None,
    quiet: bool = False,
) -> Summary:
    """Train by the settings, in one process or in each of a job's. Collective.

    Args:
        config: The same on every rank.
        model: Makes the model, the same on every rank: a `StagedModel`, an `Adapted` module, or
            any other, which trains over dp and FSDP; None: that of ``config.model``.
        task: Which columns it reads, and how a row's answer is judged; None: the label of an
            image, or the next token.
        fields: Of a sample, for a task that reads others than ``config.data`` names.
        evaluation_fields: Of a sample that is evaluated on, where ``fields`` crop or flip by
            chance; None: as those of training.
        transform: Of a sample, as of `dataio.Loader`; ``evaluation_transform``: of one that is
            evaluated on.
        optimizer: Makes it of this rank's parameters. The settings still say the learning rate: of
            the group whose rate is the largest on any rank; others keep their share of it.
        loss: Logits and the task's target -> floating[rows], one loss a row, in place of the
            task's.
        resume: ``"auto"`` goes on from the run directory's newest checkpoint, if there is one;
            ``"never"`` starts anew; else the checkpoint's directory.
        metrics_path: Instead of ``metrics.jsonl`` in the run directory.
        plan: What ``tonari plan --json`` printed, to be put beside each epoch.
        skip_steps: Optimizer steps, the run's first being 1, whose rows are passed over, each range
            within one epoch: the run goes on from a checkpoint before them, and counts them as
            steps. A checkpoint that has them behind it is gone on from as it is.
        on_epoch: Called on rank 0 with each epoch's line.
        quiet: Whether rank 0 prints nothing; else a line an epoch and one at the end.

    Raises:
        ConfigError: If the settings do not fit this world, there is nothing to resume, the plan is
            of another run, or steps cannot be skipped.
        DataioError: If the data or the cache cannot be used.
    """
    own = Own(
        model=model, task=task, fields=fields, evaluation_fields=evaluation_fields,
        transform=transform,
        evaluation_transform=evaluation_transform, optimizer=optimizer, loss=loss,
    )  # fmt: skip

    def listen(line: Line) -> None:
        if not quiet:
            show(epoch_words(line, config.run.epochs).splitlines())
        if on_epoch is not None:
            on_epoch(line)

    summary = train_observed(
        config, own, resume=resume, metrics_path=metrics_path, plan=plan, skip_steps=skip_steps,
        on_epoch=listen, speaks=not quiet,
    )  # fmt: skip
    if summary.rank == 0 and not quiet:
        show(summary_words(summary, config.run.directory).splitlines())
    return summary


def train_observed(
    config: Config,
    own: Own,
    *,
    resume: str = "auto",
    metrics_path: Path | None = None,
    plan: Path | None = None,
    skip_steps: Sequence[range] = (),
    on_epoch: Listener | None = None,
    observer: Observer | None = None,
    speaks: bool = False,
    live: Live | None = None,
) -> Summary:
    """Train as `train` does, and let ``observer`` look on, by default at the first step.

    Collective. Rank 0 says on standard error how far it is if it ``speaks``.
    """
    if config.run.live and live is None:
        again = partial(
            train_observed, own=own, resume=resume, metrics_path=metrics_path, plan=plan,
            skip_steps=skip_steps, on_epoch=on_epoch, observer=observer, speaks=speaks,
        )  # fmt: skip
        return train_on(config, again)
    live = live or Live(config)
    if config.run.evaluation != "inline":
        from tonari.trainer.run.beside.evaluations import check_evaluation

        check_evaluation(config, own)
    own, observer = own_of(config, own), Observer() if live.goes_on else observer or FirstStep()
    directory = Path(config.run.directory)
    check_device(config.run.device)
    limit_waits_of_groups(timedelta(seconds=config.run.timeout_s + LATER_S))
    with (
        # Until all is closed: a checkpoint may still be under way, and launchers repeat signals.
        StopRequest(leave=live.leave_job if config.run.live else None, noted=live.signals) as stop,
        deterministic(config.run.deterministic),
        live.joined() as job,
        contextlib.ExitStack() as opened,
    ):
        building = opened.enter_context(contextlib.ExitStack())
        building.enter_context(live.noting_groups())
        # Before anything is staged: what does not fit should be said at once.
        parts = EpochParts(read_plan(plan, config, job.world) if plan else None)
        parallel = build_parallel(config, job, own)
        place = parallel.pipeline.place
        job.watchdog.set_roles(name_roles(place.sizes, tiles=place.tiles))
        skips = Skips(tuple(skip_steps))
        found = None
        if not live.goes_on:
            found = find(directory / "checkpoints", resume, fits=skips.fits)
        if found:
            skips = skips.after(read_progress(found), path=found)
        elif not live.goes_on:
            start_from_weights(config, parallel.pipeline, own)
        made = make_optimizer(config.optimizer, parallel.pipeline.parameters(), own.optimizer)
        live.check_optimizer(made)
        # A rank that stands still and was left behind may hold it.
        with contextlib.suppress(*[ConfigError] * live.goes_on):
            if job.world.rank == 0:
                claim_directory(config, opened)
        config = with_keys(config, own, job.world)
        loader, test = build_loader(
            config, job, place=place, task=parallel.task, own=own, logs_rows=True
        )
        opened.enter_context(loader)
        is_inline = config.run.evaluation == "inline"
        evaluation = None if test is None or not is_inline else loader.evaluation(
            test, fields=make_evaluation_fields(config, own, tile=place.tile),
            transform=own.evaluation_transform, classes=config.data.test_classes,
        )  # fmt: skip
        logs = open_logs(
            config, job, opened, found=found, metrics_path=metrics_path, stats=loader.stats,
            replica=place.replica,
            lost_after=live.progress.steps if live.goes_on else None,
        )  # fmt: skip
        run = Run(
            in_steps(config, num_replicas=place.num_replicas), job, parallel=parallel,
            optimizer=made, loader=loader, evaluation=evaluation, opened=opened, logs=logs,
            stop=stop, parts=parts, on_epoch=on_epoch, own=own, skips=skips, observer=observer,
            speaks=speaks, live=live,
        )  # fmt: skip
        if found:
            run.restore(found)
            set_aside_later(directory / "checkpoints", found)
        run.keep()
        noted = None
        if job.world.rank == 0:
            noted = note_start(
                live.as_given(config), job, opened, logs, done_steps=run.progress.steps,
                planned_steps=run.most_steps(), metrics_path=metrics_path,
            )  # fmt: skip
        if not is_inline:
            run.evaluate_apart(live.as_given(config), opened)
        run.begin(found)
        building.close()
        finished = run.train() and run.complete_evaluations()
        if noted:
            noted.end(COMPLETE if finished else f"stopped by {run.stopped_by}", run.progress.steps)
        return Summary(
            progress=run.progress, num_replicas=place.num_replicas, rank=job.world.rank,
            world_size=job.world.world_size,
            finished=finished, stopped_by=run.stopped_by, last=run.last,
            totals=run.sum_up(), parts_s=parts.run_s,
        )  # fmt: skip


class Run:
    """A run under way on one rank. All its methods are collective.

    Args:
        config: The settings.
        job: This rank.
        parallel: The model.
        optimizer: Of its parameters on this rank.
        loader: The training data.
        evaluation: The test data; None: there is none.
        opened: Closes what the run opens.
        logs: Of this rank; most are rank 0's.
        stop: Notes signals.
        parts: Times the parts of epochs.
        on_epoch: Called on rank 0 with each epoch's line.
        own: What the caller brings.
        skips: Steps to pass over.
        observer: Looks on.
        speaks: Whether rank 0 says on standard error how far it is.
        live: Keeps what steps change where ranks may be lost.

    Attributes:
        progress: What is done.
        last: The last line of an epoch.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        *,
        parallel: Parallel,
        optimizer: Optimizer,
        loader: ReplicaLoader,
        evaluation: ReplicaEvaluation | None,
        opened: contextlib.ExitStack,
        logs: list[Log],
        stop: StopRequest,
        parts: EpochParts,
        on_epoch: Listener | None,
        own: Own,
        skips: Skips,
        observer: Observer,
        speaks: bool,
        live: Live,
    ) -> None:
        self._live = live
        self.progress = Progress()
        self.last: Line | None = None
        self._logs, self._stop, self._parts, self._totals = logs, stop, parts, Totals()
        self._config = config
        self._job = job
        self._parallel = parallel
        self._pipeline = parallel.pipeline
        self._loader = loader
        self._evaluation = evaluation
        self._optimizer = optimizer
        self._lr, self._lr_shares = config.optimizer.lr, find_lr_shares(self._optimizer)
        self._pace = build_pace(
            config, num_replicas=parallel.pipeline.place.num_replicas, epoch_batches=len(loader)
        )
        self._ema: WeightAverage | None = None
        if config.optimizer.ema:
            self._ema = WeightAverage(self._pipeline.parts, decay=config.optimizer.ema)
        self._on_epoch, self._skips = on_epoch, skips
        self._own, self._observer = own, observer
        run, rank = config.run, job.world.rank
        if rank == 0:
            warn_of_padding(config, self._pipeline, loader)
        directory = Path(run.directory)
        checkpoints = Checkpoints(
            directory / "checkpoints", keep=run.keep_checkpoints, background=run.checkpoint_async,
            of_rank=self._pipeline.of_rank,
        )  # fmt: skip
        self._checkpoints = opened.enter_context(checkpoints)
        if run.live:
            checkpoints.open_group()
            live.leave = checkpoints.leave
        trace = StepTrace(
            run.profile_steps, directory=directory / "profile", rank=rank, device=job.device
        )
        self._trace = opened.enter_context(trace)
        self._evaluations: Evaluations | None = None
        self._line = opened.enter_context(ProgressLine(shown=speaks and rank == 0))

    @property
    def stopped_by(self) -> str:
        """The signal that ended the run early; empty if none did."""
        return self._stop.words

    def restore(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        self.progress = restore(
            path, self._pipeline.parts, self._optimizer, self._loader, average=self._average,
            trusted=self._config.run.trust_checkpoints, of_rank=self._pipeline.of_rank,
        )  # fmt: skip

    def keep(self) -> None:
        """Have what steps change kept, if ranks may be lost; after a loss, take up what was."""
        self.progress = self._live.keep(
            self.progress, self._loader, self._optimizer, self._pipeline.parts, self._ema
        )
        self._skips = self._skips.after(self.progress)

    def evaluate_apart(self, config: Config, opened: contextlib.ExitStack) -> None:
        """Have another process evaluate, by the settings as given, until ``opened`` is closed."""
        from tonari.trainer.run.beside.evaluations import Evaluations

        evaluations = Evaluations(
            config, self._job, self._checkpoints, logs=self._logs, take=self._take_result,
            num_replicas=self._pipeline.place.num_replicas, say=self._line.begin,
            batch_size=self._config.data.batch_size,
            stops=lambda: self._stop.agreed(self._job.world),
        )  # fmt: skip
        self._evaluations = opened.enter_context(evaluations)

    def complete_evaluations(self) -> bool:
        """Wait for what another process has left to evaluate; say whether no signal cut it."""
        return self._evaluations is None or self._evaluations.complete()

    def _take_result(self, line: Line) -> None:
        self._write(line)
        if self.last and self.last["step"] == line["step"]:
            self.last = {**self.last, **line, "kind": "epoch"}

    def begin(self, found: Path | None) -> None:
        """Show the observer the run, which goes on from a checkpoint or starts anew."""
        begun = Begun(
            config=self._config, own=self._own, job=self._job, pipeline=self._pipeline,
            optimizer=self._optimizer, average=self._average, progress=self.progress,
            checkpoint=found,
        )  # fmt: skip
        self._observer.begin(begun)

    def train(self) -> bool:
        """Train the epochs that remain; say whether all are done, rather than stopped."""
        before: Mapping[str, float] = {}
        began = self.progress.steps
        self._skips.check(last=self.most_steps(), run_ends=True)
        words = begin_words(
            self._config, self._loader, place=self._pipeline.place, num_steps=self.progress.steps
        )  # fmt: skip
        self._line.begin(words)
        self._stop.train()
        if self._live.goes_on:
            # What follows a step may not have been done, or by some ranks only.
            at, meter = self._loader.epoch, Meter(before, self._pipeline.place)
            written = written_at(self.progress.steps, self._logs)
            if not self._follow(at, meter, written):
                return self._end_early(meter)
            if self._loader.step == len(self._loader):
                self._end_epoch(at, meter, written)
                before = self._loader.stats()
        epochs = self._loader.epochs(self._config.run.epochs)
        while True:
            # The end of the epoch before is inside next: its time belongs to the epoch it opens.
            meter = Meter(before, self._pipeline.place)
            over = self._pace.is_over(self.progress.steps)
            with self._parts.time("epoch_end_s"):
                epoch = None if over else next(epochs, None)
            if epoch is None:
                return True
            if epoch == self.progress.epochs:
                meter.go_on(self.progress.so_far)
                self._parts.go_on(self.progress.so_far)
            with self._parts.time("train_s"):
                # A step a start at least, or a job whose time is short would never get on; none
                # after SIGTERM, which SIGKILL may follow soon, or Ctrl-C.
                asked = self._stop.agreed(self._job.world)
                stops = asked and (self.progress.steps > began or self.stopped_by in AT_ONCE)
                first = self._loader.step
                whole = not stops and self._train_steps(epoch, meter)
            done = (self._loader.step - first) / max(len(self._loader), 1)
            self._totals.add(done, self._loader.stats())
            if not whole:
                return self._end_early(meter)
            self._end_epoch(epoch, meter)
            before = self._loader.stats()

    def _end_early(self, meter: Meter) -> bool:
        """End amid an epoch; say whether the run is as long as it was to be."""
        over, run = self._pace.is_over(self.progress.steps), self._config.run
        if not over or run.checkpoint_epochs or run.checkpoint_steps:
            self._save(meter)
        else:
            self._check_finite()
        return over

    def sum_up(self) -> dict[str, float]:
        """Sum up what was read and waited for, over all ranks."""
        world, place, loader = self._job.world, self._pipeline.place, self._loader
        return self._totals.sum_up(
            loader.stats(), num_samples=loader.num_samples, place=place, world=world
        )

    def _train_steps(self, epoch: int, meter: Meter) -> bool:
        """Train the rest of an epoch; say whether neither a signal nor the run's length cut it."""
        config = self._config
        lr = self._set_learning_rate(epoch)
        for batches in self._groups(epoch):
            if self._pace.by_step:
                # The loader counts a batch as it delivers it.
                lr = self._set_learning_rate(epoch, done=self._loader.step - len(batches))
            self._trace.step()
            if config.augment.draws:
                mark_draws(batches, step=self.progress.steps)
            self._observer.stepping(batches)
            clip = config.optimizer.clip or (math.inf if self._observer.wants_norm else 0.0)
            self._live.begin_step(self._loader, self._finish_step)
            step = train_step(
                self._pipeline, self._optimizer, self._observer.reports(self._loader), batches,
                clip=clip, step=self.progress.steps, before_norm=self._live.before_norm,
            )  # fmt: skip
            self._count_step(step.norm)
            self._observer.step(batches, step, number=self.progress.steps - 1, lr=lr)
            for batch in batches:
                meter.add(batch)
            self._job.watchdog.progress(self.progress.steps)
            self._line.count(self._loader.step, of=len(self._loader))
            if self.progress.steps % config.run.log_steps == 0:
                norm = None if step.norm is None else float(step.norm)
                self._write_step(epoch, meter, {"lr": lr, "gradient_norm": norm})
            if not self._follow(epoch, meter):
                return False
        return True

    def _count_step(self, norm: Tensor | None) -> None:
        """Count a step that was taken, and do all else of it that is not to be done by halves."""
        self.progress = self.progress.stepped()
        if self._ema is not None:
            self._ema.update(self.progress.steps)
        self._live.count(self.progress, norm)

    def _finish_step(self, norm: Tensor) -> None:
        finish_step(self._pipeline, self._optimizer, self._config.optimizer.clip, norm)
        self._count_step(norm)

    def _follow(self, epoch: int, meter: Meter, written: Container[str] = ()) -> bool:
        """Do what is due after a step; say whether neither a signal nor the run's end cuts it."""
        if self._evaluations is not None:
            self._evaluations.look(steps=self.progress.steps)
        stops = self._stop.after_step(self._job.world)
        run, steps = self._config.run, self.progress.steps
        over = self._pace.is_over(steps)
        evaluates = over or (run.evaluate_steps and steps % run.evaluate_steps == 0)
        saves = run.checkpoint_steps and steps % run.checkpoint_steps == 0
        # An epoch whose steps are done is ended first, so that its line gets written.
        if not (stops or evaluates or saves) or self._loader.step == len(self._loader):
            return True
        if evaluates and "evaluation" not in written:
            self._job.watchdog.rest()
            self._average_buffers()
            if not self._hands_over(epoch):
                self._write({"kind": "evaluation", **self._place(epoch), **self._evaluate()})
        if stops or over:
            return False
        if saves:
            self._save(meter)
        return True

    def _groups(self, epoch: int) -> Iterator[list[Batch]]:
        """Yield the batches of each step of the rest of an epoch, but for those to pass over."""
        size, loader = self._config.optimizer.accumulate, self._loader
        last = self.progress.steps + math.ceil((len(loader) - loader.step) / size)
        ends = epoch + 1 == self._config.run.epochs
        self._skips.check(last=self._pace.cut(last), run_ends=ends or self._pace.is_over(last))
        while True:
            if loader.step < len(loader):
                self._skip(epoch)
            for batches in grouped(iter(loader), size):
                yield batches
                if loader.step < len(loader) and self._skips.from_step(self.progress.steps + 1):
                    break
            else:
                return

    def _skip(self, epoch: int) -> None:
        """Pass over the next steps, if they are to be: they count, and nothing else is done."""
        while number := self._skips.from_step(first := self.progress.steps + 1):
            left = len(self._loader) - self._loader.step
            if not left:
                return
            self._loader.skip(min(number * self._config.optimizer.accumulate, left))
            skipped = [*self.progress.skipped, [first, first + number]]
            self.progress = replace(
                self.progress, steps=self.progress.steps + number, skipped=skipped
            )
            self._write({"kind": "skip", **self._place(epoch), "skipped_steps": number})
            if self._job.world.rank == 0:
                logger.info("[rank 0] steps %d:%d are skipped", first, first + number)

    def most_steps(self) -> int:
        """Bound the steps of the run, those that are done included."""
        done, loader = self.progress, self._loader
        begun = loader.step // self._config.optimizer.accumulate
        left = (self._config.run.epochs - done.epochs) * self._pace.epoch_steps
        return self._pace.cut(done.steps + left - begun * (loader.epoch == done.epochs))

    def _write_step(self, epoch: int, meter: Meter, figures: Figures) -> None:
        loss = self._loader.mean_loss() or 0.0
        recent = meter.recent(loss, self._loader.stats(), self._job.world)
        data, parallel = self._config.data, self._parallel
        speed = rates(
            recent["samples_per_s"] or 0.0, flops_per_row=parallel.flops_per_row,
            peak=parallel.peak_flops_per_s, world_size=self._job.world.world_size,
            row_tokens=data.sequence_length if data.kind == "text" else 0,
        )  # fmt: skip
        line = {"kind": "step", **self._place(epoch), **recent, **speed, **figures}
        self._line.say(progress_words(line))
        self._write(line)

    def _end_epoch(self, epoch: int, meter: Meter, written: Container[str] = ()) -> None:
        self._job.watchdog.rest()
        over = self._pace.is_over(self.progress.steps) or epoch + 1 == self._config.run.epochs
        self._average_buffers()
        with self._parts.time("refresh_s"):
            rescore(self._pipeline, self._loader, self._watched(self._loader.refresh()))
        if "epoch" not in written:
            self._evaluate_epoch(epoch, meter, over=over)
        self.progress = replace(self.progress, epochs=epoch + 1, so_far={})
        every = self._config.run.checkpoint_epochs
        if every and ((epoch + 1) % every == 0 or over):
            self._save()
        else:
            self._check_finite()

    def _evaluate_epoch(self, epoch: int, meter: Meter, *, over: bool) -> None:
        loss = self._loader.mean_loss() or 0.0
        world, place = self._job.world, self._pipeline.place
        line = meter.epoch_line(loss, self._loader.stats(), world)
        evaluated = over or (epoch + 1) % self._config.run.evaluate_epochs == 0
        evaluated = evaluated and not self._hands_over(epoch)
        exchange_s = line.pop("exchange_blocked_s") or 0.0
        self.last = {
            "kind": "epoch", **self._place(epoch), **line,
            **(self._evaluate() if evaluated else NOT_EVALUATED),
            **self._parts.end_epoch(epoch, exchange_s=exchange_s),
            "lr": self._lr,
            "order_hash": combine_order_hashes(self._loader.order_hash(), world, place),
        }  # fmt: skip
        self._write(self.last)
        if self._on_epoch and world.rank == 0:
            self._on_epoch(self.last)

    def _check_finite(self) -> None:
        """End a run whose weights are lost, also where no checkpoint is written. Collective."""
        together(lambda: check_finite(self._pipeline.parts, self.progress))

    def _hands_over(self, epoch: int) -> bool:
        """Have another process judge the weights; say whether one does. Collective."""
        if self._evaluations is None:
            return False
        with self._parts.time("evaluation_s"):
            self._evaluations.hand_over(
                self._pipeline.parts, self.progress, epoch=epoch, average=self._average
            )
        return True

    def _evaluate(self) -> Figures:
        """Judge the weights, and their average if there is one, on the test data."""
        started, ema = time.perf_counter(), self._ema
        accuracy = evaluation_loss = None
        averaged: Figures = {}
        if self._evaluation is not None:
            with self._parts.time("evaluation_s"):
                batches = self._observer.evaluating(self._watched(self._evaluation))
                found = evaluate(self._pipeline, batches)
                self._observer.evaluated(found)
                accuracy, evaluation_loss = found
                if ema is not None:
                    with ema.applied():
                        found = evaluate(self._pipeline, self._watched(self._evaluation))
                    self._observer.average_evaluated(found)
                    averaged = {"ema_accuracy": found.accuracy, "ema_evaluation_loss": found.loss}
        return {
            "accuracy": accuracy, "evaluation_loss": evaluation_loss, **averaged,
            "evaluation_s": time.perf_counter() - started,
        }  # fmt: skip

    def _watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches of which none but the first may take longer than a step."""
        for batch in batches:
            self._job.watchdog.progress(self.progress.steps)
            yield batch
        self._job.watchdog.rest()

    def _set_learning_rate(self, epoch: int, *, done: float = 0) -> float:
        before, steps = self._loader.steps_before, self.progress.steps
        rate = self._pace.rate(
            epoch, steps=steps, done=before + done, epoch_batches=before + len(self._loader)
        )
        self._lr = lr = self._loader.lr_factor * rate
        for group, share in zip(self._optimizer.param_groups, self._lr_shares, strict=True):
            group["lr"] = lr * share
        return lr

    def _save(self, meter: Meter | None = None) -> None:
        """Write a checkpoint; within an epoch with what its meter has counted."""
        self._job.watchdog.rest()
        if not self.progress.steps:
            return
        with self._parts.time("checkpoint_s"):
            self._average_buffers()
            progress = self.progress
            if meter is not None:
                loss = self._loader.mean_loss() or 0.0
                so_far = meter.so_far(loss, self._loader.stats(), self._job.world)
                progress = replace(progress, so_far=so_far | self._parts.so_far())
            self._checkpoints.save(
                self._pipeline.parts, self._optimizer, self._loader, progress, average=self._average
            )
        self._totals.num_saved += 1

    @property
    def _average(self) -> Mapping[str, Tensor] | None:
        return self._ema.state if self._ema is not None else None

    def _average_buffers(self) -> None:
        for part in self._pipeline.parts:
            average_buffers(part, self._pipeline.mesh)
        if self._ema is not None:
            self._ema.average_buffers(self._pipeline.mesh)
        self._observer.buffers_averaged()

    def _place(self, epoch: int) -> dict[str, int]:
        return {"epoch": epoch, "step": self.progress.steps}

    def _write(self, line: Line) -> None:
        for log in self._logs:
            log.write(line)
