"""The ranks that hold the tiles of one sample: who holds which, and that all decide alike.

The ranks of one tile are a world of their own, in which a loader works as with a dataset of its
own. Which rows are trained when follows from the seed, the number of rows, the layout and the
scores. All these are the same for each tile, which is compared, not believed.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dataio.arguments import Arguments, check_agreement
from dataio.base.errors import WorldError
from dataio.base.sizes import format_bytes
from dataio.plan.policies import ByCost
from dataio.rows.fields import Array, Field
from dataio.source import Shards, Source
from dataio.source.base import ReadsTiles
from dataio.world import World

log = logging.getLogger(__name__)

MUCH_READ = 1.5
"""Times the bytes that a rank keeps of a sample; a source that reads more is warned of."""
SMALL_BYTES = 64 << 10
"""Of what is read of a sample at most so much, nobody is warned."""


@dataclass(frozen=True)
class TileRanks:
    """This rank's tile, and the ranks that it shares rows and samples with.

    Attributes:
        whole: The ranks of all tiles.
        part: Those of this tile; ``whole`` where there are no others.
        index: Number of this tile.
        num_tiles: Of a sample.
    """

    whole: World
    part: World
    index: int
    num_tiles: int

    def own(self, arguments: Arguments) -> Arguments:
        """Make of the arguments of all ranks those of this tile's: one tile alone writes reports.

        Raises:
            ValueError: If one does not go with tiles.
        """
        source, policy, staging = arguments.source, arguments.importance, arguments.staging
        by_cost = isinstance(policy, ByCost) and policy.by_cost
        for is_given, what, because, cure in (
            (arguments.cache.quota, "a quota", "other rows could stay of each tile",
             "give none: a tile takes its part of the bytes"),
            (arguments.on_error == "skip", 'on_error="skip"', "a row would be padding in one tile",
             'give on_error="raise", and exclude='),
            (staging.transform, "Staging(transform=...)", "it may change what a tile is",
             "give it as transform="),
            (isinstance(source, Shards) and source.grows, "Shards(grows=True)",
             "tiles could see other shards", "give grows=False"),
            (by_cost, f"importance={policy}", "costs are measured on each rank",
             "give a policy that goes by losses"),
        ):  # fmt: skip
            if is_given:
                raise ValueError(
                    f"fields: tiles and {what} exclude one another, because {because}; {cure}"
                )
        reports, here = arguments.reports, self.whole.local_size
        if self.index:
            reports = replace(reports, metrics=None, progress=False)
        # Other tiles' ranks of the node read and decode, too; in a world without them, as many
        here *= 1 if self.whole is not self.part else self.num_tiles
        mine = staging.bytes_per_s * self.part.local_size / here
        workers = arguments.workers
        return replace(
            arguments, reports=reports, staging=replace(staging, bandwidth=mine),
            workers=replace(workers, threads=workers.num_threads(local_size=here)),
        )  # fmt: skip

    def warn_of_reading(self, source: Source, fields: Mapping[str, Field]) -> None:
        """Log it where much more of a sample must be read than a rank keeps of it."""
        for name, field in fields.items():
            if self.whole.rank or not isinstance(field, Array) or field.tiles is None:
                continue
            itemsize, box = np.dtype(field.dtype).itemsize, field.tiles.box(field.shape)
            kept = itemsize * prod(part.stop - part.start for part in box)
            read, cure = itemsize * prod(field.shape), "keep it in Zarr, HDF5 or .npy"
            if isinstance(source, ReadsTiles):
                read, cure = source.tile_bytes(field, field.tiles)
            if read > max(MUCH_READ * kept, SMALL_BYTES):
                log.warning(
                    "[rank 0] fields: of each sample's %r a rank keeps a tile of %s and has to "
                    "read about %s of %s, as it lies in %s; %s",
                    name, format_bytes(kept), format_bytes(read),
                    format_bytes(itemsize * prod(field.shape)), source.name, cure,
                )  # fmt: skip

    def check_same(self, found: Mapping[str, str], *, epoch: int) -> None:
        """Refuse to train other rows in a tile than in the others of a sample. Collective.

        Args:
            found: Digests of what must be the same on all ranks of a sample, by name.
            epoch: The epoch.

        Raises:
            WorldError: On all ranks, if they are not.
        """
        if self.whole is self.part:
            return
        mine = json.dumps([self.part.rank, self.index, found]).encode()
        everyone = self.whole.allgather(mine, doing="compare the tiles of a sample")
        first: dict[int, tuple[int, int, Mapping[str, str]]] = {}
        for rank, (place, index, theirs) in enumerate(map(json.loads, everyone)):
            other, its, expected = first.setdefault(place, (rank, index, theirs))
            if name := next((name for name in expected if theirs[name] != expected[name]), None):
                raise WorldError(
                    f"Loader: epoch {epoch}: rank {rank}, which holds tile {index}, has other "
                    f"{name} than rank {other}, which holds tile {its} of the same samples, "
                    "expected the same; report on each of them the same loss of a row, that of "
                    "the whole sample: add up what the tiles cost, by all_reduce, before "
                    "loader.report, and report each row on all or none",
                    on_all_ranks=True,
                )


def find_tile_ranks(fields: Mapping[str, Field], world: World) -> TileRanks:
    """Find which tile this rank holds, and who else does. Collective.

    Args:
        fields: As all ranks were given them, but for the index of their tiles; some have tiles.
        world: All ranks.

    Raises:
        ValueError: If the fields are cut into different numbers of tiles, or the number of ranks
            is no multiple of it.
        WorldError: On all ranks, if they do not agree, or the layout of a tile is another.
    """
    tiled = {
        name: field.tiles
        for name, field in fields.items()
        if isinstance(field, Array) and field.tiles is not None
    }
    given = {(tiles.num_tiles, tiles.index) for tiles in tiled.values()}
    if len(given) > 1:
        raise ValueError(
            f"fields: {tiled} are cut into different numbers of tiles, or have different indexes, "
            "expected the same of all that are cut; correct parts"
        )
    num_tiles, index = given.pop()
    if index is None:
        if world.world_size % num_tiles:
            raise ValueError(
                f"fields: samples are cut into {num_tiles} tiles, and there are "
                f"{world.world_size} ranks, expected a multiple of {num_tiles}; start as many, or "
                "cut into as many tiles as there are ranks for"
            )
        index = world.rank % num_tiles
    check_agreement({"tiles": repr(tiled)}, world)
    indexes = world.allgather_array(np.array([index]), doing="meet the ranks of all tiles")[:, 0]
    if (indexes == index).all():
        return TileRanks(world, world, index, num_tiles)
    held = [np.flatnonzero(indexes == tile).tolist() for tile in range(num_tiles)]
    nodes = [[world.topology.node_of_rank[rank] for rank in ranks] for ranks in held]
    # Which of a tile's ranks share a node, whatever node it is
    layouts = [[each.index(node) for node in each] for each in nodes]
    if other := next((tile for tile in range(num_tiles) if layouts[tile] != layouts[0]), None):
        raise WorldError(
            f"Loader: the ranks {held[0]} of tile 0 are on the nodes {nodes[0]}, and the ranks "
            f"{held[other]} of tile {other} on {nodes[other]}, expected as many, divided among "
            f"nodes in the same way, so that all tiles have one order; start a multiple of "
            f"{num_tiles} ranks on each node, or on each the ranks of as many tiles",
            on_all_ranks=True,
        )
    ranks = tuple(held[index])
    if taken := next((made for made in world.parts if made != ranks), ()):
        raise WorldError(
            f"Loader: rank {world.rank} holds a tile with the ranks {ranks}, and had the part "
            f"{taken} of this world before, expected one; cut all samples into as many tiles"
        )
    return TileRanks(world, world.part(ranks), index, num_tiles)
