"""What the loader asks of a shuffle policy and of an importance policy.

``shuffle`` and ``importance`` implement these; the loader knows nothing else about either.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataio.plan.history import Candidates, ScoreColumn, Scores
from dataio.plan.layout import Layout
from dataio.rows.parcel import ParcelBuffers
from dataio.rows.rows import Fetch, Rows, RowSchema
from dataio.world import World


@dataclass(frozen=True)
class Selection:
    """Which rows of a pool an epoch leaves out, how often the others come, and what they weigh.

    Attributes:
        hidden: int64[num_hidden]: Slots left out, least worth first; those at the end come back
            first.
        weights: float32[num_slots]: Gradient weight of each row when visible; None means ones.
        lr_factor: What the learning rate is multiplied by; the same on every rank, so a function of
            the epoch, the policy's settings and totals over all pools.
        top_up: Whether steps that not all replicas can fill are filled with hidden rows, instead of
            padding of weight 0. Unbiased policies pad.
        figures: What else there is to know of the choice, for ``Loader.stats``; of this pool, or of
            all where they were totalled. The policy receives them in the next epoch.
        counts: int64[num_slots]: How often each row comes in the epoch, 0 for the hidden ones; None
            means once. Only of a policy without score columns, and without ``top_up``.
        note: Why it chose so, where that is worth a line in the log of rank 0.

    Raises:
        ValueError: If ``counts`` do not go with ``hidden`` or ``top_up``.
    """

    hidden: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    weights: NDArray[np.float32] | None = None
    lr_factor: float = 1.0
    top_up: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    counts: NDArray[np.int64] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.counts is None:
            return
        num_zero = int((self.counts == 0).sum())
        if self.top_up or num_zero != len(self.hidden) or self.counts[self.hidden].any():
            raise ValueError(
                f"Selection: counts are 0 for {num_zero} rows, {len(self.hidden)} are hidden, and "
                f"top_up is {self.top_up}; expected counts >= 0 that are 0 for exactly the hidden "
                "rows, and no top_up; give hidden=np.flatnonzero(counts == 0)"
            )


class Importance(Protocol):
    """Decides which rows are worth this epoch. Pure: same candidates and epoch, same answer."""

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        """What must be remembered of every row; none, if reports change nothing."""
        ...

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Args:
            rows: Of the pool.
            epoch: The epoch selected for.
            num_epochs: Length of the whole run, None where the caller never said.
        """
        ...

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose the hidden slots that get a new score at the end of this epoch."""
        ...


@runtime_checkable
class ByFields(Protocol):
    """What else the loader asks of an importance policy that goes by fields, such as labels."""

    @property
    def by_fields(self) -> tuple[str, ...]:
        """Fields of one number a sample whose values of all samples it asks `Candidates` for."""
        ...


@runtime_checkable
class Rescoring(Protocol):
    """What else is asked of an importance policy that can give hidden rows new scores."""

    @property
    def refresh_every(self) -> int | None:
        """Hidden rows are due at the end of every so many epochs; None: never."""
        ...


def refresh_every(policy: Importance | None) -> int | None:
    """Find every how many epochs a policy gives hidden rows new scores; None: never."""
    return policy.refresh_every if isinstance(policy, Rescoring) else None


@runtime_checkable
class ByCost(Protocol):
    """What else the loader asks of an importance policy that goes by what rows cost."""

    @property
    def by_cost(self) -> bool:
        """Whether it asks `Candidates` for ``cost_s``; then it names the column ``bytes`` too."""
        ...


@runtime_checkable
class DrawsRows(Protocol):
    """What else the loader asks of an importance policy that sets ``Selection.counts``."""

    def num_drawn(self, num_samples: int, *, num_excluded: int = 0) -> int:
        """Count the rows of an epoch on all ranks, each as often as it comes.

        Args:
            num_samples: Of the dataset.
            num_excluded: Of these, the ones left out for good; given only where there are some.

        Raises:
            ValueError: If the policy is not one for a dataset of so many samples.
        """
        ...


class RowStore(Protocol):
    """A node's rows by slot, as an exchange sees them."""

    @property
    def schema(self) -> RowSchema: ...

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        ...

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        ...

    def read_into(self, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows, in the order of ``slots``, to where there is room for rows of their lengths.

        Any thread may call it, as ``lengths`` and ``write_arrivals``, one at a time.
        """
        ...

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows that live in ``slots`` from the next epoch on; live rows stay as they are."""
        ...

    def keep_rows(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Let the rows of ``held_in`` live in ``slots`` from the next epoch on; no byte moves."""
        ...


@dataclass(frozen=True)
class AtHand:
    """Rows that the node they go to holds already, as copies or as their owner.

    They are not sent, but their slots: the receiver keeps them where they lie, in other slots.

    Attributes:
        receivers: Ranks whose nodes hold what this rank sends.
        senders: Ranks whose rows this rank's node holds.
        first_slot: What their slots are counted from in this rank's store.
    """

    receivers: Container[int] = ()
    senders: Container[int] = ()
    first_slot: int = 0


@dataclass(frozen=True)
class ExchangeContext:
    """The epoch beside which rows travel, to take effect in the next, as one rank sees it.

    Attributes:
        world: All ranks.
        store: This node's rows.
        layout: Replicas and samples.
        epoch: The running epoch.
        seed: The run's seed.
        steps: Its steps that remain.
        mean_row_bytes: The same on all ranks: it says into how many parcels a chunk is cut.
        first_tag: Messages use the CHANNEL_TAGS tags from here on.
        first_epoch: In which the layout began, with the rows where `Layout` puts them at first.
        fetch: Reads samples from the source, for rows that come damaged; any thread may call it.
            None if nothing can.
        buffers: Memory for parcels, which one exchange after the other uses.
        at_hand: What need not be sent, because of copies.
    """

    world: World
    store: RowStore
    layout: Layout
    epoch: int
    seed: int
    steps: range
    mean_row_bytes: int
    first_tag: int
    first_epoch: int = 0
    fetch: Fetch | None = None
    buffers: ParcelBuffers = field(default_factory=ParcelBuffers)
    at_hand: AtHand = field(default_factory=AtHand)


class RowExchange(Protocol):
    """One epoch's exchange under way, on one replica."""

    def progress(self, step: int) -> None:
        """Send and take in what is due by this step. Never blocks."""
        ...

    def stop(self) -> None:
        """Let go after an error, without the other ranks: nothing is read or written any more."""
        ...

    def finish(self, scores: Scores | None) -> dict[str, float]:
        """Complete the exchange, then move the scores of the rows that moved.

        Blocks until this replica's rows have left and its arrivals are written, at most for the
        world's time limit. ``scores`` is the pool's array: on return the arrivals' slots of this
        replica hold the arrivals' scores; no other slot is touched. None: no scores are kept, on
        any replica. Collective among partners.

        Returns:
            Figures for ``Loader.stats``: rows, bytes and messages sent and received, seconds
            blocked.
        """
        ...


class Shuffle(Protocol):
    """Decides which node holds which row, epoch by epoch."""

    @property
    def holds_all(self) -> bool:
        """Whether every node's pool is the whole dataset, so that nothing moves."""
        ...

    def num_leaving(self, layout: Layout) -> int:
        """Rows that every replica gives and takes an epoch, at most; the cache has room for them.

        0: nothing ever moves.
        """
        ...

    def placement(
        self, layout: Layout, *, node: int, epoch: int, seed: int, first_epoch: int = 0
    ) -> NDArray[np.int64]:
        """int64[pool_rows(node)]: Samples that a node's slots hold at the start of an epoch.

        A pure function: any rank can ask for any node. ``first_epoch`` is the epoch in which this
        layout began, with the rows where `Layout` puts them at first. Time O(pool rows x epochs
        since then), memory O(pool rows).
        """
        ...

    def trace(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """int64[len(homes)]: Where the rows stood in ``first_epoch`` that are here in ``epoch``.

        Pure, as ``placement``, for homes of any nodes; asked where the dataset grew.
        """
        ...

    def begin(self, context: ExchangeContext) -> RowExchange | None:
        """Start an epoch's exchange, spread over the steps that remain; None if nothing moves."""
        ...


@runtime_checkable
class Following(Protocol):
    """What else a shuffle may offer: where rows go, without looking through all pools for them."""

    def follow(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """int64[len(homes)]: Where the rows of these homes stand in the epoch after this one.

        Pure, as `Shuffle.trace`, for homes of any nodes.
        """
        ...


@dataclass(frozen=True)
class Local:
    """Rows never move: every node shuffles its own pool anew each epoch."""

    holds_all: ClassVar[bool] = False

    def num_leaving(self, layout: Layout) -> int:
        """Nothing leaves."""
        return 0

    def placement(
        self, layout: Layout, *, node: int, epoch: int, seed: int, first_epoch: int = 0
    ) -> NDArray[np.int64]:
        """Every slot holds the sample it was staged with."""
        return layout.pool_start(node) + np.arange(layout.pool_rows(node), dtype=np.int64)

    def trace(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """Every row stays."""
        return homes

    def follow(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """Every row stays."""
        return homes

    def begin(self, context: ExchangeContext) -> None:
        """Nothing moves."""
