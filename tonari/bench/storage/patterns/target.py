"""A directory under measurement: what it lies on, the files in it, and that all see the same."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dataio.world import World
from tonari.bench.errors import BenchError
from tonari.bench.storage.patterns.calls import takes_direct
from tonari.bench.storage.patterns.files import Footprint, OwnFiles, check_directory, check_room
from tonari.bench.storage.patterns.together import agree, explain
from tonari.bench.storage.results.results import Tier
from tonari.bench.storage.site.site import Site, describe_site

VISIBLE_S = 10.0
"""What one node wrote, another sees within this time: clients keep names for seconds."""


@dataclass(frozen=True, kw_only=True)
class OpenTarget:
    """A directory under measurement, as one rank sees it.

    Attributes:
        tier: Whether all ranks share it.
        files: The benchmark's own in it.
        site: What it lies on, seen from this node.
        sites: By node, without layouts.
        takes_direct: Whether files in it can be read with O_DIRECT.
    """

    tier: Tier
    files: OwnFiles
    site: Site
    sites: Sequence[Site]
    takes_direct: bool


@contextlib.contextmanager
def open_target(
    world: World, directory: Path, tier: Tier, *, name: str, footprint: Footprint, seed: int
) -> Iterator[OpenTarget]:
    """Write files into a directory, and remove them however the block ends. Collective.

    Args:
        world: All ranks.
        directory: That exists.
        tier: ``"shared"``: ranks read the files of the next node's ranks, and must see the same
            directory; ``"local"``: each reads its own.
        name: Of the benchmark's directory in it.
        footprint: Of each rank.
        seed: Of the contents.

    Raises:
        TogetherError: If any rank cannot use the directory, or sees another one.
    """
    theirs = partner(world) if tier == "shared" else world.rank
    files = OwnFiles(directory / name, rank=world.rank, theirs=theirs, footprint=footprint)
    site = agree(world, lambda: _look(world, directory, tier, footprint), doing="looking at it")
    # Layouts may be long, and no verdict rests on them.
    mine = msgspec.json.encode(replace(site, layout=None))
    received = world.allgather(mine, doing="comparing sites")
    sites = [msgspec.json.decode(text, type=Site) for text in received]
    try:
        if tier == "shared":
            check_same(world, files)
        agree(world, lambda: files.write(seed), doing=f"writing files ({tier})")
        direct = agree(
            world, lambda: takes_direct(files.shard(world.rank)), doing="trying O_DIRECT"
        )
        yield OpenTarget(
            tier=tier, files=files, site=site, takes_direct=direct,
            sites=[sites[ranks[0]] for ranks in world.topology.ranks_of_node],
        )  # fmt: skip
        # Together, as it takes long where metadata is slow.
        agree(world, files.remove_own, doing=f"removing files ({tier})")
    finally:
        files.remove_all()


def partner(world: World) -> int:
    """Choose the rank whose files this one reads: of the next node, if there is another."""
    ranks = world.topology.ranks_of_node[(world.node + 1) % world.num_nodes]
    return ranks[world.local_rank % len(ranks)] if world.num_nodes > 1 else world.rank


def check_same(world: World, files: OwnFiles) -> None:
    """Make sure that all ranks see one directory, by what they write into it. Collective.

    Device numbers do not show it: they differ between nodes that see the same files.

    Raises:
        TogetherError: If a rank does not see what the first rank of a node wrote.
    """
    firsts = [ranks[0] for ranks in world.topology.ranks_of_node]
    token = time.time_ns().to_bytes(8, "big").hex() + f" of rank {world.rank}"

    def write() -> None:
        try:
            files.root.mkdir(mode=0o700, exist_ok=True)
            if world.rank in firsts:
                _token(files, world.rank).write_text(token)
        except OSError as error:
            raise explain(files.root, "making the benchmark's own directory", error) from error

    agree(world, write, doing="writing a token")
    tokens = [text.decode() for text in world.allgather(token.encode(), doing="exchanging tokens")]

    def look() -> None:
        until = time.monotonic() + VISIBLE_S
        for rank in firsts:
            while _seen(_token(files, rank)) != tokens[rank]:
                if time.monotonic() > until:
                    raise BenchError(
                        f"{files.root.parent}: does not hold what rank {rank} (node "
                        f"{world.topology.node_of_rank[rank]}) has written into its directory of "
                        "that name; expected one directory that all ranks see: name one on a "
                        "filesystem that every node has mounted, or measure on one node"
                    )
                time.sleep(0.1)

    agree(world, look, doing="comparing directories")
    if world.rank in firsts:
        _token(files, world.rank).unlink(missing_ok=True)


def _token(files: OwnFiles, rank: int) -> Path:
    return files.root / f"token-{rank}"


def _seen(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _look(world: World, directory: Path, tier: Tier, footprint: Footprint) -> Site:
    check_directory(directory)
    writers = world.world_size if tier == "shared" else world.local_size
    check_room(directory, writers * footprint.total_bytes)
    return describe_site(directory)
