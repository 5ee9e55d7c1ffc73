"""What a loader is made of: a session, and what deals, moves and scores its rows."""

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dataio.arguments import (
    Arguments,
    agreed,
    check_agreement,
    check_batch_size,
    check_growth,
    check_policy,
    find_device,
)
from dataio.base.errors import OtherDatasetError
from dataio.base.filesystem import cache_directory
from dataio.base.seeding import ORDER_VERSION, digest
from dataio.batch.feed import BatchFeed, DeviceDelivery
from dataio.batch.figures import EpochLine, Figures, check_metrics
from dataio.batch.meter import CostsMeter
from dataio.documents import mask_documents
from dataio.evaluation import Evaluation
from dataio.excluding import find_excluded, paths_among
from dataio.opening import Openable, Opener
from dataio.plan.dealer import Dealer
from dataio.plan.epoch import find_sampling_groups
from dataio.plan.exclusion import Exclusion
from dataio.plan.history import no_field
from dataio.plan.layout import Layout
from dataio.plan.order import deal, deal_all, num_steps
from dataio.plan.placement import Placements, copy_holders
from dataio.plan.policies import ByCost, ByFields, DrawsRows
from dataio.rowlog.attempts import Setup
from dataio.rowlog.log import RowLog
from dataio.rows.fields import Array, Field
from dataio.rows.image import Image, Mask
from dataio.rows.samples import BatchTransform, Collate, Transform
from dataio.session import Session
from dataio.source import Shards, Source
from dataio.source.base import costs_of
from dataio.source.classes import Classes
from dataio.source.wrap.growing import GrowingSource
from dataio.state.report import Feedback, Reported
from dataio.state.resume import RunIdentity
from dataio.store.field_reader import FieldReader
from dataio.store.moves import PoolMoves
from dataio.store.open import NodeRows
from dataio.store.share import Share, lay_out
from dataio.tiling import TileRanks, find_tile_ranks
from dataio.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lasting:
    """What a loader has as long as it lives, whatever session it is in.

    Attributes:
        opener: Opens sources of samples with the same fields.
        delivery: Takes batches to the device.
        figures: What is measured.
        line: Sums up an epoch's figures.
        first_tag: Of messages about rows that move.
        copies_tag: Of messages about copies that move; -1: there are none.
        tiles: Who holds the tiles of samples; None: they are not cut.
    """

    opener: Opener
    delivery: DeviceDelivery
    figures: Figures
    line: EpochLine
    first_tag: int
    copies_tag: int = -1
    tiles: TileRanks | None = None


class TrainingSession(Session):
    """A session whose rows are dealt, moved between nodes, scored and delivered to be trained.

    Args:
        arguments: Those of the loader.
        world: All ranks.
        source: Where the rows come from.
        fields: What is kept of a sample, as rows are stored.
        layout: Replicas and samples, and what they were before samples came.
        exclusion: Samples that no epoch shows.
        lasting: What the loader has anyway.
        earlier: The session of the same source while it had fewer samples, closed before. Pool and
            scores are empty until they are filled.

    Attributes:
        identity: What the run keeps, whoever goes on with it.
        sampling: All sampling groups, and this replica's place.
        dealer: Deals the replica its rows of an epoch.
        placements: Which node holds which row, as far as it follows from the seed.
        moves: Takes the rows from one epoch's placement to the next.
        feedback: Takes reports into the scores.
        reported: Misses reports.
        feed: Delivers batches, step by step.

    Raises:
        ValueError: If a batch is more than a replica's rows.
        DataioError: If the cache cannot be used.
    """

    def __init__(
        self,
        arguments: Arguments,
        world: World,
        source: Source,
        fields: Mapping[str, Field],
        layout: Layout,
        exclusion: Exclusion,
        lasting: Lasting,
        *,
        earlier: "TrainingSession | None" = None,
    ) -> None:
        shuffle, seed = arguments.shuffle_or_local, arguments.seed
        self.layout = layout
        check_batch_size(arguments.batch_size, layout)
        self.exclusion = exclusion
        self.lasting = lasting
        self.identity = identify(source, arguments)
        self.sampling = find_sampling_groups(
            layout, replica=world.replica, holds_all=shuffle.holds_all
        )
        # What every node holds has copies.
        copies = arguments.cache.copies > 1 and layout.can_copy and not shuffle.holds_all
        racks = world.topology.rack_of_node if copies else ()
        self.placements = placements = Placements(
            shuffle, layout, world.node, self.sampling.num_rows, seed, shuffle.num_leaving(layout),
            copy_holders(layout, seed=seed, racks=racks) if copies else None,
        )  # fmt: skip
        share = Share(
            placements.num_slots,
            None if placements.num_leaving else placements.of(0, first_epoch=0),
            placements.num_leaving,
            num_copied=placements.copied.num_slots if copies else 0,
        )
        super().__init__(
            NodeRows(source, fields, share, arguments, world, lasting.opener.root),
            pinned=lasting.delivery.pinned, are_excluded=exclusion.flags, earlier=earlier,
        )  # fmt: skip
        pool, gather, figures = self.pool, self.gather, lasting.figures
        self.moves = PoolMoves(
            pool, placements, first_tag=lasting.first_tag, copies_tag=lasting.copies_tag
        )
        self.feedback: Feedback = Feedback(
            pool.scores, pool.ids_in, rank=world.rank,
            num_lost=earlier.feedback.num_lost if earlier is not None else 0,
        )  # fmt: skip
        self.reported: Reported = Reported(
            self.feedback, world, arguments.importance, keeps_scores=pool.keeps_scores,
            earlier=earlier.reported if earlier is not None else None,
        )  # fmt: skip
        policy = arguments.importance
        goes_by_cost = isinstance(policy, ByCost) and policy.by_cost
        self.dealer = Dealer(
            self.sampling, world=world, importance=policy, seed=seed,
            batch_size=arguments.batch_size, drop_last=arguments.drop_last,
            by_field=FieldReader(pool, num_samples=layout.num_samples, holds_all=shuffle.holds_all)
            if isinstance(policy, ByFields) else no_field,
            costs=costs_of(source), exclusion=exclusion,
            meter=CostsMeter(pool, gather, figures) if goes_by_cost else None,
        )  # fmt: skip
        self.feed: BatchFeed = BatchFeed(
            pool, gather, lasting.delivery, figures=figures,
            take=earlier.feed.take if earlier is not None else None,
        )  # fmt: skip

    @property
    def growing(self) -> GrowingSource | None:
        """The source, if samples may come to it."""
        return self.source if isinstance(self.source, GrowingSource) else None

    def followed_by(self, source: Source, layout: Layout) -> "TrainingSession":
        """End this session, and begin the next, of a source that is longer or was cut. Collective.

        Args:
            source: The source.
            layout: Of its samples: the rows that were known before keep their slots.

        Raises:
            ValueError: If a batch is more than a replica's rows.
            DataioError: If the cache cannot be used.
        """
        self.close()
        return TrainingSession(
            self.arguments, self.world, source, self.fields, layout,
            self.exclusion.of(layout.num_samples), self.lasting, earlier=self,
        )  # fmt: skip

    def most_steps(self, num_done: int = 0) -> int:
        """Count the steps of an epoch that shows each row not done; see `Loader.max_steps`."""
        arguments, layout, exclusion = self.arguments, self.layout, self.exclusion
        dealt = deal(layout.num_samples, layout.num_replicas)
        if isinstance(arguments.importance, DrawsRows):
            gone = {"num_excluded": exclusion.num_excluded} if exclusion.num_excluded else {}
            num_drawn = arguments.importance.num_drawn(layout.num_samples, **gone)
            dealt = deal(num_drawn, layout.num_replicas)
        elif exclusion.num_excluded and self.placements.shuffle.holds_all:
            dealt = deal(exclusion.num_left, layout.num_replicas)
        elif exclusion.num_excluded and not (self.placements.num_leaving or layout.earlier):
            dealt = deal_all(exclusion.left_in_pools(layout), layout.replicas)
        left = dealt - num_done // layout.num_replicas
        return num_steps(left, arguments.batch_size, drop_last=arguments.drop_last)

    def open_evaluation(
        self,
        source: Openable,
        fields: Mapping[str, Field] | None,
        *,
        classes: Classes,
        transform: Transform | None,
        batch_transform: BatchTransform | None,
        collate: Collate | None,
    ) -> Evaluation:
        """Open another dataset, with the loader's fields or its own. Collective.

        Raises:
            SourceError: If its classes are not those of training; see `Loader.evaluation`.
            ValueError: If the loader's fields draw crops, flips or patches, or the fields are cut
                into other numbers of tiles than the loader's.
        """
        if fields is None:
            check_draws_nothing(self.lasting.opener.fields)
        given = self.lasting.opener.fields if fields is None else fields
        num_tiles = 0 if self.lasting.tiles is None else self.lasting.tiles.num_tiles
        for name, field in given.items():
            cut = field.tiles if isinstance(field, Array) else None
            if cut is not None and cut.num_tiles != num_tiles:
                raise ValueError(
                    f"evaluation: field {name!r} is cut into {cut.num_tiles} tiles, and those of "
                    f"the loader into {num_tiles or 'none'}, expected as many, of which each rank "
                    "holds the one it trains; give as many, or leave tiles out"
                )
        arguments = replace(
            self.arguments, fields=given, transform=transform, batch_transform=batch_transform,
            collate=collate,
        )  # fmt: skip
        trained = {} if classes == "own" else self.lasting.opener.class_names(self.source)
        opened, stored = replace(self.lasting.opener, fields=given).open(
            source, trained=trained, classes=classes
        )
        return Evaluation(
            opened,
            self.fields if fields is None else stored,
            _to_evaluate(arguments),
            self.world,
            root=self.lasting.opener.root,
            delivery=self.lasting.delivery,
        )

    def close(self) -> None:
        """Stop threads, without the other ranks, and let go of the cache; idempotent."""
        self.feed.stop()
        self.moves.stop()
        super().close()


def check_draws_nothing(fields: Mapping[str, Field]) -> None:
    """Refuse to evaluate by fields of training that draw, or raise ValueError."""
    for name, field in fields.items():
        if isinstance(field, Array | Image | Mask) and field.draws:
            raise ValueError(
                f"evaluation: field {name!r} of the loader draws a crop, a flip or a patch, "
                "expected none where a model is measured; give fields=, such as Array(...) or "
                "Image(..., resize=ResizeShort(256), crop=CenterCrop(224)), or these themselves"
            )


def _to_evaluate(arguments: Arguments) -> Arguments:
    """Leave out what is of training alone."""
    # Without a transform of its own there is nothing that would hold the interpreter.
    processes = arguments.workers.processes if arguments.transform is not None else 0
    return replace(
        arguments, cache=replace(arguments.cache, quota=None), importance=None, exclude=None,
        workers=replace(arguments.workers, processes=processes),
    )  # fmt: skip


def open_evaluation_alone(
    arguments: Arguments, source: Openable, world: World, *, classes: Classes
) -> Evaluation:
    """Open a dataset to evaluate on, and stage no row of training. Collective.

    Args:
        arguments: Of a loader; fields and transforms are the evaluation's own.
        source: The dataset.
        world: All ranks.
        classes: As of `Loader.evaluation`.

    Raises:
        DataioError: If one of both sources, or the cache, cannot be used.
    """
    root = cache_directory(os.fspath(arguments.cache.path), read_only=True)
    opener = Opener(root, dict(arguments.fields), arguments.staging.transform, world)
    trained = {}
    if classes != "own":
        trained = opener.class_names(opener.open(arguments.source)[0])
    opened, stored = opener.open(source, trained=trained, classes=classes)
    delivery = DeviceDelivery(find_device(arguments.device))
    return Evaluation(opened, stored, _to_evaluate(arguments), world, root=root, delivery=delivery)


def begin_training(arguments: Arguments, world: World) -> tuple[TrainingSession, RowLog | None]:
    """Open source and cache, and stage the rows unless training begins before. Collective.

    Returns:
        The session, and the log of which rows are trained, if one is asked for.

    Raises:
        ValueError: If an argument does not go with the source, or the world.
        DataioError: If the source or the cache cannot be used.
    """
    tiled = any(getattr(field, "tiles", None) for field in arguments.fields.values())
    try:
        return _begin(arguments, world)
    except OtherDatasetError as error:
        if tiled or not error.on_all_ranks:
            raise
    # Shards that another job has staged may have come since they were listed.
    return _begin(arguments, world)


def _begin(arguments: Arguments, world: World) -> tuple[TrainingSession, RowLog | None]:
    root = cache_directory(os.fspath(arguments.cache.path), read_only=True)
    tiles: TileRanks | None = None
    everyone = world
    if any(getattr(field, "tiles", None) for field in arguments.fields.values()):
        tiles = find_tile_ranks(arguments.fields, world)
        arguments, world = tiles.own(arguments), tiles.part
    opener = Opener(
        root, dict(arguments.fields), arguments.staging.transform, everyone,
        None if tiles is None else tiles.index,
    )  # fmt: skip
    may_lack = () if arguments.exclude is None else paths_among(arguments.exclude)
    source, fields = opener.open(arguments.source, may_lack=may_lack)
    if tiles is not None:
        arguments = replace(arguments, fields=fields)
        tiles.warn_of_reading(source, fields)
    given = arguments.reports.metrics
    metrics = Path(given) if given is not None else None
    if metrics is not None and world.rank == 0:
        check_metrics(metrics)
    layout = lay_out(source, world)
    check_batch_size(arguments.batch_size, layout)
    check_policy(arguments, source, fields)
    if isinstance(arguments.source, Shards) and arguments.source.grows:
        check_growth(arguments, source)
    exclusion = Exclusion(source.num_samples)
    if arguments.exclude is not None:
        exclusion = find_excluded(arguments.exclude, source, world)
        then = mask_documents(arguments.batch_transform, fields, source, exclusion, world)
        arguments = replace(arguments, batch_transform=then)
    if everyone.world_size > 1:
        check_agreement(agreed(arguments, source, fields, exclusion), everyone)
    if arguments.cache.copies > 1 and world.rank == 0 and not (
        layout.can_copy or arguments.shuffle_or_local.holds_all
    ):  # fmt: skip
        log.warning(
            "[rank 0] NodeCache: copies=2 on %d nodes of %d to %d ranks, expected two nodes or "
            "more of equally many: rows are held once, as with copies=1",
            layout.num_nodes, min(layout.replicas), layout.widest,
        )  # fmt: skip
    figures = Figures()
    lasting = Lasting(
        opener, DeviceDelivery(find_device(arguments.device)), figures,
        EpochLine(figures, source, world=world, metrics=metrics), world.open_channel(),
        world.open_channel() if arguments.cache.copies > 1 else -1, tiles,
    )  # fmt: skip
    with contextlib.ExitStack() as undo:
        training = TrainingSession(
            arguments, world, source, dict(fields), layout, exclusion, lasting
        )
        undo.callback(training.close)
        if exclusion.num_excluded and training.growing is None and not training.most_steps():
            raise ValueError(
                f"exclude: {exclusion.num_left} samples of {source.name} are left, and with "
                f"drop_last and batch_size {arguments.batch_size} some rank has no whole batch of "
                "them, expected one at least; exclude fewer, lower the batch size, or give "
                "drop_last=False"
            )
        # Of one that grows, nobody knows yet how many samples the first epoch has.
        if arguments.staging.when == "before" and training.growing is None:
            training.moves.stage()
        rowlog = None
        if arguments.reports.rows is not None and not (tiles is not None and tiles.index):
            rowlog = _open_rowlog(training, Path(arguments.reports.rows))
        undo.pop_all()
    return training, rowlog


def _open_rowlog(training: TrainingSession, directory: Path) -> RowLog:
    """Open the log of which rows are trained. Collective."""
    arguments, source = training.arguments, training.source
    shuffle, costs = arguments.shuffle_or_local, costs_of(source)
    setup = Setup(
        seed=arguments.seed, num_samples=source.num_samples, shuffle=repr(shuffle),
        importance="" if arguments.importance is None else repr(arguments.importance),
        holds_all=shuffle.holds_all, drop_last=arguments.drop_last,
        accumulate=arguments.reports.accumulate, source=source.name, made_as=source.made_as,
        fingerprint=source.fingerprint, costs="" if costs is None else digest(costs.tobytes()),
        order_version=ORDER_VERSION,
    )  # fmt: skip
    return RowLog(directory, setup, costs, training.world)


def identify(source: Source, arguments: Arguments) -> RunIdentity:
    """Say what a run over a source keeps, whoever goes on with it."""
    return RunIdentity(
        arguments.seed,
        source.num_samples,
        arguments.shuffle_or_local,
        *((source.digest,) if isinstance(source, GrowingSource) else ("", source.fingerprint)),
    )
