"""A step by ParaDL's equations: its limits, and what joins a group."""

import pytest

from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.errors import OracleError
from tonari.oracle.paradl import Link, Terms, link_across, price, probed_link
from tonari.oracle.probe.messages import MessageTimes
from tonari.oracle.record import Message

MIB = 1 << 20
LINK = Link(latency_s=1e-3, byte_s=1e-9)
SIZES = (2, 2, 1, 1, 2)
"""pp 2, dp_replicate 2, tp 2."""
EVENTS = (
    Message("send", (0, 4), 3 * MIB, peer=4),
    Message("all_reduce", (0, 1), MIB),
    Message("all_reduce", (0, 2), 8 * MIB),
    Message("all_reduce", (0, 1), MIB),
    Message("receive", (0, 4), 3 * MIB, peer=4),
)


def terms(events=EVENTS, *, link=LINK, sizes=SIZES, microbatches=4) -> Terms:
    return price(
        events, computation_s=2.0, sizes=sizes, microbatches=microbatches, link_of=lambda _: link
    )


def test_one_rank_is_serial():
    alone = terms([Message("all_reduce", (0,), MIB)], sizes=(1, 1, 1, 1, 1), microbatches=1)
    assert (alone.rings, alone.bubble_s, alone.step_s) == ((), 0.0, 2.0)


def test_without_latency_on_infinite_bandwidth_computation_and_bubble_are_left():
    found = terms(link=Link(0.0, 0.0))
    assert [ring.seconds for ring in found.rings] == [0.0] * 4
    assert found.step_s == found.computation_s + found.bubble_s


@pytest.mark.parametrize(("pp", "microbatches", "step_s"), [(4, 1, 8), (4, 3, 4), (1, 1, 2)])
def test_a_batch_that_is_not_cut_passes_the_stages_one_after_another(pp, microbatches, step_s):
    found = terms([], sizes=(pp, 1, 1, 1, 1), microbatches=microbatches)
    assert found.step_s == pytest.approx(step_s)


def test_more_microbatches_leave_less_bubble_and_nothing_else_changes():
    few, many = terms(microbatches=4), terms(microbatches=400)
    assert many.bubble_s == pytest.approx(few.bubble_s / 100)
    assert (many.computation_s, many.rings) == (few.computation_s, few.rings)


def test_messages_are_named_by_their_axis_in_the_order_of_the_mesh():
    found = terms()
    assert [ring.name for ring in found.rings] == [
        "pp: send", "pp: receive", "dp_replicate: all-reduce", "tp: all-reduce",
    ]  # fmt: skip
    tp = found.rings[-1]
    assert (tp.messages, tp.num_bytes, tp.ranks) == (2, 2 * MIB, 2)


def test_seconds_do_not_depend_on_what_bytes_are_counted_in():
    counted = [Message(each.kind, each.ranks, each.num_bytes // 1024) for each in EVENTS]
    in_kib = terms(counted, link=Link(LINK.latency_s, LINK.byte_s * 1024))
    assert in_kib.step_s == pytest.approx(terms().step_s)


def test_latency_and_bandwidth_add_up():
    parts = [terms(link=link) for link in (Link(1e-3, 0.0), Link(0.0, 1e-9), LINK)]
    messages_s = [sum(ring.seconds for ring in each.rings) for each in parts]
    assert messages_s[0] > 0
    assert messages_s[1] > 0
    assert messages_s[2] == pytest.approx(messages_s[0] + messages_s[1])


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks):
    group, sizes = tuple(range(ranks)), (1, ranks, 1, 1, 1)
    seconds = {
        kind: terms([Message(kind, group, MIB)], sizes=sizes).rings[0].seconds
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    parts_s = seconds["reduce_scatter"] + seconds["all_gather"]
    assert seconds["all_reduce"] == pytest.approx(parts_s)


def test_a_send_and_its_receive_are_one_message():
    send, receive, *_ = terms().rings
    one_s = LINK.latency_s + 3 * MIB * LINK.byte_s
    assert send.seconds + receive.seconds == pytest.approx(one_s)


def test_the_link_is_that_of_the_probe_s_sends():
    times = MessageTimes(
        kind="send", ranks=2, num_bytes=(256, 1 << 26), seconds=(1e-4, 1e-4 + 2.0 - 2**-17),
        cores=(1.0, 1.0), spread=(1.0, 1.0),
    )  # fmt: skip
    found = probed_link([times])
    assert found.latency_s == 1e-4
    # 64 MiB take two seconds more
    assert found.byte_s == pytest.approx(2.0 / (1 << 26), rel=1e-3)
    with pytest.raises(OracleError, match=r"timed no sends .* probe with two ranks at least"):
        probed_link([])


def test_a_group_goes_by_the_slowest_level_that_it_crosses():
    cluster = Cluster(
        name="hall",
        level=(
            Level(name="node", units=2, latency_us=1.0),
            Level(name="rack", units=2, gbyte_s=2.0, latency_us=5.0),
            Level(name="hall", units=2, gbyte_s=1.0, latency_us=3.0),
        ),
    )
    inside = Link(latency_s=2e-6, byte_s=1e-10)
    links = {
        ranks: link_across(cluster, ranks, inside=inside) for ranks in ((0, 1), (0, 2), (0, 2, 4))
    }
    assert links[0, 1] == inside
    alone = link_across(cluster, (0, 1), inside=None)
    figures = [(link.latency_s, link.byte_s) for link in (*links.values(), alone)]
    assert figures[1] == pytest.approx((5e-6, 1 / 2e9))
    assert figures[2] == pytest.approx((5e-6, 1 / 1e9))
    assert figures[3] == pytest.approx((1e-6, 0.0))


@pytest.mark.parametrize(
    ("ranks", "link", "seconds"),
    [
        (2, Link(9e-6, 2e-11), 0.00183672128),
        (8, Link(4.031e-5, 8e-11), 0.01329538896),
        (64, Link(4.031e-5, 8e-11), 0.01940149008),
    ],
)
def test_gradients_take_what_the_authors_program_printed(ranks, link, seconds):
    # github.com/TruongThaoNguyen/paraDL-analysis, log/ranking_log/resnet/64/data.log: ResNet-50
    gradients = Message("all_reduce", tuple(range(ranks)), 90_936_064)
    found = terms([gradients], link=link, sizes=(1, ranks, 1, 1, 1))
    assert found.rings[0].seconds == pytest.approx(seconds)
