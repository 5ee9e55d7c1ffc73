"""The parcels of one replica's epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.errors import ExchangeError
from dataio.plan.layout import Layout
from dataio.world import CHANNEL_TAGS
from shuffle.ring import partners
from shuffle.schedule import plan_legs

LAYOUT = Layout((2, 1, 2), 1000)


def plan(replica=0, *, leaving=100, first_tag=0, row_bytes=100, steps=range(20)):
    return plan_legs(
        LAYOUT, replica=replica, num_leaving=leaving, seed=3, epoch=2, steps=steps,
        mean_row_bytes=row_bytes, first_tag=first_tag,
    )  # fmt: skip


@given(st.integers(1, 200), st.sampled_from([1, 10**6, 10**8]), st.integers(0, 4))
def test_parcels_cover_the_leaving_rows_once_in_order(leaving, row_bytes, replica):
    parcels = plan(replica, leaving=leaving, row_bytes=row_bytes)
    rows = np.concatenate([np.arange(parcel.start, parcel.stop) for parcel in parcels])
    assert rows.tolist() == list(range(leaving))
    steps = [parcel.step for parcel in parcels]
    assert steps == sorted(steps)
    assert 0 <= min(steps) <= max(steps) < 20


@given(st.integers(0, 5))
def test_every_parcel_has_a_tag_of_its_own_in_its_channel(channel):
    first = channel * CHANNEL_TAGS
    tags = [parcel.tag for parcel in plan(first_tag=first)]
    assert tags == list(range(first, first + len(tags)))


def test_sender_and_receiver_agree_on_every_parcel():
    plans = {replica: plan(replica) for replica in range(5)}
    for replica, parcels in plans.items():
        for number, parcel in enumerate(parcels):
            theirs = plans[parcel.dest][number]
            assert theirs.source == replica
            assert (theirs.start, theirs.stop, theirs.tag) == (
                parcel.start,
                parcel.stop,
                parcel.tag,
            )
            expected = partners(LAYOUT, seed=3, epoch=2, chunk=parcel.chunk, replica=replica)
            assert (parcel.dest, parcel.source) == expected


def test_no_step_left_sends_at_once():
    assert {parcel.step for parcel in plan(steps=range(7, 7))} == {7}


def test_more_parcels_than_tags_are_refused():
    big = Layout((1, 1), 20_000)
    with pytest.raises(ExchangeError, match=r"9000 parcels an epoch, expected at most 4096; lower"):
        plan_legs(big, replica=0, num_leaving=9000, seed=0, epoch=0, steps=range(5),
                     mean_row_bytes=10**8, first_tag=0)  # fmt: skip
