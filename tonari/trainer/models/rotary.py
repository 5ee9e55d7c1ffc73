"""Rotary position embedding: a pair of a head's features turns by an angle that grows by place.

Source: Su et al., RoFormer: enhanced transformer with rotary position embedding, 2021; pairs lie
half a head apart, and long contexts are scaled, as in Llama 3.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tonari.trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How fast the pairs turn.

    Attributes:
        theta: The slowest pair turns about ``theta`` times slower than the fastest.
        factor: Llama 3.1's scaling: pairs that turn slowly turn this many times slower still; 1
            does not scale, and the fields below are ignored.
        low_freq_factor: Pairs that turn less often than this in ``original_length`` are slowed.
        high_freq_factor: Pairs that turn more often than this are not; those between partly.
        original_length: Places of a sequence before the context was made longer.
    """

    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(
                    f"model.rope.{name} is {value!r}, expected a number > 0; correct it, or leave "
                    "it out"
                )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"model.rope.low_freq_factor is {self.low_freq_factor}, expected less than "
                f"high_freq_factor, {self.high_freq_factor}; correct one of them"
            )

    def angles(self, positions: Tensor, *, head_width: int) -> Tensor:
        """Compute by how much each pair is turned at each place.

        Args:
            positions: integer[...].
            head_width: Features of a head.

        Returns:
            float32[..., head_width / 2]: Radians; in float32 whatever the model computes in, as
            other implementations have it.
        """
        return positions[..., None].float() * self._per_place(head_width, positions.device)

    def _per_place(self, head_width: int, device: torch.device) -> Tensor:
        pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
        angle = 1.0 / (self.theta ** (pairs / head_width))
        if self.factor == 1:
            return angle
        places = 2 * math.pi / angle  # of a full turn
        turns = self.original_length / places
        low, high = self.low_freq_factor, self.high_freq_factor
        share = (turns - low) / (high - low)
        between = (1 - share) * angle / self.factor + share * angle
        slowed = torch.where(places > self.original_length / low, angle / self.factor, between)
        return torch.where(places < self.original_length / high, angle, slowed)


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs of queries or keys.

    Args:
        heads: floating[batch, heads, places, head_width].
        angles: float32[places, head_width / 2], or with the batch before it.
    """
    if angles.dim() == 3:
        # float32[batch, 1, places, head_width / 2]
        angles = angles[:, None]
    both = torch.cat([angles, angles], dim=-1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return heads * both.cos().to(heads.dtype) + turned * both.sin().to(heads.dtype)
