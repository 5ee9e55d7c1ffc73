"""How long messages take among the ranks of this job, by kind and size."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dataio.world import World
from tonari.trainer.private.messages import all_gather, reduce_scatter

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
"""The last one needs two ranks."""
SIZES = tuple(256 * 4**power for power in range(10))
"""In bytes: to 64 MiB."""
LEAST_MESSAGES, MOST_MESSAGES = 5, 40
"""Of one kind and size."""
LONGEST_S = 0.1
"""That messages of a size are sent for, unless the least of them take longer."""
LINK_SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""In bytes, between nodes: up to the first of which one takes longer than `LONGEST_S`."""
PINGS = 10
"""By which the clocks of two nodes are compared; the shortest counts."""
HOST = torch.device("cpu")
EXCHANGE = "exchange"
"""What two ranks send each other at once by the run's own transport, such as MPI."""
WIDTH = 256
"""Of a product between two messages, about a millisecond of one core, as a step computes."""


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Messages of one kind in a group, each after some computation, as in a step.

    Attributes:
        kind: One of `KINDS`, or `EXCHANGE`.
        ranks: Of the group.
        num_bytes: int[sizes]: As `tonari.oracle.record.Message` counts them, ascending.
        seconds: float[sizes]: From when the last rank sends until the last one has what was sent;
            mean, as a few that take long add up in a step of many.
        cores: float[sizes]: Processor time of all ranks together over ``seconds``.
        spread: float[sizes]: The longest over the mean.
        nodes: That the group lies on, evenly. Of a send from one node to another, each rank of the
            first half sends so many bytes to its counterpart in the second, all at once.
    """

    kind: str
    ranks: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    cores: tuple[float, ...]
    spread: tuple[float, ...]
    nodes: int = 1


def group_sizes(num_ranks: int) -> list[int]:
    """List the sizes of the groups that ranks are divided into by a mesh, and pairs; ascending."""
    return [
        size for size in range(1, num_ranks + 1) if num_ranks % size == 0 or size == 2
    ]  # fmt: skip


def time_messages(
    *, sizes: Sequence[int] = SIZES, ranks: int = 0, device: torch.device = HOST
) -> list[MessageTimes]:
    """Send messages of each kind and size in groups of `group_sizes`. Collective.

    Between two messages the ranks of the group compute: in a step too threads have gone to sleep
    until the next one, and ranks come at different times.

    Args:
        sizes: In bytes.
        ranks: The first of all, on one node; 0: all are on one.
        device: Where this rank has what it sends.
    """
    found = []
    for num_ranks in group_sizes(ranks or dist.get_world_size()):
        members = list(range(num_ranks))
        group = dist.new_group(members)
        for kind in KINDS[: len(KINDS) if num_ranks > 1 else -1]:

            def make(size: int) -> Callable[[], object]:
                return make_message(kind, size, group, num_ranks, device)  # noqa: B023

            rows = _time_sizes(members, make, sizes)
            found.append(_times_of(kind, num_ranks, 1, sizes, rows))
    return found


def time_links(
    world: World, *, ranks: int, sizes: Sequence[int] = LINK_SIZES, device: torch.device = HOST
) -> list[MessageTimes]:
    """Send messages between nodes: from one to the next, and of each kind among all. Collective.

    Args:
        world: The ranks, node by node, of torch's default group.
        ranks: Of each node.
        sizes: In bytes; larger ones are left out where one takes longer than `LONGEST_S`.
        device: Where this rank has what it sends, but for an exchange.
    """
    found = []
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for kind, width in itertools.product(KINDS, sorted({1, ranks})):
        nodes = 2 if kind == "send" else world.num_nodes
        members = tuple(node * ranks + rank for node in range(nodes) for rank in range(width))
        if members not in groups:
            groups[members] = dist.new_group(list(members))
        group, num_ranks = groups[members], len(members)

        def make(size: int) -> Callable[[], object]:
            return make_message(kind, size, group, num_ranks, device)  # noqa: B023

        rows = _time_sizes(members, make, sizes, per_node=ranks)
        found.append(_times_of(kind, num_ranks, nodes, sizes, rows))
    return [*found, _time_exchange(world, ranks=ranks, sizes=sizes)]


def _time_exchange(world: World, *, ranks: int, sizes: Sequence[int]) -> MessageTimes:
    """Let the first ranks of two nodes send to each other at once, as an exchange of rows does."""
    other = ranks - world.rank

    def make(size: int) -> Callable[[], object]:
        sent, got = np.zeros(size, np.uint8), np.zeros(size, np.uint8)

        def send() -> None:
            requests = [
                world.irecv(got, source=other, tag=0), world.isend(sent, dest=other, tag=0)
            ]  # fmt: skip
            world.wait(requests, peers=[other, other], doing="timing the exchange")

        return send

    return _times_of(EXCHANGE, 2, 2, sizes, _time_sizes((0, ranks), make, sizes, per_node=ranks))


def _time_sizes(
    members: Sequence[int], make: Callable[[int], Callable[[], object]], sizes: Sequence[int], *,
    per_node: int = 0,
) -> list[tuple[float, float, float]]:  # fmt: skip
    """Time messages of each size; between nodes up to the first that takes long. Collective.

    Args:
        members: Ranks that send them.
        make: Makes what they call, of a size.
        sizes: In bytes.
        per_node: Ranks of a node, where there are several, whose clocks differ; 0: there is one.

    Returns:
        The mean, processors, and the longest over the mean, for each size.
    """
    rows: list[tuple[float, float, float]] = []
    for size in sizes:
        send = make(size) if dist.get_rank() in members else None
        rows.append(_time_size(send, per_node=per_node))
        if per_node and rows[-1][0] > LONGEST_S:
            break
    return rows


def _times_of(
    kind: str, ranks: int, nodes: int, sizes: Sequence[int],
    rows: Sequence[tuple[float, float, float]],
) -> MessageTimes:  # fmt: skip
    seconds, cores, spread = zip(*rows, strict=True)
    return MessageTimes(
        kind=kind, ranks=ranks, nodes=nodes, num_bytes=tuple(sizes[: len(rows)]), seconds=seconds,
        cores=cores, spread=spread,
    )  # fmt: skip


def _time_size(send: Callable[[], object] | None, *, per_node: int) -> tuple[float, float, float]:
    dist.barrier()
    ahead_s = clock_ahead_s(per_node) if per_node else 0.0
    # The first one opens connections.
    first_s = float(_send_some(send, 2, ahead_s=ahead_s)[0, -1])
    count = int(min(max(LONGEST_S / max(first_s, 1e-6), LEAST_MESSAGES), MOST_MESSAGES))
    took_s, used_s = _send_some(send, count, ahead_s=ahead_s)
    mean_s = float(took_s.mean())
    return mean_s, float(used_s.mean()) / mean_s, float(took_s.max()) / mean_s


def clock_ahead_s(per_node: int) -> float:
    """Compare this node's clock to that of rank 0: by how much it is ahead. Collective.

    Args:
        per_node: Ranks of each node; the first of each sends.
    """
    own, nodes = dist.get_rank(), dist.get_world_size() // per_node
    ahead_s = torch.zeros(nodes, dtype=torch.float64)
    word = torch.zeros(1, dtype=torch.float64)
    for node in range(1, nodes):
        least_s = float("inf")
        for _ in range(PINGS if own in (0, node * per_node) else 0):
            if not own:
                dist.recv(word, node * per_node)
                word[0] = time.perf_counter()
                dist.send(word, node * per_node)
                continue
            began_s = time.perf_counter()
            dist.send(word, 0)
            dist.recv(word, 0)
            ended_s = time.perf_counter()
            if ended_s - began_s < least_s:
                # Rank 0 looked at its clock half way
                least_s = ended_s - began_s
                ahead_s[node] = (began_s + ended_s) / 2 - word[0]
    dist.all_reduce(ahead_s)
    return float(ahead_s[own // per_node])


def _send_some(
    send: Callable[[], object] | None, count: int, *, ahead_s: float
) -> NDArray[np.float64]:
    """Send some messages; float64[2, count]: seconds of each, and of processors. Collective."""
    # When each began and ended, and what processors it took: of the ranks that send
    times = torch.zeros(3, count, dtype=torch.float64)
    product = torch.zeros(WIDTH, WIDTH)
    for number in range(count) if send is not None else ():
        product = product @ product
        used_s, began_s = time.process_time(), time.perf_counter() - ahead_s
        assert send is not None
        send()
        ended_s = time.perf_counter() - ahead_s
        times[:, number] = torch.tensor(
            [began_s, ended_s, time.process_time() - used_s], dtype=torch.float64
        )
    latest = times[:2].clone()
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    dist.all_reduce(times)
    found: NDArray[np.float64] = torch.stack([latest[1] - latest[0], times[2]]).numpy()
    return np.maximum(found, [[1e-9], [0.0]])


def make_message(
    kind: str, num_bytes: int, group: dist.ProcessGroup, num_ranks: int,
    device: torch.device = HOST,
) -> Callable[[], object]:  # fmt: skip
    """Make what sends a message of a kind once, and waits for it."""
    whole = torch.zeros(max(num_bytes // 4, num_ranks), device=device)
    part = torch.zeros(whole.numel() // num_ranks, device=device)
    whole = whole[: part.numel() * num_ranks]
    first = dist.get_process_group_ranks(group)[0]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "send": lambda: _pass_on(whole, group),
    }
    call = calls[kind]

    def complete() -> None:
        call()
        torch.cuda.synchronize(device)

    return call if device == HOST else complete


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send from each rank of a group's first half to its counterpart in the second."""
    ranks = dist.get_process_group_ranks(group)
    half, own = len(ranks) // 2, ranks.index(dist.get_rank())
    if own < half:
        dist.send(tensor, ranks[own + half], group=group)
    elif own < 2 * half:
        dist.recv(tensor, ranks[own - half], group=group)
