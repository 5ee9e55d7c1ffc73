"""Steps from given weights on many meshes; reports losses, gradient norms and logits.

Arguments: report directory, settings, tokens (``.pt``), then cases as JSON: lists of overrides.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.config.config import load_config
from trainer.mesh.clip import clip_gradients
from trainer.run.build import build_optimizer, build_parallel
from trainer.run.pretrained import start_from_weights
from trainer.watch.launch import Job, join


def main() -> None:
    directory, settings, tokens = map(Path, sys.argv[1:4])
    with join(device="cpu") as job:
        reports = [
            run(job, settings, torch.load(tokens, weights_only=True), overrides)
            for overrides in json.loads(sys.argv[4])
        ]
    (directory / f"{job.world.rank}.json").write_text(json.dumps(reports))


def run(job: Job, settings: Path, tokens: torch.Tensor, overrides: list[str]) -> dict[str, Any]:
    config = load_config(settings, overrides)
    parallel = build_parallel(config, job)
    pipeline, place = parallel.pipeline, parallel.pipeline.place
    start_from_weights(config, pipeline)
    optimizer = build_optimizer(config.optimizer, pipeline)
    num_rows = config.data.batch_size
    rows = slice(place.replica * num_rows, (place.replica + 1) * num_rows)
    report: dict[str, Any] = {"replica": place.replica, "losses": [], "norms": []}
    for step in tokens:
        scored = pipeline.train({"tokens": step[rows], "weight": torch.ones(num_rows)})
        report["losses"].append(scored and scored.loss.double().tolist())
        norm = clip_gradients(pipeline.parameters(), pipeline.mesh, max_norm=float("inf"))
        report["norms"].append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return report


if __name__ == "__main__":
    main()
