"""Full hides nothing, whatever the scores say; and every policy is an Importance."""

import numpy as np
import pytest

from dataio.policies import SCORE_DTYPE, Importance
from importance import Full, Kakurenbo, RandomPrune

POLICIES: tuple[Importance, ...] = (Full(), Kakurenbo(), RandomPrune())


def test_full_hides_nothing_even_of_rows_that_are_easy() -> None:
    scores = np.array([(0.0, 1.0, True, 0)] * 10, SCORE_DTYPE)
    rng = np.random.default_rng(0)
    selection = Full().select(scores, epoch=5, num_epochs=None, rng=rng)
    assert (len(selection.hidden), selection.weights, selection.lr_factor) == (0, None, 1.0)
    assert len(Full().due(np.array([3]), epoch=5)) == 0


def test_only_kakurenbo_looks_at_scores() -> None:
    assert [policy.uses_scores for policy in POLICIES] == [False, True, False]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_can_be_kept_and_compared_but_not_changed(policy: Importance) -> None:
    assert policy == type(policy)()
    with pytest.raises(AttributeError):
        policy.fraction = 0.5  # type: ignore[attr-defined]
