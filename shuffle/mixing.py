"""How well an exchange mixes, epoch by epoch, from its plan alone: no row is moved.

Rows are followed by the functions that training follows them with, and batches are those that it
would train. What is looked at are some nodes; whole pools, where these are not too large.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute
from dataio.base.seeding import Key, key
from dataio.plan.epoch import Counts, find_sampling_groups, plan_epoch
from dataio.plan.layout import Layout
from dataio.plan.policies import Selection
from shuffle.plan import homes_before, num_leaving, trace_homes

MAX_BATCHES = 64
"""Batches of a replica and epoch that are compared with one another."""


@dataclass(frozen=True)
class Labels:
    """What class every sample is of.

    Attributes:
        sizes: int64[num_classes]: Samples of every class.
        of: From samples to their labels, int64[n] to int64[n].
    """

    sizes: NDArray[np.int64]
    of: Callable[[NDArray[np.int64]], NDArray[np.int64]]

    @cached_property
    def fractions(self) -> NDArray[np.float64]:
        """float64[num_classes]: Shares of the classes in the dataset."""
        return np.asarray(self.sizes / self.sizes.sum(), np.float64)


def sorted_labels(num_samples: int, num_classes: int) -> Labels:
    """Give classes of the same size to samples that lie sorted by class: the hardest start."""
    bounds = -(-np.arange(num_classes + 1) * num_samples // num_classes)
    return Labels(np.diff(bounds), lambda samples: samples * num_classes // num_samples)


def random_labels(num_samples: int, num_classes: int, stream: Key) -> Labels:
    """Give classes of the same size to samples that lie in random order."""
    inner = sorted_labels(num_samples, num_classes)
    return Labels(inner.sizes, lambda samples: inner.of(permute(samples, num_samples, stream)))


def given_labels(labels: NDArray[np.integer]) -> Labels:
    """Take the label of every sample from an array, whose labels are >= 0."""
    return Labels(np.bincount(labels), lambda samples: labels[samples].astype(np.int64))


@dataclass(frozen=True)
class SampledNodes:
    """Which nodes' rows are looked at.

    Attributes:
        nodes: int64[n]: Nodes, drawn without replacement.
        homes: Homes of each node that are followed: its whole pool, or as many as were asked for.
    """

    nodes: NDArray[np.int64]
    homes: list[NDArray[np.int64]]


def choose_look(layout: Layout, *, num_nodes: int, num_rows: int, seed: int) -> SampledNodes:
    """Draw nodes, and of pools larger than an equal part of the rows a sample of the slots.

    Args:
        layout: Replicas and samples.
        num_nodes: Nodes to look at, at most; all, where there are fewer.
        num_rows: Rows to follow, at most.
        seed: The run's seed.
    """
    count = min(num_nodes, layout.num_nodes)
    stream = key(seed, "nodes looked at")
    nodes = np.sort(permute(np.arange(count), layout.num_nodes, stream))
    homes = []
    for node in nodes.tolist():
        pool = layout.pool_rows(node)
        rows = min(pool, max(1, num_rows // count))
        slots = np.arange(rows)
        if rows < pool:
            slots = permute(slots, pool, key(seed, "slots looked at", replica=node))
        homes.append(layout.pool_start(node) + slots)
    return SampledNodes(nodes, homes)


@dataclass(frozen=True)
class Mixing:
    """How well rows are mixed at the start of an epoch.

    Attributes:
        epoch: At whose start.
        distances: float64[nodes]: Total variation distance, in [0, 1], of the class shares among a
            node's rows from those of the dataset.
        step_correlation: Of the batches of two consecutive steps of a replica; see
            ``correlation``. NaN where an epoch has fewer than two full batches.
        epoch_correlation: Of a step's batch and the same step's an epoch before. NaN in epoch 0.
    """

    epoch: int
    distances: NDArray[np.float64]
    step_correlation: float
    epoch_correlation: float


@dataclass
class BatchTrail:
    """Compares an epoch's batches with each other and with those of the epoch before."""

    fractions: NDArray[np.float64]
    _last: NDArray[np.int64] | None = field(default=None, init=False)

    def follow(self, batches: NDArray[np.int64]) -> tuple[float, float]:
        """Find both correlations.

        Args:
            batches: int64[replicas, steps, batch]: Labels.
        """
        last, self._last = self._last, batches
        steps = correlation(batches[:, :-1], batches[:, 1:], self.fractions)
        epochs = math.nan if last is None else correlation(last, batches, self.fractions)
        return steps, epochs


def mix(
    layout: Layout,
    look: SampledNodes,
    labels: Labels,
    *,
    exchange: float,
    seed: int,
    num_epochs: int,
    batch_size: int,
) -> Iterator[Mixing]:
    """Follow an exchange of a fraction of the rows; fraction 0 is local shuffling.

    Time O(rows looked at x (epochs + exchange x epochs^2)): a row that stays is not traced anew.
    """
    edges = np.cumsum([0, *map(len, look.homes)])
    homes, trail = np.concatenate(look.homes), BatchTrail(labels.fractions)
    for epoch, found in enumerate(
        labels_by_epoch(layout, homes, labels, exchange=exchange, seed=seed, num_epochs=num_epochs)
    ):
        distances = [
            distance(found[start:stop], labels.fractions)
            for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
        slots = [
            layout.pool_start(node)
            + full_batches(
                layout,
                replica=int(layout.first_replica[node]),
                holds_all=False,
                seed=seed,
                epoch=epoch,
                batch_size=batch_size,
            )
            for node in look.nodes.tolist()
        ]
        trained = np.stack(slots)
        samples = trace_homes(layout, trained.ravel(), exchange=exchange, seed=seed, epoch=epoch)
        yield Mixing(
            epoch, np.array(distances), *trail.follow(labels.of(samples).reshape(trained.shape))
        )


def mix_globally(
    layout: Layout,
    look: SampledNodes,
    labels: Labels,
    *,
    seed: int,
    num_epochs: int,
    batch_size: int,
) -> Iterator[Mixing]:
    """Follow a shuffle of the whole dataset; its distances are the expected ones."""
    trail = BatchTrail(labels.fractions)
    expected = np.array([random_distance(labels.sizes, len(homes)) for homes in look.homes])
    for epoch in range(num_epochs):
        trained = np.stack(
            [
                full_batches(
                    layout,
                    replica=int(layout.first_replica[node]),
                    holds_all=True,
                    seed=seed,
                    epoch=epoch,
                    batch_size=batch_size,
                )
                for node in look.nodes.tolist()
            ]
        )
        found = labels.of(trained.ravel()).reshape(trained.shape)
        yield Mixing(epoch, expected, *trail.follow(found))


def labels_by_epoch(
    layout: Layout,
    homes: NDArray[np.int64],
    labels: Labels,
    *,
    exchange: float,
    seed: int,
    num_epochs: int,
) -> Iterator[NDArray[np.int64]]:
    """Say what labels the rows in some homes have at the start of each epoch.

    Yields:
        int64[len(homes)], the same array each time.
    """
    found, leaving = labels.of(homes), num_leaving(layout, exchange)
    for epoch in range(num_epochs):
        if leaving and epoch:
            last = epoch - 1
            before = homes_before(layout, homes, num_leaving=leaving, seed=seed, epoch=last)
            came = np.flatnonzero(before != homes)
            samples = trace_homes(layout, before[came], exchange=exchange, seed=seed, epoch=last)
            found[came] = labels.of(samples)
        yield found


def full_batches(
    layout: Layout, *, replica: int, holds_all: bool, seed: int, epoch: int, batch_size: int
) -> NDArray[np.int64]:
    """int64[steps, batch]: Slots of a replica's first batches of an epoch that have no padding.

    The same number for all replicas: what the one with the fewest rows fills.
    """
    sampling = find_sampling_groups(layout, replica=replica, holds_all=holds_all)
    plan = plan_epoch(
        sampling,
        Selection(),
        Counts(sampling.sizes, sampling.sizes),
        stream=sampling.stream(seed, "order", epoch=epoch),
        batch_size=batch_size,
    )
    steps = min(MAX_BATCHES, int(plan.dealt.min()) // batch_size)
    if steps == 0:
        return np.empty((0, batch_size), np.int64)
    return plan.block(0, steps).slots


def distance(labels: NDArray[np.int64], fractions: NDArray[np.float64]) -> float:
    """Total variation distance of some labels' shares from those of the dataset, in [0, 1]."""
    shares = np.bincount(labels, minlength=len(fractions)) / len(labels)
    return float(np.abs(shares - fractions).sum() / 2)


def random_distance(sizes: NDArray[np.int64], num_rows: int) -> float:
    """Expected distance of rows drawn from the dataset at random: what global shuffling gives.

    Source: Diaconis and Zabell, Closed form summation for classical distributions, 1991, for the
    mean absolute deviation of a hypergeometric number.
    """
    total = int(sizes.sum())
    values, times = np.unique(sizes, return_counts=True)
    deviations = [_mean_deviation(total, size, num_rows) for size in values.tolist()]
    return float(np.dot(times, deviations) / num_rows / 2)


def _mean_deviation(total: int, marked: int, drawn: int) -> float:
    """E|X - EX| of the marked ones among rows drawn without replacement."""
    above = drawn * marked // total + 1
    if above > min(drawn, marked) or above < drawn + marked - total:
        return 0.0
    log_chance = (
        _log_choose(marked, above)
        + _log_choose(total - marked, drawn - above)
        - _log_choose(total, drawn)
    )
    return 2 * above * (total - marked - drawn + above) / total * math.exp(log_chance)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def correlation(
    one: NDArray[np.int64], other: NDArray[np.int64], fractions: NDArray[np.float64]
) -> float:
    """Correlate the class shares of pairs of batches, as they deviate from the dataset's.

    With d the vector of a batch's shares less the dataset's: the mean of the products d . d' of the
    pairs, over the mean of d . d of all batches. 1: a batch determines its partner's classes. 0: it
    says nothing, as with batches drawn at random.

    Args:
        one: int64[..., batch]: Labels.
        other: int64[..., batch]: Labels of their partners.
        fractions: float64[num_classes]: Shares of the classes in the dataset.

    Returns:
        NaN of no pairs, or if no batch deviates.
    """
    pairs = zip(one.reshape(-1, one.shape[-1]), other.reshape(-1, other.shape[-1]), strict=True)
    products = np.array(
        [[_product(a, b, fractions), _product(a, a, fractions), _product(b, b, fractions)]
         for a, b in pairs]
    ).reshape(-1, 3)  # fmt: skip
    variance = products[:, 1:].mean() if len(products) else 0.0
    # Below rounding all batches are alike
    return float(products[:, 0].mean() / variance) if variance > 1e-12 else math.nan


def _product(a: NDArray[np.int64], b: NDArray[np.int64], fractions: NDArray[np.float64]) -> float:
    """Multiply two batches' deviations, d . d', without arrays of all classes."""
    values, times = np.unique(a, return_counts=True)
    at = np.minimum(np.searchsorted(values, b), len(values) - 1)
    together = times[at][values[at] == b].sum() / (len(a) * len(b))
    expected = fractions[a].mean() + fractions[b].mean() - np.dot(fractions, fractions)
    return float(together - expected)


@dataclass(frozen=True)
class Visits:
    """Different nodes on which a sample has been trained by the end of an epoch.

    Attributes:
        mean: float64[num_epochs]: Over the samples followed.
        error: float64[num_epochs]: Its standard error, from having followed only some samples.
    """

    mean: NDArray[np.float64]
    error: NDArray[np.float64]


def count_visits(
    layout: Layout, *, exchange: float, seed: int, num_epochs: int, num_samples: int
) -> Visits:
    """Follow samples drawn at random back from the last epoch, and count the nodes they were on."""
    leaving, total = num_leaving(layout, exchange), layout.num_samples
    count = min(num_samples, total)
    homes = permute(np.arange(count), total, key(seed, "samples followed"))
    # int64[num_epochs, count]: node of each sample in each epoch
    nodes = np.empty((num_epochs, count), np.int64)
    starts = np.concatenate([[0], np.cumsum(layout.pool_sizes)])
    for epoch in reversed(range(num_epochs)):
        nodes[epoch] = np.searchsorted(starts, homes, side="right") - 1
        if leaving and epoch:
            homes = homes_before(layout, homes, num_leaving=leaving, seed=seed, epoch=epoch - 1)
    new = np.array([~(nodes[:epoch] == nodes[epoch]).any(axis=0) for epoch in range(num_epochs)])
    seen = np.cumsum(new, axis=0)
    spread = seen.std(axis=1) * math.sqrt(1 - count / total)
    return Visits(seen.mean(axis=1), spread / math.sqrt(count))


def random_visits(layout: Layout, num_epochs: int) -> NDArray[np.float64]:
    """float64[num_epochs]: As `count_visits`, of a sample on any replica alike in each epoch."""
    widths, times = np.unique(layout.replicas, return_counts=True)
    missed = (1 - widths / layout.num_replicas)[None, :] ** np.arange(1, num_epochs + 1)[:, None]
    return (1 - missed) @ times.astype(np.float64)
