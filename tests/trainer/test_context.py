"""Causal attention over the parts of a sequence that ranks hold."""

import json
from typing import Any

import pytest

from tests.multirank import RunRanks
from tonari.trainer.models.context import worker_of

CASES = [(24, 4, 4), (48, 4, 2), (12, 2, 1)]
ODD = (36, 2, 2)
"""Nine places on each of 4 ranks, and 18 or 12 on each of fewer."""


@pytest.mark.multirank
@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly), 4],
)
def test_every_rank_of_a_sequence_computes_as_much_and_half_of_the_square(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    reports: Any = run_ranks(
        "trainer/context_attention", num_ranks, json.dumps([*CASES, ODD])
    ).reports
    for number, (places, heads, _) in enumerate(CASES):
        found = [report[number] for report in reports]
        assert max(each["error"] for each in found) < 1e-12, found
        assert [each["shape"] for each in found] == num_ranks * [[2, heads, places // num_ranks, 8]]
        if places // num_ranks % 2:
            continue
        half = places // num_ranks // 2
        assert [each["pairs"] for each in found] == num_ranks * [(2 * num_ranks + 1) * half**2]
    odd = [report[len(CASES)] for report in reports]
    assert max(each["error"] for each in odd) < 1e-12
    if num_ranks == 4:
        assert [each["pairs"] for each in odd] == [9 * stop for stop in (9, 18, 27, 36)]


@pytest.mark.parametrize("parts", range(1, 9))
def test_every_rank_works_on_two_halves_as_far_from_the_middle(parts: int) -> None:
    worked = [[h for h in range(2 * parts) if worker_of(h, parts) == rank] for rank in range(parts)]
    assert [len(halves) for halves in worked] == parts * [2]
    assert [sum(halves) for halves in worked] == parts * [2 * parts - 1]
