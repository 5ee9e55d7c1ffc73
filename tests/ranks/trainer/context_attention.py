"""Attention over parts of a sequence on all ranks: how far it is from that of one process.

Arguments: report directory, cases as JSON: (places, heads of queries, heads of keys) each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataio.job.launch import join
from tonari.trainer.models import context


def main() -> None:
    directory, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    with join(device="cpu") as job:
        cp = init_device_mesh("cpu", (job.world.world_size,))
        reports = [_run(cp, *case) for case in cases]
    (directory / f"{job.world.rank}.json").write_text(json.dumps(reports))


def _run(cp: DeviceMesh, places: int, heads: int, kv_heads: int) -> object:
    torch.manual_seed(places)
    whole = [
        torch.randn(2, number, places, 8, dtype=torch.float64, requires_grad=True)
        for number in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(2, heads, places, 8, dtype=torch.float64)
    q, k, v = whole
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (expected * weight).sum().backward()
    rank, num_ranks = cp.get_local_rank(), cp.size()

    def own(values: Tensor) -> Tensor:
        parts: tuple[Tensor, ...] = values.detach().tensor_split(num_ranks, dim=2)
        return parts[rank]

    q, k, v = parts = [own(each).requires_grad_() for each in whole]
    pairs = _counted(context)
    looked = context.attend_causally(q, k, v, cp)
    (looked * own(weight)).sum().backward()
    errors = [(looked - own(expected)).abs().max()]
    for part, each in zip(parts, whole, strict=True):
        assert part.grad is not None
        assert each.grad is not None
        errors.append((part.grad - own(each.grad)).abs().max())
    return {"error": float(max(errors)), "pairs": sum(pairs), "shape": list(looked.shape)}


def _counted(module: Any) -> list[int]:
    """Count the pairs of places that attention multiplies."""
    pairs: list[int] = []

    class Counting:
        @staticmethod
        def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            pairs.append(q.shape[2] * k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, **given)

    module.F = Counting
    return pairs


if __name__ == "__main__":
    main()
