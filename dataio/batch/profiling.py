"""Whether torch's profiler is on: the one thing that the data layer takes from inside torch.

Apart from ``tonari/trainer/private``, as the data layer works without the trainer, on older torch.

Why: a mark in a profile takes some microseconds a batch where nobody profiles, too. Public instead:
none.
"""

from torch.autograd import profiler

__all__ = ["is_profiling"]


def is_profiling() -> bool:
    """Say whether marks in a profile are seen by anybody."""
    return profiler._is_profiler_enabled
