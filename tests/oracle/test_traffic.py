"""What a step sends is named by the axes of the mesh along which it goes."""

from tonari.oracle import Message, Trace, traffic
from tonari.oracle.traffic import axes_of

SIZES = (2, 1, 3, 1, 2)
"""pp 2, dp_shard 3, tp 2."""


def test_the_axes_of_a_group_are_those_in_which_its_ranks_differ():
    assert axes_of((0, 1), SIZES) == ("tp",)
    assert axes_of((1, 3, 5), SIZES) == ("dp_shard",)
    assert axes_of((0, 6), SIZES) == ("pp",)
    assert axes_of(range(12), SIZES) == ("pp", "dp_shard", "tp")
    assert axes_of((7,), SIZES) == ()


def test_messages_of_a_kind_along_the_same_axes_are_added_up_the_most_bytes_first():
    events = (
        Message("all_gather", (0, 1), 10),
        Message("send", (0, 6), 100, peer=6),
        Message("all_gather", (0, 1), 20),
        Message("all_gather", (0, 2, 4), 7),
    )
    found = traffic(Trace(rank=0, events=events, kept_bytes=0, peak_bytes=0), SIZES)
    assert [(t.kind, t.axes, t.messages, t.num_bytes) for t in found] == [
        ("send", ("pp",), 1, 100),
        ("all_gather", ("tp",), 2, 30),
        ("all_gather", ("dp_shard",), 1, 7),
    ]
