"""What an epoch takes, and what comes before the first: steps, and the loaders beside them.

`tonari plan` has it of steps that were timed, `tonari search` of such as were estimated.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dataio.plan.policies import refresh_every
from tonari.oracle.cluster.cluster import StorageRates
from tonari.oracle.costs import Machine
from tonari.oracle.feeds import (
    RowsOnNodes,
    SourceRates,
    find_source,
    make_feeds,
    stage_beside,
    stage_s,
)
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.simulate import Simulation, simulate
from tonari.oracle.stopwatch import Timed
from tonari.oracle.windows import wait_for_windows
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_importance
from tonari.trainer.watch.plan import PARTS

STEPS = 21
"""Simulated; the first one is not counted."""
MOVING = ("train_s", "refresh_s", "evaluation_s")
"""Parts of an epoch that are longer where steps are."""


@dataclass(frozen=True, kw_only=True)
class PlannedEpoch:
    """An epoch as it would be, and what comes before the first.

    Attributes:
        steps: Of the optimizer.
        train_s: Of these, the first batch and the waits for windows included.
        windows_s: Of these, for which steps wait for rows that a quota leaves no room for.
        read_bytes: That the node with most rows reads from the source in an epoch.
        exchange_s: For which the end of the epoch waits for rows that are still on their way.
        epoch_end_s: To the next epoch.
        refresh_s: Of scoring hidden rows anew; on average over epochs.
        refresh_every: Epochs from one such to the next; 0: there is none.
        evaluation_s: Of the test data.
        checkpoint_s: Of writing one, for which training waits; on average over epochs.
        checkpoint_every: Epochs from one to the next; 0: none is written.
        spread: Of steps that were timed: the tenth and the ninetieth of a hundred, over the median.
        staging_s: Before the first epoch.
        late_rows_s: For which the first epoch waits for rows that are staged beside it.
        unstaged_s: What the steps would take, were no row staged and each read from the source in
            every epoch; 0: none is staged.
        link_bytes: That leave the busiest node in an epoch with the exchange.
        hidden_fraction: Of the rows.
        num_nodes: Nodes.
    """

    steps: int
    train_s: float
    windows_s: float = 0.0
    read_bytes: float = 0.0
    exchange_s: float
    epoch_end_s: float
    refresh_s: float
    refresh_every: int
    evaluation_s: float
    checkpoint_s: float
    checkpoint_every: int
    spread: tuple[float, float]
    staging_s: float
    late_rows_s: float = 0.0
    unstaged_s: float
    link_bytes: float
    hidden_fraction: float
    num_nodes: int

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts of an epoch."""
        return {words: getattr(self, name) for name, words in PARTS.items()}

    @property
    def epoch_s(self) -> float:
        """Seconds from one epoch to the next."""
        return sum(self.parts_s.values())

    @property
    def range_s(self) -> tuple[float, float]:
        """The same, were all steps as the fast or as the slow ones that were timed."""
        low, high = self.spread
        moving_s = sum(getattr(self, name) for name in MOVING)
        return self.epoch_s + (low - 1) * moving_s, self.epoch_s + (high - 1) * moving_s

    @property
    def pays_after(self) -> int | None:
        """Epochs after which staging has cost less than reading from the source; None: never."""
        saved_s = self.unstaged_s - self.train_s - self.exchange_s - self.epoch_end_s
        return math.ceil((self.staging_s + self.late_rows_s) / saved_s) if saved_s > 0 else None

    def run_s(self, epochs: int) -> float:
        """Seconds of a run, staging included."""
        return self.staging_s + self.late_rows_s + epochs * self.epoch_s


@dataclass(frozen=True, kw_only=True)
class FedJob:
    """A job whose ranks are fed by loaders, as it is simulated.

    Attributes:
        config: The settings.
        data: What a batch takes.
        rows: Where they lie.
        machine: What all of it takes.
        storage: Rates of the cluster.
        steps: What each rank does in a step, in the order of the ranks.
        evaluations: The same, in a forward pass of a batch.
        hidden_fraction: Of the rows, that an epoch leaves out.
    """

    config: Config
    data: DataTimes
    rows: RowsOnNodes
    machine: Machine
    storage: StorageRates
    steps: Sequence[Timed]
    evaluations: Sequence[Timed]
    hidden_fraction: float = 0.0

    def simulate(self) -> Simulation:
        """Let all ranks make some steps, of which `plan` makes an epoch."""
        feeds = make_feeds(
            self.config, self.data, self.rows, self.machine, source=self.source,
            hidden_fraction=self.hidden_fraction, disk_bytes_per_s=self._disk_bytes_per_s,
        )  # fmt: skip
        return simulate(self.steps, self.machine, feeds=feeds, steps=STEPS)

    def plan(
        self, simulation: Simulation, *, checkpoint_s: float = 0.0, unstaged_s: float = 0.0,
        spread: tuple[float, float] = (1.0, 1.0),
    ) -> PlannedEpoch:  # fmt: skip
        """Plan an epoch of steps that were simulated.

        Args:
            simulation: By `simulate`.
            checkpoint_s: See `PlannedEpoch`, as of the others.
            unstaged_s: By `unstaged_s`; 0: nobody asks.
            spread: Of steps that were timed.
        """
        steps = self.num_steps
        first_s = simulation.step_ends_s[0] - simulation.step_s
        behind_s = simulation.behind_s / len(simulation.step_ends_s)
        evaluated = self.data.evaluated_rows * (2 if self.config.optimizer.ema else 1)
        evaluated *= self.config.run.evaluation == "inline"
        hidden_rows = self.hidden_fraction * self.data.num_rows
        every = refresh_every(make_importance(self.config)) or 0
        steps_s = steps * statistics.mean(simulation.steps_s) + max(first_s, 0.0)
        windows_s = self.windows_s(steps_s)
        staging_s, late_rows_s = self._staging_s(), 0.0
        if self.config.data.staging.when == "overlap":
            staging_s, late_rows_s = stage_beside(staging_s, steps_s=steps_s)
        return PlannedEpoch(
            steps=steps,
            train_s=steps_s + windows_s,
            windows_s=windows_s,
            read_bytes=sum((count * num_bytes for count, _, num_bytes in self._windows), 0.0),
            exchange_s=steps * behind_s,
            epoch_end_s=self.data.epoch_end_s,
            refresh_s=self._scoring_s(hidden_rows) / every if every else 0.0,
            refresh_every=every,
            evaluation_s=self._scoring_s(evaluated),
            checkpoint_s=checkpoint_s,
            checkpoint_every=self.config.run.checkpoint_epochs,
            spread=spread,
            staging_s=staging_s,
            late_rows_s=late_rows_s,
            unstaged_s=unstaged_s,
            link_bytes=self.rows.leaving_bytes * self.rows.layout.widest,
            hidden_fraction=self.hidden_fraction,
            num_nodes=self.rows.layout.num_nodes,
        )

    @cached_property
    def source(self) -> SourceRates:
        """At which rows are read from where they were in the beginning."""
        return find_source(self.storage, self.data)

    def unstaged_s(self) -> float:
        """Compute what an epoch's steps take where every row is read from the source.

        Returns:
            0: No row is staged, so that there is nothing to compare.
        """
        if not self.rows.staged_bytes:
            return 0.0
        feeds = make_feeds(
            self.config, self.data, self.rows, self.machine, source=self.source, exchanges=False,
            staged=False,
        )  # fmt: skip
        simulation = simulate(self.steps, self.machine, feeds=feeds, steps=STEPS)
        return self.num_steps * statistics.mean(simulation.steps_s)

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.rows.num_steps(self.config, hidden_fraction=self.hidden_fraction)

    def windows_s(self, steps_s: float) -> float:
        """Compute for how long an epoch's steps wait for rows beyond the quota.

        Args:
            steps_s: Of the steps, where nobody waits.
        """
        counts, shares, num_bytes = zip(*self._windows, strict=True) if self._windows else ((),) * 3
        num_nodes = self.rows.layout.num_nodes
        reads_s = [self.source.seconds(one, num_nodes) for one in num_bytes]
        return wait_for_windows(shares, reads_s, steps_s=steps_s, counts=counts)

    @cached_property
    def _windows(self) -> list[tuple[int, float, float]]:
        """Runs of equal windows of rows beyond the quota; see `tonari.oracle.windows.Quota`."""
        quota = self.rows.quota
        if quota is None or not quota.missing_rows:
            return []
        return list(quota.runs(visible_fraction=1 - self.hidden_fraction))

    @property
    def _disk_bytes_per_s(self) -> float | None:
        rate = self.storage.disk_read_gbyte_s
        return None if rate is None else rate * 1e9

    def _scoring_s(self, num_rows: float) -> float:
        """Compute how long it takes to pass rows forward, dealt out to all replicas."""
        if not num_rows:
            return 0.0
        share = num_rows / self.rows.layout.num_replicas
        batches = math.ceil(share / self.config.data.batch_size)
        one_by_one = replace(self.config, optimizer=replace(self.config.optimizer, accumulate=1))
        feeds = make_feeds(
            one_by_one, self.data, self.rows, self.machine, source=self.source, exchanges=False,
            disk_bytes_per_s=self._disk_bytes_per_s,
        )  # fmt: skip
        shown = min(batches, STEPS)
        passes = simulate(self.evaluations, self.machine, feeds=feeds, steps=shown)
        return passes.step_ends_s[-1] + (batches - shown) * passes.step_s

    def _staging_s(self) -> float:
        return stage_s(
            self.storage, self.source, self.rows,
            limit_bytes_per_s=self.config.data.staging.bytes_per_s,
        )  # fmt: skip
