"""How long messages take among the ranks of this job, by kind and size."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
"""The last one needs two ranks."""
SIZES = tuple(256 * 4**power for power in range(10))
"""In bytes: to 64 MiB."""
LEAST_MESSAGES, MOST_MESSAGES = 5, 40
"""Of one kind and size."""
LONGEST_S = 0.1
"""That messages of a size are sent for, unless the least of them take longer."""
WIDTH = 256
"""Of a product between two messages, about a millisecond of one core, as a step computes."""


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Messages of one kind in a group, each after some computation, as in a step.

    Attributes:
        kind: One of `KINDS`.
        ranks: Of the group.
        num_bytes: int[sizes]: As `oracle.record.Message` counts them, ascending.
        seconds: float[sizes]: From when the last rank sends until the last one has what was sent;
            mean, as a few that take long add up in a step of many.
        cores: float[sizes]: Processor time of all ranks together over ``seconds``.
        spread: float[sizes]: The longest over the mean.
    """

    kind: str
    ranks: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    cores: tuple[float, ...]
    spread: tuple[float, ...]


def group_sizes(num_ranks: int) -> list[int]:
    """List the sizes of the groups that ranks are divided into by a mesh, and pairs; ascending."""
    return [
        size for size in range(1, num_ranks + 1) if num_ranks % size == 0 or size == 2
    ]  # fmt: skip


def time_messages(*, sizes: Sequence[int] = SIZES) -> list[MessageTimes]:
    """Send messages of each kind and size in groups of `group_sizes`. Collective, on one node.

    Between two messages the ranks of the group compute: in a step too threads have gone to sleep
    until the next one, and ranks come at different times.
    """
    found = []
    for num_ranks in group_sizes(dist.get_world_size()):
        group = dist.new_group(list(range(num_ranks)))
        for kind in KINDS[: len(KINDS) if num_ranks > 1 else -1]:
            rows = [_time_size(kind, group, num_ranks, size) for size in sizes]
            seconds, cores, spread = zip(*rows, strict=True)
            found.append(
                MessageTimes(
                    kind=kind, ranks=num_ranks, num_bytes=tuple(sizes), seconds=seconds,
                    cores=cores, spread=spread,
                )
            )  # fmt: skip
    return found


def _time_size(
    kind: str, group: dist.ProcessGroup, num_ranks: int, num_bytes: int
) -> tuple[float, float, float]:
    dist.barrier()
    send = None
    if dist.get_rank() < num_ranks:
        send = make_message(kind, num_bytes, group, num_ranks)
    # The first one opens connections.
    first_s = float(_send_some(send, 2)[0, -1])
    count = int(min(max(LONGEST_S / max(first_s, 1e-6), LEAST_MESSAGES), MOST_MESSAGES))
    took_s, used_s = _send_some(send, count)
    mean_s = float(took_s.mean())
    return mean_s, float(used_s.mean()) / mean_s, float(took_s.max()) / mean_s


def _send_some(send: Callable[[], object] | None, count: int) -> NDArray[np.float64]:
    """Send some messages; float64[2, count]: seconds of each, and of processors. Collective."""
    # When each began and ended, and what processors it took: of the ranks that send
    times = torch.zeros(3, count, dtype=torch.float64)
    product = torch.zeros(WIDTH, WIDTH)
    for number in range(count) if send is not None else ():
        product = product @ product
        used_s, began_s = time.process_time(), time.perf_counter()
        assert send is not None
        send()
        ended_s = time.perf_counter()
        times[:, number] = torch.tensor(
            [began_s, ended_s, time.process_time() - used_s], dtype=torch.float64
        )
    latest = times[:2].clone()
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    dist.all_reduce(times)
    found: NDArray[np.float64] = torch.stack([latest[1] - latest[0], times[2]]).numpy()
    return np.maximum(found, [[1e-9], [0.0]])


def make_message(
    kind: str, num_bytes: int, group: dist.ProcessGroup, num_ranks: int
) -> Callable[[], object]:
    """Make what sends a message of a kind once, and waits for it."""
    whole = torch.zeros(max(num_bytes // 4, num_ranks))
    part = torch.zeros(whole.numel() // num_ranks)
    whole = whole[: part.numel() * num_ranks]
    first = dist.get_process_group_ranks(group)[0]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "send": lambda: _pass_on(whole, group),
    }
    return calls[kind]


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send from the first rank of a group to the second."""
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
    if own == ranks[0]:
        dist.send(tensor, ranks[1], group=group)
    elif own == ranks[1]:
        dist.recv(tensor, ranks[0], group=group)
