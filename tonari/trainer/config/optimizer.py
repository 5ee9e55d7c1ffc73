"""What a TOML file says of the optimizer, its learning rate, and what a step is."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from dataio.base.checked import Count, NotNegative, Positive, Range, Share, Whole
from tonari.trainer.config.settings import Section
from tonari.trainer.errors import ConfigError

ScheduleKind = Literal["cosine", "linear", "steps", "wsd"]
Compressed = Literal["none", "bfloat16", "powersgd"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its learning rate: a warm-up, then a schedule that ends at ``min_lr``.

    Where ``run.max_steps`` or ``run.max_tokens`` is the length of the run, the schedule goes by
    steps of the run, and ``milestones`` are steps.

    Attributes:
        kind: ``"sgd"``, ``"adamw"`` or the name of a class, such as ``"torch.optim.NAdam"`` or
            ``"package.module:Name"``.
        args: A table: the keyword arguments of such a class.
        lr: The learning rate after the warm-up.
        momentum: Of SGD.
        betas: Of AdamW.
        weight_decay: Pulls the weights towards 0.
        decay_norms: Whether ``weight_decay`` applies to parameters of at most one dimension too,
            which are norms and biases; left out: false for AdamW and true for the others.
        clip: Most that the norm of a gradient may be, over the whole mesh; 0: no limit.
        accumulate: Batches whose rows make one step: its gradient is their mean.
        schedule: A cosine, a line, ``steps`` down at ``milestones``, or ``wsd``: constant, and a
            line down over the last ``decay_fraction`` of the run.
        schedule_by: ``"step"`` changes the rate at every step, by the part of the epoch's steps
            that is done: hidden rows make an epoch shorter, not the schedule.
        min_lr: The learning rate at the end.
        warmup_epochs: Epochs in which the learning rate rises to ``lr``.
        warmup_steps: The same, counted in steps.
        warmup_tokens: The same of text, counted in tokens.
        milestones: Epochs at which the schedule ``steps`` lowers the rate.
        decay: What the rate is multiplied by at each of them.
        decay_fraction: Part of the run in which ``wsd`` lowers the rate.
        ema: Share of the averaged weights that a step keeps; 0 averages none.
        compress_gradients: How replicas send each other their gradients: as they are, in bfloat16,
            or matrices as products of narrow ones (PowerSGD). See docs/results/compression.md.
        compress_rank: Columns of these narrow ones.
        compress_warmup_steps: First steps of the run in which PowerSGD compresses nothing.
    """

    kind: str = "sgd"
    args: dict[str, object] = field(default_factory=dict)
    lr: Positive = 0.1
    momentum: Share = 0.9
    betas: tuple[Share, ...] = (0.9, 0.95)
    weight_decay: NotNegative = 5e-4
    decay_norms: bool | None = None
    clip: NotNegative = 0.0
    accumulate: Count = 1
    schedule: ScheduleKind = "cosine"
    schedule_by: Literal["epoch", "step"] = "epoch"
    min_lr: NotNegative = 0.0
    warmup_epochs: NotNegative = 0
    warmup_steps: Whole = 0
    warmup_tokens: Whole = 0
    milestones: tuple[Count, ...] = ()
    decay: Annotated[float, Range(0, 1, "(]")] = 0.1
    decay_fraction: Annotated[float, Range(0, 1, "(]")] = 0.1
    ema: Share = 0.0
    compress_gradients: Compressed = "none"
    compress_rank: Count = 4
    compress_warmup_steps: Whole = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise ConfigError(
                f"optimizer.betas is {self.betas!r}, expected two numbers in [0, 1); give for "
                "example [0.9, 0.95]"
            )
        if self.kind not in ("sgd", "adamw") and not {".", ":"} & set(self.kind):
            raise ConfigError(
                f'optimizer.kind is "{self.kind}", expected sgd, adamw, or the name of a class '
                'with its module; give for example "torch.optim.NAdam"'
            )
        if self.args and self.kind in ("sgd", "adamw"):
            raise ConfigError(
                f'optimizer.args is given, but optimizer.kind "{self.kind}" has settings of its '
                "own; leave it out, or name a class such as torch.optim.SGD"
            )
        for name in ("params", "lr", "weight_decay"):
            if name in self.args:
                raise ConfigError(
                    f"optimizer.args.{name} is given, but the trainer sets it; leave it out"
                    + ("" if name == "params" else f", and give optimizer.{name}")
                )
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optimizer.min_lr is {self.min_lr}, expected at most optimizer.lr = {self.lr}; "
                "give a smaller one"
            )
        names = ("warmup_steps", "warmup_epochs", "warmup_tokens")
        given = [
            f"optimizer.{name} is {getattr(self, name)}" for name in names if getattr(self, name)
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}, expected one of them; leave the other out")

    @property
    def decays_norms(self) -> bool:
        """Whether the weight decay applies to norms and biases."""
        return self.kind != "adamw" if self.decay_norms is None else self.decay_norms

    @property
    def warms_up_by_step(self) -> bool:
        """Whether the warm-up can end within an epoch."""
        return self.warmup_steps + self.warmup_tokens > 0 or self.warmup_epochs != int(
            self.warmup_epochs
        )
