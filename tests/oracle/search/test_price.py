"""Each term of a price has its dimension and its limits."""

import contextlib
import itertools
from pathlib import Path
from typing import get_args

import pytest

from tests.oracle.search.orders import idle_s
from tests.oracle.search.planning import load
from tonari.oracle.cluster.cluster import Cluster, Device, Level
from tonari.oracle.search.choices import Group, Variant
from tonari.oracle.search.parts import WHOLE, Parts, Work
from tonari.oracle.search.price import Pricing, bubble_s, work_s
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.pipeline import check_microbatches
from tonari.trainer.mesh.place import Schedule
from tonari.trainer.run.build import make_without_data
from tonari.trainer.run.own import Own

DEVICE = Device(tflops=100, efficiency=0.5, memory_gbyte_s=1000, memory_gib=1, launch_us=0)
ONE = Variant("1f1b", 1, "none", False)


def cluster(gbyte_s: float = 1e-3, *, device: Device = DEVICE) -> Cluster:
    node = Level(name="node", units=4, gbyte_s=10 * gbyte_s)
    return Cluster(
        name="two", level=(node, Level(name="net", units=4, gbyte_s=gbyte_s)), device=device
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    config = load(tmp_path_factory.mktemp("parts"))
    model = make_without_data(config, WHOLE, Own())
    return Parts.of(config, model, tp=2, cp=2, sequential=True)


@pytest.fixture
def pricing_of(parts: Parts, tmp_path: Path):
    def make(world_size: int, found: Cluster | None = None) -> Pricing:
        found = found or cluster()
        assert found.device is not None
        return Pricing(load(tmp_path), found, found.device, parts, world_size=world_size)

    return make


def price(pricing: Pricing, group: Group, variant: Variant = ONE) -> dict[str, float]:
    return pricing.parts_s(group, variant)


def test_work_is_operations_over_a_rate_then_bytes_over_a_rate_and_a_launch_each():
    assert work_s(Work(flops=50e12), DEVICE) == pytest.approx(1.0)
    assert work_s(Work(other_bytes=1e12), DEVICE) == pytest.approx(1.0)
    assert work_s(Work(flops=50e12, product_bytes=3e12), DEVICE) == pytest.approx(3.0)
    assert work_s(Work(flops=50e12, other_bytes=1e12), DEVICE) == pytest.approx(2.0)
    slow = Device(tflops=100, memory_gbyte_s=1000, memory_gib=1, launch_us=10)
    assert work_s(Work(operators=100), slow) == pytest.approx(1e-3)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_one_rank_has_no_bubble_and_more_ranks_never_less(schedule):
    bubbles = [
        bubble_s(schedule, pp=pp, virtual=2, microbatches=64, forward_s=1.0, backward_s=2.0)
        for pp in (1, 2, 4, 8)
    ]
    assert bubbles[0] == 0
    assert bubbles == sorted(bubbles)
    assert all(0 <= each <= (pp - 1) * 3 for each, pp in zip(bubbles, (1, 2, 4, 8), strict=True))


def test_the_schedules_stand_in_the_order_of_their_bubbles():
    order: tuple[Schedule, ...] = ("zbv", "zero_bubble", "dualpipev", "interleaved", "1f1b")
    found = [
        bubble_s(name, pp=4, virtual=2, microbatches=64, forward_s=1.0, backward_s=2.0)
        for name in order
    ]
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("interleaved", 2), ("interleaved", 4), ("zero_bubble", 2), ("zero_bubble", 4), ("zbv", 1),
     ("dualpipev", 1)],
)  # fmt: skip
def test_bubbles_are_those_of_torchs_own_orders(schedule, virtual):
    compared = 0
    for pp, microbatches, backward_s in itertools.product(
        (2, 3, 8), (1, 2, 3, 6, 8, 12, 16, 24), (2.0, 2.5, 4.0)
    ):
        numbers = {"pp": pp, "virtual": virtual, "microbatches": microbatches}
        with contextlib.suppress(ConfigError):
            check_microbatches(schedule=schedule, batch_size=microbatches, **numbers)
            found_s, real_s = (
                find(schedule, forward_s=1.0, backward_s=backward_s, **numbers)
                for find in (bubble_s, idle_s)
            )
            assert found_s == pytest.approx(real_s), numbers
            compared += 1
    assert compared >= 15


def test_a_backward_pass_no_longer_than_a_forward_pass_is_priced_within_three_in_a_hundred():
    for pp, microbatches in itertools.product((2, 4, 16), (2, 8, 24, 32)):
        found_s, real_s = (
            find("zbv", pp=pp, virtual=1, microbatches=microbatches, forward_s=1.0, backward_s=1.0)
            for find in (bubble_s, idle_s)
        )
        assert found_s == pytest.approx(real_s, abs=0.04 * (2 * microbatches + real_s))


def test_one_rank_is_serial(pricing_of):
    alone = price(pricing_of(1), Group((1, 1, 1, 1, 1), 8, 1))
    assert alone["computation"] > 0
    assert alone["update"] > 0
    assert not any(alone[name] for name in ("recomputation", "bubble", "tp", "cp", "dp", "pp"))


@pytest.mark.parametrize(
    ("sizes", "variant", "part"),
    [
        ((1, 1, 1, 1, 4), ONE, "tp"),
        ((1, 1, 1, 1, 4), Variant("1f1b", 1, "none", True), "tp"),
        ((1, 1, 1, 4, 1), ONE, "cp"),
        ((4, 1, 1, 1, 1), ONE, "pp"),
        ((1, 4, 1, 1, 1), ONE, "dp"),
        ((1, 1, 4, 1, 1), ONE, "dp"),
        ((2, 1, 2, 1, 1), ONE, "dp"),
    ],
)
def test_links_without_end_leave_computation_and_bubble(pricing_of, sizes, variant, part):
    group = Group(sizes, 8, 4)
    slow = price(pricing_of(4), group, variant)
    twice = price(pricing_of(4, cluster(2e-3)), group, variant)
    fast = price(pricing_of(4, cluster(1e12)), group, variant)
    assert slow[part] > 0
    assert slow[part] / 2 * 0.99 <= twice[part] < slow[part]
    assert sum(fast[name] for name in ("tp", "cp", "dp", "pp")) < 1e-3 * slow[part]
    assert fast["computation"] == slow["computation"] > 0
    assert bool(fast["bubble"]) == (sizes[0] > 1)


def test_peers_of_tp_send_a_part_each_out_of_the_node_and_gather_the_others_in_it(pricing_of):
    pricing, parts_of_sequence = pricing_of(8), Variant("1f1b", 1, "none", True)
    # Four replicas side by side, each of which sends the whole of its own
    whole = price(pricing, Group((2, 4, 1, 1, 1), 8, 4))["pp"]
    split = Group((2, 1, 1, 1, 4), 8, 4)
    assert price(pricing, split, parts_of_sequence)["pp"] == pytest.approx(whole / 4, rel=0.05)
    # Links in the node, over which the parts come together, are ten times as fast
    assert whole / 4 < price(pricing, split)["pp"] < whole / 2


def test_twice_the_operations_a_second_halve_products(pricing_of):
    products = Device(tflops=100, memory_gbyte_s=1e12, memory_gib=1, launch_us=0)
    faster = Device(tflops=200, memory_gbyte_s=1e12, memory_gib=1, launch_us=0)
    group = Group((2, 1, 1, 1, 1), 8, 4)
    once, half = (
        price(pricing_of(2, cluster(1e12, device=device)), group) for device in (products, faster)
    )
    assert half["computation"] == pytest.approx(once["computation"] / 2, rel=1e-6)
    assert half["bubble"] == pytest.approx(once["bubble"] / 2, rel=1e-6)


def test_full_recomputation_is_a_forward_pass_of_the_blocks_and_selective_less(pricing_of):
    group = Group((1, 1, 1, 1, 1), 8, 1)
    none, selective, full = (
        price(pricing_of(1), group, ONE._replace(checkpointing=kind))
        for kind in ("none", "selective", "full")
    )
    assert none["recomputation"] == 0
    assert 0 < selective["recomputation"] < full["recomputation"] < full["computation"] / 2
    assert none["computation"] == full["computation"]


def test_no_floor_is_above_a_price(pricing_of):
    for sizes in ((1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (1, 1, 2, 1, 2), (2, 1, 1, 2, 1)):
        world_size = sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4]
        pricing, group = pricing_of(world_size), Group(sizes, 8, 4)
        for sequential in (False, True)[: 1 + (sizes[-1] > 1)]:
            variant = ONE._replace(sequence_parallel=sequential)
            priced = pricing.pipeline_s(group, variant)
            busy_s = sum(priced.values()) - priced["bubble"]
            assert 0 < pricing.floor_s(group) <= busy_s


def test_groups_that_lie_side_by_side_share_their_node_s_link(pricing_of):
    pricing = pricing_of(16)
    # One rank a node, four groups at a time; then whole nodes, whose rings leave each node once
    apart = pricing.route("all_reduce", 4, 4).seconds(1 << 30)
    along = pricing.route("all_reduce", 1, 16).seconds(1 << 30)
    lone = 2 * 3 / 4 * 2**30 / 1e6
    assert apart == pytest.approx(4 * lone)
    assert along == pytest.approx(2 * 15 / 16 * 2**30 / 1e6)
