"""What a step of a configuration takes, by equations: computation, bubble, messages.

It stands in for a step that nobody timed, and takes microseconds; what data adds to it is planned
by `tonari.oracle.epoch`, as for a step that was timed. Its assumptions:

- A pass takes its products at ``efficiency`` of the peak, or their bytes at the memory's rate if
  that is longer, then the bytes of all else; at least a launch an operator. Nothing is fused.
- The slowest rank sets the pace of a pipeline, and all microbatches take as long.
- Messages of tp and cp, and sends between stages, overlap with nothing.
- Without a pipeline, gathers and scatters of dp overlap with computation: what exceeds it counts,
  and the first gather and the last scatter. In one, parameters are gathered beside the first
  forward pass, and gradients are reduced after the last backward pass.
- Offloaded parameters and gradients cross the host's link beside nothing else, and the host updates
  them at its memory's rate.
- Activations that swap leave beside the forward passes, and come back beside the backward passes,
  of all blocks of their stage but the first; what takes longer is waited for.
- As many groups of one axis as lie side by side in a node share its links at a time.

Not priced: the loss, clipping, norms across ranks, loading data, checkpoints, compilation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from operator import mul, sub
from typing import NamedTuple

from tonari.oracle.cluster.cluster import Cluster, Device
from tonari.oracle.cluster.links import Route, lay_route
from tonari.oracle.search.choices import Group, Variant
from tonari.oracle.search.parts import Parts, Passes, SentMessage, Work
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.parallelize import stage_blocks
from tonari.trainer.mesh.place import LOOPED, SPLIT, Schedule, num_stages, stages_of
from tonari.trainer.run.memory import COMPUTE_BYTES, FLOAT_BYTES, share_of_tp

UPDATE_ACCESSES = {"sgd": 5, "adamw": 7}
"""Numbers that an update reads and writes for each parameter; of another optimizer, as AdamW."""


class PipelineRanks(NamedTuple):
    """Ranks of a pipeline that hold as much.

    Attributes:
        pp_rank: The first of them.
        counts: How many it has of each of `Parts.all`.
        orders: Of each of its stages, the kind of each block, in their order.
    """

    pp_rank: int
    counts: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]

    def without(
        self, parts: Parts, swaps: int
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Count its parts, and the blocks of each kind of its stages, that do not swap."""
        kinds = range(len(parts.kinds))
        stages = tuple(
            tuple(map(sub, map(order.count, kinds), parts.swapped(order, swaps)))
            for order in self.orders
        )
        return (*self.counts[:2], *map(sum, zip(*stages, strict=True))), stages


class MicrobatchTimes(NamedTuple):
    """Seconds of one microbatch on a rank, or of a part of it.

    Attributes:
        forward_s: Computing.
        backward_s: Computing gradients, without what is computed again.
        again_s: Computing again.
        tp_forward_s: Messages of tp.
        tp_backward_s: The same of the backward pass, with what is computed again.
        cp_forward_s: Messages of cp.
        cp_backward_s: The same of the backward pass, with what is computed again.
        swap_out_s: Waiting for activations to leave.
        swap_back_s: Waiting for them to come back.
    """

    forward_s: float
    backward_s: float
    again_s: float
    tp_forward_s: float
    tp_backward_s: float
    cp_forward_s: float
    cp_backward_s: float
    swap_out_s: float = 0.0
    swap_back_s: float = 0.0

    @property
    def whole_forward_s(self) -> float:
        """All of them."""
        return self.forward_s + self.tp_forward_s + self.cp_forward_s + self.swap_out_s

    @property
    def whole_backward_s(self) -> float:
        """All of them, what is computed again included."""
        return (
            self.backward_s + self.again_s + self.tp_backward_s + self.cp_backward_s
            + self.swap_back_s
        )  # fmt: skip


def work_s(work: Work, device: Device) -> float:
    """Price a pass: what its operators take on a device that waits for nothing else."""
    memory_s = device.memory_gbyte_s * 1e9
    products_s = max(
        work.flops / (device.tflops * device.efficiency * 1e12), work.product_bytes / memory_s
    )
    return max(products_s + work.other_bytes / memory_s, work.operators * device.launch_us * 1e-6)


def bubble_s(
    schedule: Schedule, *, pp: int, virtual: int, microbatches: int, forward_s: float,
    backward_s: float,
) -> float:  # fmt: skip
    """Price the time in which a rank of a pipeline has nothing to do, between two updates.

    Args:
        schedule: The order of the work.
        pp: Ranks of the pipeline.
        virtual: Stages a rank, where the schedule is looped.
        microbatches: Of a batch.
        forward_s: Of a microbatch, over all stages of a rank.
        backward_s: The same; half of it is for the input, and half for the weights.

    Sources: of 1F1B and interleaving, Narayanan et al., SC 2021; of the split backward pass, Qi et
    al., Zero bubble pipeline parallelism, ICLR 2024; of DualPipeV, DeepSeek's own table. What they
    call no bubble has one here, as all ranks of the trainer meet at the update. The equations of a
    split backward pass, and of few microbatches, were found from torch's own orders: they are the
    idle time there, exactly, where a backward pass takes at least twice as long as a forward pass.
    """
    if pp == 1:
        return 0.0
    half_s = backward_s / 2
    longer_s, excess_s = max(forward_s, half_s), max(forward_s - half_s, 0.0)
    missing = pp - microbatches  # for a microbatch to be on every rank
    if schedule == "dualpipev":
        return max((pp - 1) * forward_s, (pp - 1) * half_s - forward_s) / 2
    if schedule == "zbv":
        many_s = ((pp - 1) * longer_s + (pp - 2) * excess_s) / 2
        each_s = forward_s if missing > 0 else longer_s
        few_s = (pp - 1) * half_s + missing * each_s + (microbatches - 1) * excess_s / 2
        return max(many_s, few_s)
    looped = virtual if schedule in LOOPED else 1
    back_s = half_s if schedule in SPLIT else backward_s
    # The passes of the first one over all ranks, and the others behind it, as far as it is longer
    way_s = pp * (forward_s + back_s) - microbatches * (forward_s + backward_s)
    way_s += (microbatches - 1) * (forward_s + back_s) / looped + (backward_s - back_s) / looped
    if schedule != "zero_bubble":
        return max((pp - 1) * (forward_s + backward_s) / looped, way_s)
    waits_s = max(missing, 0) * (forward_s - excess_s / looped)
    return max(
        (pp - 1) * longer_s / looped + waits_s,
        way_s + (microbatches - 1) * max(half_s - forward_s, 0.0) / looped,
    )


class Pricing:
    """Prices configurations of one model on one machine.

    Args:
        config: The settings.
        cluster: The machine.
        device: Of the machine.
        parts: Of the model.
        world_size: Ranks.
    """

    def __init__(
        self, config: Config, cluster: Cluster, device: Device, parts: Parts, *, world_size: int
    ) -> None:
        self.cluster, self.device, self.parts = cluster, device, parts
        self._config, self._world_size = config, world_size
        self.route = lru_cache(maxsize=None)(self._route)
        self.holders = lru_cache(maxsize=None)(self._holders)
        self._part_times = lru_cache(maxsize=None)(self._time_part)
        self._slowest = lru_cache(maxsize=None)(self._find_slowest)
        self._floor = lru_cache(maxsize=None)(self._floor_of_rows)
        self._dp_messages = lru_cache(maxsize=None)(self._time_dp)

    def floor_s(self, group: Group) -> float:
        """Bound from below what any configuration of a group takes.

        That is computation, and messages of tp and cp, shared evenly among a pipeline's ranks.
        """
        pp, _, _, cp, tp = group.sizes
        # A little less: sums are rounded in another order
        return self._passes(group) * self._floor(group.rows, cp, tp) / pp * (1 - 1e-9)

    def pipeline_s(self, group: Group, variant: Variant) -> dict[str, float]:
        """Price all but messages of dp and pp, and the update.

        Returns:
            Seconds of a step, by ``"computation"``, ``"recomputation"``, ``"swap"``, ``"bubble"``,
            ``"tp"`` and ``"cp"``.
        """
        times, passes = self._times(group, variant), self._passes(group)
        idle_s = bubble_s(
            variant.schedule, pp=group.sizes[0], virtual=variant.virtual,
            microbatches=group.microbatches,
            forward_s=times.whole_forward_s, backward_s=times.whole_backward_s,
        )  # fmt: skip
        return {
            "computation": passes * (times.forward_s + times.backward_s),
            "recomputation": passes * times.again_s,
            "swap": passes * (times.swap_out_s + times.swap_back_s),
            "bubble": self._config.optimizer.accumulate * idle_s,
            "tp": passes * (times.tp_forward_s + times.tp_backward_s),
            "cp": passes * (times.cp_forward_s + times.cp_backward_s),
        }

    def parts_s(self, group: Group, variant: Variant) -> dict[str, float]:
        """Price a step: to `pipeline_s` come ``"dp"``, ``"pp"``, ``"update"`` and ``"offload"``."""
        times = self._times(group, variant)
        return self.pipeline_s(group, variant) | {
            "dp": self._dp_s(group, variant, times),
            "pp": self._pp_s(group, variant),
            "update": self._update_s(group, variant),
            "offload": self.offload_s(group, variant) if variant.offload else 0.0,
        }

    def step_s(self, group: Group, variant: Variant) -> float:
        """Price a step, in all."""
        return sum(self.parts_s(group, variant).values())

    def messages_s(self, group: Group, variant: Variant) -> float:
        """Price messages of dp and pp.

        With `pipeline_s`, never less where more is recomputed, or swaps.
        """
        return self._dp_s(group, variant, self._times(group, variant)) + self._pp_s(group, variant)

    def forward_s(self, group: Group, variant: Variant) -> float:
        """Price a batch's forward pass over all stages, without a backward pass or swaps."""
        times = self._times(group, variant)
        one_s = times.whole_forward_s - times.swap_out_s
        return (group.microbatches + group.sizes[0] - 1) * one_s

    def link_s(self, group: Group, variant: Variant) -> float:
        """Price the time for which messages of a step keep a node's link, hidden ones included."""
        pp, dp_replicate, dp_shard, cp, tp = group.sizes
        node, passes = self.cluster.ranks_per_node, self._passes(group)
        times, inner = self._times(group, variant), cp * tp
        gather_s, scatter_s, reduce_s, _ = self._dp_messages(group.sizes, variant.cut)
        sharded_s = gather_s + scatter_s if pp > 1 else passes * (2 * gather_s + scatter_s)
        return sum(
            (
                passes * (times.tp_forward_s + times.tp_backward_s) * (tp > node),
                passes * (times.cp_forward_s + times.cp_backward_s) * (inner > node),
                sharded_s * (inner * dp_shard > node),
                reduce_s * (inner * dp_shard * dp_replicate > node),
                self._pp_s(group, variant) * (self._world_size > node),
            )
        )

    def _passes(self, group: Group) -> int:
        return group.microbatches * self._config.optimizer.accumulate

    def _times(self, group: Group, variant: Variant) -> MicrobatchTimes:
        pp, _, _, cp, tp = group.sizes
        # A backward pass that goes twice over a stage computes it again twice
        repeats = 2 if variant.schedule in SPLIT and variant.checkpointing == "full" else 1
        return self._slowest(
            pp,
            variant.cut,
            group.rows,
            cp,
            tp,
            variant.checkpointing,
            variant.blocks,
            variant.sequence_parallel,
            repeats,
            variant.swaps,
        )

    def _find_slowest(
        self, pp: int, cut: tuple[Schedule, int], rows: int, cp: int, tp: int,
        checkpointing: str, blocks: int, sequential: bool, repeats: int, swaps: int,
    ) -> MicrobatchTimes:  # fmt: skip
        found = []
        for holder in self.holders(pp, *cut):
            _, stages = holder.without(self.parts, swaps)
            again = self.parts.again(stages, checkpointing, blocks)
            each = [
                (num, self._part_times(number, rows, cp, tp, way, sequential, repeats))
                for number, (count, redone) in enumerate(zip(holder.counts, again, strict=True))
                for num, way in ((count - redone, "none"), (redone, checkpointing))
                if num
            ]
            counts = [count for count, _ in each]
            fields = zip(*(times for _, times in each), strict=True)
            times = MicrobatchTimes(*(sum(map(mul, counts, field)) for field in fields))
            if swaps:
                out_s = back_s = 0.0
                for order, stage in zip(holder.orders, stages, strict=True):
                    one_out_s, one_back_s = self._stage_swaps_s(
                        order, self.parts.again([stage], checkpointing, blocks), rows, cp, tp,
                        checkpointing, sequential, swaps,
                    )  # fmt: skip
                    out_s, back_s = out_s + one_out_s, back_s + one_back_s
                times = times._replace(swap_out_s=out_s, swap_back_s=back_s)
            found.append(times)
        return max(found, key=sum)

    def _stage_swaps_s(
        self, order: tuple[int, ...], again: tuple[int, ...], rows: int, cp: int, tp: int,
        checkpointing: str, sequential: bool, swaps: int,
    ) -> tuple[float, float]:  # fmt: skip
        """Price what copies of a stage's activations take longer than what they hide behind."""
        share = share_of_tp(self._config.model.kind, tp, sequence_parallel=sequential)
        copies_s = sum(
            count * part.stored(rows, "none") / cp * share / self._copied_bytes_per_s
            for count, part in zip(self.parts.swapped(order, swaps), self.parts.kinds, strict=True)
        )
        forward_s = backward_s = 0.0
        for kind in order[1:]:
            times = self._part_times(kind + 2, rows, cp, tp, "none", sequential, 1)
            forward_s += times.whole_forward_s
            backward_s += times.whole_backward_s
        for number, redone in enumerate(again):
            if redone:
                plain, more = (
                    self._part_times(number, rows, cp, tp, way, sequential, 1).whole_backward_s
                    for way in ("none", checkpointing)
                )
                backward_s += redone * (more - plain)
        return max(copies_s - forward_s, 0.0), max(copies_s - backward_s, 0.0)

    def _time_part(
        self, number: int, rows: int, cp: int, tp: int, checkpointing: str, sequential: bool,
        repeats: int,
    ) -> MicrobatchTimes:  # fmt: skip
        part, own_rows = self.parts.all[number], rows / cp
        works: tuple[Callable[[Passes], Work], ...] = (
            lambda each: each.forward.work,
            lambda each: each.backward.work,
            lambda each: each.again,
        )
        forward_s, backward_s, selective_s = (
            work_s(part.work(of, own_rows, tp, sequential), self.device) for of in works
        )
        is_block = number > 1  # others are not computed again
        again = repeats if is_block and checkpointing != "none" else 0
        again_s = again * (forward_s if checkpointing == "full" else selective_s)
        tp_s, cp_s = (0.0, 0.0), (0.0, 0.0)
        if tp > 1:
            sent = part.split[sequential].one
            tp_s = tuple(  # type: ignore[assignment]
                sum(
                    self.route(each.kind, 1, tp).seconds(int(each.num_bytes * own_rows))
                    for each in way.sent
                )
                for way in (sent.forward, sent.backward)
            )
        if cp > 1 and part.apart is not None:
            cp_s = tuple(  # type: ignore[assignment]
                sum(self._cp_message_s(each, rows, cp, tp, part.cp) for each in way.sent)
                for way in (part.apart.forward, part.apart.backward)
            )
        return MicrobatchTimes(
            forward_s, backward_s, again_s, tp_s[0], tp_s[1] + again * tp_s[0], cp_s[0],
            cp_s[1] + again * cp_s[0],
        )  # fmt: skip

    def _cp_message_s(self, sent: SentMessage, rows: int, cp: int, tp: int, traced: int) -> float:
        # What a rank sends to all others shrinks with its part of the sequence
        whole = sent.num_bytes * (traced if sent.kind == "all_to_all" else 1) * rows / tp
        return self.route(sent.kind, tp, cp).seconds(int(whole))

    def _floor_of_rows(self, rows: int, cp: int, tp: int) -> float:
        counts = self.parts.counts(range(len(self.parts.kind_of_block)), first=True, last=True)
        ways = (False, True) if tp > 1 and True in self.parts.stem.split else (False,)
        return min(
            sum(
                count * sum(self._part_times(number, rows, cp, tp, "none", way, 1))
                for number, count in enumerate(counts)
            )
            for way in ways
        )

    def _holders(self, pp: int, schedule: Schedule, virtual: int) -> tuple[PipelineRanks, ...]:
        stages, blocks = num_stages(pp, schedule, virtual), len(self.parts.kind_of_block)
        found: dict[object, PipelineRanks] = {}
        for pp_rank in range(pp):
            own = stages_of(pp_rank, pp, schedule, virtual)
            numbers = [[*stage_blocks(stage, stages, num_blocks=blocks)] for stage in own]
            counts = self.parts.counts(
                [*chain.from_iterable(numbers)], first=0 in own, last=stages - 1 in own
            )
            # In which order its stages lie makes no difference
            orders = tuple(
                tuple(self.parts.kind_of_block[number] for number in each) for each in numbers
            )
            key = counts, tuple(sorted(orders))
            found.setdefault(key, PipelineRanks(pp_rank, counts, orders))
        return tuple(found.values())

    def _route(self, kind: str, stride: int, count: int) -> Route:
        """Lay the messages of all groups of ranks a stride apart, which are sent at one time."""
        route = lay_route(self.cluster, kind, range(0, stride * count, stride))
        spans = dict(zip((level.name for level in self.cluster.level), self.cluster.spans()))  # noqa: B905
        crowded = (
            rate / min(stride, spans[link[0]])
            for (link, _), rate in zip(route.shares, route.gbyte_s, strict=True)
        )
        return replace(route, gbyte_s=tuple(crowded))

    def _pp_s(self, group: Group, variant: Variant) -> float:
        pp, _, _, cp, tp = group.sizes
        if pp == 1:
            return 0.0
        model = self.parts.model
        shape = model.hidden_shape_before(min(1, model.num_blocks), group.rows)
        num_bytes = COMPUTE_BYTES[self._config.mesh.dtype] * math.prod(shape) // cp
        one_s = self.route("send", self._world_size // pp, 2).seconds(num_bytes // tp)
        if tp > 1 and not variant.sequence_parallel:
            # Each sends its part of what all of them hold, and has the others' from its peers
            one_s += self.route("all_gather", 1, tp).seconds(num_bytes)
        stages = num_stages(pp, variant.schedule, variant.virtual) // pp
        # Forward and back, past each of the rank's stages, and until the first one has arrived
        return 2 * one_s * (self._passes(group) * stages + pp - 1)

    def _dp_s(self, group: Group, variant: Variant, times: MicrobatchTimes) -> float:
        gather_s, scatter_s, reduce_s, ends_s = self._dp_messages(group.sizes, variant.cut)
        if group.sizes[0] > 1:
            first_s = times.whole_forward_s
            return max(gather_s - first_s, 0.0) + scatter_s + reduce_s
        computing_s = times.whole_forward_s + times.whole_backward_s
        each_s = 2 * gather_s + scatter_s - computing_s
        others = self._passes(group) - 1
        return others * max(each_s, 0.0) + max(each_s + reduce_s, 0.0) + ends_s

    def _time_dp(
        self, sizes: Sequence[int], cut: tuple[Schedule, int]
    ) -> tuple[float, float, float, float]:
        """Price gathers, scatters and reductions of a rank's parts, and the two at the ends."""
        pp, dp_replicate, dp_shard, cp, tp = sizes
        dtype, shards = self._config.mesh.dtype, dp_shard * cp
        gather, scatter = (
            self.route(kind, tp, shards) for kind in ("all_gather", "reduce_scatter")
        )
        reduce = self.route("all_reduce", tp * shards, dp_replicate)
        # FSDP sums bfloat16 gradients in float32
        kept, sent = FLOAT_BYTES[dtype], COMPUTE_BYTES[dtype]
        each = []
        for part in self.parts.all:
            own = part.num_parameters(tp, shards)
            sums_s = scatter.seconds(own * shards * kept) if shards > 1 else 0.0
            gathers_s = gather.seconds(own * shards * sent) if shards > 1 else 0.0
            total_s = reduce.seconds(own * kept) if dp_replicate > 1 else 0.0
            each.append((gathers_s, sums_s, total_s))
        fullest = max(
            (
                tuple(
                    sum(count * part[way] for count, part in zip(holder.counts, each, strict=True))
                    for way in range(3)
                )
                for holder in self.holders(pp, *cut)
            ),
            key=sum,
        )
        first, last = each[0], each[-1]
        ends_s = first[0] + last[1] + (last[2] if shards == 1 else 0.0)
        return fullest[0], fullest[1], fullest[2], ends_s

    @property
    def can_offload(self) -> bool:
        """Whether the machine's file has what offloading is priced by, and settings go with it."""
        host, compress = self.cluster.host, self._config.optimizer.compress_gradients
        return None not in (host.device_gbyte_s, host.memory_gbyte_s) and compress == "none"

    @property
    def can_swap(self) -> bool:
        """Whether the machine's file has what swapping is priced by."""
        return self.cluster.host.device_gbyte_s is not None

    @property
    def _copied_bytes_per_s(self) -> float:
        """Of a rank's copies, each way: by its link, and its part of the host's memory."""
        link = (self.cluster.host.device_gbyte_s or math.inf) * 1e9
        return min(link, self._host_bytes_per_s)

    def _count(self, counts: Sequence[int], tp: int, shards: int) -> int:
        return sum(
            count * part.num_parameters(tp, shards)
            for count, part in zip(counts, self.parts.all, strict=True)
        )

    def _own_parameters(self, group: Group, variant: Variant) -> int:
        pp, _, dp_shard, cp, tp = group.sizes
        return max(
            self._count(holder.counts, tp, dp_shard * cp)
            for holder in self.holders(pp, *variant.cut)
        )

    def _update_s(self, group: Group, variant: Variant) -> float:
        accesses = UPDATE_ACCESSES.get(self._config.optimizer.kind, UPDATE_ACCESSES["adamw"])
        own = self._own_parameters(group, variant)
        num_bytes = own * accesses * FLOAT_BYTES[self._config.mesh.dtype]
        if variant.offload:
            return num_bytes / self._host_bytes_per_s
        return num_bytes / (self.device.memory_gbyte_s * 1e9)

    @property
    def _host_bytes_per_s(self) -> float:
        """A rank's part of what the host's memory moves."""
        here = min(self.cluster.ranks_per_node, self._world_size)
        return (self.cluster.host.memory_gbyte_s or math.inf) * 1e9 / here

    def offload_s(self, group: Group, variant: Variant) -> float:
        """Price copies of parameters to a device and of gradients from it, were they offloaded."""
        # Without a pipeline parameters come for each way over a block, and gradients go each time
        accumulate = self._config.optimizer.accumulate
        copies = 2 * accumulate if group.sizes[0] > 1 else 3 * self._passes(group)
        own = self._own_parameters(group, variant)
        num_bytes = own * FLOAT_BYTES[self._config.mesh.dtype]
        return copies * num_bytes / ((self.cluster.host.device_gbyte_s or math.inf) * 1e9)
