"""What a machine has, from a TOML file: levels of links, processors, storage."""

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dataio.base import toml
from tonari.names import EXAMPLES
from tonari.oracle.errors import OracleError

EXAMPLE = EXAMPLES / "clusters/gigabit.toml"

Count = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Level(_Table, frozen=True, kw_only=True):
    """Units that are joined by links, such as the ranks of a node, or the nodes of a rack.

    Attributes:
        name: Such as ``"node"``.
        units: Of the level below, in one of this; of the innermost level they are ranks.
        gbyte_s: Of the link from each unit into this level, each way, in 1e9 bytes/s; None: not
            the limit there, such as among processes of one node that were probed.
        latency_us: Of a message between two units.
    """

    name: str
    units: Count
    gbyte_s: Rate | None = None
    latency_us: NotNegative = 0.0


class Device(_Table, frozen=True, kw_only=True):
    """What a rank computes on, for jobs that no probe was made of.

    Attributes:
        tflops: Of products in the precision that is trained in, in 1e12 operations/s.
        efficiency: Share of these that large products attain.
        memory_gbyte_s: Of its memory, in 1e9 bytes/s.
        memory_gib: Its size, in GiB.
        launch_us: That an operator takes at least.
    """

    tflops: Rate
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.6
    memory_gbyte_s: Rate
    memory_gib: Rate
    launch_us: NotNegative = 4.0


class Host(_Table, frozen=True, kw_only=True):
    """What a node has beside its devices; None: not the limit.

    Attributes:
        cores: Of its processors, that its ranks and their loaders may use.
        decode_mbyte_s: Of rows as they are stored, that a core decodes and transforms, in 1e6
            bytes/s; of a probe's data, the probe knows better.
        memory_gib: Of the node, in GiB.
        memory_gbyte_s: Of its memory, in 1e9 bytes/s, by all ranks together.
        device_gbyte_s: Between the host and each device, each way, in 1e9 bytes/s.
    """

    cores: Count | None = None
    decode_mbyte_s: Rate | None = None
    memory_gib: Rate | None = None
    memory_gbyte_s: Rate | None = None
    device_gbyte_s: Rate | None = None

    @property
    def memory_bytes(self) -> float | None:
        """The node's memory; None: not known."""
        return None if self.memory_gib is None else self.memory_gib * 2**30


class StorageRates(_Table, frozen=True, kw_only=True):
    """Where data and checkpoints lie, in 1e9 bytes/s; None: not the limit.

    Attributes:
        read_gbyte_s: Of the shared filesystem, by all nodes together.
        write_gbyte_s: To it, by all nodes together.
        node_read_gbyte_s: That one node reads from it.
        node_write_gbyte_s: That one node writes to it.
        disk_write_gbyte_s: To a node's own disk.
        disk_read_gbyte_s: From a node's own disk.
        disk_gbyte: That caches may take of it, in 1e9 bytes.
    """

    read_gbyte_s: Rate | None = None
    write_gbyte_s: Rate | None = None
    node_read_gbyte_s: Rate | None = None
    node_write_gbyte_s: Rate | None = None
    disk_write_gbyte_s: Rate | None = None
    disk_read_gbyte_s: Rate | None = None
    disk_gbyte: Rate | None = None


class Cluster(_Table, frozen=True, kw_only=True):
    """A machine, or the part of it that a job would get. Ranks lie in it in their order.

    Attributes:
        name: For people.
        level: The innermost first: it is a node.
        device: None: what ranks compute must have been probed.
        host: What else is known of a node.
        storage: What is known of it.
    """

    name: str
    level: Annotated[tuple[Level, ...], Meta(min_length=1)]
    device: Device | None = None
    host: Host = Host()
    storage: StorageRates = StorageRates()

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return self.level[0].units

    @property
    def world_size(self) -> int:
        """Ranks of all of it."""
        return self.spans()[-1]

    def spans(self) -> tuple[int, ...]:
        """Count the ranks in one unit below each level, and in all: int[levels + 1]."""
        spans = [1]
        for level in self.level:
            spans.append(spans[-1] * level.units)
        return tuple(spans)

    def num_nodes(self, world_size: int) -> int:
        """Count the nodes that so many ranks are on.

        Raises:
            OracleError: If they do not fit, or leave a node partly empty.
        """
        if world_size > self.world_size:
            raise OracleError(
                f'"{self.name}" has {self.world_size} ranks, fewer than the {world_size} of the '
                "job; give its levels more units, or the job fewer ranks"
            )
        if world_size > self.ranks_per_node and world_size % self.ranks_per_node:
            raise OracleError(
                f'{world_size} ranks do not fill nodes of {self.ranks_per_node} ("{self.name}"); '
                f"give a multiple of {self.ranks_per_node}"
            )
        return math.ceil(world_size / self.ranks_per_node)


def load_cluster(path: Path) -> Cluster:
    """Read a machine's file, such as those in ``examples/clusters``.

    Raises:
        OracleError: If it cannot be read, a key is unknown or missing, a value is out of range, or
            the name of a level is taken.
    """
    try:
        tables = toml.loads(path.read_text())
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise OracleError(
            f"{path}: cannot be read as TOML: {error}; give a file like {EXAMPLE}"
        ) from error
    try:
        found = msgspec.convert(tables, Cluster)
    except msgspec.ValidationError as error:
        raise OracleError(f"{path}: {error}; correct it, {EXAMPLE} shows every table") from error
    # A simulation counts what is wanted of a link by its level's name, and of processors by "cores"
    taken = {"cores"}
    for level in found.level:
        if level.name in taken:
            raise OracleError(
                f'{path}: level "{level.name}" has a name that is taken, by a level below it or by '
                "the processors of a node; give each level a name of its own, other than cores"
            )
        taken.add(level.name)
    for number, level in enumerate(found.level[1:], 1):
        if level.gbyte_s is None:
            raise OracleError(
                f'{path}: level "{level.name}" has no gbyte_s; give what the link of each '
                f"{found.level[number - 1].name} into it carries each way, in 1e9 bytes a second"
            )
    return found
