"""Full hides nothing, whatever the scores say; and every policy is an Importance."""

import numpy as np
import pytest

from dataio.plan.policies import Importance
from importance import Full, InfoBatch, Kakurenbo, RandomPrune, SelectiveBackprop
from tests.importance.rows import one_pool, reported

POLICIES: tuple[Importance, ...] = (
    Full(), Kakurenbo(), InfoBatch(), SelectiveBackprop(), RandomPrune()
)  # fmt: skip


def test_full_hides_nothing_even_of_rows_that_are_easy() -> None:
    selection = Full().select(one_pool(reported(np.zeros(10))), epoch=5, num_epochs=None)
    assert (len(selection.hidden), selection.weights, selection.lr_factor) == (0, None, 1.0)
    assert len(Full().due(np.array([3]), epoch=5)) == 0


def test_a_policy_says_which_columns_it_goes_by() -> None:
    named = [policy.columns for policy in POLICIES]
    assert named == [(), ("loss", "confidence", "correct"), ("loss",), ("loss",), ()]
    assert Full(columns=("forgotten",)).columns == ("forgotten",)
    with pytest.raises(ValueError, match=r"columns is \('grad',\), expected a tuple of \"loss\""):
        Full(columns=("grad",))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_can_be_kept_and_compared_but_not_changed(policy: Importance) -> None:
    assert policy == type(policy)()
    with pytest.raises(AttributeError):
        policy.fraction = 0.5  # type: ignore[attr-defined]
