"""Whether what was trained was reported, asked once an epoch where a policy goes by losses."""

import logging

import numpy as np

from dataio.base.errors import StateError
from dataio.plan.policies import Importance
from dataio.state.report import Feedback
from dataio.world import World

REPORTED_FRACTION = 0.9
"""Of the rows trained must be reported, else a message says so: the last batch may come later."""

CALL = "loader.report(batch, loss, *importance.outcome(logits, labels))"

log = logging.getLogger(__name__)


class Reported:
    """Misses the reports of an epoch.

    Args:
        feedback: Counts the rows that were reported on this rank.
        world: All ranks.
        importance: The policy, for messages.
        keeps_scores: Whether it keeps what is reported.
        earlier: One of the same run, of fewer samples: what it saw is remembered.
    """

    def __init__(
        self,
        feedback: Feedback,
        world: World,
        importance: Importance | None,
        *,
        keeps_scores: bool,
        earlier: "Reported | None" = None,
    ) -> None:
        self._feedback = feedback
        self._world = world
        self._importance = importance
        self._keeps_scores = keeps_scores
        # Of all ranks: whether rows were reported, and whether it was reported that too few were.
        self._has_any: bool = earlier is not None and earlier._has_any
        self._has_told_few: bool = earlier is not None and earlier._has_told_few

    def check(self, num_rows: int, *, epoch: int) -> None:
        """Refuse an epoch of which nothing was reported to a policy that keeps it. Collective.

        Also the point that no rank passes before all have reported.

        Args:
            num_rows: Rows that this rank trained in the epoch.
            epoch: The epoch.

        Raises:
            StateError: On all ranks, if no row was reported so far.
        """
        reported, self._feedback.num_rows = self._feedback.num_rows, 0
        mine = np.array([num_rows, reported])
        trained, reported = self._world.allreduce(mine, op="sum", doing="report scores").tolist()
        self._has_any |= reported > 0
        if not self._keeps_scores or reported >= REPORTED_FRACTION * trained:
            return
        if not self._has_any:
            raise StateError(
                f"Loader: epoch {epoch} ended and no row was reported, expected all, as "
                f"importance is {self._importance}, which goes by losses: call {CALL} after each "
                "step, or leave importance out",
                on_all_ranks=True,
            )
        if not self._has_told_few and self._world.rank == 0:
            log.warning(
                "[rank 0] epoch %d: %d of %d rows that were trained were reported, and importance "
                "goes by losses: call %s after each step",
                epoch, reported, trained, CALL,
            )  # fmt: skip
        self._has_told_few = True
