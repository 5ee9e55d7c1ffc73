"""Find the fastest settings of the mesh for a model, on a machine that nothing was probed on."""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tonari.names import EXAMPLES
from tonari.oracle.cluster.cluster import Cluster, Device
from tonari.oracle.epoch import PlannedEpoch
from tonari.oracle.errors import OracleError
from tonari.oracle.search.choices import Choices, Group, Variant, overrides
from tonari.oracle.search.epoch import Epochs, GroupEpoch
from tonari.oracle.search.memory import MemoryOf
from tonari.oracle.search.parts import WHOLE, Parts
from tonari.oracle.search.price import Pricing
from tonari.oracle.search.words import why_slower
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.place import LOOPED
from tonari.trainer.run.build import lay_out, make_without_data
from tonari.trainer.run.own import Own, own_of

TOP = 10
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration, as it would be.

    Attributes:
        settings: ``SECTION.KEY=VALUE`` for `tonari train`.
        step_s: Of an optimizer step that waits for no data, estimated: see `price.py`.
        epoch_s: Of an epoch; see `epoch.py`. 0: nobody asked for the data.
        parts_s: What the epoch is made of, or else the step: they sum to it.
        memory_bytes: Of the fullest rank; see `tonari.trainer.run.memory.Memory`.
        samples_per_s: Rows of all replicas.
        node_hours: For 1e6 samples.
        why_slower: One sentence; empty of the best one.
        choice: Of exchange, hidden rows and quota, whose epoch it is.
        staging_s: That staging adds to a run, before its first epoch or in it.
    """

    settings: tuple[str, ...]
    step_s: float
    epoch_s: float = 0.0
    parts_s: dict[str, float]
    memory_bytes: int
    samples_per_s: float
    node_hours: float
    why_slower: str
    choice: tuple[str, ...] = ()
    staging_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What a search found.

    Attributes:
        candidates: The best, the fastest first.
        choices: The best of each choice of exchange, hidden rows and quota; empty: there is one.
        unfit_choices: Words of those of which nothing fits.
        global_batch_size: Rows of an optimizer step, of each of them.
        legal: Configurations that the trainer would start.
        unfit: Those of them that were found not to fit into a rank's memory, or whose cache does
            not fit on a node's disk.
        pruned: Those whose bound was above the last candidate's time, so that neither their
            memory nor their time in full was worked out.
        priced: The others.
    """

    candidates: tuple[Candidate, ...]
    choices: tuple[Candidate, ...] = ()
    unfit_choices: tuple[tuple[str, ...], ...] = ()
    global_batch_size: int
    legal: int
    unfit: int
    pruned: int
    priced: int


class Chosen(NamedTuple):
    """A configuration, what it takes, and the parts of that; see `Candidate`."""

    group: Group
    variant: Variant
    step_s: float
    parts_s: dict[str, float]
    memory_bytes: int
    data: GroupEpoch | None = None
    planned: PlannedEpoch | None = None

    @property
    def whole_s(self) -> float:
        """Of an epoch, or of a step."""
        return sum(self.parts_s.values())

    @property
    def rank(self) -> tuple[float, float, int]:
        """What goes first is less: its time, of a step where data sets the pace, and its memory."""
        return _rounded(self.whole_s), _rounded(self.step_s), self.memory_bytes


def _rounded(seconds: float) -> float:
    """Make equal what differs by the order in which it was added up."""
    return float(f"{seconds:.9g}")


class _Fastest:
    """The best so far, and what became of all."""

    def __init__(self, top: int, *, capacity_bytes: int) -> None:
        self._top, self.capacity_bytes = top, capacity_bytes
        # The worst of them first: all but the configuration are negated
        self._heap: list[tuple[float, float, int, int, Chosen]] = []
        self.legal = self.unfit = self.pruned = self.priced = 0
        self.without_disk = 0  # of unfit

    @property
    def limit_s(self) -> float:
        """Time of the last of the best; what takes longer is not among them."""
        # And what is as long as it, however it was added up
        return -self._heap[0][0] * (1 + 1e-8) if len(self._heap) == self._top else math.inf

    def add(self, chosen: Chosen) -> None:
        """Take a configuration; of equals the earlier one."""
        self.priced += 1
        whole_s, step_s, memory_bytes = chosen.rank
        entry = (-whole_s, -step_s, -memory_bytes, -self.priced, chosen)
        if len(self._heap) < self._top:
            heapq.heappush(self._heap, entry)
        elif entry[:4] > self._heap[0][:4]:
            heapq.heapreplace(self._heap, entry)

    def best(self) -> list[Chosen]:
        """List them, the fastest first."""
        ordered = sorted(self._heap, key=lambda entry: entry[:4], reverse=True)
        return [entry[4] for entry in ordered]


def search(
    config: Config, cluster: Cluster, *, world_size: int, global_batch_size: int | None = None,
    own: Own | None = None, top: int = TOP, prunes: bool = True, epochs: Sequence[Epochs] = (),
) -> Plans:  # fmt: skip
    """Price every legal configuration, but those that cannot be among the best, and order them.

    Tried are all sizes of the mesh, microbatches, schedules, and sequence_parallel with tp. Where
    memory asks for it, as few blocks as it takes are computed again or swap, or parameters are
    offloaded, whichever is faster; the last two if the machine's file describes its hosts. What is
    fixed: the rows of an optimizer step, the model, the precision, loss_parallel, the optimizer and
    its ``accumulate``.

    Args:
        config: The settings; of its mesh only the above counts.
        cluster: The machine, with what it computes on.
        world_size: Ranks.
        global_batch_size: Rows of an optimizer step; None: those of the config, whose mesh is laid
            out on so many ranks for that.
        own: What the caller of `trainer.train` would bring.
        top: Configurations to return.
        prunes: Whether to leave out what a lower bound shows to be slower; the answer is the same.
        epochs: Choices of the data, of each of which every configuration's epoch is priced; none:
            steps are, without data.

    Raises:
        ConfigError: If the config's own mesh does not fit so many ranks and no batch is given.
        OracleError: If the machine is not described, is too small, or nothing fits into memory.
    """
    device = _device(cluster)
    num_nodes = cluster.num_nodes(world_size)
    rows = global_batch_size or _rows_of(config, world_size)
    pricing, choices, memory_of = _prepare(config, cluster, device, own, world_size, rows)
    capacity_bytes = int(device.memory_gib * GIB)
    bounded = [(pricing.floor_s(group), group) for group in choices.groups()]
    every = []
    for each in epochs or (None,):
        found = _Fastest(top, capacity_bytes=capacity_bytes)
        _search_one(bounded, choices, pricing, memory_of, found, each, prunes=prunes)
        every.append(found)
    if not any(found.priced for found in every):
        raise _nothing(
            every[0], choices, memory_of, cluster, offloads=pricing.can_offload,
            swaps=pricing.can_swap, world_size=world_size, rows=rows,
        )  # fmt: skip

    best = sorted((one for found in every for one in found.best()), key=lambda one: one.rank)
    of_choices = [found.best()[0] for found in every if found.priced] if len(every) > 1 else []

    def candidates(chosen: Sequence[Chosen]) -> tuple[Candidate, ...]:
        return tuple(
            _candidate(each, best[0].parts_s, rows=rows, num_nodes=num_nodes) for each in chosen
        )

    return Plans(
        candidates=candidates(best[:top]),
        choices=candidates(of_choices),
        unfit_choices=tuple(
            each.words for each, found in zip(epochs, every, strict=False) if not found.priced
        ),
        global_batch_size=rows,
        legal=sum(found.legal for found in every),
        unfit=sum(found.unfit for found in every),
        pruned=sum(found.pruned for found in every),
        priced=sum(found.priced for found in every),
    )


def _search_one(
    bounded: Sequence[tuple[float, Group]], choices: Choices, pricing: Pricing,
    memory_of: MemoryOf, found: _Fastest, epochs: Epochs | None, *, prunes: bool,
) -> None:  # fmt: skip
    """Price configurations group by group, those of the lowest bound first."""
    of_groups = {group: epochs.of(group) for _, group in bounded} if epochs else {}
    floors = [
        (data.floor_s(floor_s) if (data := of_groups.get(group)) else floor_s, group)
        for floor_s, group in bounded
    ]
    # From some on all bounds are above the limit
    for floor_s, group in sorted(floors):
        variants, data = choices.variants_of(group), of_groups.get(group)
        found.legal += len(variants)
        if epochs and data is None:
            found.unfit += len(variants)
            found.without_disk += len(variants)
        elif prunes and floor_s > found.limit_s:
            found.pruned += len(variants)
        else:
            _GroupSearch(group, data, choices, pricing, memory_of, found, prunes).add(variants)


def estimate(
    config: Config, cluster: Cluster, *, world_size: int, own: Own | None = None
) -> Candidate:
    """Price a config's own settings as `search` prices them, whether they fit into memory or not.

    Raises:
        ConfigError: If the settings do not fit so many ranks.
        OracleError: If the machine is not described, or is too small.
    """
    device, layout = _device(cluster), lay_out(config, world_size)
    num_nodes, rows = cluster.num_nodes(world_size), _rows_of(config, world_size)
    pricing, _, memory_of = _prepare(config, cluster, device, own, world_size, rows)
    mesh = config.mesh
    group = Group(layout.sizes, config.data.batch_size, layout.microbatches)
    variant = Variant(
        mesh.schedule, mesh.virtual if mesh.schedule in LOOPED else 1, mesh.checkpointing,
        mesh.sequence_parallel, mesh.checkpointing_blocks, mesh.offload, mesh.swap_blocks,
    )  # fmt: skip
    parts_s = pricing.parts_s(group, variant)
    chosen = Chosen(group, variant, sum(parts_s.values()), parts_s, memory_of(group, variant))
    return _candidate(chosen, parts_s, rows=rows, num_nodes=num_nodes)


def _device(cluster: Cluster) -> Device:
    if cluster.device is None:
        raise OracleError(
            f'"{cluster.name}" has no table [device], from which the search prices computation '
            "that nobody probed; give its tflops, memory_gbyte_s and memory_gib, as "
            f"{EXAMPLES / 'clusters/h100.toml'} does"
        )
    return cluster.device


def _rows_of(config: Config, world_size: int) -> int:
    sizes = lay_out(config, world_size).sizes
    return config.data.batch_size * sizes[1] * sizes[2] * config.optimizer.accumulate


def _prepare(
    config: Config, cluster: Cluster, device: Device, own: Own | None, world_size: int, rows: int
) -> tuple[Pricing, Choices, MemoryOf]:
    if config.model.is_own or (own is not None and own.model is not None):
        raise OracleError(
            f"model.kind is {config.model.kind}, a model of your own, whose layers the search "
            "cannot price one by one; expected one of Tonari's kinds: state the sizes of a GPT-2 "
            'or Llama of Hugging Face as model.kind = "gpt" or "llama", or time the meshes in '
            "question with `tonari probe` and `tonari plan`"
        )
    model = make_without_data(config, WHOLE, own_of(config, own))
    choices = Choices(config, model, world_size=world_size, global_batch_size=rows)
    parts = Parts.of(
        config, model, tp=_fewest(choices.tps), cp=_fewest(choices.cps),
        sequential=choices.sequential,
    )  # fmt: skip
    pricing = Pricing(config, cluster, device, parts, world_size=world_size)
    return pricing, choices, MemoryOf(config, parts, choices, pricing)


def _fewest(sizes: Sequence[int]) -> int:
    """Find the fewest ranks that share something."""
    return min((size for size in sizes if size > 1), default=1)


@dataclass(frozen=True)
class _GroupSearch:
    """Prices the configurations of one group, and remembers the best."""

    group: Group
    data: GroupEpoch | None
    choices: Choices
    pricing: Pricing
    memory_of: MemoryOf
    found: _Fastest
    prunes: bool

    def add(self, variants: Sequence[Variant]) -> None:
        """Price what fits: each variant as lightly as it must be, in the fastest such way."""
        group, found, pricing = self.group, self.found, self.pricing
        whole, light = self._ways_out()
        if not (whole or light):
            found.unfit += len(variants)
            return
        for variant in variants:
            # What is computed again and offloaded adds to it; sums are rounded in another order
            bound_s = sum(pricing.pipeline_s(group, variant).values())
            bound_s += 0.0 if whole else pricing.offload_s(group, variant)
            if self._is_slower(bound_s * (1 - 1e-9)) or self._is_slower(
                (bound_s + pricing.messages_s(group, variant)) * (1 - 1e-9)
            ):
                found.pruned += 1
                continue
            fitting = self._lighten(variant, whole=whole, offloads=light)
            fastest = self._find_fastest(fitting)
            if fastest:
                found.add(fastest)
            elif fitting:
                found.pruned += 1
            else:
                found.unfit += 1

    def _ways_out(self) -> tuple[bool, bool]:
        """Report whether all but activations may fit, and whether it may with offloading."""
        group, memory_of = self.group, self.memory_of
        capacity_bytes = self.found.capacity_bytes
        offloads = self.pricing.can_offload and memory_of.host_fits(group)
        return (
            memory_of.floor_bytes(group) <= capacity_bytes,
            offloads and memory_of.floor_bytes(group, offload=True) <= capacity_bytes,
        )

    def _lighten(self, variant: Variant, *, whole: bool, offloads: bool) -> list[Variant]:
        """List the ways of a variant that fit: as it is, or else with least recomputation."""
        found: list[Variant] = []
        for offload in (False,) * whole + (True,) * offloads:
            start = variant._replace(offload=offload)
            if self._fits(start):
                return [*found, start]
            found += self._recompute(start)
            if self.pricing.can_swap and self.choices.swaps(variant.schedule):
                found += self._swap(start, found)
        return found

    def _recompute(self, start: Variant) -> list[Variant]:
        """List the ways of computing again that fit, each with the fewest blocks."""
        return [
            way[bisect_left(way, True, key=self._fits)]
            for way in self.choices.lighter(self.group.sizes[0], start)
            if self._fits(way[-1])
        ]

    def _swap(self, start: Variant, others: Sequence[Variant]) -> list[Variant]:
        """List those in which blocks swap, and as few of the others compute again as it takes."""
        most = self.choices.stage_blocks(self.group.sizes[0], start)
        counts = [start._replace(swaps=count) for count in range(1, most + 1)]
        if len(self.pricing.parts.kinds) > 1:
            roomy = [each for each in counts if self._has_room(each)]
            return [
                one
                for each in roomy
                for one in ([each] if self._fits(each) else self._recompute(each))
            ]
        # Of blocks of one kind, more that swap never take less time, or more of the device's memory
        counts = counts[: bisect_left(counts, True, key=lambda each: not self._has_room(each))]
        enough = bisect_left(counts, True, key=self._fits)
        found = counts[enough : enough + 1]
        free_s = self._busy_s(start) * (1 + 1e-9)
        if found and self._busy_s(found[0]) <= free_s:
            return found
        best_s = min(map(self._busy_s, (*others, *found)), default=math.inf)
        # Of those that add no time the last one leaves the least to compute again; but while there
        # are two of them, both are on the device
        free = bisect_right(counts, free_s, hi=enough, key=self._busy_s)
        for each in (*counts[: min(enough, 1)], *counts[max(free - 1, 1) : enough]):
            if self._busy_s(each) >= best_s:
                break
            fitting = self._recompute(each)
            found += fitting
            best_s = min([best_s, *map(self._busy_s, fitting)])
        return found

    def _has_room(self, variant: Variant) -> bool:
        return self.memory_of.has_room(self.group, variant)

    def _busy_s(self, variant: Variant) -> float:
        return self.pricing.step_s(self.group, variant)

    def _fits(self, variant: Variant) -> bool:
        return self.memory_of(self.group, variant) <= self.found.capacity_bytes

    def _is_slower(self, step_s: float) -> bool:
        """Report whether nothing with a step of at least so long is among the best."""
        return self.prunes and self._floor_s(step_s) > self.found.limit_s

    def _floor_s(self, step_s: float, forward_s: float = 0.0) -> float:
        """Bound from below what is compared of a configuration; without data it is the step."""
        return self.data.floor_s(step_s, forward_s) if self.data else step_s

    def _find_fastest(self, fitting: Sequence[Variant]) -> Chosen | None:
        """Price ways of a variant, the lowest bound first; None: none is among the best."""
        bounded = []
        for number, variant in enumerate(fitting):
            forward_s = self.pricing.forward_s(self.group, variant)
            bounded.append((self._floor_s(self._busy_s(variant), forward_s), number))
        limit_s = self.found.limit_s if self.prunes and self.data else math.inf
        best: Chosen | None = None
        for floor_s, number in sorted(bounded):
            if floor_s > limit_s or (best is not None and floor_s > best.whole_s * (1 + 1e-8)):
                break
            one = self._price(fitting[number])
            best = one if best is None else min(best, one, key=lambda each: each.rank)
        return best

    def _price(self, variant: Variant) -> Chosen:
        group, pricing = self.group, self.pricing
        parts_s = pricing.parts_s(group, variant)
        step_s, memory_bytes = sum(parts_s.values()), self.memory_of(group, variant)
        if not self.data:
            return Chosen(group, variant, step_s, parts_s, memory_bytes)
        planned, waits_s = self.data.plan(
            step_s, pricing.link_s(group, variant), pricing.forward_s(group, variant)
        )
        parts_s = {name: planned.steps * each for name, each in parts_s.items()} | waits_s
        return Chosen(group, variant, step_s, parts_s, memory_bytes, self.data, planned)


def _least(
    choices: Choices, memory_of: MemoryOf, *, offloads: bool, swaps: bool
) -> tuple[int, Group, Variant]:
    """Find the configuration that takes the least memory."""
    least: tuple[int, Group, Variant] | None = None
    for floor_bytes, group in sorted(
        (memory_of.floor_bytes(each, offload=offloads), each) for each in choices.groups()
    ):
        if least is not None and floor_bytes >= least[0]:
            break
        for variant in choices.variants_of(group):
            start = variant._replace(offload=offloads and memory_of.host_fits(group))
            moves = swaps and choices.swaps(variant.schedule)
            most = choices.stage_blocks(group.sizes[0], start) if moves else 0
            moved = [start._replace(swaps=count) for count in range(most + 1)]
            ways = [
                each for one in moved for way in choices.lighter(group.sizes[0], one)
                for each in way[-1:]
            ]  # fmt: skip
            for each in (*moved, *ways):
                if not memory_of.has_room(group, each):
                    continue
                memory_bytes = memory_of(group, each)
                if least is None or memory_bytes < least[0]:
                    least = memory_bytes, group, each
    assert least is not None, "some configuration is legal"
    return least


def _nothing(
    found: _Fastest, choices: Choices, memory_of: MemoryOf, cluster: Cluster, *, offloads: bool,
    swaps: bool, world_size: int, rows: int,
) -> OracleError:  # fmt: skip
    if not found.legal:
        return OracleError(
            f"no configuration on {world_size} ranks divides {rows} rows a step; give another "
            "global batch size, such as a multiple of the number of ranks"
        )
    if found.without_disk == found.legal:
        return OracleError(
            f"of {found.legal} configurations none has a cache that fits on a node's disk: "
            f'disk_gbyte of "{cluster.name}" is {cluster.storage.disk_gbyte:g}, expected room for '
            "data.cache.quota, or without one for the rows of a few steps; give it more room, the "
            "job another quota, or more ranks"
        )
    least_bytes, group, variant = _least(choices, memory_of, offloads=offloads, swaps=swaps)
    return OracleError(
        f"of {found.legal} configurations none fits into the {found.capacity_bytes / GIB:g} GiB of "
        f'a rank of "{cluster.name}": the least is {least_bytes / GIB:.3g} GiB, of '
        f"{' '.join(overrides(group, variant))}; give more ranks, a smaller model, or "
        "mesh.dtype=bfloat16 where it is not"
    )


def _candidate(chosen: Chosen, best_s: dict[str, float], *, rows: int, num_nodes: int) -> Candidate:
    group, variant, step_s, parts_s, memory_bytes, data, planned = chosen
    settings, samples_per_s = overrides(group, variant), rows / step_s
    choice: tuple[str, ...] = ()
    epoch_s = staging_s = 0.0
    if data and planned:
        settings, choice = (*settings, *data.settings(step_s)), data.words
        epoch_s, staging_s = planned.epoch_s, planned.staging_s + planned.late_rows_s
        samples_per_s = data.num_rows / epoch_s
    return Candidate(
        settings=settings,
        step_s=step_s,
        epoch_s=epoch_s,
        parts_s=parts_s,
        memory_bytes=memory_bytes,
        samples_per_s=samples_per_s,
        node_hours=1e6 / samples_per_s * num_nodes / 3600,
        why_slower=why_slower(parts_s, best_s),
        choice=choice,
        staging_s=staging_s,
    )
