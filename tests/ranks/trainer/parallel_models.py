"""One step of tiny models on many meshes: reports how far each is from one process.

Arguments: report directory, cases as JSON: lists of kind, sizes of the mesh, options. The option
``swap`` is the number of blocks that swap.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dataio.job.launch import join
from tests.trainer.mesh.same_weights import same_weights
from tests.trainer.mesh.tiny_models import NUM_ROWS, TEXT, batch_of, make, one_process, task_of
from tonari.trainer.mesh.average import add_partial_gradients, average_gradients
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import left_whole, parallelize
from tonari.trainer.mesh.swap import Swap
from tonari.trainer.models import deferred
from tonari.trainer.run.tasks import NextToken


def main() -> None:
    directory, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    reports = []
    with join(device="cpu") as job:
        for kind, sizes, options in cases:
            reports.append(_run(kind, sizes, options))
    (directory / f"{job.world.rank}.json").write_text(json.dumps({"cases": reports}))


def _run(kind: str, sizes: list[int], options: dict[str, Any]) -> dict[str, object]:
    mesh = make_mesh(tuple(sizes), device_type="cpu")
    options = dict(options)
    if "swap" in options:
        options["swap"] = Swap(options["swap"], torch.device("cpu"), least_bytes=0)
    (part,) = parallelize(make(kind, build=deferred), mesh, **options)
    built = parallelize(make(kind), mesh, **options)
    weights = same_weights([part], built)
    task = NextToken(cp=mesh["cp"]) if kind in TEXT else task_of(kind)
    _, replicate, shard, cp, tp = sizes
    replica = mesh.get_local_rank("dp_replicate") * shard + mesh.get_local_rank("dp_shard")
    share = NUM_ROWS // (replicate * shard)
    rows = slice(replica * share, (replica + 1) * share)
    batch = {name: column[rows] for name, column in batch_of(kind).items()}
    logits, target = part(task.input(batch)), task.target(batch)
    loss = task.losses(logits, target)
    # Ranks of cp have a part of each loss, and are averaged over like replicas.
    ((loss * batch["weight"]).mean() * cp).backward()
    whole = left_whole(part, mesh) and not options
    if whole and replicate > 1:
        average_gradients(part.parameters(), mesh.get_group("dp_replicate"))
    if tp > 1 and not isinstance(part, FSDPModule):
        # As a pipeline does; else the gradients would be added up as they are compared.
        add_partial_gradients(part.parameters(), mesh["tp"])
    correct, confidence = task.outcome(logits, target)
    loss = loss.detach()
    dist.all_reduce(loss, group=mesh.get_group("cp"))
    expected, scores = one_process(kind)
    described = part.output_shape(share)
    found = {name: parameter.grad for name, parameter in part.named_parameters()}
    return {
        "names": list(found) == list(expected),
        "sharded": all(isinstance(p, DTensor) is (tp > 1 or not whole) for p in part.parameters()),
        "gradient": max(_error(_whole(found[name]), expected[name]) for name in found),
        "loss": _error(loss, scores["loss"][rows]),
        "confidence": _error(confidence.double(), scores["confidence"][rows].double()),
        "correct": bool((correct == scores["correct"][rows]).all()),
        "shape": (logits.shape, logits.dtype) == (described.shape, described.dtype),
        "split": isinstance(logits, DTensor),
        "dtype": str(logits.dtype),
        "weights": weights,
    }


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


if __name__ == "__main__":
    main()
