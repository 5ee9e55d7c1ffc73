"""Gradients and scores of a toy model by pipelines; cases one after the other on the same ranks.

Arguments: report directory, then for each case ``schedule:pp,dp_replicate,dp_shard,cp,tp``.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dataio.job.launch import join
from tests.trainer.toy import Places, gradients, make_batch, make_toy, spread
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.clip import clip_gradients
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.pipeline import Pipeline, Scored
from tonari.trainer.mesh.place import Schedule, place_of
from tonari.trainer.mesh.stage import check_same
from tonari.trainer.run.step import evaluate


def run_case(rank: int, case: str) -> dict[str, Any]:
    name, _, numbers = case.partition(":")
    schedule = cast(Schedule, name)
    sizes = tuple(map(int, numbers.split(",")))
    place = place_of(rank, sizes, schedule=schedule, virtual=2)
    mesh = make_mesh(sizes, device_type="cpu")
    num_rows = 16 // place.num_replicas
    rows = slice(place.replica * num_rows, (place.replica + 1) * num_rows)
    batches: list[dict[str, Tensor]] = [make_batch(number, rows) for number in range(3)]
    # What another rank needs is not here.
    for batch in batches:
        if not place.has_input:
            del batch["x"]
        if not place.has_target:
            del batch["label"], batch["weight"], batch["valid"]
    task, parts = Places(mesh), spread(make_toy(), mesh, place)
    pipeline = Pipeline(
        parts, place, mesh, task, schedule=schedule, microbatches=4, batch_size=num_rows,
        device=torch.device("cpu"),
    )  # fmt: skip
    report: dict[str, Any] = {"replica": place.replica, "has_target": place.has_target}
    report["before"] = told(pipeline.forward(batches[0]))
    report["trained"] = told(pipeline.train(batches[0]))
    report["calls"] = task.calls
    report["gradients"] = gradients(parts)
    drop(pipeline)
    report["evaluated"] = evaluate(pipeline, batches)
    pipeline.train(batches[0], share=0.5, sync=False)
    report["again"] = told(pipeline.train(batches[1], share=0.5))
    report["accumulated"] = gradients(parts)
    report["norm"] = float(clip_gradients(pipeline.parameters(), mesh, max_norm=0.01))
    report["clipped"] = gradients(parts)
    if mesh["tp"].size() > 1:
        report["differing"] = refusal(mesh["tp"])
    return report


def refusal(tp: DeviceMesh) -> str:
    """Say how a stage refuses values that the ranks of tp do not share."""
    same, other = torch.ones(4), torch.full((4,), 1.0 + tp.get_local_rank())
    check_same([same], tp.get_group(), 3)
    try:
        check_same([same, other], tp.get_group(), 3)
    except ConfigError as error:
        return str(error)
    return ""


def drop(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None


def told(scored: Scored | None) -> list[list[float]] | None:
    return scored and [column.double().tolist() for column in scored if column is not None]


def main() -> None:
    with join(device="cpu") as job:
        reports = {case: run_case(job.world.rank, case) for case in sys.argv[2:]}
        (Path(sys.argv[1]) / f"{job.world.rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
