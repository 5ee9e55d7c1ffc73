"""First weights are the same on every rank, or refused."""

import pytest

from tests.multirank import RunRanks
from tests.ranks.trainer.drawn_weights import WAYS

SEEDED = ("torch", "numpy", "python")


@pytest.mark.multirank
def test_weights_that_a_constructor_draws_are_made_alike_or_refused(run_ranks: RunRanks) -> None:
    ended = run_ranks("trainer/drawn_weights", 2, timeout_s=120)
    one, other = ended.reports
    for way in WAYS:
        for build in ("seeded", "deferred"):
            words, _ = one[f"{way} {build}"]
            if way in SEEDED:
                assert not words, (way, build)
                assert one[f"{way} {build}"] == other[f"{way} {build}"]
                assert one[f"{way} seeded"] == one[f"{way} deferred"]
                continue
            assert words == other[f"{way} {build}"][0] or way == "width", (way, build)
            expected = "has other weights" if way == "width" else "the weight scale is another"
            assert expected in words, (way, build)
