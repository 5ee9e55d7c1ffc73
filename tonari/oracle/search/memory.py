"""What the fullest rank of a configuration holds, by the dry run's arithmetic."""

from functools import lru_cache
from operator import mul

from tonari.oracle.search.choices import Choices, Group, Variant, layout_of
from tonari.oracle.search.parts import Parts
from tonari.oracle.search.price import PipelineRanks, Pricing
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.recompute import Checkpointing
from tonari.trainer.run.build import RunLayout
from tonari.trainer.run.live import is_one_over_shards
from tonari.trainer.run.memory import (
    COMPUTE_BYTES,
    Counted,
    Memory,
    memory_of,
    share_of_tp,
    under_way,
)


class MemoryOf:
    """Adds up memory, as `memory_of` of the trainer does, of parts that were traced alone.

    Where the dry run leaves in what selective recomputation saves, this takes it off: a block keeps
    its input, and the results of its products and of attention.

    Args:
        config: The settings.
        parts: Of the model.
        choices: Where the configurations come from.
        pricing: Knows which ranks hold as much.
    """

    def __init__(self, config: Config, parts: Parts, choices: Choices, pricing: Pricing) -> None:
        self._config, self.parts, self._choices = config, parts, choices
        self._pricing = pricing
        self._swapped = lru_cache(maxsize=None)(self._swapped_bytes)
        self._counted = lru_cache(maxsize=None)(self._count)
        self._stored = lru_cache(maxsize=None)(self._stored_bytes)
        self._floor = lru_cache(maxsize=None)(self._floor_of_parameters)

    def __call__(self, group: Group, variant: Variant) -> int:
        """Count the bytes of the fullest rank of a configuration."""
        pp, _, dp_shard, cp, tp = group.sizes
        mesh = self._choices.mesh(
            variant.schedule, variant.checkpointing, variant.sequence_parallel
        )
        assert mesh is not None, "a choice is legal"
        layout = layout_of(group, variant)
        most = 0
        for holder in self._pricing.holders(pp, *variant.cut):
            counted = self._counted(holder, tp, dp_shard * cp)
            passing = (
                self._swapped(holder, group.rows, cp, variant.swaps)[1] if variant.swaps else 0
            )
            memory = memory_of(
                counted,
                self._stored(
                    holder, group.rows, cp, variant.checkpointing, variant.blocks, variant.swaps
                ),
                passing,
                mesh=mesh,
                layout=layout,
                optimizer=self._config.optimizer,
                model_kind=self._config.model.kind,
                pp_rank=holder.pp_rank,
                has_copies=self._config.run.live and is_one_over_shards(layout.sizes),
            )
            total_bytes = memory.total_bytes
            if variant.offload:
                total_bytes -= _kept_bytes(memory)
                if not memory.gathered_bytes:  # whole, so that they come to be used
                    own = counted.own if pp > 1 else counted.largest_block
                    total_bytes += own * COMPUTE_BYTES[mesh.dtype]
            most = max(most, total_bytes)
        return most

    def host_fits(self, group: Group) -> bool:
        """Report whether a node's host has room for what its ranks offload."""
        limit = self._pricing.cluster.host.memory_bytes
        here = self._pricing.cluster.ranks_per_node
        pp, _, dp_shard, cp, tp = group.sizes
        kept = _kept_bytes(self._floor(pp, tp, dp_shard * cp))
        return limit is None or kept * here <= limit

    def has_room(self, group: Group, variant: Variant) -> bool:
        """Report whether a node's host has room for what its ranks swap, and offload."""
        limit = self._pricing.cluster.host.memory_bytes
        if limit is None or not variant.swaps:
            return True
        pp, _, dp_shard, cp, tp = group.sizes
        layout = layout_of(group, variant)
        most = max(
            self._swapped(holder, group.rows, cp, variant.swaps)[0]
            * under_way(variant.schedule, pp, holder.pp_rank, layout)
            for holder in self._pricing.holders(pp, *variant.cut)
        )
        kind, sequential = self._config.model.kind, variant.sequence_parallel
        most *= share_of_tp(kind, tp, sequence_parallel=sequential)
        kept = _kept_bytes(self._floor(pp, tp, dp_shard * cp)) if variant.offload else 0
        return (kept + most) * self._pricing.cluster.ranks_per_node <= limit

    def floor_bytes(self, group: Group, *, offload: bool = False) -> int:
        """Bound from below what any configuration of a group holds: all but activations."""
        pp, _, dp_shard, cp, tp = group.sizes
        memory = self._floor(pp, tp, dp_shard * cp)
        return memory.total_bytes - (_kept_bytes(memory) if offload else 0)

    def _floor_of_parameters(self, pp: int, tp: int, shards: int) -> Memory:
        counts = self.parts.counts(range(len(self.parts.kind_of_block)), first=True, last=True)
        whole = self._count(PipelineRanks(0, counts, ()), tp, shards)
        # The fullest of a pipeline's ranks holds the mean of them at least
        mean = Counted(whole=whole.whole // pp, own=whole.own // pp, largest_block=0)
        layout = RunLayout(sizes=(pp, 1, shards, 1, tp), num_stages=pp, microbatches=1)
        return memory_of(
            mean, 0, mesh=self._config.mesh, layout=layout, optimizer=self._config.optimizer,
            model_kind=self._config.model.kind, pp_rank=0,
        )  # fmt: skip

    def _count(self, holder: PipelineRanks, tp: int, shards: int) -> Counted:
        pairs = [*zip(holder.counts, self.parts.all, strict=True)]
        own = sum(count * part.num_parameters(tp, shards) for count, part in pairs)
        return Counted(
            whole=sum(count * part.num_parameters(1, 1) for count, part in pairs),
            own=own,
            largest_block=max(
                (part.num_parameters(tp, shards) for count, part in pairs[2:] if count),
                default=own,
            ),
        )

    def _stored_bytes(
        self, holder: PipelineRanks, rows: int, cp: int, checkpointing: Checkpointing, blocks: int,
        swaps: int,
    ) -> int:  # fmt: skip
        counts, stages = holder.without(self.parts, swaps)
        again = self.parts.again(stages, checkpointing, blocks)
        stored = 0
        for count, redone, part in zip(counts, again, self.parts.all, strict=True):
            stored += (count - redone) * part.stored(rows, "none")
            stored += redone * part.stored(rows, checkpointing)
        return stored // cp

    def _swapped_bytes(
        self, holder: PipelineRanks, rows: int, cp: int, swaps: int
    ) -> tuple[int, int]:
        """Count what a rank swaps of a microbatch, and what of it is on the device at a time."""
        of_stages = [self.parts.swapped(order, swaps) for order in holder.orders]
        each = [part.stored(rows, "none") // cp for part in self.parts.kinds]
        largest = max(
            (
                min(sum(stage), 2) * max(size for num, size in zip(stage, each, strict=True) if num)
                for stage in of_stages
                if any(stage)
            ),
            default=0,
        )
        return sum(sum(map(mul, stage, each)) for stage in of_stages), largest


def _kept_bytes(memory: Memory) -> int:
    """Count what offloading moves to the host."""
    return memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
