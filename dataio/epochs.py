"""The conductor of epochs: it alone knows the order of the stages of one, and between two.

    selection -> order -> gather -> batches -> reports -> exchange -> commit -> the next epoch

How an epoch begins is in `run_state`; how one ends on disk in `pool.epoch_end`.
"""

import time
from collections.abc import Generator, Iterator, Mapping

from torch.profiler import record_function

from dataio.base.errors import StateError
from dataio.batch.figures import RankFigures
from dataio.iterations import Iterations, Loop
from dataio.rowlog.log import RowLog
from dataio.rows.samples import Batch
from dataio.run_state import RunState
from dataio.state.scores import spread_scores
from dataio.stats import collect_stats
from dataio.store.epoch_end import end_epoch
from dataio.training import TrainingSession


class Conductor:
    """Takes a loader from one epoch to the next, and through the batches of each.

    Args:
        session: What the loader begins with.
        rowlog: Notes which rows are trained; None: nothing does.

    Attributes:
        run: Where the run stands.
    """

    def __init__(self, session: TrainingSession, *, rowlog: RowLog | None) -> None:
        self._iterations = Iterations("Loader")
        self.run = RunState(session, self._iterations, rowlog=rowlog)

    def stats(self) -> dict[str, float]:
        """Collect the figures of `Loader.stats`."""
        session, run = self.run.session, self.run
        return collect_stats(
            session.pool,
            session.gather,
            session.feedback,
            session.lasting.figures,
            epoch=run.epoch,
            step=run.step,
            plan=run.running.plan if run.is_running else None,
            last_epoch=session.lasting.line.last,
        )

    def end_and_begin(self) -> None:
        """End the running epoch and begin the next. Collective."""
        with record_function("tonari: epoch end"):
            started, session, run = time.perf_counter(), self.run.session, self.run
            run.begin_waiting_exchange()
            session.feed.stop()
            session.pool.finish_staging()
            figures = session.lasting.line.end()
            session.feedback.flush()
            if session.arguments.importance is not None:
                session.reported.check(figures.rows, epoch=run.epoch)
                if run.remembered:
                    run.remembered[-1].end()

            def agree(doing: str, exchange: Mapping[str, float] | None) -> None:
                if exchange is not None:
                    session.lasting.figures.take_in(exchange)
                self._write_line(figures, doing)

            position = run.position
            session.gather.forget(end_epoch(session.pool, session.moves, position, agree=agree))
            if session.placements.shuffle.holds_all and session.pool.keeps_scores:
                spread_scores(session.pool.scores, epoch=run.epoch, world=session.world)
            run.begin(run.next_position())
            run.begin_exchange()
            session.lasting.figures.epoch_end_s += time.perf_counter() - started

    def _write_line(self, figures: RankFigures, doing: str) -> None:
        session = self.run.session
        session.lasting.line.write(figures, doing, stats=self.stats)
        if self.run.rowlog is not None:
            self.run.rowlog.count_padded(session.lasting.line.num_padded)

    def up_to(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run. Collective between two epochs."""
        run = self.run
        run.num_epochs = num_epochs
        run.ensure_running()
        run.begin_waiting_exchange()
        running = run.running
        if self.is_used_up() and running.refresh_step >= running.refresh_order.steps:
            if run.epoch + 1 >= num_epochs:
                return
            self.end_and_begin()
        with self._iterations.led():
            while run.epoch < num_epochs:
                yield run.epoch
                if run.epoch + 1 >= num_epochs:
                    session = self.run.session
                    session.feedback.flush()
                    self._write_line(session.lasting.line.end(), "end the epoch")
                    return
                self.end_and_begin()

    def is_used_up(self) -> bool:
        """Whether all the epoch's batches were delivered. Collective before the first."""
        # The epoch that begins now has a step of its own.
        running = self.run.ensure_running()
        return self.run.step >= running.plan.order.steps

    def progress(self, num_steps: int) -> float:
        """Compute how much of the run is done, in [0, 1].

        Args:
            num_steps: Of the running epoch.

        Raises:
            StateError: If nobody said how many epochs the run has.
        """
        run = self.run
        if run.num_epochs is None:
            raise StateError(
                f"Loader.progress: at epoch {run.epoch} the number of epochs is not known; "
                f"iterate with `for epoch in loader.epochs(n)`, or count epochs yourself"
            )
        position = run.position
        done, step_rows = position.ended_rows, position.running.step_rows
        done, whole = done + run.step * step_rows, done + num_steps * step_rows
        epochs = run.epoch + (done / whole if whole else 1.0)
        return min(epochs / run.num_epochs, 1.0) if run.num_epochs else 1.0

    def go_to(self, epoch: int) -> None:
        """Let the next loop over the batches be of an epoch. Collective."""
        run = self.run
        run.start_with(epoch)
        run.ensure_running()
        if epoch == run.epoch + 1:
            self.end_and_begin()
        elif epoch != run.epoch:
            run.choose(run.start_of(epoch, run.position.running))
            run.ensure_running()
        self._iterations.ask()

    def batches(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches; if there are none, those of the next epoch.

        Raises:
            StateError: If it is the second whole loop in one epoch of `up_to`; or from ``next``,
                if another loop has begun since.
        """
        return Loop(self._iterations, self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        run = self.run
        is_used_up = self.is_used_up()
        start = self._iterations.start(run.epoch, is_used_up=is_used_up)
        if start == "next epoch":
            self.end_and_begin()
        elif start == "again":
            run.again()
        run.begin_waiting_exchange()
        # Here, not above: others from an epoch on in which the dataset grew.
        session = self.run.session
        session.feed.stop()
        plan = run.running.plan
        steps = range(run.step, plan.order.steps)
        for batch in session.feed.training(plan, steps, epoch=run.epoch):
            session.moves.progress(run.step)
            run.count_step()
            yield batch
        self._iterations.end()

    def skip(self, num_steps: int) -> None:
        """Pass over the next batches of the epoch. Collective where it begins.

        Raises:
            ValueError: If the epoch has not as many left.
        """
        run = self.run
        left = run.ensure_running().plan.order.steps - run.step
        if not 0 <= num_steps <= left:
            raise ValueError(
                f"Loader.skip: {num_steps} batches, expected a number in [0, {left}], as many as "
                f"epoch {run.epoch} has left; pass over the others in the next epoch"
            )
        self._iterations.break_off()
        self.run.session.feed.stop()
        run.skip(num_steps)

    def refresh(self) -> Iterator[Batch]:
        """Yield batches of the hidden rows that are due for a new score.

        Raises:
            StateError: From ``next``, if another loop has begun since.
        """
        return Loop(self._iterations, self._refresh())

    def _refresh(self) -> Generator[Batch, None, None]:
        session, running = self.run.session, self.run.running
        feed, order = session.feed, running.refresh_order
        feed.stop()
        steps = range(running.refresh_step, order.steps)
        if self.run.remembered and steps:
            session.feedback.flush()
            session.world.barrier(doing="take in reports")
            self.run.remembered[-1].end()
        for batch in feed.batches(order.even_block, order, steps, epoch=self.run.epoch):
            running.refresh_step += 1
            yield batch
