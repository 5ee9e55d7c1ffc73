"""Who is where, and a few verbs between ranks: a transport plus a topology."""

import struct
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from dataio.base.checked import checked
from dataio.base.errors import StallError, WorldError
from dataio.world.base import Bytes, PartTransport, Request, Transport
from dataio.world.collectives import NUM_USER_TAGS, Collectives
from dataio.world.topology import Topology

Element = TypeVar("Element", bound=np.generic)
Operation = Literal["sum", "max", "min"]
CHANNEL_TAGS = 4096
"""Tags of one channel; 256 channels fit, half of them in a world, a quarter in its parts."""

NUM_CHANNELS = NUM_USER_TAGS // CHANNEL_TAGS // 2

UFUNCS: dict[Operation, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@checked
class World:
    """The ranks of a job, seen from one of them. Used by one thread at a time.

    Where it is ``threaded``, other threads may send, receive and test meanwhile, each its own
    requests; collectives stay with one thread.

    ``allgather``, ``allgather_array``, ``allreduce`` and ``barrier`` are collective: every rank
    calls them in the same order with the same ``doing``, a few words such as ``"agreeing on the
    epoch"`` that errors repeat. They block until all ranks came, ``timeout_s`` at most, and raise
    ``StallError`` then, ``WorldError`` if the ranks' calls differ.

    Args:
        transport: Moves bytes between ranks.
        topology: The node of every rank.
        timeout_s: Longest wait for another rank, > 0.
        names: Number of each rank in messages, where the job numbers them otherwise.

    Attributes:
        threaded: Whether several threads may send, receive and test at once.
        local_rank: This rank's number on its node.
        local_size: Ranks on this node.
        replicas_per_node: Replicas on each node.
        parts: Worlds of some of its ranks, by these.
    """

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        *,
        timeout_s: float = 300.0,
        names: Sequence[int] | None = None,
    ) -> None:
        if topology.world_size != transport.world_size:
            raise ValueError(
                f"world: the topology has {topology.world_size} ranks, the transport "
                f"{transport.world_size}"
            )
        if not timeout_s > 0:
            raise ValueError(f"world: timeout_s is {timeout_s}, must be > 0")
        self._transport = transport
        self.topology = topology
        self.rank, self.world_size = transport.rank, transport.world_size
        self.threaded = transport.threaded
        self.node = topology.node_of_rank[self.rank]
        self.num_nodes = topology.num_nodes
        self.local_rank = topology.local_rank(self.rank)
        self.local_size = topology.layout[self.node]
        self.replica = topology.replica_of_rank[self.rank]
        self.num_replicas = len(topology.rank_of_replica)
        self.replicas_per_node = topology.layout
        self.timeout_s = timeout_s
        self._names = tuple(range(transport.world_size)) if names is None else tuple(names)
        self._collectives = Collectives(transport, timeout_s=timeout_s, names=self._names)
        self._channels = range(NUM_CHANNELS)
        self._num_channels = 0
        self.parts: dict[tuple[int, ...], World] = {}
        self._kept: list[object] = []

    def rank_of_replica(self, replica: int) -> int:
        return self.topology.rank_of_replica[replica]

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        """Start to send at least one byte. ``data`` must stay unchanged until the request is done.

        Args:
            data: uint8[num_bytes], contiguous.
            dest: Another rank.
            tag: In [0, 2**20).
        """
        self._check(data, peer=dest, tag=tag)
        return self._transport.isend(data, dest=dest, tag=tag)

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        """Start to receive exactly ``len(into)`` bytes; one (source, tag) keeps its order."""
        self._check(into, peer=source, tag=tag)
        if not into.flags.writeable:
            raise ValueError("world: cannot receive into a read-only array")
        return self._transport.irecv(into, source=source, tag=tag)

    def keep(self, holder: object) -> None:
        """Keep alive what holds abandoned requests: the medium may still write into buffers."""
        self._kept.append(holder)

    def open_channel(self) -> int:
        """Reserve CHANNEL_TAGS tags for one user of this world, such as one of several loaders.

        Collective in that all ranks open their channels in the same order; nothing is sent.

        Returns:
            The first tag.

        Raises:
            WorldError: If all channels are taken.
        """
        if self._num_channels == len(self._channels):
            raise WorldError(
                f"[rank {self.rank}] world: {self._num_channels} channels are open, there are no "
                f"more; make loaders once, not once an epoch"
            )
        first = self._channels[self._num_channels] * CHANNEL_TAGS
        self._num_channels += 1
        return first

    def part(self, ranks: Sequence[int]) -> "World":
        """Make a world of some ranks, this one among them, such as those that read the data.

        Its nodes are those that have such ranks, its ranks are numbered anew in the same order. Its
        calls and this world's must come in the same order on all ranks that make both. An abort
        still ends the whole job. Parts of one world must not share ranks, unless they are the same:
        then it is made once. A part may have parts, and those of its own.

        Args:
            ranks: Of this world, ascending.
        """
        if tuple(ranks) in self.parts:
            return self.parts[tuple(ranks)]
        whole = self.topology
        nodes = [str(whole.node_of_rank[rank]) for rank in ranks]
        racks = [whole.racks[rank] for rank in ranks if whole.racks]
        made = World(
            PartTransport(self._transport, ranks),
            Topology.from_names(nodes, by_host=whole.by_host, racks=racks),
            timeout_s=self.timeout_s,
            names=[self._names[rank] for rank in ranks],
        )
        # Half of what no world around it opens
        first = self._channels.stop
        made._channels = range(first, (first + 2 * NUM_CHANNELS) // 2)
        self.parts[tuple(ranks)] = made
        return made

    def wait(
        self,
        requests: Sequence[Request],
        *,
        peers: Sequence[int],
        doing: str,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until all requests are done. Blocks for the other ranks.

        Args:
            requests: Sends and receives under way.
            peers: The other rank of each request.
            doing: What this rank is doing, for the message: "sending rows".
            timeout_s: Instead of the world's own limit.

        Raises:
            StallError: If the limit passes; names the ranks still missing.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._collectives.wait(requests, peers=peers, doing=doing, timeout_s=limit_s)

    def stall_error(self, missing: Collection[int], *, doing: str, limit_s: float) -> StallError:
        """Name the ranks that this one waited for in vain, by their numbers in the job."""
        return self._collectives.stall_error(missing, doing=doing, limit_s=limit_s)

    def allgather(self, data: bytes, *, doing: str) -> list[bytes]:
        """Hand every rank the bytes of all ranks, in rank order. Collective."""
        packed = self._collectives.combine(data, doing=f"{doing} (allgather)", combine=_pack)
        return _unpack(packed, self.world_size)

    def allgather_array(self, values: NDArray[Element], *, doing: str) -> NDArray[Element]:
        """Hand every rank the arrays of all ranks, equal in shape and dtype. Collective.

        Returns:
            dtype[world_size, ...]: In rank order.

        Raises:
            WorldError: On every rank, if shapes or dtypes differ; names who differs.
        """
        joined = self._collectives.combine(
            _describe(values) + values.tobytes(),
            doing=f"{doing} (allgather_array)",
            combine=lambda parts: b"".join(_same_arrays(parts, doing)),
        )
        return np.frombuffer(joined, values.dtype).reshape(self.world_size, *values.shape).copy()

    def allreduce(self, values: NDArray[Element], *, op: Operation, doing: str) -> NDArray[Element]:
        """Reduce all ranks' values, element by element. Collective.

        Returns:
            Same shape and dtype: Reduced in rank order, hence bitwise the same on every rank.

        Raises:
            WorldError: On every rank, if shapes or dtypes differ; names who differs.
        """

        def reduce(parts: list[bytes]) -> bytes:
            arrays = [np.frombuffer(part, values.dtype) for part in _same_arrays(parts, doing)]
            total = arrays[0].copy()
            for array in arrays[1:]:
                UFUNCS[op](total, array, out=total)
            return total.tobytes()

        data = _describe(values) + values.tobytes()
        reduced = self._collectives.combine(data, doing=f"{doing} (allreduce {op})", combine=reduce)
        return np.frombuffer(reduced, values.dtype).reshape(values.shape).copy()

    def barrier(self, *, doing: str) -> None:
        """Wait until every rank is here. Collective."""
        self._collectives.combine(b"", doing=f"{doing} (barrier)", combine=lambda _: b"")

    def abort(self, message: str) -> NoReturn:
        """End the whole job, every rank of it, with this message."""
        self._transport.abort(f"[rank {self._names[self.rank]}] {message}")

    def close(self) -> None:
        """Give back what the transport holds. Never blocks on other ranks."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, data: Bytes, *, peer: int, tag: int) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ValueError(
                f"world: rank {self.rank} of {self.world_size} cannot exchange bytes with rank "
                f"{peer}; name another rank"
            )
        if not 0 <= tag < NUM_USER_TAGS:
            raise ValueError(f"world: tag {tag} lies outside [0, {NUM_USER_TAGS})")
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or not data.size:
            raise ValueError(
                f"world: found {data.dtype}{list(data.shape)}, expected contiguous "
                "uint8[num_bytes] of at least one byte"
            )


def _pack(parts: list[bytes]) -> bytes:
    return struct.pack(f"<{len(parts)}Q", *map(len, parts)) + b"".join(parts)


def _unpack(packed: bytes, num_parts: int) -> list[bytes]:
    ends = np.cumsum([8 * num_parts, *struct.unpack_from(f"<{num_parts}Q", packed)]).tolist()
    return [packed[start:end] for start, end in pairwise(ends)]


def _describe(values: NDArray[Element]) -> bytes:
    if values.dtype.hasobject:
        raise TypeError(
            f"world: an array of {values.dtype} cannot be sent; send numbers, or bytes by allgather"
        )
    return f"{values.dtype.str}{list(values.shape)}\n".encode()


def _same_arrays(parts: list[bytes], doing: str) -> list[bytes]:
    described = [part.partition(b"\n") for part in parts]
    for rank, (found, _, _) in enumerate(described):
        if found != described[0][0]:
            raise WorldError(
                f"world: while {doing}, rank {rank} gave {found.decode()}, rank 0 "
                f"{described[0][0].decode()}; all ranks must give the same dtype and shape: give a "
                "fixed shape, or bytes by allgather"
            )
    return [data for _, _, data in described]
