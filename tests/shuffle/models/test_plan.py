"""Who exchanges with whom, and what that costs beside rows."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shuffle import equal_exchange
from shuffle.models.plan import partner_of
from tests.shuffle.models.replicas import SEED


@given(st.integers(1, 90), st.integers(0, 50))
def test_partners_are_each_others_and_only_an_odd_replica_is_left_over(
    num_replicas: int, number: int
) -> None:
    found = [
        partner_of(replica, num_replicas=num_replicas, seed=SEED, round_number=number)
        for replica in range(num_replicas)
    ]
    assert found.count(None) == num_replicas % 2
    for replica, partner in enumerate(found):
        if partner is not None:
            assert partner != replica
            assert found[partner] == replica


def test_every_pair_is_as_likely_as_every_other_and_all_sit_out_alike() -> None:
    rounds, pairs = 2000, Counter[tuple[int, int | None]]()
    for number in range(rounds):
        for replica in range(5):
            partner = partner_of(replica, num_replicas=5, seed=SEED, round_number=number)
            pairs[replica, partner] += 1
    assert len(pairs) == 25, "each with four others, or alone"
    for count in pairs.values():
        assert abs(count - rounds / 5) < 5 * (rounds * 0.2 * 0.8) ** 0.5


def test_partners_of_a_large_world_are_found_without_looking_at_the_others() -> None:
    size = 2**40
    partner = partner_of(12345, num_replicas=size, seed=SEED, round_number=3)
    assert partner is not None
    assert partner_of(partner, num_replicas=size, seed=SEED, round_number=3) == 12345


def test_models_cost_what_the_equal_exchange_of_rows_costs() -> None:
    assert equal_exchange(100, share_bytes=1000, rounds_per_epoch=3) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="expected the bytes of a replica's rows"):
        equal_exchange(100, share_bytes=0)
