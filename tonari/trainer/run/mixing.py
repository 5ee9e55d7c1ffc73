"""Classification of images that are erased in part and mixed, and whose labels are smoothed.

A row is mixed with the row before it in its replica's batch, as by torchvision's ``MixUp`` and
``CutMix`` (v2). What is drawn follows from the run's seed, the step, the batch in it and the
replica, so that all ranks of a replica draw the same, without a message.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dataio.base.seeding import generator, key
from dataio.rows.samples import Batch
from tonari.trainer.run.erasing import RandomErasing
from tonari.trainer.run.tasks import Classify, cross_entropy, label_margin

DRAW = "draw"
"""Column of int64[2] in a training batch: the number of its step, and its own in the step."""


class ImageMixture(NamedTuple):
    """How the images of a batch are mixed.

    Attributes:
        share: Of a row's own image and label, in [0, 1].
        box: Rows and columns of pixels that come from the other image: first and last of each;
            None: all pixels are mixed.
    """

    share: float
    box: tuple[int, int, int, int] | None


class MixedClassify(Classify):
    """One class an image, trained on mixtures and smoothed labels; scored and evaluated as it is.

    A training row's loss is that of its own label and of the other's, by their shares: it is what
    is reported, and what importance goes by. Smoothing changes the gradient alone: the value of a
    loss is the cross-entropy, which can be compared with that of an evaluation and of other rows.

    Args:
        mixup: Alpha of the Beta distribution of the share; 0: rows are not mixed so.
        cutmix: The same, of the share that a box leaves. With both, each batch draws one of them.
        size: Height and width of an image; only ``cutmix`` needs it.
        smoothing: Share of a label that goes to all classes alike, in [0, 1).
        erase: Paints boxes of a training batch's images over, before they are mixed; optional.
        seed: The run's.
        replica: Whose rows it gets.

    Source: Zhang et al., mixup, ICLR 2018; Yun et al., CutMix, ICCV 2019; Szegedy et al., CVPR
    2016 (label smoothing).
    """

    def __init__(
        self,
        *,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        size: int = 0,
        smoothing: float = 0.0,
        erase: RandomErasing | None = None,
        seed: int,
        replica: int,
    ) -> None:
        super().__init__()
        self._ways = [way for way in ((mixup, 0), (cutmix, size)) if way[0]]
        self._smoothing, self._seed, self._replica = smoothing, seed, replica
        self._erase = erase

    def input(self, batch: Batch) -> Tensor:
        """Take the images, in training erased in part and mixed: uint8, rounded."""
        images = super().input(batch)
        if self._erase is not None and DRAW in batch:
            step, number = batch[DRAW].tolist()
            images = self._erase(images, step=step, number=number)
        mixture = self._mixture(batch)
        if mixture is None:
            return images
        share, box = mixture
        others = images.roll(1, 0)
        if box is None:
            mixed = images.float() * share + others.float() * (1 - share)
            return mixed.round().to(images.dtype)
        top, bottom, left, right = box
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        return mixed

    def target(self, batch: Batch) -> Tensor:
        """Take int64[batch], or of mixed rows float64[batch, 3]: own label, other, own share."""
        labels = super().target(batch)
        mixture = self._mixture(batch)
        if mixture is None:
            return labels
        shares = torch.full_like(labels, mixture.share, dtype=torch.float64)
        return torch.stack([labels.double(), labels.roll(1, 0).double(), shares], dim=1)

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the cross-entropy a row, whose gradient is that of smoothed labels."""
        if target.ndim == 1:
            return self._each(logits, target)
        own, other, share = target.unbind(dim=1)
        first, second = self._each(logits, own.long()), self._each(logits, other.long())
        share = share.to(first.dtype)
        return first * share + second * (1 - share)

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compare with the label; of mixed rows with the one of the larger share."""
        if target.ndim == 1:
            return super().outcome(logits, target)
        own, other, share = target.unbind(dim=1)
        return super().outcome(logits, torch.where(share >= 0.5, own, other).long())

    def _each(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = cross_entropy(logits, target)
        if not self._smoothing or not torch.is_grad_enabled():
            return losses
        # (1 - e) times the label's cross-entropy and e times the mean of all classes'.
        smoothed = losses + self._smoothing * label_margin(logits, target)
        return losses.detach() + (smoothed - smoothed.detach())

    def _mixture(self, batch: Batch) -> ImageMixture | None:
        if DRAW not in batch or not self._ways:
            return None
        step, number = batch[DRAW].tolist()
        rng = generator(key(self._seed, f"mixing {number}", replica=self._replica, step=step))
        alpha, size = self._ways[int(rng.integers(len(self._ways)))]
        share = float(rng.beta(alpha, alpha))
        if not size:
            return ImageMixture(share, None)
        half = int(0.5 * math.sqrt(1 - share) * size)
        middles = rng.integers(size, size=2).tolist()
        top, left = (max(middle - half, 0) for middle in middles)
        bottom, right = (min(middle + half, size) for middle in middles)
        return ImageMixture(
            1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right)
        )


def mark_draws(batches: Sequence[Batch], *, step: int) -> None:
    """Number the batches of a training step, so that their rows are mixed; others never are.

    Args:
        batches: Of the step, in order.
        step: Its number in the run.
    """
    for number, batch in enumerate(batches):
        batch[DRAW] = torch.tensor([step, number])
