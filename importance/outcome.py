"""Say of each row of a batch whether the model was right, and how sure it was."""

import torch
from torch import Tensor

MOST_NUMBERS = 1 << 25
"""Of the logits that a softmax is made of at a time."""


def outcome(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compare a batch's logits with its labels.

    Confidence is the softmax over classes of the largest class: the other rows of the batch do
    not change it (``docs/adr/0003``).

    Args:
        logits: floating[batch, classes], on any device; no gradient flows back into them.
        labels: integer[batch]: The right class of each row.

    Returns:
        correct: bool[batch]: Whether the largest class is the label, on the device of ``logits``.
        confidence: float32[batch], in [0, 1].

    Raises:
        ValueError: If a shape, or the dtype of the labels, is another.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"outcome: logits have shape {tuple(logits.shape)}, expected [batch, classes] with at "
            f"least one class; flatten or unsqueeze them so that each row is one sample"
        )
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"outcome: labels are {labels.dtype}{list(labels.shape)}, expected integers of shape "
            f"[{logits.shape[0]}] as logits have {logits.shape[0]} rows; pass class numbers, "
            f"not one-hot or mixed labels"
        )
    with torch.no_grad():
        # Half precision would round confidences near tau: at least float32.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        some = max(MOST_NUMBERS // logits.shape[1], 1)
        if len(logits) <= some:
            confidence, predicted = logits.softmax(dim=1, dtype=dtype).max(dim=1)
            return predicted == labels, confidence.float()
        # A vocabulary of 128 k would take twice the memory of all its logits in float32.
        parts = [rows.softmax(dim=1, dtype=dtype).max(dim=1) for rows in torch.split(logits, some)]
        confidence, predicted = (torch.cat(column) for column in zip(*parts, strict=True))
        return predicted == labels, confidence.float()
