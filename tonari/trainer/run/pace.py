"""How long a run is, the learning rate at each moment of it, and what is due after a step."""

import math
from collections.abc import Callable
from dataclasses import replace

from tonari.trainer.config.config import Config
from tonari.trainer.config.optimizer import OptimizerConfig
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import num_microbatches
from tonari.trainer.run.schedule import learning_rate


def build_schedule(
    config: OptimizerConfig, *, length: float, warmup: float | None = None, tick: float = 1
) -> Callable[[float], float]:
    """Make moment -> learning rate of a run, before the importance policy's factor.

    Args:
        config: The settings.
        length: Of the run, in epochs or in steps, as all times here.
        warmup: Of the warm-up; defaults to ``config.warmup_epochs``.
        tick: Between two changes of the rate.
    """
    return lambda moment: learning_rate(
        moment, length=length, lr=config.lr, schedule=config.schedule, min_lr=config.min_lr,
        warmup=config.warmup_epochs if warmup is None else warmup, tick=tick,
        milestones=config.milestones, decay=config.decay, decay_fraction=config.decay_fraction,
    )  # fmt: skip


class Pace:
    """The length of a run and its learning rate.

    Args:
        optimizer: The settings.
        epochs: Most epochs of the run.
        max_steps: Most steps of the run, from `find_max_steps`; None: there is no such limit.
        epoch_steps: Steps of the run's first epoch.

    Attributes:
        epoch_steps: As given.

    Raises:
        ConfigError: If the epochs are too few for the steps.
    """

    def __init__(
        self, optimizer: OptimizerConfig, *, epochs: int, max_steps: int | None, epoch_steps: int
    ) -> None:
        if max_steps is not None and epochs * epoch_steps < max_steps:
            raise ConfigError(
                f"run.max_steps, or run.max_tokens, makes a run of {max_steps} steps, but "
                f"run.epochs = {epochs} of {epoch_steps} steps are {epochs * epoch_steps}; give "
                f"run.epochs={math.ceil(max_steps / epoch_steps)} or more"
            )
        self._optimizer, self._epochs, self._max_steps = optimizer, epochs, max_steps
        self.epoch_steps = epoch_steps

    @property
    def by_step(self) -> bool:
        """Whether the rate changes at every step."""
        return self._max_steps is not None or self._optimizer.schedule_by == "step"

    def is_over(self, steps: int) -> bool:
        """Whether the run has its last step behind it."""
        return self._max_steps is not None and steps >= self._max_steps

    def cut(self, steps: int) -> int:
        """Return as many steps as the run makes of some."""
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def rate(self, epoch: int, *, steps: int, done: float = 0, epoch_batches: float = 1) -> float:
        """Compute the learning rate of the next step, before the policy's factor.

        Args:
            epoch: The running epoch.
            steps: Of the run that are done.
            done: Batches of the epoch that are done.
            epoch_batches: Batches of this epoch.
        """
        config = self._optimizer
        if self._max_steps is not None:
            schedule = build_schedule(config, length=self._max_steps, warmup=config.warmup_steps)
            return schedule(steps)
        if not self.by_step:
            return build_schedule(config, length=self._epochs)(epoch)
        warmup = config.warmup_epochs
        if config.warmup_steps:
            warmup = config.warmup_steps / self.epoch_steps
        tick = config.accumulate / epoch_batches
        schedule = build_schedule(config, length=self._epochs, warmup=warmup, tick=tick)
        return schedule(epoch + done / epoch_batches)


def in_steps(config: Config, *, num_replicas: int) -> Config:
    """Turn the settings that count tokens into steps, but for ``run.max_tokens``.

    Args:
        config: The settings.
        num_replicas: Replicas that train.

    Returns:
        The settings, with as many steps as reach the tokens.
    """
    step_tokens = tokens_per_step(config, num_replicas=num_replicas)
    run, optimizer = config.run, config.optimizer

    def steps(tokens: int) -> int:
        return math.ceil(tokens / step_tokens)

    return replace(
        config,
        run=replace(
            run,
            evaluate_steps=run.evaluate_steps or steps(run.evaluate_tokens), evaluate_tokens=0,
            checkpoint_steps=run.checkpoint_steps or steps(run.checkpoint_tokens),
            checkpoint_tokens=0,
        ),
        optimizer=replace(
            optimizer,
            warmup_steps=optimizer.warmup_steps or steps(optimizer.warmup_tokens), warmup_tokens=0,
        ),
    )  # fmt: skip


def tokens_per_step(config: Config, *, num_replicas: int) -> int:
    """Count the tokens of a step over all replicas, padding included."""
    data, accumulate = config.data, config.optimizer.accumulate
    return data.batch_size * num_replicas * accumulate * data.sequence_length


def find_max_steps(max_steps: int, max_tokens: int, *, step_tokens: int) -> int | None:
    """Find how many steps a run has at most.

    Args:
        max_steps: As set; 0: there is no such limit.
        max_tokens: As set; 0: there is no such limit.
        step_tokens: Tokens of a step over all replicas.

    Returns:
        Steps: enough for the tokens; None: there is no limit but the epochs.
    """
    return max_steps or math.ceil(max_tokens / step_tokens) or None


def same_rows(config: Config, *, before: int, now: int) -> Config:
    """Choose batches and `optimizer.accumulate` so that a step keeps its rows on other replicas.

    Args:
        config: The settings.
        before: Replicas over dp_replicate that they are for.
        now: Those that are there.

    Returns:
        The settings for these. No batch gets larger. Where rows do not divide, a step has fewer;
        but a replica has one at least.
    """
    if now == before:
        return config
    data, optimizer, mesh = config.data, config.optimizer, config.mesh
    parts = num_microbatches(
        mesh.microbatches, pp=mesh.pp, schedule=mesh.schedule, virtual=mesh.virtual
    )
    # In rows of a microbatch: what a replica has of a step, and of a batch at most.
    share, most = (
        max(rows // parts, 1)
        for rows in (data.batch_size * optimizer.accumulate * before // now, data.batch_size)
    )
    accumulate = -(-share // most)
    return replace(
        config,
        data=replace(data, batch_size=share // accumulate * parts),
        optimizer=replace(optimizer, accumulate=accumulate),
        mesh=replace(mesh, dp_replicate=None, microbatches=parts),
    )
