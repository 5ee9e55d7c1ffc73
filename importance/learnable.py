"""Hide the rows whose loss does not fall: for text with much in it that cannot be learned."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Range, Share, checked
from dataio.plan.history import QUANTUM, Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.threshold import lowest

FIRST_EPOCH = 3
"""The first before which a row can have been reported in two epochs after its first one."""

NUM_LEVELS = 1 << 12
"""Parts in which falls are counted, so that every world finds the same threshold."""

LEARNED = 0.5
"""Of the mean loss of the rows that learn: a row below it has little left to lose."""

MOST_LOSS = 2.0**20
"""More counts as this in a mean, so that sums of 2**32 rows stay exact."""


@checked
@dataclass(frozen=True)
class Learnable:
    """Hide the rows whose loss does not fall, at most ``fraction`` of all rows.

    What can be learned has a loss that falls, be it high or low. That of random bytes, or of text
    whose bytes were shuffled, falls within an epoch to what their frequencies give, and stays. So a
    row is held against its own past. Its *fall* is the share of its second loss that it has lost
    since (``loss_second``, see `dataio.plan.history.ScoreColumn`); a loss that rose fell by 0. A
    row *learns* if its fall is at least ``least_fall`` of the mean fall of the rows that learn:
    beginning with all rows, the threshold is raised until that holds. The others are hidden, the
    smallest falls first, but for those that were learned before: their loss is below half of the
    mean loss of the rows that learn.

    A high loss alone hides no row, so text that is hard but learnable stays, as long as it falls
    at least ``least_fall`` times as fast as the other text. Hidden rows are passed forward again
    every so often. One comes back once its loss has fallen, as that of learnable text does while
    the model learns from other rows like it.

    Nothing is hidden before epoch ``begins``, nor a row without a second loss. Gradients are not
    weighted, and steps that not all replicas fill are padded.

    Args:
        fraction: Largest share of all rows to hide, in [0, 1).
        least_fall: Share of the mean fall of the rows that learn, in [0, 1).
        begins: First epoch that hides rows, >= 3: a fall takes two losses after a row's first
            epoch, which has to be long enough for the model to learn how frequent tokens are.
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never, and they stay hidden.

    Raises:
        ValueError: If a setting is out of range.

    Source: Mindermann et al., Prioritized Training on Points that are Learnable, Worth Learning,
    and Not Yet Learnt (RHO-loss), ICML 2022, section 3, on leaving out what is noisy. There a
    second model shows how low a loss can get; here the row's own past does.
    """

    fraction: Share = 0.5
    _: KW_ONLY
    least_fall: Share = 0.3
    begins: Annotated[int, Range(FIRST_EPOCH)] = 4
    refresh_every: Count | None = 4

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss", "loss_second")
    """The last loss, and the second."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is."""
        if epoch < self.begins:
            return Selection()
        known = np.flatnonzero(np.isfinite(rows.scores["loss_second"]))
        loss, second = (rows.scores[name][known] for name in ("loss", "loss_second"))
        level, quanta = _fall_levels(loss, second), _quanta(loss)
        least, mean_loss = self._learning(level, quanta, rows)
        stuck = (level < least) & (quanta >= LEARNED * mean_loss)
        slots = known[stuck]
        place_bits = max(rows.num_samples - 1, 1).bit_length()
        places = rows.places[slots].astype(np.uint64)
        keys = level[stuck].astype(np.uint64) << np.uint64(place_bits) | places
        chosen = lowest(
            keys, math.floor(self.fraction * rows.num_samples), rows.total,
            num_bits=NUM_LEVELS.bit_length() + place_bits,
        )  # fmt: skip
        return Selection(hidden=slots[chosen], figures={"not_falling": float(len(slots))})

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]

    def _learning(
        self, level: NDArray[np.int64], quanta: NDArray[np.int64], rows: Candidates
    ) -> tuple[float, float]:
        """Find the least fall of a row that learns, as a level, and the mean loss of such rows."""
        sums = [np.zeros(NUM_LEVELS + 1, np.int64) for _ in range(2)]
        np.add.at(sums[0], level, 1)
        np.add.at(sums[1], level, quanta)
        # int64[NUM_LEVELS + 1] each: rows of all pools by level, and the sums of their losses
        counts, losses = rows.total(np.concatenate(sums)).reshape(2, -1)
        levels, least = np.arange(NUM_LEVELS + 1), 0.0
        while True:
            learns = levels >= least
            num_rows = int(counts[learns].sum())
            if not num_rows:
                return least, 0.0
            raised = self.least_fall * int((levels * counts)[learns].sum()) / num_rows
            if raised <= least:
                return least, int(losses[learns].sum()) / num_rows
            least = raised


def _fall_levels(loss: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.int64]:
    """int64[n], in [0, NUM_LEVELS]: The share of its second loss that each row has lost since."""
    before = np.maximum(_quanta(second), 1)
    fallen = np.clip(before - _quanta(loss), 0, before)
    return fallen * NUM_LEVELS // before


def _quanta(loss: NDArray[np.float32]) -> NDArray[np.int64]:
    """int64[n]: Losses in whole quanta; one that is not a number, or infinite, is the most."""
    bounded = np.clip(np.nan_to_num(loss, nan=MOST_LOSS), -MOST_LOSS, MOST_LOSS)
    whole: NDArray[np.int64] = np.rint(bounded / QUANTUM).astype(np.int64)
    return whole
