"""What is asked of the ranks of an exchange benchmark, and what they answer, as lines of JSON."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

Step = Literal["sleep", "product"]


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """What is measured of each set, as flags of the command."""

    exchanges: tuple[float, ...] = (0.0, 0.05, 0.1, 0.3, 0.5, 1.0)
    """Fractions Q of a rank's rows that are exchanged each epoch."""
    get: float = 0.1
    """Fraction fetched by one message a sample; 0 skips that way."""
    shared_rate: float = 200.0
    """MB/s of the shared directory, all ranks together; 0 skips the way that reads it."""
    steps: tuple[Step, ...] = ("sleep", "product")
    """How a step is emulated."""
    step_s: Annotated[float, tyro.conf.arg(name="step")] = 0.02
    """Seconds that a step lasts."""
    repeats: int = 5
    """Epochs measured of each, beside a first that warms up."""
    timeout_s: Annotated[float, tyro.conf.arg(name="timeout")] = 300.0
    """Seconds without a sign of life after which a job is ended."""


@dataclass(frozen=True, kw_only=True)
class ExchangeTask:
    """One job: every way of getting samples, on the same ranks, an epoch each.

    Attributes:
        settings: What is measured.
        rows_per_rank: Samples that each rank trains in an epoch.
        row_bytes: Size of each sample.
        batch_size: Rows a step.
        cache: Directory of this node, the same path on each.
        shared: Directory that all ranks see.
        seed: Of contents and order.
    """

    settings: ExchangeSettings
    rows_per_rank: int
    row_bytes: int
    batch_size: int
    cache: str
    shared: str
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch with one way, over all ranks.

    Attributes:
        way: ``local``, ``exchange``, ``get`` or ``reread``.
        fraction: Q of the ways that have one, else 0.
        step: How a step was emulated.
        repeat: Epochs of the same repeat ran one after the other.
        epoch_s: From the first batch until the next epoch can begin, of the slowest rank.
        epoch_end_s: Part of it after the last batch: what arrived is flushed and committed.
        cpu_s: Processor time of all ranks.
        sent_bytes: Of all ranks.
        messages: Most of any rank.
        blocked_s: Longest that a rank waited for its partners at the epoch end.
        overlap_fraction: Part of the arrivals that was written before the epoch end.
        exact: Whether the ranks together delivered every sample once.
    """

    way: str
    fraction: float
    step: Step
    repeat: int
    epoch_s: float
    epoch_end_s: float
    cpu_s: float
    sent_bytes: int
    messages: int
    blocked_s: float
    overlap_fraction: float
    exact: bool
