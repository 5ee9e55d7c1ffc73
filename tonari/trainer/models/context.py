"""Causal attention over a sequence that lies in consecutive parts on the ranks of cp.

Later places look at more places than earlier ones do. So the sequence is cut into two halves a
rank, and each rank works on one of the early halves and on the late half that makes up for it: all
ranks have as much to do, and no rank computes what the causal mask would take away, but for half of
the blocks on the diagonal. Queries and results travel for this; the parts that the model sees stay
consecutive.

Source: of the pairs of halves, Brandon et al., Striped attention, 2023, and torch's own context
parallelism, which cannot run on a CPU.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tonari.trainer.models.styles import redistribute
from tonari.trainer.private.messages import functional_collectives as funcol


def attend_causally(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """Let each place of the whole sequence look at itself and at those before. Collective over cp.

    Args:
        q: floating[batch, heads here, places here, head_width].
        k: The same; or fewer heads, each for as many consecutive heads of ``q``.
        v: As ``k``.
        cp: Its j-th rank holds the j-th part of the places.

    Returns:
        floating[batch, heads here, places here, head_width].
    """
    # floating[2, batch, heads here, all places, head_width]
    k, v = redistribute(torch.stack([k, v]), cp, Shard(3), Replicate(), Partial())
    num_places, parts, rank = q.shape[2], cp.size(), cp.get_local_rank()
    if num_places % 2:
        # There are no equal halves: later ranks have more to do.
        return _attend(q, k, v, first=rank * num_places)
    half = num_places // 2
    # floating[2, batch, heads here, half of the places here, head_width]
    early, late = _exchange(torch.stack(q.chunk(2, dim=2)), cp, back=False)
    looked = torch.stack(
        [
            _attend(early, k, v, first=rank * half),
            _attend(late, k, v, first=(2 * parts - 1 - rank) * half),
        ]
    )
    return _exchange(looked, cp, back=True).movedim(0, 2).flatten(2, 3)


def worker_of(half: int, parts: int) -> int:
    """Say which rank works on a half: the first one and the last one are the first rank's."""
    return half if half < parts else 2 * parts - 1 - half


def _attend(q: Tensor, k: Tensor, v: Tensor, *, first: int) -> Tensor:
    """Let consecutive places, from ``first`` on, look at all places up to themselves."""
    num_places = q.shape[2]
    stop = first + num_places
    # bool[places, places up to the last of them]: aligned at the last of both.
    mask = torch.ones(num_places, stop, dtype=torch.bool, device=q.device).tril(first)
    return F.scaled_dot_product_attention(
        q, k[:, :, :stop], v[:, :, :stop], attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )


def _exchange(halves: Tensor, cp: DeviceMesh, *, back: bool) -> Tensor:
    """Give each half to the rank that works on it; or back to the rank whose part it lies in.

    Args:
        halves: floating[2, ...]: In the order of the sequence.
        cp: All ranks.
        back: Which way.

    Returns:
        floating[2, ...]: In the order of the sequence.
    """
    parts, rank = cp.size(), cp.get_local_rank()
    own = (2 * rank, 2 * rank + 1)
    workers = [worker_of(half, parts) for half in own]
    owners = [half // 2 for half in (rank, 2 * parts - 1 - rank)]
    away, here = ([ranks.count(other) for other in range(parts)] for ranks in (workers, owners))
    # Messages lie in the order of the ranks, which is not always that of the halves.
    swapped = workers[0] > workers[1]
    if not back:
        sent = halves.flip(0) if swapped else halves
        return _all_to_all(sent, here, away, cp)
    received = _all_to_all(halves, away, here, cp)
    return received.flip(0) if swapped else received


def _all_to_all(sent: Tensor, received: list[int], away: list[int], cp: DeviceMesh) -> Tensor:
    given = funcol.all_to_all_single_autograd(sent.contiguous(), received, away, cp.get_group())
    # A view of it would not wait for the message.
    return cast(Tensor, funcol.wait_tensor(given))  # type: ignore[no-untyped-call]
