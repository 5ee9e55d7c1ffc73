"""The process that evaluates a run: one that has the whole model, and all of the test data."""

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dataio import Reports
from dataio.arguments import Arguments
from dataio.base.atomic import read_record
from dataio.base.claim import NoLocksError, claim, claimant
from dataio.job.launch import join
from dataio.metrics import replace_text
from dataio.rows.samples import Batch
from dataio.training import check_draws_nothing, open_evaluation_alone
from dataio.world import World
from tonari.trainer.checkpoint.directory import EVALUATIONS
from tonari.trainer.checkpoint.restore import restore_weights
from tonari.trainer.config.config import Config
from tonari.trainer.config.saved import SETTINGS, read_settings
from tonari.trainer.errors import CheckpointError, ConfigError
from tonari.trainer.mesh.mesh import num_microbatches
from tonari.trainer.mesh.randomness import deterministic
from tonari.trainer.run.beside.records import (
    BEAT,
    HandedOver,
    evaluated_steps,
    forget_evaluated,
    keep_result,
    line_of,
    read_handed,
    results,
    settings_digest,
    waiting,
)
from tonari.trainer.run.build import build_rank, make_evaluation_fields, make_fields, open_data
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.own import own_of
from tonari.trainer.run.step import EvaluationMeans, evaluate_alone
from tonari.trainer.watch.history import read_history
from tonari.trainer.watch.metrics import MetricsLog
from tonari.trainer.watch.page import PAGE, page_of
from tonari.trainer.watch.record import CLAIM, read_run, state_of

logger = logging.getLogger(__name__)

LOOK_S, FOLLOW_S = 0.5, 2.0
"""Between two looks for weights that have come, beside a run and elsewhere."""
LOCK = "evaluator.lock"
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Meant for the ranks; the evaluator of a run ends with rank 0, whatever reaches it."""


def check_mesh(config: Config) -> None:
    """Refuse meshes whose ranks sum up what one process would sum up otherwise.

    Raises:
        ConfigError: Names the axis.
    """
    for name, size in (
        ("tp", config.mesh.tp),
        ("cp", config.mesh.cp),
        ("tiles", config.mesh.tiles),
    ):
        if size not in (1, ()):
            shown = [*size] if isinstance(size, tuple) else size
            raise ConfigError(
                f"mesh.{name} is {shown}, whose ranks share a sample's sums: one process that "
                "evaluates would give other last digits, and this is not built; leave "
                "run.evaluation out, so that the training ranks evaluate"
            )


class Evaluator:
    """Evaluates weights of one run, as its training ranks would. In a job of one process.

    Args:
        config: The run's settings.
        device: Where it computes.
        world: Of this process.
        beat: Touched at each batch.
        progress: Whether staging says how far it is.

    Attributes:
        settings: What `settings_digest` gives.

    Raises:
        ConfigError: If there is nothing to evaluate on, or the mesh is one of `check_mesh`.
        DataioError: If the data cannot be read.
    """

    def __init__(
        self, config: Config, *, device: torch.device, world: World, beat: Path, progress: bool
    ) -> None:
        check_mesh(config)
        self._beat = beat
        self.settings, self._config = settings_digest(config), config
        self._device, self._world, self._progress = device, world, progress
        self._own = own_of(config)
        self._train, self._test = open_data(config)
        if self._test is None:
            raise ConfigError(
                "there is nothing to evaluate on; give data.test, or for text data.test_fraction"
            )
        self._prepare(config)

    def evaluate(self, weights: Path, handed: HandedOver) -> dict[str, Any]:
        """Evaluate weights: the figures of an evaluation's line.

        Args:
            weights: A checkpoint, or what was handed over.
            handed: How.

        Raises:
            CheckpointError: If the weights are damaged.
            ConfigError: If they are of another model, or of a run with other settings.
        """
        if handed.settings != self.settings:
            raise ConfigError(
                f"{weights}: is of a run with other settings of the model or the data than "
                f"{SETTINGS} beside it had as this evaluator began; start it again, or train with "
                "the settings as they were"
            )
        started = time.perf_counter()
        if handed.threads:
            torch.set_num_threads(handed.threads)
        if handed.batch_size != self._evaluation.batch_size:
            self._evaluation.close()
            data = replace(self._config.data, batch_size=handed.batch_size)
            self._prepare(replace(self._config, data=data))
        average, trusted = self._average, self._config.run.trust_checkpoints
        state = None if average is None else average.state
        restore_weights(weights, self._pipeline.parts, average=state, trusted=trusted)
        found = self._judge(handed)
        figures: dict[str, Any] = {"accuracy": found.accuracy, "evaluation_loss": found.loss}
        if average is not None:
            with average.applied():
                found = self._judge(handed)
            figures |= {"ema_accuracy": found.accuracy, "ema_evaluation_loss": found.loss}
        took_s = time.perf_counter() - started
        return {**figures, "evaluation_s": took_s, "samples": self._evaluation.num_samples}

    def close(self) -> None:
        """Let go of the cache."""
        self._evaluation.close()

    def _judge(self, handed: HandedOver) -> EvaluationMeans:
        batches = (
            self._touching(self._evaluation.batches_of(replica, num_replicas=handed.replicas))
            for replica in range(handed.replicas)
        )
        return evaluate_alone(self._pipeline, batches)

    def _touching(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._beat.touch()
            yield batch

    def _prepare(self, config: Config) -> None:
        """Make the model, and open the test data."""
        own, device = self._own, self._device
        parallel = build_rank(alone(config), rank=0, world_size=1, device=device, own=own)
        self._pipeline, columns = parallel.pipeline, parallel.task.columns
        self._average = None
        if config.optimizer.ema:
            self._average = WeightAverage(self._pipeline.parts, decay=config.optimizer.ema)
        fields = make_evaluation_fields(config, own)
        if fields is None:
            check_draws_nothing(fields := make_fields(config, own))
        names = {*columns.input, *columns.target}
        arguments = Arguments(
            source=self._train, batch_size=config.data.batch_size, seed=config.run.seed,
            device=device, fields={name: its for name, its in fields.items() if name in names},
            transform=own.evaluation_transform, cache=config.data.cache,
            staging=config.data.staging, workers=config.data.workers,
            reports=Reports(progress=self._progress),
        )  # fmt: skip
        assert self._test is not None, "it was looked for"
        self._evaluation = open_evaluation_alone(
            arguments, self._test, self._world, classes=config.data.test_classes
        )


def alone(config: Config) -> Config:
    """Make the settings by which one process has the whole model, and cuts batches as ranks do."""
    mesh = config.mesh
    microbatches = num_microbatches(
        mesh.microbatches, pp=mesh.pp, schedule=mesh.schedule, virtual=mesh.virtual
    )
    return replace(
        config,
        mesh=replace(
            mesh, pp=1, dp_replicate=None, dp_shard=1, schedule="1f1b", microbatches=microbatches,
            checkpointing="none", checkpointing_blocks=0, swap_blocks=0, offload=False,
        ),
    )  # fmt: skip


def evaluate_run(
    run: Path, *, device: str = "cpu", follow: bool = False, attached: bool = False
) -> Iterator[dict[str, Any]]:
    """Evaluate the weights of a run that have no result yet, and keep the results beside them.

    Those are the weights that the run hands over; where its own ranks evaluate, its checkpoints.
    At the end the results join the metrics of a run that has ended. Blocks.

    Args:
        run: Its directory.
        device: Where to compute: ``"cpu"``, ``"cuda"``.
        follow: Wait for further weights until the run ends.
        attached: Of the process that a run starts beside it: ends with its standard input, whatever
            it is about. The run takes the results.

    Yields:
        Each result, as it is kept.

    Raises:
        ConfigError: If the run cannot be evaluated, or another process does.
        DataioError: If data, or weights, cannot be used.
    """
    if attached:
        _end_with_standard_input()
    config = read_settings(run / SETTINGS)
    with (
        _alone_in(run, waits=attached),
        deterministic(config.run.deterministic),
        join(device=device, timeout_s=config.run.timeout_s) as job,
        contextlib.closing(
            Evaluator(
                config,
                device=job.device,
                world=job.world,
                beat=run / EVALUATIONS / BEAT,
                progress=not attached,
            )
        ) as evaluator,
    ):
        forget_evaluated(run)
        while True:
            # Asked before: what a run that ends has handed over is there then.
            goes_on = attached or (follow and _state(run) == "running")
            found = _due(run, config)
            for weights in found[:1]:
                result = _evaluate(run, config, evaluator, weights)
                if result is not None:
                    yield result
            if not (found or goes_on):
                break
            if not found:
                time.sleep(LOOK_S if attached else FOLLOW_S)
    if _state(run) != "running":
        _add_lines(run)


def _due(run: Path, config: Config) -> list[Path]:
    inline = config.run.evaluation == "inline"
    found = waiting(run, checkpoints=inline)
    known = evaluated_steps(run / read_run(run).metrics) if found and inline else ()
    return [path for path in found if int(path.name[5:]) not in known]


def _evaluate(
    run: Path, config: Config, evaluator: Evaluator, weights: Path
) -> dict[str, Any] | None:
    """Evaluate one step, and keep its result; None: a checkpoint has gone meanwhile."""
    record = read_run(run)
    try:
        ranks = record.starts[-1].ranks
        sharing = config.mesh.pp * config.mesh.sharing * config.mesh.tp
        handed = read_handed(weights, config, replicas=ranks // sharing)
        figures = evaluator.evaluate(weights, handed)
    except (CheckpointError, ConfigError, OSError):
        if weights.exists():
            raise
        logger.warning(
            "%s: was removed before it was evaluated, expected it to stay: raise "
            "run.keep_checkpoints, or give run.evaluation=elsewhere", weights,
        )  # fmt: skip
        return None
    for other in itertools.islice(results(run), 1):
        if other["settings"] == handed.settings and other["samples"] != figures["samples"]:
            raise ConfigError(
                f"{run}: step {other['step']} was evaluated on {other['samples']} samples, and "
                f"here data.test has {figures['samples']}; evaluate on the same data"
            )
    keep_result(run, handed, figures, weights=weights)
    return {"epoch": handed.epoch, "step": handed.step, **figures}


@contextlib.contextmanager
def _alone_in(run: Path, *, waits: bool) -> Iterator[None]:
    """Keep every other evaluator of a run out, or wait until it has ended."""
    path = run / EVALUATIONS / LOCK
    with contextlib.ExitStack() as held:
        try:
            while not held.enter_context(claim(path)):
                if not waits:
                    raise ConfigError(
                        f"{run}: {claimant(path) or 'another process'} evaluates this run already; "
                        "wait for it to end"
                    )
                held.close()
                time.sleep(LOOK_S)
        except NoLocksError as error:
            logger.warning(
                "%s: its filesystem has no locks (%s), so that a second process that evaluates "
                "this run would not be noticed", run, error.strerror,
            )  # fmt: skip
        yield


def _state(run: Path) -> str:
    return state_of(run, read_run(run).starts)


def _add_lines(run: Path) -> None:
    """Append the results that the metrics of a run that has ended lack; write its page anew."""
    record = read_run(run)
    metrics, settings = run / record.metrics, read_record(run / SETTINGS)
    known = evaluated_steps(metrics)
    new = [line_of(result) for result in results(run, known=known)][::-1]
    with claim(run / CLAIM) as taken:
        if not (taken and new):
            return
        with MetricsLog(metrics, after_step=sys.maxsize) as log:
            for line in new:
                log.write(line)
        history, state = read_history(metrics), record.starts[-1].how or "stopped"
        replace_text(run / PAGE, page_of(run, record, settings, history, state=state))


def _end_with_standard_input() -> None:
    """End this process when whoever started it closes its standard input, or is gone."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="standard input", daemon=True).start()
