"""What is asked of the ranks of an exchange benchmark, and what they answer, as lines of JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from typing_extensions import Self

Step = Literal["sleep", "product"]


@dataclass(frozen=True, kw_only=True)
class ExchangeTask:
    """One job: every way of getting samples, on the same ranks, an epoch each.

    Attributes:
        rows_per_rank: Samples that each rank trains in an epoch.
        row_bytes: Size of each sample.
        batch_size: Rows a step.
        exchanges: Fractions Q of the exchange.
        get: Fraction that is fetched with one message a sample; if 0, this way is skipped.
        shared_bytes_per_s: Bandwidth of the shared directory for all ranks together; if 0, the way
            that reads it is skipped.
        steps: How a training step is emulated.
        step_s: How long one lasts.
        repeats: Epochs measured of each, after a first one that warms up.
        cache: Directory of this node, the same path on each.
        shared: Directory that all ranks see.
        timeout_s: Longest wait for another rank.
        seed: Of contents and order.
    """

    rows_per_rank: int
    row_bytes: int
    batch_size: int
    exchanges: tuple[float, ...]
    get: float
    shared_bytes_per_s: float
    steps: tuple[Step, ...]
    step_s: float
    repeats: int
    cache: str
    shared: str
    timeout_s: float = 60.0
    seed: int = 0

    def to_json(self) -> str:
        """Write it as JSON, for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        lists = {name: tuple(v) for name, v in fields.items() if isinstance(v, list)}
        return cls(**{**fields, **lists})


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
