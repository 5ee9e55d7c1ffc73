"""Let a row come as often as its weight says: a weighted sampler over all ranks."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, checked
from dataio.base.permutation import unpermute
from dataio.base.seeding import generator, key
from dataio.plan.exclusion import Exclusion
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.sample_values import (
    Values,
    check_equal,
    check_length,
    checked_classes,
    checked_weights,
    name_of,
)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Weighted:
    """Draw ``num_samples`` rows an epoch, each in proportion to its weight, over all ranks.

    A row of weight w is expected e = num_samples * w / (sum of all weights) times an epoch. It
    comes floor(e) or ceil(e) times, e times on average over epochs and seeds, and all rows together
    come exactly ``num_samples`` times: no whole counts with these means vary less. Where no e is
    above 1, this is drawing without replacement. The counts are a function of (seed, epoch,
    weights) alone, so the same rows are drawn on any ranks and nodes, and after any resume.

    Each row has gradient weight 1, and a transform draws other numbers for each time. A node trains
    the rows it holds: if its rows weigh more than its share, the epoch takes the steps that it
    needs, and the other nodes pad at the end, which ``stats()["padded_fraction"]`` shows. Shuffles
    that move rows even that out; ``Global()``, where each node holds all rows, has no such padding;
    nor has ``over="pool"``. No reports are kept.

    Every rank holds the weights of all samples, and passes over them once an epoch.

    Args:
        weights: Numbers >= 0 by sample id, the same on every rank; or the name of a field that is
            one number a sample; or a function of the epoch that returns numbers. None: all alike.
        balance: Whole numbers by sample id, or the name of a field of whole numbers, such as a
            label: the rows of each value together have the same share of the epoch, in each epoch
            up to one row; within a value ``weights`` decide.
        num_samples: Rows of an epoch on all ranks; None: as many as the dataset has, less those
            that the loader excludes.
        over: ``"global"``: draw from the rows of all nodes. ``"pool"``: each node draws its part of
            ``num_samples``, as large as its part of the dataset, rounded down to at least one, from
            its own rows by their weights. These have the gradient weight (share of its rows in all
            weights) * num_samples / (rows it draws), so that the expected sum of gradients is the
            same; no steps are padded for it, but the counts depend on which node holds which rows.

    Raises:
        ValueError: If weights are negative, not finite, all 0 or not one a sample.

    Source: systematic sampling in random order, Goodman and Kish, Controlled Selection, JASA 1950;
    its variance, Hartley and Rao, Annals of Mathematical Statistics 1962. Particle filters call it
    systematic resampling, Kitagawa, JCGS 1996.
    """

    weights: Values | str | Callable[[int], Values] | None = None
    _: KW_ONLY
    balance: Values | str | None = None
    num_samples: Count | None = None
    over: Literal["global", "pool"] = "global"

    columns: ClassVar[tuple[ScoreColumn, ...]] = ()
    """None: reports change nothing, and several ranks would report of one row."""

    def __post_init__(self) -> None:
        weights, balance = self.weights, self.balance
        # Copies: what the caller does with its own arrays changes no epoch
        if weights is not None and not isinstance(weights, str) and not callable(weights):
            object.__setattr__(self, "weights", checked_weights(weights, where="Weighted: weights"))
        if balance is not None and not isinstance(balance, str):
            object.__setattr__(self, "balance", checked_classes(balance, where="Weighted: balance"))

    @property
    def by_fields(self) -> tuple[str, ...]:
        """Fields whose values of all samples it goes by."""
        return tuple(given for given in (self.weights, self.balance) if isinstance(given, str))

    def num_drawn(self, num_samples: int, *, num_excluded: int = 0) -> int:
        """Count the rows of an epoch on all ranks; excluded ones are none of them.

        Raises:
            ValueError: If the weights are not those of so many samples.
        """
        for name in ("weights", "balance"):
            given = getattr(self, name)
            if isinstance(given, np.ndarray):
                check_length(given, num_samples, where=f"Weighted: {name}")
        return self.num_samples if self.num_samples is not None else num_samples - num_excluded

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Decide how often each row of one pool comes in an epoch. Collective.

        Raises:
            ValueError: If the weights of the epoch are not as they have to be, or others than on
                another node.
        """
        num_samples, ids = rows.num_ids, rows.sample_id
        num_drawn = self.num_drawn(num_samples, num_excluded=num_samples - rows.num_samples)
        weights = self._weights_in(rows, epoch)
        if rows.exclusion is not None:
            weights = _without(weights, rows.exclusion)
        # int64[num_samples]: sample ids in the order of their places
        order = unpermute(np.arange(num_samples), num_samples, rows.stream)
        if self.balance is not None:
            weights, classes = self._balanced(rows, weights)
            # Side by side, the rows of a class share as many marks as they are due, up to one
            order = order[np.argsort(classes[order], kind="stable")]
        count, gradient_weights = num_drawn, None
        if self.over == "pool":
            order = order[np.isin(order, ids)]
            count, weight = self._part(weights, ids, num_drawn, of=rows.num_samples)
            gradient_weights = np.full(len(ids), weight, np.float32)
        start = float(generator(key(rows.stream, "start")).random())
        drawn = np.zeros(num_samples, np.int64)
        drawn[order] = systematic(weights[order], count, start)
        counts = drawn[ids]
        figures = {"most_often": float(counts.max(initial=0))}
        hidden = np.flatnonzero(counts == 0)
        return Selection(hidden, gradient_weights, figures=figures, counts=counts)

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: no scores are kept."""
        return hidden[:0]

    @staticmethod
    def _part(
        weights: NDArray[np.float64], ids: NDArray[np.int64], num_drawn: int, *, of: int
    ) -> tuple[int, float]:
        """Count the rows that a pool of some samples, of ``of`` in all, draws by itself.

        Returns:
            That number, and what each of these rows stands for.
        """
        share = float(weights[ids].sum() / weights.sum())
        if share == 0:
            return 0, 0.0
        count = max(num_drawn * len(ids) // of, 1)
        return count, share * num_drawn / count

    def _weights_in(self, rows: Candidates, epoch: int) -> NDArray[np.float64]:
        given, where = self.weights, f"Weighted: the weights of epoch {epoch}"
        if given is None:
            return np.ones(rows.num_ids)
        if callable(given):
            weights = checked_weights(given(epoch), where=where)
            # Arrays, which a policy's name distinguishes, were compared when the loader was made
            check_equal(weights, rows.total, where=where)
        else:
            # An array was checked when it was given
            found = rows.by_field(given) if isinstance(given, str) else given
            weights = checked_weights(found, where=where)
        check_length(weights, rows.num_ids, where=where)
        return weights

    def _balanced(
        self, rows: Candidates, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Scale the weights so that those of each class sum to 1; number the classes."""
        found = rows.by_field(self.balance) if isinstance(self.balance, str) else self.balance
        values = checked_classes(found, where="Weighted: balance")
        classes = np.unique(values, return_inverse=True)[1].astype(np.int64, copy=False)
        whole = np.bincount(classes, weights)
        # A class whose rows all weigh 0 has no share
        return weights / np.where(whole > 0, whole, 1)[classes], classes

    @cached_property
    def _name(self) -> str:
        given = {"weights": self.weights, "balance": self.balance, "num_samples": self.num_samples}
        shown = [f"{name}={name_of(value)}" for name, value in given.items() if value is not None]
        return f"Weighted({', '.join([*shown, f'over={self.over!r}'])})"

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weighted) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(self._name)


def _without(weights: NDArray[np.float64], exclusion: Exclusion) -> NDArray[np.float64]:
    """Give no weight to what is left out for good.

    Raises:
        ValueError: If nothing else has any.
    """
    left = np.where(exclusion.flags(np.arange(len(weights))), 0.0, weights)
    if not left.any():
        raise ValueError(
            f"Weighted: all {exclusion.num_left} samples that are not excluded have weight 0, "
            "expected one above at least; give other weights, or exclude fewer"
        )
    return left


def systematic(weights: NDArray[np.float64], count: int, start: float) -> NDArray[np.int64]:
    """Count how many of ``count`` evenly spaced marks fall on each row of a line of weights.

    Args:
        weights: float64[n], in the order of the line; each >= 0.
        count: Marks; 0 where all weights are 0.
        start: Where the first mark stands in its interval, in [0, 1).

    Returns:
        int64[n]: floor or ceil of ``count * weights / weights.sum()``; the sum is ``count``.
    """
    if count == 0:
        return np.zeros(len(weights), np.int64)
    # In place: to be given memory for one more array takes longer than to add one up
    ends = np.cumsum(weights)
    ends *= count / ends[-1]
    # Rounding neither loses the last mark nor adds one
    ends[len(weights) - 1 - np.argmax(weights[::-1] > 0) :] = count
    ends += start
    np.minimum(np.floor(ends, out=ends), count, out=ends)
    counts = np.empty(len(weights), np.int64)
    counts[0] = ends[0]
    np.subtract(ends[1:], ends[:-1], out=counts[1:], casting="unsafe")
    return counts
