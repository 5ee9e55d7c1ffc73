"""The rows that an importance policy chooses among, and the means to agree with other pools. Pure.

Nothing here depends on where a row lies: a policy that goes by scores, places and totals hides the
same samples on any number of nodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute
from dataio.base.seeding import Key
from dataio.plan.exclusion import Exclusion
from dataio.plan.history import Scores

Total = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds int64[n] of all pools, element by element, each pool once. Collective: every rank calls it
as often, with as many numbers."""


ByField = Callable[[str], NDArray[np.generic]]
"""Returns dtype[num_samples]: a field's value of every sample of the dataset, by sample id.
Collective the first time that a field is asked for; the same on all ranks."""


def no_field(name: str) -> NDArray[np.generic]:
    """Stand in for the values of a field where no rows are held."""
    raise ValueError(
        f"importance: a policy goes by the field {name!r}, which only a loader can read; give the "
        "policy an array of values by sample id"
    )


def alone(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Stand in for a total where a pool decides by itself."""
    return values


@dataclass(frozen=True)
class Candidates:
    """The rows of one pool.

    Attributes:
        scores: scores[num_slots]: The columns that the policy named, with all reports of the epoch
            before.
        sample_id: int64[num_slots], each in [0, num_ids).
        num_samples: Rows of all pools together, less those that are left out for good.
        stream: Key of the epoch's places, the same on all ranks.
        total: Sums over all pools.
        by_field: The values of a field that `ByFields.by_fields` names, of all samples.
        before: The figures of what the policy chose for the epoch before; empty where none was
            chosen. A decision that is to last is among them: they are saved and restored with it.
        exclusion: What is left out for good, of which no row is among these; None: nothing.
        cost_s: float32[num_slots]: Seconds that a rank is expected to spend on each row if it is
            visible, > 0, by what was measured before the epoch; asked for by `ByCost.by_cost`.
            None: nothing is known, so all rows cost alike.
    """

    scores: Scores
    sample_id: NDArray[np.int64]
    num_samples: int
    stream: Key
    total: Total = alone
    by_field: ByField = no_field
    before: Mapping[str, float] = field(default_factory=dict)
    exclusion: Exclusion | None = None
    cost_s: NDArray[np.float32] | None = None

    @property
    def num_ids(self) -> int:
        """Samples of the dataset, left out or not: ids are in [0, num_ids)."""
        return self.num_samples if self.exclusion is None else self.exclusion.num_samples

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """int64[num_slots]: Each row's place in a list of all rows, shuffled for this epoch.

        Distinct over all pools, in [0, num_samples): what a policy draws by, and what breaks ties.
        """
        numbers = self.sample_id
        if self.exclusion is not None:
            numbers = self.exclusion.numbers(numbers)
        return permute(numbers, self.num_samples, self.stream)

    def of(self, slots: NDArray[np.int64]) -> "Candidates":
        """Take some of the rows, int64[num_taken]: their keys and places stay what they were."""
        cost_s = None if self.cost_s is None else self.cost_s[slots]
        return replace(
            self, scores=self.scores[slots], sample_id=self.sample_id[slots], cost_s=cost_s
        )
