"""What a rank sends in a step, along which axes of the mesh. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonari.oracle.record import Message
from tonari.oracle.trace import Trace
from tonari.trainer.mesh.mesh import AXES


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one kind along the same axes.

    Attributes:
        kind: As of `Message`.
        axes: Of the mesh, in its order: those in which the ranks of the group differ.
        messages: How many.
        num_bytes: Of all of them.
    """

    kind: str
    axes: tuple[str, ...]
    messages: int
    num_bytes: int


def traffic(trace: Trace, sizes: Sequence[int]) -> tuple[Traffic, ...]:
    """Add up a step's messages, the most bytes first.

    Args:
        trace: Of a rank.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
    """
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    num_bytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for event in trace.events:
        if isinstance(event, Message):
            key = (event.kind, axes_of(event.ranks, sizes))
            counts[key] += 1
            num_bytes[key] += event.num_bytes
    return tuple(
        Traffic(kind=kind, axes=axes, messages=counts[kind, axes], num_bytes=total)
        for (kind, axes), total in sorted(num_bytes.items(), key=lambda item: (-item[1], item[0]))
    )


def axes_of(ranks: Sequence[int], sizes: Sequence[int]) -> tuple[str, ...]:
    """Find the axes of a mesh, laid out in rank order, in which some ranks differ."""
    # int64[len(AXES), len(ranks)]
    places = np.stack(np.unravel_index(np.array(ranks), tuple(sizes)))
    differ = (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, does in zip(AXES, differ.tolist(), strict=True) if does)
