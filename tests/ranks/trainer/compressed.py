"""Average gradients and train runs with compressed gradients; reports what each rank has then.

Arguments: report directory, then for each run its configuration, the checkpoint to go on from or
"auto", and overrides, joined by "|".
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dataio.job.launch import join
from tonari.trainer import train
from tonari.trainer.config.config import load_config
from tonari.trainer.mesh.compress import Compression, mean_by_bfloat16
from tonari.trainer.mesh.mesh import AXES, make_mesh

STEPS = 6


def digest(values: list[Tensor]) -> str:
    mine = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return xxhash.xxh3_64_hexdigest(b"".join(each.detach().numpy().tobytes() for each in mine))


def average(rank: int, size: int) -> dict[str, Any]:
    """Average gradients of a matrix and a vector; the last two are of low rank, and none."""
    mesh = make_mesh((1, size, 1, 1, 1), device_type="cpu")
    layer = nn.Linear(24, 16)
    compression = Compression([layer], mesh, kind="powersgd", rank=2, warmup_steps=1, seed=0)
    error, basis = compression.state.values()
    bases = [basis.tolist()]
    given, got, left = torch.zeros(16, 24), torch.zeros(16, 24), []
    for step in range(STEPS):
        torch.manual_seed(STEPS * rank + step)
        grad = torch.randn(16, 24)
        if step == STEPS - 1:  # what is left and this are of rank 1 together
            grad = torch.outer(torch.arange(16.0), torch.full((24,), 1.0 + rank)) - error
        layer.weight.grad, layer.bias.grad = grad.clone(), torch.full((16,), float(rank))
        given += grad
        compression.average(step)
        got += layer.weight.grad
        left.append(float(error.abs().max()))
        bases.append(basis.tolist())
    bias: Any = layer.bias.grad
    bias = bias.tolist()
    layer.weight.grad = layer.bias.grad = None
    compression.average(STEPS)
    unused = [layer.weight.grad, layer.bias.grad] == [None, None]
    begun = Compression([layer], mesh, kind="powersgd", rank=2, warmup_steps=0, seed=0)
    layer.weight.grad = torch.zeros(16, 24)
    begun.average(0)
    _, after_zeros = begun.state.values()
    values = torch.tensor([[256.0, 1, 1, 2][rank], 3.0, -1.0])
    return {
        "given": given.tolist(), "got": got.tolist(), "error": error.tolist(), "left": left,
        "bases": bases,
        "bias": bias, "unused": unused, "after_zeros": after_zeros.tolist(),
        "bfloat16": mean_by_bfloat16(values, mesh.get_group("dp_replicate")).tolist(),
    }  # fmt: skip


def main() -> None:
    directory = Path(sys.argv[1])
    report: dict[str, Any] = {}
    assert AXES[1] == "dp_replicate"
    with join(device="cpu") as job:
        rank = job.world.rank
        report["average"] = average(rank, job.world.world_size)
        for case in sys.argv[2:]:
            config, resume, *given = case.split("|")
            held: list[Tensor] = []

            def make(parameters: Any, held: list[Tensor] = held) -> torch.optim.Optimizer:
                held += parameters
                return torch.optim.AdamW(held, lr=0.01)

            train(load_config(Path(config), given), optimizer=make, resume=resume, quiet=True)
            report[case] = digest(held)
    (directory / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
