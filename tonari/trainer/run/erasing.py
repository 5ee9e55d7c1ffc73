"""Boxes of images that are painted over, each row's its own.

What is drawn follows from the run's seed, the step, the batch in it and the replica, so that all
ranks of a replica draw the same, without a message.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dataio.base.seeding import generator, key

SCALE, RATIO = (0.02, 1 / 3), (0.3, 3.3)
"""The area of a box, of the image's, and its height by its width: timm's and torchvision's."""
TRIES = 10
"""Boxes that are drawn for a row; the first that fits is taken, and if none does, nothing is."""


class RandomErasing:
    """Paints a box of some images over, in the colour that is zero to the model.

    Args:
        probability: That a row gets a box, in [0, 1].
        mean: Of each channel, of bytes divided by 255; by default the middle.
        seed: The run's.
        replica: Whose rows it gets.

    Source: Zhong et al., Random erasing data augmentation, AAAI 2020.
    """

    def __init__(
        self, probability: float, *, mean: Sequence[float] = (), seed: int, replica: int
    ) -> None:
        self._probability, self._seed, self._replica = probability, seed, replica
        self._colour = torch.tensor([255 * each for each in mean or (0.5,)]).round()

    def __call__(self, images: Tensor, *, step: int, number: int) -> Tensor:
        """Paint boxes into a copy of a batch.

        Args:
            images: uint8[batch, channels, height, width].
            step: In the run.
            number: Of the batch in the step.
        """
        num_rows, _, height, width = images.shape
        rng = generator(key(self._seed, f"erasing {number}", replica=self._replica, step=step))
        chosen = rng.random(num_rows) < self._probability
        area = rng.uniform(*SCALE, (TRIES, num_rows)) * height * width
        low, high = map(math.log, RATIO)
        ratio = np.exp(rng.uniform(low, high, (TRIES, num_rows)))
        # int64[TRIES, batch]
        tall = np.sqrt(area * ratio).round().astype(np.int64)
        wide = np.sqrt(area / ratio).round().astype(np.int64)
        fits = (tall < height) & (wide < width)
        place = rng.random((2, num_rows))
        painted = images.clone()
        colour = self._colour.to(images.device, images.dtype)[:, None, None]
        for row in np.flatnonzero(chosen & fits.any(axis=0)).tolist():
            drawn = int(fits[:, row].argmax())
            h, w = int(tall[drawn, row]), int(wide[drawn, row])
            top, left = int(place[0, row] * (height - h + 1)), int(place[1, row] * (width - w + 1))
            painted[row, :, top : top + h, left : left + w] = colour
        return painted
