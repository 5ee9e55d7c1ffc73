"""The loop: epochs of steps, new scores, evaluation, metrics and checkpoints."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

import dataio
from trainer import checkpoint
from trainer.build import build_evaluation, build_loader, build_model, build_optimizer
from trainer.checkpoint import Checkpoints, Progress
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.launch import Job, join
from trainer.meter import Meter, combine_order_hashes
from trainer.metrics import Line, MetricsLog, ProgressLine
from trainer.parallelize import average_buffers
from trainer.schedule import learning_rate
from trainer.step import evaluate, rescore, train_step
from trainer.stop import StopRequest

Listener = Callable[[Line], None]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended, the same on every rank.

    Attributes:
        progress: Epochs and steps that are done, all starts of the run together.
        num_replicas: Replicas that trained.
        rank: Of this process.
        finished: False if SIGTERM ended it early; the same command goes on.
        last: The line of the last epoch that this start ended; None if it ended none.
    """

    progress: Progress
    num_replicas: int
    rank: int
    finished: bool
    last: Line | None


def train(
    config: Config,
    *,
    resume: str = "auto",
    metrics_path: Path | None = None,
    on_epoch: Listener | None = None,
) -> Summary:
    """Train by the settings, in one process or in each of a job's. Collective.

    Args:
        config: The same on every rank.
        resume: ``"auto"`` goes on from the run directory's newest checkpoint, if there is one;
            ``"never"`` starts anew; else the checkpoint's directory.
        metrics_path: Instead of ``metrics.jsonl`` in the run directory.
        on_epoch: Called on rank 0 with each epoch's line.

    Raises:
        ConfigError: If the settings do not fit this world, or there is nothing to resume.
        DataioError: If the data or the cache cannot be used.
    """
    directory = Path(config.run.directory)
    with (
        join(device=config.run.device, timeout_s=config.run.timeout_s) as job,
        contextlib.ExitStack() as opened,
    ):
        # Before anything is staged: what does not fit should be said at once.
        model = build_model(config, job)
        found = checkpoint.find(directory / "checkpoints", resume)
        loader = opened.enter_context(build_loader(config, job))
        run = Run(config, job, loader=loader, model=model, opened=opened, on_epoch=on_epoch)
        if found:
            run.restore(found)
        if job.world.rank == 0:
            _make(directory)
            (directory / "config.json").write_text(json.dumps(asdict(config), indent=1))
            kept = run.progress.steps if found else None
            path = metrics_path or directory / "metrics.jsonl"
            run.log = opened.enter_context(MetricsLog(path, after_step=kept))
        finished = run.train()
        return Summary(
            progress=run.progress, num_replicas=job.world.num_replicas, rank=job.world.rank,
            finished=finished, last=run.last,
        )  # fmt: skip


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.directory is {directory}, which cannot be made ({error}); give a directory that "
            "can be written, on a filesystem that every rank sees"
        ) from error


class Run:
    """A run under way on one rank. All its methods are collective.

    Args:
        config: The settings.
        job: This rank.
        loader: The training data.
        model: Parallelized.
        opened: Closes what the run opens.
        on_epoch: Called on rank 0 with each epoch's line.

    Attributes:
        progress: What is done.
        last: The last line of an epoch.
        log: Rank 0's; None on the others.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        *,
        loader: dataio.Loader,
        model: nn.Module,
        opened: contextlib.ExitStack,
        on_epoch: Listener | None,
    ) -> None:
        self.progress = Progress()
        self.last: Line | None = None
        self.log: MetricsLog | None = None
        self._config = config
        self._job = job
        self._loader = loader
        self._model = model
        self._optimizer = build_optimizer(config.optimizer, model)
        self._evaluation = build_evaluation(config, loader)
        if self._evaluation:
            opened.callback(self._evaluation.close)
        self._stop = opened.enter_context(StopRequest())
        self._line = opened.enter_context(ProgressLine(shown=job.world.rank == 0))
        self._on_epoch = on_epoch
        self._checkpoints = opened.enter_context(
            Checkpoints(
                Path(config.run.directory) / "checkpoints", keep=config.run.keep_checkpoints
            )
        )

    def restore(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        self.progress = checkpoint.restore(path, [self._model], self._optimizer, self._loader)

    def train(self) -> bool:
        """Train the epochs that remain; say whether all are done, rather than stopped."""
        before: Mapping[str, float] = {}
        epochs = self._loader.epochs(self._config.run.epochs)
        while True:
            # The turn between epochs is inside next: its time belongs to the epoch it opens.
            meter = Meter(before, self._job.device)
            epoch = next(epochs, None)
            if epoch is None:
                return True
            if not self._train_steps(epoch, meter):
                self._save()
                return False
            self._end_epoch(epoch, meter)
            before = self._loader.stats()

    def _train_steps(self, epoch: int, meter: Meter) -> bool:
        """Train the rest of an epoch; say whether it was not stopped."""
        lr = self._set_learning_rate(epoch)
        if self._stop.agreed(self._job.world):
            return False
        for batch in self._loader:
            loss = train_step(self._model, self._optimizer, self._loader, batch)
            meter.add(loss, batch)
            self.progress = replace(self.progress, steps=self.progress.steps + 1)
            self._line.show(f"epoch {epoch}", step=self._loader.step, steps=len(self._loader))
            if self.progress.steps % self._config.run.log_steps == 0:
                recent = meter.recent_loss(self._job.world)
                self._write({"kind": "step", **self._place(epoch), "loss": recent, "lr": lr})
                # An epoch whose steps are done is ended first, so that its line gets written.
                if self._loader.step < len(self._loader) and self._stop.agreed(self._job.world):
                    return False
        return True

    def _end_epoch(self, epoch: int, meter: Meter) -> None:
        average_buffers(self._model)
        rescore(self._model, self._loader)
        world = self._job.world
        line = meter.epoch_line(self._loader.stats(), world)
        started = time.perf_counter()
        accuracy = None
        if self._evaluation is not None:
            accuracy = evaluate(self._model, self._evaluation, self._job.device)
        self.last = {
            "kind": "epoch", **self._place(epoch), **line, "accuracy": accuracy,
            "evaluation_s": time.perf_counter() - started,
            "lr": self._optimizer.param_groups[0]["lr"],
            "order_hash": combine_order_hashes(self._loader.order_hash(), world),
        }  # fmt: skip
        self._write(self.last)
        if self._on_epoch and world.rank == 0:
            self._on_epoch(self.last)
        self.progress = replace(self.progress, epochs=epoch + 1)
        every = self._config.run.checkpoint_epochs
        if every and ((epoch + 1) % every == 0 or epoch + 1 == self._config.run.epochs):
            self._save()

    def _set_learning_rate(self, epoch: int) -> float:
        settings = self._config.optimizer
        lr = self._loader.lr_factor * learning_rate(
            epoch, num_epochs=self._config.run.epochs, lr=settings.lr, schedule=settings.schedule,
            warmup_epochs=settings.warmup_epochs, milestones=settings.milestones,
            decay=settings.decay,
        )  # fmt: skip
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _save(self) -> None:
        if not self.progress.steps:
            return
        average_buffers(self._model)
        self._checkpoints.save([self._model], self._optimizer, self._loader, self.progress)

    def _place(self, epoch: int) -> dict[str, int]:
        return {"epoch": epoch, "step": self.progress.steps}

    def _write(self, line: Line) -> None:
        if self.log is not None:
            self.log.write(line)
