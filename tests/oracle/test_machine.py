"""What a node that was measured takes for what is asked of it."""

import pytest

from tonari.oracle.errors import OracleError
from tonari.oracle.machine import MeasuredCurve, OneNode
from tonari.oracle.probe.messages import MessageTimes, group_sizes


def times(
    ranks: int = 2, cores: float = 1.0, seconds: tuple[float, float] = (1.0, 3.0)
) -> MessageTimes:
    return MessageTimes(
        kind="all_reduce", ranks=ranks, num_bytes=(100, 300), seconds=seconds,
        cores=(cores, cores), spread=(1.0, 1.0),
    )  # fmt: skip


def test_a_curve_is_linear_between_points_flat_before_and_goes_on_behind():
    curve = MeasuredCurve((1.0, 2.0, 4.0), (10.0, 20.0, 30.0))
    assert [curve(x) for x in (0, 1, 1.5, 2, 3, 4, 6)] == [10, 10, 15, 20, 25, 30, 40]
    assert MeasuredCurve((1.0,), (7.0,))(5) == 7
    assert MeasuredCurve((1.0, 2.0), (3.0, 1.0))(9) == 0


def test_a_message_takes_what_was_measured_of_its_size_with_its_own_demand():
    alone = OneNode([times()], [(1, 1.0)])
    assert alone.message("all_reduce", (4, 7), 200).seconds == 2.0
    # Two cores' worth, where two at a time take 1.5 times as long: that is in the figure already
    node = OneNode([times(cores=2.0)], [(1, 1.0), (2, 1.5)])
    cost = node.message("all_reduce", (0, 1), 300)
    ((resource, demand),) = cost.demands
    assert cost.seconds * node.slowdown(resource, demand) == pytest.approx(3.0)
    assert node.slowdown(resource, 0.5) == 1.0


def test_a_group_is_as_the_next_larger_one_that_was_timed_and_else_as_the_largest():
    two, four = times(), times(ranks=4, seconds=(4.0, 8.0))
    node = OneNode([two, four], [(1, 1.0)])
    seconds = [
        node.message("all_reduce", tuple(range(n)), 100).seconds for n in (2, 3, 4, 5)
    ]  # fmt: skip
    assert seconds == [1.0, 4.0, 4.0, 4.0]
    with pytest.raises(OracleError, match="no send among ranks, only: all_reduce; probe with"):
        node.message("send", (0, 1), 100)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 3, 6])]
)
def test_every_group_of_a_mesh_is_timed(ranks, sizes):
    assert group_sizes(ranks) == sizes


def test_more_cores_than_there_are_and_were_timed_are_shared_evenly():
    slowdowns = [(1, 1.0), (2, 1.2)]
    scarce = OneNode([], slowdowns, cores=2)
    assert scarce.slowdown(("cores",), 4.0) == pytest.approx(2 * 1.2)
    timed = OneNode([], [*slowdowns, (4, 2.6)], cores=2)
    assert timed.slowdown(("cores",), 4.0) == pytest.approx(2.6)
    assert timed.slowdown(("cores",), 8.0) == pytest.approx(2 * 2.6)
    many = OneNode([], slowdowns, cores=64)
    assert many.slowdown(("cores",), 3.0) == pytest.approx(1.4)


def test_a_node_has_one_of_anything_but_cores():
    node = OneNode([], [(1, 1.0), (2, 5.0)], cores=2)
    assert node.slowdown(("source of node",), 0.4) == 1.0
    assert node.slowdown(("source of node",), 2.5) == 2.5
