"""How ranks are named in a report."""

from tonari.trainer.watch.names import name, role


def test_a_rank_is_named_by_the_axes_that_have_several() -> None:
    assert role(5, (2, 1, 2, 1, 2)) == "pp 1, dp_shard 0, tp 1"


def test_a_rank_is_named_with_its_host_where_there_are_several() -> None:
    assert name(1, (), ("here", "there")) == "rank 1 on there"
    assert name(1, (1, 2, 1, 1, 1), ("here", "there")) == "rank 1 on there (dp_replicate 1)"
    assert name(1, (), ("here", "here")) == "rank 1"
    assert name(1, ()) == "rank 1"
