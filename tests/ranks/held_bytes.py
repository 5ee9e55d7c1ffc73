"""What each rank holds after a step: numbers and bytes of its parameters, gradients, states.

Arguments: report directory, configuration, then for each case its overrides joined by "|".
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dataio.job.launch import Job, join
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.optimizers import build_optimizer


def held(config: Config, job: Job) -> dict[str, int]:
    pipeline = build_parallel(config, job).pipeline
    optimizer = build_optimizer(config.optimizer, pipeline.parameters())
    rows, length = config.data.batch_size, config.data.sequence_length
    tokens = torch.zeros(rows, length + 1, dtype=torch.uint8)
    pipeline.train({"tokens": tokens, "weight": torch.ones(rows)})
    optimizer.step()
    parameters = list(pipeline.parameters())
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    return {
        "rank_parameters": sum(local(parameter).numel() for parameter in parameters),
        "parameters_bytes": num_bytes(parameters),
        "gradients_bytes": num_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer_bytes": num_bytes(states),
    }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def main() -> None:
    with join(device="cpu") as job:
        cases = [load_config(Path(sys.argv[2]), case.split("|")) for case in sys.argv[3:]]
        reports = [held(config, job) for config in cases]
        (Path(sys.argv[1]) / f"{job.world.rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
