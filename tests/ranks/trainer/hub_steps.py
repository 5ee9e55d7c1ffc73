"""Steps from given weights on many meshes; reports losses, gradient norms and logits.

Arguments: report directory, settings, tokens (``.pt``), then cases as JSON: lists of overrides.
"""

import json
import sys
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.distributed.tensor import DTensor

from dataio.job.launch import Job, join
from tonari.trainer.config.config import load_config
from tonari.trainer.mesh.clip import clip_gradients
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.pretrained import start_from_weights

counted: list[int] = []
"""Numbers of each piece that safetensors was asked for."""


class Counting:
    """A file of tensors that counts what is taken from it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._opened = plain_open(*args, **settings)

    def __enter__(self) -> "Counting":
        self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    def get_slice(self, name: str) -> "CountedSlice":
        return CountedSlice(self._opened.get_slice(name))


class CountedSlice:
    """One tensor of such a file."""

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy

    def get_shape(self) -> list[int]:
        return list(self._lazy.get_shape())

    def __getitem__(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        piece: torch.Tensor = self._lazy[ranges]
        counted.append(piece.numel())
        return piece


plain_open = safetensors.safe_open
safetensors.safe_open = Counting  # type: ignore[misc,assignment]


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
    counted.clear()
    start_from_weights(config, pipeline, Own())
    optimizer = build_optimizer(config.optimizer, pipeline.parameters())
    num_rows = config.data.batch_size
    rows = slice(place.replica * num_rows, (place.replica + 1) * num_rows)
    report: dict[str, Any] = {"replica": place.replica, "losses": [], "norms": []}
    report["numbers_read"] = sum(counted)
    report["numbers_kept"] = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in pipeline.parameters()
    )
    for step in tokens:
        scored = pipeline.train({"tokens": step[rows], "weight": torch.ones(num_rows)})
        report["losses"].append(scored and scored.loss.double().tolist())
        norm = clip_gradients(
            pipeline.parameters(), pipeline.mesh, max_norm=float("inf"), again=pipeline.again
        )
        report["norms"].append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return report


if __name__ == "__main__":
    main()
