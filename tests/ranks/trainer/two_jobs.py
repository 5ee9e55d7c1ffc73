"""Be part of two jobs of the same mesh, one after the other; the second has more groups before it.

Arguments: where reports go, the settings' file, and what changes in it.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from dataio.job.launch import join
from tonari.oracle.trace import NoReports, make_batch
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step


def train(config: Config, *, more_groups: int) -> tuple[int, list[float]]:
    """Train two steps on the same batch: this rank, and the norms of the gradients."""
    with join(device="cpu") as job:
        for _ in range(more_groups):
            dist.new_group()
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        batch = make_batch(config, Own(), parallel.task, pipeline.place)
        norms = []
        for step in range(2):
            norm = train_step(pipeline, optimizer, NoReports(), [batch], clip=1.0, step=step).norm
            assert norm is not None
            norms.append(float(norm))
        return job.world.rank, norms


def main() -> None:
    out, settings, *overrides = sys.argv[1:]
    config = load_config(Path(settings), overrides)
    _, first = train(config, more_groups=0)
    rank, second = train(config, more_groups=3)
    (Path(out) / f"{rank}.json").write_text(json.dumps({"first": first, "second": second}))


if __name__ == "__main__":
    main()
