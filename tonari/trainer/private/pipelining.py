"""What a stage of a pipeline is checked for before torch 2.13.

Why: torch 2.11 and 2.12 refuse inputs that lie otherwise in memory than they were described, such
as pictures with one channel, and send back a gradient for each tensor that they send. Public
instead: torch 2.13, which does neither.
"""

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

__all__ = ["SENDS_WHOLE_NUMBERS", "StageOfAnyLayout"]

SENDS_WHOLE_NUMBERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether tensors that have no gradients may pass between stages."""


class StageOfAnyLayout(PipelineStage):
    """A stage that takes inputs in any layout: whoever makes it describes what it makes."""

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Leave it out."""
