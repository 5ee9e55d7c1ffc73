"""Every configuration of the mesh that is legal on a number of ranks."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, get_args

from tonari.oracle.trace import alone
from tonari.trainer.config.config import Config, MeshConfig
from tonari.trainer.config.text import check_text
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import check_context, make_mesh
from tonari.trainer.mesh.pipeline import check_microbatches
from tonari.trainer.mesh.place import LOOPED, Schedule, num_stages
from tonari.trainer.mesh.recompute import Checkpointing
from tonari.trainer.models import StagedModel
from tonari.trainer.run.build import RunLayout
from tonari.trainer.run.memory import TRANSFORMERS

VIRTUAL = (1, 2, 3, 4, 6, 8)
"""Stages a rank that are tried, beside the config's own, where a schedule is looped."""


class Group(NamedTuple):
    """Configurations of one mesh that cut a batch into as many microbatches.

    Attributes:
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
        batch_size: Rows of a replica's batch.
        microbatches: Parts of it.
    """

    sizes: tuple[int, ...]
    batch_size: int
    microbatches: int

    @property
    def rows(self) -> int:
        """Of a microbatch."""
        return self.batch_size // self.microbatches


class Variant(NamedTuple):
    """How a group's work is done.

    Attributes:
        schedule: The order of a pipeline's work.
        virtual: Stages a rank; of a schedule that is not looped, 1.
        checkpointing: What is computed again.
        sequence_parallel: Whether tp divides the sequence between layers.
        blocks: Of each stage, that are computed again; 0: all that do not swap.
        offload: Whether parameters and the optimizer lie in the host's memory.
        swaps: Blocks of each stage that swap; see `tonari.trainer.mesh.swap`.
    """

    schedule: Schedule
    virtual: int
    checkpointing: Checkpointing
    sequence_parallel: bool
    blocks: int = 0
    offload: bool = False
    swaps: int = 0

    @property
    def cut(self) -> tuple[Schedule, int]:
        """Which schedule cuts the model into the same stages, and how many a rank has."""
        kind = "1f1b" if self.schedule == "gpipe" else self.schedule
        if self.schedule in LOOPED:
            kind = "interleaved"
        return ("zbv" if self.schedule == "dualpipev" else kind), self.virtual


def layout_of(group: Group, variant: Variant) -> RunLayout:
    """Lay a configuration out as the trainer does."""
    stages = num_stages(group.sizes[0], variant.schedule, variant.virtual)
    return RunLayout(sizes=group.sizes, num_stages=stages, microbatches=group.microbatches)


def overrides(group: Group, variant: Variant) -> tuple[str, ...]:
    """List the settings of a configuration, as `tonari train` takes them."""
    pp, dp_replicate, dp_shard, cp, tp = group.sizes
    looped = variant.schedule in LOOPED
    return (
        f"mesh.pp={pp}", f"mesh.dp_replicate={dp_replicate}", f"mesh.dp_shard={dp_shard}",
        f"mesh.cp={cp}", f"mesh.tp={tp}", f"mesh.microbatches={group.microbatches}",
        f"mesh.schedule={variant.schedule}", *([f"mesh.virtual={variant.virtual}"] * looped),
        f"mesh.checkpointing={variant.checkpointing}",
        f"mesh.checkpointing_blocks={variant.blocks}", f"mesh.swap_blocks={variant.swaps}",
        f"mesh.offload={str(variant.offload).lower()}",
        f"mesh.sequence_parallel={str(variant.sequence_parallel).lower()}",
        f"data.batch_size={group.batch_size}",
    )  # fmt: skip


def passes(check: Callable[[], object]) -> bool:
    """Report whether a check of the settings lets them through."""
    try:
        check()
    except ConfigError:
        return False
    return True


class Choices:
    """The legal configurations of a model on a number of ranks, by the trainer's own checks.

    Without a pipeline all schedules are one, which is listed as 1f1b; sequence_parallel is tried
    with tp only. A config's ``optimizer.accumulate`` is kept.

    Args:
        config: The settings.
        model: Of the config, without data.
        world_size: Ranks.
        global_batch_size: Rows of an optimizer step.

    Attributes:
        sequential: Whether the model has a plan for sequence_parallel.
        pps: Numbers of ranks that a pipeline may have, ascending.
        tps: Those that may share a layer.
        cps: Those that may share a sequence.
    """

    def __init__(
        self, config: Config, model: StagedModel, *, world_size: int, global_batch_size: int
    ) -> None:
        self._config, self._model = config, model
        self._world_size, self._rows = world_size, global_batch_size
        self._variants = lru_cache(maxsize=None)(self._list_variants)
        self._divides = lru_cache(maxsize=None)(self._can_divide)
        self.mesh = lru_cache(maxsize=None)(self._make_mesh)
        self.swaps = lru_cache(maxsize=None)(self._can_swap)
        self.sequential = config.model.kind in TRANSFORMERS
        sizes = divisors(world_size)
        self.pps = [pp for pp in sizes if self._divides(pp, 1)]
        self.tps = [tp for tp in sizes if self._divides(1, tp)]
        self.cps = [cp for cp in sizes if self._shares(cp)]
        if config.optimizer.compress_gradients != "none":
            self.pps = self.tps = self.cps = [1]  # with which it goes alone
        if len(self.cps) > 1 and not self._takes_context():
            self.cps = [1]

    def groups(self) -> Iterator[Group]:
        """List the meshes, each with every division of its batch."""
        for pp in self.pps:
            for tp in (tp for tp in self.tps if self._world_size % (pp * tp) == 0):
                for cp in (cp for cp in self.cps if self._world_size % (pp * tp * cp) == 0):
                    yield from self._replicas(pp, cp, tp)

    def _replicas(self, pp: int, cp: int, tp: int) -> Iterator[Group]:
        replicas = self._world_size // (pp * cp * tp)
        batch_size, remainder = divmod(self._rows, replicas * self._config.optimizer.accumulate)
        if remainder or not batch_size:
            return
        for dp_shard in divisors(replicas):
            sizes = (pp, replicas // dp_shard, dp_shard, cp, tp)
            for microbatches in divisors(batch_size):
                group = Group(sizes, batch_size, microbatches)
                if self.variants_of(group):
                    yield group

    def variants_of(self, group: Group) -> tuple[Variant, ...]:
        """List the ways in which a group's work can be done, where nothing is computed again."""
        pp, tp = group.sizes[0], group.sizes[-1]
        return self._variants(pp, tp, group.batch_size, group.microbatches)

    def _list_variants(
        self, pp: int, tp: int, batch_size: int, microbatches: int
    ) -> tuple[Variant, ...]:
        own = self._config.mesh.virtual
        found = []
        for schedule in get_args(Schedule) if pp > 1 else ("1f1b",):
            for virtual in sorted({*VIRTUAL, own}) if schedule in LOOPED else (1,):
                if virtual == 1 and schedule == "interleaved":
                    continue  # 1f1b by another name
                stages = num_stages(pp, schedule, virtual)
                if not (
                    self._divides(stages, tp)
                    and passes(
                        lambda: check_microbatches(
                            batch_size=batch_size, microbatches=microbatches, pp=pp,
                            schedule=schedule, virtual=virtual,  # noqa: B023
                        )
                    )
                ):  # fmt: skip
                    continue
                found += [
                    Variant(schedule, virtual, "none", sequential)
                    for sequential in ((False, True) if tp > 1 and self.sequential else (False,))
                ]
        return tuple(found)

    def lighter(self, pp: int, variant: Variant) -> list[list[Variant]]:
        """List what takes less memory than a variant: of each way, from the most memory on.

        Ways are selective and full recomputation, of one block a stage, two, and so on to all that
        do not swap.
        """
        most = self.stage_blocks(pp, variant) - variant.swaps
        if most < 1:
            return []
        return [
            [
                variant._replace(checkpointing=way, blocks=count if count < most else 0)
                for count in range(1, most + 1)
            ]
            for way in get_args(Checkpointing)
            if way != "none" and self.mesh(variant.schedule, way, False) is not None
        ]

    def stage_blocks(self, pp: int, variant: Variant) -> int:
        """Count the blocks of the largest stage."""
        return -(-self._model.num_blocks // num_stages(pp, variant.schedule, variant.virtual))

    def _can_swap(self, schedule: Schedule) -> bool:
        """Report whether blocks may swap by the trainer's checks."""
        config = self._config
        return passes(
            lambda: replace(
                config, mesh=replace(config.mesh, schedule=schedule, checkpointing="none",
                checkpointing_blocks=0, swap_blocks=1),
            )
        )  # fmt: skip

    def _shares(self, cp: int) -> bool:
        data, text = self._config.data, self._config.text
        is_text = data.kind == "text"
        length = data.sequence_length if is_text else None
        return passes(lambda: check_context(cp, sequence_length=length)) and passes(
            lambda: check_text(text, is_text=is_text, test_fraction=data.test_fraction, cp=cp)
        )

    def _takes_context(self) -> bool:
        """Ask the model itself, with the fewest ranks."""
        with alone(0, self.cps[1]):
            mesh = make_mesh((1, 1, 1, self.cps[1], 1), device_type="cpu")
            return passes(lambda: copy.deepcopy(self._model).use_context_parallel(mesh["cp"]))

    def _can_divide(self, stages: int, tp: int) -> bool:
        return passes(lambda: self._model.check_mesh(num_stages=stages, tp=tp))

    def _make_mesh(
        self, schedule: Schedule, checkpointing: Checkpointing, sequential: bool
    ) -> MeshConfig | None:
        """Make the settings that do not go by numbers of ranks; None: they are refused."""
        try:
            return replace(
                self._config.mesh, schedule=schedule, checkpointing=checkpointing,
                checkpointing_blocks=0, swap_blocks=0, sequence_parallel=sequential,
            )  # fmt: skip
        except ConfigError:
            return None


def divisors(number: int) -> list[int]:
    """List the numbers that divide one, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]
