"""A loss that wrong labels pull at less, as a recipe of a run: `recipe.kind` of `tonari train`.

Zhang and Sabuncu, Generalized Cross Entropy Loss, NeurIPS 2018, section 3.3.
"""

from typing import Any

from torch import Tensor


def recipe(*, q: float = 0.7) -> dict[str, Any]:
    """Give (1 - p ** q) / q of the probability p of the label, in place of the cross entropy.

    Args:
        q: Above 0, at most 1; towards 0 it is the cross entropy.
    """

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        shares = logits.float().softmax(dim=1).gather(1, target[:, None])[:, 0]
        return (1 - shares.clamp_min(1e-7) ** q) / q

    return {"loss": loss}
