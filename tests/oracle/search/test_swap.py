"""Swapping is priced by its copies and what these hide behind, and chosen where it is fastest."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.oracle.search.planning import load
from tonari.oracle.cluster.cluster import Cluster, Device, Host, Level
from tonari.oracle.search.choices import Choices, Group, Variant, overrides
from tonari.oracle.search.memory import MemoryOf
from tonari.oracle.search.price import Pricing
from tonari.oracle.search.search import Chosen, _Fastest, _GroupSearch, _prepare, estimate, search
from tonari.oracle.search.words import why_slower
from tonari.plan.search import search_words
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.recompute import Checkpointing
from tonari.trainer.mesh.swap import swapped_blocks
from tonari.trainer.run.dry_run import dry_run
from tonari.trainer.run.own import Own

DEVICE = Device(tflops=1e-3, memory_gbyte_s=1, memory_gib=1, launch_us=1)
RATE = 0.05
"""Of copies, in 1e9 bytes/s, at which those of a block take about as long as its forward pass."""
IMAGES = """
[data]
train = "absent.tar"
test = "absent.tar"
batch_size = 8
image_size = 16
[shuffle]
exchange = 0.1
[model]
kind = "resnet"
num_classes = 4
depth = 20
"""


def cluster(gbyte_s: float | None = RATE, *, gib: float = 1, **host: float) -> Cluster:
    return Cluster(
        name="small",
        level=(
            Level(name="node", units=2, gbyte_s=0.5, latency_us=2),
            Level(name="net", units=8, gbyte_s=0.05, latency_us=20),
        ),
        device=msgspec.structs.replace(DEVICE, memory_gib=gib),
        host=msgspec.structs.replace(Host(device_gbyte_s=gbyte_s), **host),
    )


@dataclass(frozen=True)
class Searched:
    """What a search goes by, on any machine."""

    config: Config
    choices: Choices
    plain: MemoryOf
    world_size: int

    def on(self, machine: Cluster) -> tuple[Pricing, MemoryOf]:
        pricing = Pricing(
            self.config, machine, DEVICE, self.plain.parts, world_size=self.world_size
        )
        return pricing, MemoryOf(self.config, self.plain.parts, self.choices, pricing)

    def choose(self, machine: Cluster, group: Group, start: Variant, limit: int) -> Chosen | None:
        """Find what the search makes of a variant in so much memory."""
        pricing, memory_of = self.on(machine)
        found = _Fastest(1, capacity_bytes=limit)
        prices = _GroupSearch(group, None, self.choices, pricing, memory_of, found, prunes=True)
        prices.add([start])
        return next(iter(found.best()), None)


def searched(directory: Path, *settings: str, world_size: int = 1, text: str = "") -> Searched:
    given = (*settings, "run.device=auto")
    config = load(directory, *given, text=text) if text else load(directory, *given)
    _, choices, plain = _prepare(config, cluster(), DEVICE, Own(), world_size, 16)
    return Searched(config, choices, plain, world_size)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Six blocks on one rank."""
    return searched(tmp_path_factory.mktemp("deep"), "model.depth=6")


def whole(found: Searched) -> Group:
    return next(group for group in found.choices.groups() if group.microbatches == 1)


KINDS: tuple[Checkpointing, ...] = ("full", "selective")
ONE = Variant("1f1b", 1, "none", False)


def test_no_assignment_of_blocks_is_faster_than_what_is_chosen(deep):
    """Keep, compute again, or swap: each for each of six blocks, 3^6 of them.

    By the prices of the search, for which it counts how many blocks swap, and not which.
    """
    group, (stem, head, block) = whole(deep), deep.plain.parts.all
    rows, num_compared, ways = group.batch_size, 0, set()
    ends = sum(part.stored(rows, "none") for part in (stem, head))
    for factor in (0.15, 0.4, 0.7, 1.5, 8.0):
        machine = cluster(RATE * factor)
        pricing, memory_of = deep.on(machine)
        bare_bytes = memory_of(group, ONE) - 6 * block.stored(rows, "none") - ends
        copy_s = block.stored(rows, "none") / (RATE * factor * 1e9)
        base_s = pricing.step_s(group, ONE)
        every: set[tuple[int, float]] = set()
        for kind in KINDS:
            times = pricing._part_times(2, rows, 1, 1, kind, False, 1)
            for assigned in itertools.product("krs", repeat=6):
                again, moved = assigned.count("r"), assigned.count("s")
                kept = (6 - again - moved) * block.stored(rows, "none")
                kept += again * block.stored(rows, kind)
                kept += min(moved, 2) * block.stored(rows, "none")
                back_s = 5 * times.backward_s + again * times.again_s
                waits_s = max(moved * copy_s - 5 * times.forward_s, 0)
                waits_s += max(moved * copy_s - back_s, 0)
                waits_s += base_s + again * times.again_s
                every.add((bare_bytes + ends + kept, waits_s))
        limits = sorted({num_bytes for num_bytes, _ in every})
        for limit in {*limits[:: len(limits) // 12], limits[-1]}:
            chosen = deep.choose(machine, group, ONE, limit)
            fastest_s = min(each_s for num_bytes, each_s in every if num_bytes <= limit)
            assert chosen is not None
            assert chosen.memory_bytes <= limit
            assert chosen.step_s == pytest.approx(fastest_s, rel=1e-6)
            ways.add((chosen.variant.checkpointing != "none", chosen.variant.swaps > 0))
            num_compared += 1
    assert num_compared > 40
    assert ways == {(False, False), (True, False), (False, True), (True, True)}


def every_way(found: Searched, group: Group, start: Variant) -> Iterator[Variant]:
    pp = group.sizes[0]
    most = found.choices.stage_blocks(pp, start) if found.choices.swaps(start.schedule) else 0
    for offload in (False, True):
        for swaps in range(most + 1):
            moved = start._replace(swaps=swaps, offload=offload)
            yield moved
            yield from itertools.chain.from_iterable(found.choices.lighter(pp, moved))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param(("model.depth=8",), "", marks=pytest.mark.thorough),
        # Blocks of several kinds, which differ in what they keep and compute
        pytest.param((), IMAGES, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_on_every_mesh_the_fastest_that_fits_is_found(tmp_path, settings, text):
    found, swapped, both = searched(tmp_path, *settings, world_size=4, text=text), 0, 0
    groups = [group for group in found.choices.groups() if group.microbatches in (1, 4)]
    for factor in (0.3, 1.0):
        machine = cluster(RATE * factor, memory_gbyte_s=1, memory_gib=1)
        pricing, memory_of = found.on(machine)
        for group in groups[:: max(len(groups) // 12, 1)]:
            for start in found.choices.variants_of(group)[::3]:
                priced = [
                    (memory_of(group, each), pricing.step_s(group, each))
                    for each in every_way(found, group, start)
                ]
                limits = sorted({num_bytes for num_bytes, _ in priced})
                for limit in limits[:: max(len(limits) // 4, 1)]:
                    chosen = found.choose(machine, group, start, limit)
                    fastest_s = min(each_s for num_bytes, each_s in priced if num_bytes <= limit)
                    assert chosen is not None
                    assert chosen.step_s == pytest.approx(fastest_s, rel=1e-8)
                    swapped += chosen.variant.swaps > 0
                    both += chosen.variant.swaps > 0 and chosen.variant.checkpointing != "none"
    assert swapped > 5
    assert both > 0 or text


def test_a_fast_link_takes_no_time_and_half_as_fast_a_one_twice_as_long(deep):
    group, swaps = whole(deep), ONE._replace(swaps=6)
    fast, slow, slower = (
        deep.on(cluster(rate))[0].pipeline_s(group, swaps) for rate in (1e6, 1e-6, 5e-7)
    )
    assert fast["swap"] == 0
    assert slower["swap"] == pytest.approx(2 * slow["swap"], rel=0.01)
    assert {name: s for name, s in slow.items() if name != "swap"} == pytest.approx(
        {name: s for name, s in fast.items() if name != "swap"}
    )
    shared = deep.on(cluster(1e-6, memory_gbyte_s=5e-7))[0].pipeline_s(group, swaps)
    assert shared["swap"] == pytest.approx(slower["swap"]), "of one rank, all of the host's memory"
    assert deep.on(cluster(None))[0].pipeline_s(group, swaps)["swap"] == 0


def test_copies_come_back_behind_what_is_computed_again(deep):
    group, pricing = whole(deep), deep.on(cluster(RATE / 6))[0]
    some = ONE._replace(swaps=3)
    alone, beside = (
        pricing.pipeline_s(group, some._replace(checkpointing=kind)) for kind in ("none", "full")
    )
    assert beside["swap"] < alone["swap"]
    assert sum(beside.values()) >= sum(alone.values())


def test_what_swaps_adds_up_on_a_node_s_memory_and_on_its_host(deep):
    group = whole(deep)
    _, memory_of = deep.on(cluster(memory_gib=1))
    block = deep.plain.parts.kinds[0].stored(group.batch_size, "none")
    none, *some = (memory_of(group, ONE._replace(swaps=count)) for count in range(7))
    assert [none - each for each in some] == [max(count - 2, 0) * block for count in range(1, 7)]
    room = ONE._replace(swaps=6)
    for gib, fits in ((12 * block / 2**30 * 1.01, True), (12 * block / 2**30 * 0.99, False)):
        # A node of two ranks
        assert deep.on(cluster(memory_gib=gib))[1].has_room(group, room) == fits


@pytest.mark.parametrize("text", ["", pytest.param(IMAGES, marks=pytest.mark.thorough)])
def test_memory_is_that_of_the_dry_run(tmp_path, text):
    found = searched(tmp_path, world_size=4, text=text)
    every = [
        (group, variant)
        for group in found.choices.groups()
        for start in found.choices.variants_of(group)
        if found.choices.swaps(start.schedule)
        for variant in every_way(found, group, start)
        if variant.swaps and variant.checkpointing != "selective" and not variant.offload
    ]
    # Where blocks meet, parts that are traced alone count twice what both keep, as without swaps
    off = 0.1 if text else 0.03
    for group, variant in every[:: len(every) // 5]:
        settings = (*overrides(group, variant), "run.device=auto")
        given = load(tmp_path, *settings, text=text) if text else load(tmp_path, *settings)
        ranks = dry_run(given, world_size=4, num_nodes=1).pipeline_ranks
        expected = max(rank.memory.total_bytes for rank in ranks)
        assert found.plain(group, variant) == pytest.approx(expected, rel=off), settings


def test_nothing_swaps_where_it_cannot(tmp_path, deep):
    gib = (deep.plain(whole(deep), ONE) - 1) / (1 << 30)
    for machine, device in ((cluster(100, gib=gib), "cpu"), (cluster(None, gib=gib), "auto")):
        config = load(tmp_path, "model.depth=6", f"run.device={device}")
        found = search(config, machine, world_size=1, global_batch_size=16).candidates
        assert all("mesh.swap_blocks=0" in each.settings for each in found)
        assert not all("mesh.checkpointing=none" in each.settings for each in found)
    split = searched(tmp_path, world_size=2).choices
    assert not any(map(split.swaps, ("zero_bubble", "zbv", "dualpipev")))
    assert all(map(split.swaps, ("gpipe", "1f1b", "interleaved")))


def test_the_search_names_what_swaps_and_a_config_s_own_is_priced_alike(tmp_path, deep):
    config = load(tmp_path, "model.depth=6", "run.device=auto")
    machine = cluster(0.3, gib=(deep.plain(whole(deep), ONE) - 1) / (1 << 30))
    found = search(config, machine, world_size=1, global_batch_size=16)
    swapping = [each for each in found.candidates if "mesh.swap_blocks=0" not in each.settings]
    assert swapping
    assert " swaps " in "\n".join(search_words(found, config))
    for each in swapping[:2]:
        same = estimate(
            load(tmp_path, *each.settings, "model.depth=6", "run.device=auto"),
            machine,
            world_size=1,
        )
        assert same.step_s == pytest.approx(each.step_s, rel=1e-9)
        assert same.memory_bytes == each.memory_bytes
    words = why_slower({"computation": 1.0, "swap": 0.5}, {"computation": 1.0})
    assert "copies of activations to the host's memory and back: 500 ms" in words


def waits(num_blocks: int, count: int, copy_s: float, *, back_s: float) -> tuple[float, float]:
    """Follow `Swap` over a stage whose blocks take 1 s forward: what it waits."""
    chosen = swapped_blocks(range(num_blocks), count)
    now = lane = 0.0
    leaving: list[int] = []
    there: dict[int, float] = {}
    for number in range(num_blocks):
        if number in chosen:
            while len(leaving) > 1:
                now = max(now, there[leaving.pop(0)])
        now += 1.0
        if number in chosen:
            there[number] = lane = max(lane, now) + copy_s
            leaving.append(number)
    begins = now
    for number in reversed(range(num_blocks)):
        wanted = [chosen[-1]] if number == num_blocks - 1 else []
        if number in chosen[1:]:
            now = max(now, there[number])
            wanted.append(chosen[chosen.index(number) - 1])
        for each in wanted:
            lane = max(lane, now)
            if each not in leaving:
                there[each] = lane = lane + copy_s
        if number in chosen:
            now = max(now, there[number])
        now += back_s
    return begins - num_blocks, now - begins - num_blocks * back_s


def test_the_price_of_a_pass_is_what_its_copies_are_waited_for_within_two_of_them():
    for num_blocks, back_s, copy_s in itertools.product(
        (1, 2, 6, 13, 24), (2.0, 3.0), (0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 8.0)
    ):
        for count in range(1, num_blocks + 1):
            followed_s = sum(waits(num_blocks, count, copy_s, back_s=back_s))
            priced_s = max(count * copy_s - (num_blocks - 1), 0.0)
            priced_s += max(count * copy_s - (num_blocks - 1) * back_s, 0.0)
            assert abs(followed_s - priced_s) <= 2 * copy_s + 1e-9
