"""Predict what each way to feed training will cost, from measured figures alone. Pure.

The model: an epoch takes what its steps take with samples in memory, or what its slowest means of
transport takes, whichever is more. Only a DataLoader without workers takes both, one after another.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dataio.source.row_block import BLOCK_BYTES
from dataio.store.staging import SEAL_BYTES

WayName = Literal["null", "dataloader", "staged", "exchange", "hiding"]
HORIZON = 64
"""Epochs that are predicted one by one; the last of them stands for all later ones."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and on what.

    Attributes:
        num_samples: Of the dataset.
        sample_bytes: Stored in the shared directory, on average.
        batch_size: Of a rank.
        ranks_of_node: How many ranks each node has.
        workers: Processes of each rank's DataLoader.
        exchange_fraction: Of a rank's rows, an epoch.
        hidden_fraction: Of the rows, an epoch.
        staging_readers: Of each rank.
        staging_limit_bytes_per_s: That a node may read while it stages; 0: no limit.
        fits_in_memory: Whether every node can keep the whole dataset in its memory.
    """

    num_samples: int
    sample_bytes: float
    batch_size: int
    ranks_of_node: tuple[int, ...]
    workers: int = 0
    exchange_fraction: float = 0.0
    hidden_fraction: float = 0.0
    staging_readers: int = 2
    staging_limit_bytes_per_s: float = 0.0
    fits_in_memory: bool = False

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_node)

    @property
    def num_bytes(self) -> float:
        """Of the dataset."""
        return self.num_samples * self.sample_bytes

    @property
    def share_rows(self) -> int:
        """Samples of the rank that has most."""
        return math.ceil(self.num_samples / self.num_ranks)

    @property
    def pool_bytes(self) -> float:
        """Of the node that holds most."""
        return self.num_bytes * max(self.ranks_of_node) / self.num_ranks

    def steps(self, hidden_fraction: float = 0.0) -> int:
        """Count an epoch's steps, the same on every rank."""
        visible = self.num_samples - math.floor(hidden_fraction * self.num_samples)
        return math.ceil(math.ceil(visible / self.num_ranks) / self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured; None where it was not.

    Attributes:
        step_s: A step with samples from memory: compute, barrier and what decoding adds.
        dataloader_sample_s: The DataLoader's own work on a sample, its bytes in memory.
        start_s: Of a loader that stages, beyond reading: seen with null storage.
        random_bytes_per_s: All readers that the DataLoaders have, together, from the shared
            directory, one sample a read, cold.
        random_warm_bytes_per_s: The same with the files in the client's memory.
        staging_bytes_per_s: All readers that staging has, together, shards front to back, cold.
        local_read_bytes_per_s: One node from its own directory, a sample a read, cold.
        local_write_bytes_per_s: One node to its own directory.
        link_bytes_per_s: The slowest between two nodes, each way.
    """

    step_s: float
    dataloader_sample_s: float
    start_s: float = 0.0
    random_bytes_per_s: float | None
    random_warm_bytes_per_s: float | None = None
    staging_bytes_per_s: float | None = None
    local_read_bytes_per_s: float | None = None
    local_write_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One way's cost.

    Attributes:
        staging_s: Before the first step; None: a figure that it needs was not measured.
        epoch_s: By epoch, HORIZON of them; empty as None.
        paid_after: Epochs after which less time has passed than with the DataLoader; None: never,
            or not known.
    """

    staging_s: float | None
    epoch_s: Sequence[float]
    paid_after: int | None = None


def predict(workload: Workload, rates: Rates) -> dict[WayName, Predicted]:
    """Predict staging, epochs and the epoch at which staging has paid, for every way.

    A figure that was not measured of the node's own disk or of the links is taken to be no limit;
    without one of the shared directory the ways that read it get no prediction.
    """
    memory = Predicted(staging_s=0.0, epoch_s=[workload.steps() * rates.step_s] * HORIZON)
    shared = Predicted(staging_s=0.0, epoch_s=_dataloader_epochs(workload, rates))
    staging_s = _staging_s(workload, rates)
    ways: dict[WayName, Predicted] = {"null": memory, "dataloader": shared}
    for name, epoch_s in _staged_epochs(workload, rates).items():
        epochs = [epoch_s] * HORIZON
        paid = None
        if staging_s is not None and shared.epoch_s:
            paid = paid_after(
                staging_s, epochs, shared.epoch_s, later=epoch_s, other_later=shared.epoch_s[-1]
            )
        ways[name] = Predicted(staging_s=staging_s, epoch_s=epochs, paid_after=paid)
    return ways


def paid_after(
    staging_s: float,
    epoch_s: Sequence[float],
    other_s: Sequence[float],
    *,
    later: float,
    other_later: float,
) -> int | None:
    """Count the epochs after which staging has paid: the first when less time has passed in all.

    Args:
        staging_s: Before the first epoch.
        epoch_s: With staging, by epoch.
        other_s: Without.
        later: With staging, every epoch beyond ``epoch_s``.
        other_later: Without.

    Returns:
        None if that never comes.
    """
    behind_s, known = staging_s, max(len(epoch_s), len(other_s))
    for epoch in range(known):
        own = epoch_s[epoch] if epoch < len(epoch_s) else later
        behind_s += own - (other_s[epoch] if epoch < len(other_s) else other_later)
        if behind_s < 0:
            return epoch + 1
    gain_s = other_later - later
    return known + math.floor(behind_s / gain_s) + 1 if gain_s > 0 else None


def cached_fraction(epoch: int, num_nodes: int) -> float:
    """Estimate how much of an epoch's samples a node has read in the epochs before.

    Each epoch brings it a new random share of all samples.

    Args:
        epoch: From 0.
        num_nodes: Equal ones.
    """
    return 1.0 - (1.0 - 1.0 / num_nodes) ** epoch


def _dataloader_epochs(workload: Workload, rates: Rates) -> list[float]:
    cold = rates.random_bytes_per_s
    if not cold:
        return []
    warm = rates.random_warm_bytes_per_s if workload.fits_in_memory else None
    epochs = []
    for epoch in range(HORIZON):
        cached = cached_fraction(epoch, len(workload.ranks_of_node)) if warm else 0.0
        byte_s = (1.0 - cached) / cold + (cached / warm if warm else 0.0)
        epochs.append(_dataloader_epoch(workload, rates, byte_s * workload.sample_bytes))
    return epochs


def _dataloader_epoch(workload: Workload, rates: Rates, sample_s: float) -> float:
    """Predict an epoch in which all readers together take so long a sample."""
    own_s = rates.dataloader_sample_s
    read_s = workload.num_ranks * sample_s  # a sample of this rank, when all ranks read
    compute_s = workload.steps() * rates.step_s
    if not workload.workers:
        return compute_s + workload.share_rows * (read_s + own_s)
    # Before the first batch is there nothing is trained, before the last is, nothing ends.
    first_s = workload.batch_size * (read_s * workload.workers + own_s)
    load_s = workload.share_rows * (read_s + own_s / workload.workers)
    return max(first_s + compute_s, load_s + rates.step_s)


def _staging_s(workload: Workload, rates: Rates) -> float | None:
    if not rates.staging_bytes_per_s:
        return None
    read_s = workload.num_bytes / rates.staging_bytes_per_s
    if workload.staging_limit_bytes_per_s:
        waits_s = workload.pool_bytes / workload.staging_limit_bytes_per_s
        # A reader that is held back waits when it has read a block: the first blocks come before,
        # and where it is alone nobody reads while it waits.
        readers = max(workload.ranks_of_node) * workload.staging_readers
        first = 1.0 if readers == 1 else min(readers * BLOCK_BYTES / workload.pool_bytes, 1.0)
        read_s = max(waits_s + first * read_s, read_s)
    if not rates.local_write_bytes_per_s:
        return rates.start_s + read_s
    # Rows are written while others are read, but the last of them are sealed after that.
    write_s = workload.pool_bytes / rates.local_write_bytes_per_s
    last_bytes = min(workload.pool_bytes, SEAL_BYTES * max(workload.ranks_of_node))
    last_s = last_bytes / rates.local_write_bytes_per_s
    return rates.start_s + max(read_s, write_s - last_s) + last_s


def _staged_epochs(workload: Workload, rates: Rates) -> Mapping[WayName, float]:
    visible = 1.0 - workload.hidden_fraction
    read_s = 0.0  # what lies in memory costs no more than null storage, which is memory
    if not workload.fits_in_memory and rates.local_read_bytes_per_s:
        read_s = workload.pool_bytes / rates.local_read_bytes_per_s
    staged_s = max(workload.steps() * rates.step_s, read_s)
    sent_bytes = workload.pool_bytes * workload.exchange_fraction
    moves = len(workload.ranks_of_node) > 1
    links_s = sent_bytes / rates.link_bytes_per_s if moves and rates.link_bytes_per_s else 0.0
    hiding_s = workload.steps(workload.hidden_fraction) * rates.step_s
    return {
        "staged": staged_s,
        "exchange": max(staged_s, links_s),
        "hiding": max(hiding_s, visible * read_s, links_s),  # beside the exchange
    }
