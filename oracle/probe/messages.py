"""How long messages take among the ranks of this job, by kind and size."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
"""The last one needs two ranks."""
SIZES = tuple(256 * 4**power for power in range(10))
"""In bytes: to 64 MiB."""
REPEATS = 5
LEAST_S = 0.004
"""Of a repeat: short messages are sent many times in it."""
MOST_MESSAGES = 64


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Messages of one kind in groups of one size.

    Attributes:
        kind: One of `KINDS`.
        ranks: Of a group.
        groups: How many of them sent at a time.
        num_bytes: int[sizes]: As `oracle.record.Message` counts them, ascending.
        seconds: float[sizes]: Of a message; median over repeats of the slowest group.
        cores: float[sizes]: Processor time of all ranks together over ``seconds``.
        spread: float[sizes]: The longest repeat over the median.
    """

    kind: str
    ranks: int
    groups: int
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
    """Send messages of each kind and size in groups of `group_sizes`. Collective."""
    world_size = dist.get_world_size()
    found = []
    for num_ranks in group_sizes(world_size):
        firsts = range(0, world_size - num_ranks + 1, num_ranks)
        groups = [dist.new_group(list(range(at, at + num_ranks))) for at in firsts]
        for num_groups in sorted({1, len(groups)}):
            for kind in KINDS[: len(KINDS) if num_ranks > 1 else -1]:
                found.append(_time_kind(kind, groups, num_ranks, num_groups, sizes))
    return found


def _time_kind(
    kind: str, groups: Sequence[dist.ProcessGroup], num_ranks: int, num_groups: int,
    sizes: Sequence[int],
) -> MessageTimes:  # fmt: skip
    rows = [_time_size(kind, groups[:num_groups], num_ranks, size) for size in sizes]
    seconds, cores, spread = zip(*rows, strict=True)
    return MessageTimes(
        kind=kind, ranks=num_ranks, groups=num_groups, num_bytes=tuple(sizes), seconds=seconds,
        cores=cores, spread=spread,
    )  # fmt: skip


def _time_size(
    kind: str, groups: Sequence[dist.ProcessGroup], num_ranks: int, num_bytes: int
) -> tuple[float, float, float]:
    rank = dist.get_rank()
    mine = groups[rank // num_ranks] if rank // num_ranks < len(groups) else None
    send = None if mine is None else make_message(kind, num_bytes, mine, num_ranks)
    count, took_s, used_s = 1, [], []
    for repeat in range(-1, REPEATS):
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        if send is not None:
            for _ in range(count):
                send()
        times = torch.tensor([
            (time.perf_counter() - start) / count, (time.process_time() - used) / count
        ])  # fmt: skip
        if send is None:
            times.zero_()
        slowest = times[:1].clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(times)
        if repeat < 0:  # the first one opens connections
            count = max(1, min(MOST_MESSAGES, int(LEAST_S / max(float(slowest), 1e-6))))
            continue
        took_s.append(float(slowest))
        used_s.append(float(times[1]))
    median = statistics.median(took_s)
    return median, statistics.median(used_s) / median, max(took_s) / median


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
