"""What a loader is made of: its arguments become an opened source, an open cache, and the rest."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dataio.arguments import (
    Arguments,
    check_agreement,
    check_batch_size,
    check_growth,
    check_policy,
    find_device,
)
from dataio.base.digest import digest
from dataio.base.errors import StateError
from dataio.base.filesystem import cache_directory
from dataio.base.seeding import ORDER_VERSION
from dataio.batch.deliver import Delivery
from dataio.batch.epoch_line import EpochLine
from dataio.batch.feed import Feed
from dataio.batch.figures import Figures
from dataio.batch.gather import Gather
from dataio.batch.meter import Meter
from dataio.evaluation import Evaluation, Transforms
from dataio.excluding import find_excluded
from dataio.opening import Openable, Opener
from dataio.plan.dealer import Dealer
from dataio.plan.epoch import SamplingGroups, find_sampling_groups
from dataio.plan.exclusion import Exclusion
from dataio.plan.layout import Layout
from dataio.plan.order import deal, deal_all, num_steps
from dataio.plan.placement import Placements
from dataio.plan.policies import Drawing, Shuffle
from dataio.pool.field_reader import FieldReader
from dataio.pool.moves import Moves
from dataio.pool.pool import Pool, lay_out
from dataio.rowlog.attempts import Setup
from dataio.rowlog.log import RowLog
from dataio.rows.fields import Field
from dataio.rows.image import Image, Mask
from dataio.source import Source
from dataio.source.base import costs_of, place_of
from dataio.source.classes import Classes
from dataio.source.wrap.growing import GrowingSource
from dataio.state.metrics import check_metrics
from dataio.state.report import Feedback
from dataio.state.reported import Reported
from dataio.state.resume import RunIdentity
from dataio.world import World


@dataclass(frozen=True)
class Parts:
    """What a loader is made of.

    Attributes:
        arguments: What it was told.
        world: All ranks.
        opener: Opens sources of samples with the same fields.
        source: Where the rows come from.
        fields: What is kept of a sample, as rows are stored.
        layout: Replicas and samples.
        exclusion: Samples that no epoch shows.
        identity: What the run keeps, whoever goes on with it.
        sampling: All sampling groups, and this replica's place.
        dealer: Deals the replica its rows of an epoch.
        placements: Which node holds which row, as far as the seed tells.
        pool: The node's rows.
        moves: Takes them from one epoch's placement to the next.
        first_tag: Of messages about rows that move.
        feedback: Takes reports into the scores.
        reported: Misses reports.
        gather: Makes batches.
        delivery: Takes them to the device.
        feed: Both, step by step.
        figures: What is measured.
        line: What is told of an epoch.
        rowlog: Notes which rows are trained; None: nothing does.
    """

    arguments: Arguments
    world: World
    opener: Opener
    source: Source
    fields: dict[str, Field]
    layout: Layout
    exclusion: Exclusion
    identity: RunIdentity
    sampling: SamplingGroups
    dealer: Dealer
    placements: Placements
    pool: Pool
    moves: Moves
    first_tag: int
    feedback: Feedback
    reported: Reported
    gather: Gather
    delivery: Delivery
    feed: Feed
    figures: Figures
    line: EpochLine
    rowlog: RowLog | None = None

    @property
    def grows(self) -> bool:
        """Whether samples may come to the source."""
        return isinstance(self.source, GrowingSource)

    def most_steps(self) -> int:
        """Count the steps of an epoch that shows every row; see `Loader.max_steps`."""
        arguments, layout, exclusion = self.arguments, self.layout, self.exclusion
        dealt = deal(layout.num_samples, layout.num_replicas)
        if isinstance(arguments.importance, Drawing):
            gone = {"num_excluded": exclusion.num_excluded} if exclusion.num_excluded else {}
            num_drawn = arguments.importance.num_drawn(layout.num_samples, **gone)
            dealt = deal(num_drawn, layout.num_replicas)
        elif exclusion.num_excluded and self.placements.shuffle.holds_all:
            dealt = deal(exclusion.num_left, layout.num_replicas)
        elif exclusion.num_excluded and not (self.placements.num_leaving or layout.earlier):
            dealt = deal_all(exclusion.left_in_pools(layout), layout.replicas)
        return num_steps(dealt, arguments.batch_size, drop_last=arguments.drop_last)

    def open_evaluation(
        self,
        source: Openable,
        fields: Mapping[str, Field] | None,
        transforms: Transforms,
        *,
        classes: Classes,
    ) -> Evaluation:
        """Open another dataset, with the loader's fields or its own. Collective.

        Raises:
            SourceError: If its classes are not those of training; see `Loader.evaluation`.
            ValueError: If the loader's fields draw crops or flips.
        """
        own = self.opener.fields.items()
        drawn = [name for name, field in own if isinstance(field, Image | Mask) and field.draws]
        if fields is None and drawn:
            raise ValueError(
                f"evaluation: field {drawn[0]!r} of the loader draws a crop or a flip, expected "
                "none where a model is measured; give fields=, such as Image(..., "
                "resize=ResizeShort(256), crop=CenterCrop(224)), or these fields themselves"
            )
        given = self.opener.fields if fields is None else fields
        trained = {} if classes == "own" else self.opener.class_names(self.source)
        opened, stored = replace(self.opener, fields=given).open(
            source, trained=trained, classes=classes
        )
        arguments = self.arguments
        return Evaluation(
            opened,
            self.fields if fields is None else stored,
            seed=arguments.seed,
            transforms=transforms,
            batch_size=arguments.batch_size,
            world=self.world,
            root=self.opener.root,
            foreign=arguments.foreign,
            staging=arguments.staging,
            workers=arguments.workers,
            reports=arguments.reports,
            verify=arguments.cache.verify,
            on_error=arguments.on_error,
            delivery=self.delivery,
        )


def build_parts(arguments: Arguments, world: World) -> Parts:
    """Open source and cache, and stage the rows unless training begins before. Collective.

    Raises:
        ValueError: If an argument does not go with the source, or the world.
        DataioError: If the source or the cache cannot be used.
    """
    shuffle, seed = arguments.shuffle_or_local, arguments.seed
    root = cache_directory(os.fspath(arguments.cache.path), read_only=True)
    opener = Opener(root, dict(arguments.fields), arguments.staging.transform, world)
    source, stored = opener.open(arguments.source)
    fields = dict(stored)
    metrics = Path(told) if (told := arguments.reports.metrics) is not None else None
    if metrics is not None and world.rank == 0:
        check_metrics(metrics)
    layout = lay_out(source, world)
    check_batch_size(arguments.batch_size, layout)
    check_policy(arguments, source, fields)
    check_growth(arguments, source)
    exclusion = find_excluded(arguments.exclude, source, world)
    check_agreement(arguments.agreed(source, fields, exclusion), world)
    identity = identify(source, seed=seed, shuffle=shuffle)
    parts = _assemble(
        arguments, world, opener, source, fields, layout, exclusion, identity,
        first_tag=world.open_channel(), figures=(figures := Figures()),
        delivery=Delivery(find_device(arguments.device)),
        line=EpochLine(figures, source, world=world, metrics=metrics),
    )  # fmt: skip
    if exclusion.num_excluded and not parts.grows and not parts.most_steps():
        release(parts)
        raise ValueError(
            f"exclude: {exclusion.num_left} samples of {source.name} are left, and with drop_last "
            f"and batch_size {arguments.batch_size} some rank has no whole batch of them, expected "
            "one at least; exclude fewer, lower the batch size, or give drop_last=False"
        )
    # Of one that grows, nobody knows yet how many samples the first epoch has.
    if arguments.staging.when == "before" and not parts.grows:
        with contextlib.ExitStack() as undo:
            undo.callback(release, parts)
            parts.moves.stage()
            undo.pop_all()
    return replace(parts, rowlog=_open_rowlog(parts))


def _open_rowlog(parts: Parts) -> RowLog | None:
    """Open the log of which rows are trained, if one is asked for. Collective."""
    arguments, source = parts.arguments, parts.source
    if arguments.reports.rows is None:
        return None
    shuffle, costs = arguments.shuffle_or_local, costs_of(source)
    setup = Setup(
        seed=arguments.seed, num_samples=source.num_samples, shuffle=repr(shuffle),
        importance="" if arguments.importance is None else repr(arguments.importance),
        holds_all=shuffle.holds_all, drop_last=arguments.drop_last,
        accumulate=arguments.reports.accumulate, source=source.name, made_as=source.made_as,
        fingerprint=source.fingerprint, costs="" if costs is None else digest(costs.tobytes()),
        order_version=ORDER_VERSION,
    )  # fmt: skip
    try:
        return RowLog(Path(arguments.reports.rows), setup, costs, parts.world)
    except StateError:
        release(parts)
        raise


def identify(source: Source, *, seed: int, shuffle: Shuffle) -> RunIdentity:
    """Tell what a run over a source keeps, whoever goes on with it."""
    shards = source.digest if isinstance(source, GrowingSource) else ""
    return RunIdentity(seed, source.num_samples, shuffle, shards)


def with_layout(parts: Parts, source: Source, layout: Layout) -> Parts:
    """Make the parts anew for a source that has become longer, or is cut. Collective.

    The old ones are released. Pool and scores are empty until they are filled.

    Args:
        parts: Of the same source, while it had other samples.
        source: The source.
        layout: Of its samples.

    Raises:
        ValueError: If a batch is more than a replica's rows.
        DataioError: If the cache cannot be used.
    """
    arguments, old = parts.arguments, parts.pool
    check_batch_size(arguments.batch_size, layout)
    release(parts)
    identity = identify(source, seed=arguments.seed, shuffle=arguments.shuffle_or_local)
    made = _assemble(
        arguments, parts.world, parts.opener, source, parts.fields, layout,
        parts.exclusion.of(layout.num_samples), identity,
        first_tag=parts.first_tag, figures=parts.figures, delivery=parts.delivery, line=parts.line,
    )  # fmt: skip
    made.pool.go_on_from(old)
    made.reported.go_on_from(parts.reported)
    made.feedback.num_lost = parts.feedback.num_lost
    made.feed.take = parts.feed.take
    return replace(made, rowlog=parts.rowlog)


def release(parts: Parts) -> None:
    """Stop the parts' threads and let go of the cache; idempotent."""
    parts.feed.stop()
    parts.moves.stop()
    parts.gather.close()
    parts.pool.close()


def _assemble(
    arguments: Arguments,
    world: World,
    opener: Opener,
    source: Source,
    fields: dict[str, Field],
    layout: Layout,
    exclusion: Exclusion,
    identity: RunIdentity,
    *,
    first_tag: int,
    figures: Figures,
    delivery: Delivery,
    line: EpochLine,
) -> Parts:
    """Open the cache, and put together what depends on the number of samples. Collective."""
    shuffle, seed = arguments.shuffle_or_local, arguments.seed
    sampling = find_sampling_groups(layout, replica=world.replica, holds_all=shuffle.holds_all)
    placements = Placements(
        shuffle, layout, world.node, sampling.num_rows, seed, shuffle.num_leaving(layout)
    )
    # Whoever catches an error may try again in this process: the cache must not stay locked.
    with contextlib.ExitStack() as undo:
        pool = _open_pool(arguments, source, fields, opener.root, placements, world)
        undo.callback(pool.close)
        feedback = Feedback(pool.scores, pool.ids_in, rank=world.rank)
        reported = Reported(feedback, world, arguments.importance, keeps_scores=pool.keeps_scores)
        gather = _start_gather(arguments, source, pool, fields, delivery, world, exclusion)
        undo.callback(gather.close)
        dealer = Dealer(
            sampling, world=world, importance=arguments.importance, seed=seed,
            batch_size=arguments.batch_size, drop_last=arguments.drop_last,
            by_field=FieldReader(pool, num_samples=layout.num_samples, holds_all=shuffle.holds_all),
            costs=costs_of(source), exclusion=exclusion, meter=Meter(pool, gather, figures),
        )  # fmt: skip
        parts = Parts(
            arguments, world, opener, source, fields, layout, exclusion, identity, sampling, dealer,
            placements, pool, Moves(pool, placements, first_tag=first_tag), first_tag, feedback,
            reported, gather, delivery, Feed(pool, gather, delivery, figures=figures), figures,
            line,
        )  # fmt: skip
        undo.pop_all()
    return parts


def _open_pool(
    arguments: Arguments,
    source: Source,
    fields: Mapping[str, Field],
    root: Path,
    placements: Placements,
    world: World,
) -> Pool:
    importance, num_leaving = arguments.importance, placements.num_leaving
    return Pool(
        source,
        fields,
        world=world,
        root=root,
        num_slots=placements.num_slots,
        num_leaving=num_leaving,
        progress=arguments.reports.progress,
        wanted=None if num_leaving else placements.of(0, first_epoch=0),
        columns=importance.columns if importance is not None else (),
        foreign=arguments.foreign,
        readers=arguments.staging.readers,
        bandwidth=arguments.staging.bytes_per_s,
        check=arguments.staging.check,
        skips=arguments.on_error == "skip",
        quota_bytes=arguments.cache.quota_bytes,
        batch_size=arguments.batch_size,
    )


def _start_gather(
    arguments: Arguments,
    source: Source,
    pool: Pool,
    fields: Mapping[str, Field],
    delivery: Delivery,
    world: World,
    exclusion: Exclusion,
) -> Gather:
    return Gather(
        pool.cache,
        fields,
        num_threads=arguments.workers.num_threads(local_size=world.local_size),
        transform=arguments.transform,
        batch_transform=arguments.batch_transform,
        seed=arguments.seed,
        replica=world.replica,
        prefetch=arguments.workers.prefetch,
        timeout_s=world.timeout_s,
        num_processes=arguments.workers.processes,
        collate=arguments.collate,
        verify=arguments.cache.verify,
        on_error=arguments.on_error,
        repair=pool.repair,
        pinned=delivery.pinned,
        place_of=partial(place_of, source),
        begin=partial(pool.raise_refused, exclusion.flags),
        trusts_pictures=arguments.staging.check == "none",
    )
