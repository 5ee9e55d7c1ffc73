"""The life of a run as one value: an epoch that is to begin, or the one that runs.

    New -> Running -> Running (the next epoch) -> ...
    Chosen, Restored -> Running

Whatever the state, the run may be left for a position that was chosen or restored.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError, StallError, StateError
from dataio.base.seeding import digest
from dataio.iterations import Iterations
from dataio.plan.epoch import EpochPlan
from dataio.plan.history import unscored
from dataio.plan.layout import Layout
from dataio.plan.order import Order
from dataio.plan.replay import groups_of, trained_samples, trained_slots
from dataio.plan.segment import Position, Segment
from dataio.rowlog.log import RowLog
from dataio.source.base import costs_of
from dataio.state.remembered import Packed, Remembered, pack, recall
from dataio.state.resume import check_num_hidden, load_part, trained_before
from dataio.state.saves import CURE
from dataio.state.snapshot import NodeSnapshot, Saved
from dataio.training import TrainingSession, identify
from dataio.world.agree import together

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class New:
    """No epoch has begun yet.

    Attributes:
        position: Where the first is to begin.
    """

    position: Position


@dataclass(frozen=True)
class Repositioned:
    """An epoch is to begin whose scores start anew.

    Attributes:
        position: Where it is to begin.
        num_hidden: Rows that it hid when its state was taken; None: nobody said.
    """

    position: Position
    num_hidden: int | None = None


@dataclass(frozen=True)
class Restored:
    """An epoch is to go on from a save.

    Attributes:
        position: Where it is to go on.
        node: What was saved of this node's rows.
        figures: The epoch's line up to there; None: it begins anew.
    """

    position: Position
    node: NodeSnapshot
    figures: dict[str, float] | None = None


@dataclass
class Running:
    """An epoch runs.

    Attributes:
        position: Where it began, or went on.
        plan: Its batches.
        refresh_order: Those of the hidden rows that get a new score.
        seen: int64[rows of the sampling group]: How often each was trained in ended segments of the
            epoch; None: none has ended.
        refresh_step: Batches of hidden rows delivered.
        exchange_waits: Whether its exchange has yet to begin, as it may be the last epoch's.
    """

    position: Position
    plan: EpochPlan
    refresh_order: Order
    seen: NDArray[np.int64] | None
    refresh_step: int
    exchange_waits: bool = False


class RunState:
    """Where a run stands, and how it comes from one state to the next.

    Args:
        session: What it is carried out with.
        iterations: Takes notice of epochs that begin.
        rowlog: Notes which rows are trained; None: nothing does.

    Attributes:
        state: The state.
        epoch: The running epoch, or the last one that ran.
        step: Batches of it delivered.
        lr_factor: What the policy multiplies the learning rate by in it.
        num_epochs: Length of the run; None: nobody said.
        session: What it is carried out with: another one as the dataset grows.
        remembered: Epochs since the last step that counts, where others are to go on from it; None:
            nobody is to.
    """

    state: New | Repositioned | Restored | Running

    def __init__(
        self, session: TrainingSession, iterations: Iterations, *, rowlog: RowLog | None
    ) -> None:
        self.session = session
        self.rowlog = rowlog
        self._iterations = iterations
        self.state = New(self.start_of(0))
        self.epoch = self.step = 0
        self.lr_factor = 1.0
        self.num_epochs: int | None = None
        self.remembered: list[Remembered] | None = None
        # Where the log of rows has what the next attempt goes on from; () where it has not.
        self._after: tuple[str, int, int] | tuple[()] | None = None

    @property
    def running(self) -> Running:
        """The running epoch.

        Raises:
            StateError: If none runs.
        """
        if not isinstance(self.state, Running):
            raise StateError(
                "Loader: no epoch runs, expected one; begin it by a loop over the loader's "
                "batches, or by `for epoch in loader.epochs(n)`"
            )
        return self.state

    @property
    def is_running(self) -> bool:
        """Whether an epoch runs."""
        return isinstance(self.state, Running)

    @property
    def position(self) -> Position:
        """Where the run stands now."""
        if not isinstance(self.state, Running):
            return self.state.position
        return self.state.position.at(steps=self.step, refresh_step=self.state.refresh_step)

    @property
    def num_hidden(self) -> int | None:
        """Rows that the epoch hides on all nodes; None: not known yet."""
        if isinstance(self.state, Running):
            return self.state.plan.num_hidden
        return self.state.num_hidden if isinstance(self.state, Repositioned) else None

    def start_of(self, epoch: int, after: Segment | None = None) -> Position:
        """Find where an epoch begins.

        Args:
            epoch: The epoch.
            after: A segment of the run, whose layout goes on; None: none ran yet.
        """
        arguments, replicas = self.session.arguments, self.session.layout.replicas
        grouped = arguments.staging.when == "overlap" and epoch == 0
        first_epoch = min(after.first_epoch, epoch) if after is not None else 0
        grown: tuple[tuple[int, int], ...] = ()
        if (growing := self.session.growing) is not None:
            known = after.grown if after is not None else ((0, growing.num_samples),)
            # Of an epoch before all that is known: as many samples as were known first.
            grown = tuple(pair for pair in known if pair[0] <= epoch) or ((epoch, known[0][1]),)
            first_epoch = grown[-1][0]
        segment = Segment(
            replicas, arguments.batch_size, first_epoch, grouped=grouped, grown=grown,
            excluded=self.session.exclusion.name,
        )  # fmt: skip
        return Position(epoch, (segment,))

    def next_position(self) -> Position:
        """Find where the next epoch begins, over the shards that are there by now.

        Collective, if the source grows.

        Raises:
            SourceError: If a shard changed or vanished, or a new one is not behind the last.
        """
        session, epoch, running = self.session, self.epoch + 1, self.position.running
        position, growing = self.start_of(epoch, running), session.growing
        if growing is None:
            return position
        known = growing.look(session.world)
        session.source = known.cut(growing.num_samples)
        if known.num_samples == growing.num_samples:
            return position
        if session.world.rank == 0:
            log.info("[rank 0] %s, from epoch %d on", known.describe_growth(growing), epoch)
        segment = position.running.has_grown(epoch, known.num_samples)
        return Position(epoch, (segment,))

    def start_with(self, epoch: int) -> None:
        """Begin the run with another epoch than the first, unless a position was given to it."""
        if not isinstance(self.state, Running) and self.state.position == self.start_of(0):
            self.state = replace(self.state, position=self.start_of(epoch))

    @property
    def log_place(self) -> tuple[str, int, int] | None:
        """Where the log of rows has what was trained up to now: its name, an attempt, the step."""
        rowlog = self.rowlog
        if rowlog is None:
            return None
        if self._after is not None:  # of a state from which no epoch has gone on yet
            return self._after or None
        here = rowlog.here
        return None if here is None else (*here, self.step)

    def choose(
        self,
        position: Position,
        *,
        num_hidden: int | None = None,
        state: Mapping[str, object] | None = None,
    ) -> None:
        """Leave what runs for a position at which scores start anew. Collective while one runs.

        Args:
            position: Where to go.
            num_hidden: Rows that the epoch hid there; None: not known.
            state: What `state_dict` gave there, of which the weights are; None: they stay.
        """
        self.abandon()
        self.state = Repositioned(position, num_hidden)
        if state is not None:
            self.epoch, self.step = position.epoch, position.running.steps
            self._after = _log_place_in(state)

    def restore(self, saved: Saved, position: Position) -> None:
        """Leave what runs for what was saved. Collective.

        Args:
            saved: What was saved.
            position: Where this loader goes on from it.

        Raises:
            StateError: On all ranks, if what was saved of the rows is damaged, or of others.
        """
        self.abandon()
        self._go_to_samples_of(position)
        session = self.session
        first_epoch = position.running.first_epoch
        wanted = session.placements.sample_ids(position.epoch, first_epoch=first_epoch)
        node = load_part(
            saved, wanted, session.pool.scores.dtype, layout=session.layout, world=session.world,
            tag=session.lasting.first_tag,
        )  # fmt: skip

        def check() -> None:
            if not np.array_equal(node.sample_id, wanted):
                raise StateError(
                    f"{saved.path}: the rows saved for node {session.world.node} are not those of "
                    f"epoch {position.epoch}; it is damaged or of another run: {CURE}"
                )

        together(session.world, check, doing="compare the saved rows")
        self.state = Restored(position, node, saved.figures)
        self._after = _log_place_in(saved.state)

    def go_on(self, state: dict[str, object], remembered: Sequence[Remembered]) -> None:
        """Go on from a step that counts, on the ranks that are left, and that come. Collective.

        Args:
            state: What `state_dict` gave there.
            remembered: By this rank, of loaders before this one.

        Raises:
            StateError: On all ranks, if none knows the rows; or if the state is of another run.
        """
        position = self.find_position(state)
        self.abandon()
        self._go_to_samples_of(position)
        session, first_epoch = self.session, position.running.first_epoch
        wanted = session.placements.sample_ids(position.epoch, first_epoch=first_epoch)
        node = recall(
            remembered, Position.from_json(state), wanted, session.pool.scores.dtype,
            world=session.world, num_samples=session.layout.num_samples,
            tag=session.lasting.first_tag,
        )  # fmt: skip
        self.state = Restored(position, node)
        self.epoch, self.step = position.epoch, position.running.steps
        self._after = _log_place_in(state)

    def count(self, state: Mapping[str, object]) -> None:
        """Take notice that a step counts, behind which `state_dict` gave this."""
        if not self.remembered:
            return
        epoch, last = state["epoch"], self.remembered[-1]
        if last.position.epoch == epoch:
            del self.remembered[:-1]
            last.scores, last.has_ended = self.session.pool.scores, False
            self.session.feedback.upto = int(str(state["step"]))

    def ensure_running(self) -> Running:
        """Begin the epoch that is to begin, if none runs. Collective the first time.

        Raises:
            StateError: If it does not hide as many rows as when its state was taken.
        """
        state = self.state
        if isinstance(state, Running):
            return state
        position = state.position
        self._go_to_samples_of(position)
        session = self.session
        session.pool.finish_staging()
        groups = None
        if position.running.grouped and not position.running.steps:
            groups = groups_of(session.sampling, seed=session.arguments.seed).bounds.tolist()
        session.pool.ensure(session.placements.at(position), groups=groups)
        # Past `ensure`, where all ranks meet: none reports of what it has left any more.
        self._begin_scores(state)
        session.world.barrier(doing="restore scores")
        restored = state if isinstance(state, Restored) else None
        running = self._deal(position, restored)
        if (
            isinstance(state, Repositioned) and not session.pool.keeps_scores
        ):  # else it was warned of
            check_num_hidden(position, state.num_hidden, running.plan.num_hidden)
        self._enter(running, restored)
        # If nobody said, this may be the last epoch, whose exchange would be of no use.
        running.exchange_waits = self.num_epochs is None
        if self.num_epochs is not None:
            self.begin_exchange()
        return running

    def find_position(self, state: dict[str, object]) -> Position:
        """Check a saved state, and find where this run goes on from it.

        Raises:
            StateError: If it is of another run, or damaged.
        """
        session = self.session
        source, identity, layout = session.source, session.identity, session.layout
        num_samples = state.get("num_samples")
        if session.growing is not None and isinstance(num_samples, int):
            try:
                source = session.growing.cut(num_samples)
            except SourceError as error:
                raise StateError(f"checkpoint: {error}") from error
            identity = identify(source, session.arguments)
            layout = Layout(layout.replicas, num_samples)
        position = identity.find_position(
            state, layout=layout, batch_size=session.arguments.batch_size,
            excluded=session.exclusion.name,
        )  # fmt: skip
        if session.world.rank == 0:
            identity.warn_of_other_files(state)
        return position

    def _go_to_samples_of(self, position: Position) -> None:
        """Have the session that a position's samples need. Collective where these are others."""
        session = self.session
        layout = position.running.layout(session.layout.num_samples)
        if layout == session.layout:
            return
        growing = session.growing
        assert growing is not None, "no other dataset's length changes"
        session.pool.finish_staging()
        self.session = session.followed_by(growing.cut(layout.num_samples), layout)

    def begin(self, position: Position) -> None:
        """Begin an epoch whose rows and scores are there already, but for new ones. Collective."""
        before, chosen = self.session.pool, self.running.plan.selection.figures
        self._go_to_samples_of(position)
        session = self.session
        if session.pool is not before:
            session.pool.ensure(session.placements.at(position))
            if session.pool.keeps_scores:
                if session.world.local_rank == 0:
                    session.pool.take_scores(before.scores)
                session.world.barrier(doing="take over the scores")
        self._enter(self._deal(position, None, chosen), None)

    def begin_exchange(self) -> None:
        """Begin the running epoch's exchange, unless it is the last epoch. Collective."""
        running, session = self.running, self.session
        running.exchange_waits = False
        is_last = self.num_epochs is not None and self.epoch + 1 >= self.num_epochs
        if session.placements.num_leaving and not is_last and not session.pool.is_staging:
            session.moves.begin(running.position, range(self.step, running.plan.order.steps))

    def begin_waiting_exchange(self) -> None:
        """Begin the exchange that waits to know whether this is the last epoch. Collective."""
        if self.running.exchange_waits:
            self.begin_exchange()

    def abandon(self) -> None:
        """Leave the epoch without its exchange taking effect. Collective while one runs."""
        self._iterations.break_off()
        self.session.feed.stop()
        self.session.feedback.forget()
        try:
            self.session.moves.abandon()
        except StallError as error:
            raise StallError(
                f"Loader: this rank left epoch {self.epoch} at step {self.step} (by close, "
                "restore, load_state_dict or set_epoch), which all ranks do together, and others "
                f"have not: look for such a call on some ranks alone. {error}"
            ) from error
        if isinstance(self.state, Running):
            self.session.lasting.line.end()  # of an epoch that has no line
            self.state = Repositioned(self.state.position)

    def snapshot(self) -> NodeSnapshot:
        """Collect what a save keeps of this node's rows; the scores are not copied."""
        running, pool = self.running, self.session.pool
        pool.note_sizes()
        num_rows = self.session.sampling.num_rows
        before = running.seen if running.seen is not None else np.zeros(num_rows, np.int64)
        now = np.bincount(trained_slots(running.plan.order, self.step), minlength=num_rows)
        return NodeSnapshot(pool.sample_ids, pool.scores, running.plan.selection, before, now)

    def _begin_scores(self, state: New | Repositioned | Restored) -> None:
        pool, world = self.session.pool, self.session.world
        if world.local_rank or not pool.keeps_scores:
            return
        if isinstance(state, Restored):
            pool.scores[:] = state.node.scores
        elif isinstance(state, Repositioned):
            pool.scores[:] = unscored(len(pool.scores), pool.scores.dtype)

    def _deal(
        self,
        position: Position,
        restored: Restored | None,
        chosen: Mapping[str, float] | None = None,
    ) -> Running:
        """Decide what is left of an epoch: hidden rows, order, weights, refresh. Collective."""
        session, node = self.session, restored.node if restored is not None else None
        seen = self._seen_before(position, node) if position.ended else None
        plan, refresh_order = session.dealer.deal(
            position,
            session.pool.scores,
            lambda: session.pool.sample_ids,
            num_epochs=self.num_epochs,
            before=chosen or {},
            restored=node.selection if node is not None else None,
            seen=seen,
        )
        if self.remembered is not None:
            self._remember(self.remembered, position, plan, seen)
        return Running(position, plan, refresh_order, seen, position.refresh_step)

    def _remember(
        self, remembered: list[Remembered], position: Position, plan: EpochPlan,
        seen: NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """Send all ranks what this epoch selected, and remember it. Collective."""
        session, first_epoch = self.session, position.running.first_epoch
        sampling, world, placements = session.sampling, session.world, session.placements
        others: list[Packed] = []
        if len(sampling.sizes) > 1:
            leads = world.rank == world.rank_of_replica(sampling.leader)
            mine = pack(plan.selection, seen, sampling.num_rows) if leads else (b"", b"")
            parts = [world.allgather(data, doing="send what is selected") for data in mine]
            leaders = [world.rank_of_replica(int(each)) for each in sampling.leaders]
            others = [(parts[0][rank], parts[1][rank]) for rank in leaders]

        def sample_ids(group: int) -> NDArray[np.int64]:
            return replace(placements, node=group).sample_ids(
                position.epoch, first_epoch=first_epoch
            )

        session.feedback.upto = position.running.steps
        arguments = session.arguments
        remembered.append(
            Remembered(
                position, world.node, sampling, plan, seen, session.pool.scores, session.feedback,
                others, sample_ids, arguments.seed, arguments.drop_last, costs_of(session.source),
                session.exclusion,
            )
        )  # fmt: skip

    def _enter(self, running: Running, restored: Restored | None) -> None:
        position, tiles = running.position, self.session.lasting.tiles
        if tiles is not None:
            tiles.check_same(self._digests(running), epoch=position.epoch)
        self.state, before = running, self.log_place
        self.epoch, self.step = position.epoch, position.running.steps
        self.lr_factor = running.plan.selection.lr_factor
        self._note_attempt(before)
        earlier = restored.figures if restored is not None else None
        self.session.lasting.line.begin(
            position.epoch, num_steps=position.num_steps, earlier=earlier
        )
        self._iterations.begin_epoch()

    def _digests(self, running: Running) -> dict[str, str]:
        """Digest what the ranks of a sample must have in common, whatever tile they hold."""
        pool, plan, refresh = self.session.pool, running.plan, running.refresh_order
        ids = [
            pool.sample_ids[order.slots_at(np.arange(order.num_rows))].tobytes()
            for order in (plan.order, refresh)
        ]
        weights = plan.selection.weights
        settings = f"{plan.order.steps} {refresh.steps} {plan.selection.lr_factor}".encode()
        decided = [*ids, b"" if weights is None else weights.tobytes(), settings]
        return {
            "rows to train": digest(b"".join(decided)), "scores": digest(pool.scores.tobytes())
        }  # fmt: skip

    def again(self) -> None:
        """Go back to the first batch of the running epoch, which is used up."""
        before, self.step = self.log_place, 0
        self._note_attempt(before)

    def count_step(self) -> None:
        """Count a batch of the running epoch that is delivered."""
        padded = self.session.gather.shaper.take_padded(self.epoch, self.step)
        self.session.lasting.figures.padded += len(padded)
        if self.rowlog is not None and padded:
            self.rowlog.pad(self.step, padded)
        self.step += 1
        if self.rowlog is not None:
            self.rowlog.progress(self.step)

    def skip(self, num_steps: int) -> None:
        """Pass over batches of the running epoch."""
        if self.rowlog is not None and num_steps:
            self.rowlog.skip(range(self.step, self.step + num_steps))
        self.step += num_steps

    def _note_attempt(self, before: tuple[str, int, int] | None) -> None:
        """Have the log of rows note what is trained from here on.

        Args:
            before: The `log_place` until now.
        """
        session = self.session
        if self.rowlog is not None:
            self.rowlog.begin(
                self.position, self.running.plan, session.sampling, session.exclusion,
                after=before, begins=before is None and self._after is None,
            )  # fmt: skip
        self._after = None

    def _seen_before(self, position: Position, node: NodeSnapshot | None) -> NDArray[np.int64]:
        """int64[rows of the sampling group]: How often ended segments trained each. Collective."""
        if node is not None:
            return trained_before(position, node)
        session = self.session
        seen = trained_samples(
            position.ended,
            num_samples=session.source.num_samples,
            shuffle=session.placements.shuffle,
            seed=session.arguments.seed,
            epoch=position.epoch,
            world=session.world,
            costs=costs_of(session.source),
            exclusion=session.exclusion,
        )
        return seen[session.pool.sample_ids].astype(np.int64)


def _log_place_in(state: Mapping[str, object]) -> tuple[str, int, int] | tuple[()]:
    """Read where the log of rows has what a state was taken of; (): in none."""
    place = state.get("rows")
    if not isinstance(place, list | tuple) or len(place) != 3:
        return ()
    name, attempt, step = place
    return str(name), int(attempt), int(step)
