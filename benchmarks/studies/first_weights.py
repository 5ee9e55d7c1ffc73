r"""How much memory does a rank need to build its part of a model, beside what it keeps?

Each rank builds a GPT, spreads it over the mesh, and trains some steps of AdamW on few tokens. Two
ways: ``deferred`` cuts a model without memory and makes each weight by itself; ``seeded`` builds
the whole model in memory first. Resident memory is counted above that of the process before.

    MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=65536 \
        mpiexec -n 4 python -m benchmarks.studies.first_weights [--mesh 1,1,4,1,1]

The variables make malloc return what is freed: else what it keeps is counted, too.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch._dynamo  # An optimizer imports it in its first step: not a part of training.
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tonari.report.machine import describe_machine
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.mesh.place import place_of
from tonari.trainer.models import GPT, deferred, seeded
from tonari.trainer.run.tasks import NextToken
from tonari.trainer.watch.launch import join

VOCABULARY, LENGTH, ROWS = 256, 32, 4


def resident_bytes(name: str) -> int:
    """Read ``VmRSS``, or ``VmHWM``: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Begin to count the most that is resident anew."""
    Path("/proc/self/clear_refs").write_text("5")


def held_bytes(tensors: list[torch.Tensor]) -> int:
    """Add up this rank's parts."""
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def main() -> None:
    """Print one line of JSON, of the rank that needs most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("deferred", "seeded"), default="deferred")
    parser.add_argument("--mesh", default="1,1,4,1,1", help="pp,dp_replicate,dp_shard,cp,tp")
    parser.add_argument("--schedule", choices=("1f1b", "zbv"), default="1f1b")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=ROWS)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    sizes = tuple(map(int, args.mesh.split(",")))
    with join(device="cpu") as job:
        place = place_of(job.world.rank, sizes, schedule=args.schedule, virtual=1)
        mesh, task = make_mesh(sizes, device_type="cpu"), NextToken()
        before = resident_bytes("VmRSS")
        forget_peak()
        started = time.perf_counter()
        build = deferred if args.way == "deferred" else seeded
        model = build(
            lambda: GPT(VOCABULARY, LENGTH, width=args.width, depth=args.depth, heads=16), seed=0
        )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        parts = parallelize(model, mesh, place)
        del model
        build_s = time.perf_counter() - started
        build_peak = resident_bytes("VmHWM") - before
        pipeline = Pipeline(
            parts, place, mesh, task, schedule=args.schedule, microbatches=args.microbatches,
            batch_size=ROWS, device=job.device,
        )  # fmt: skip
        parameters = list(pipeline.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
        batch = {
            "tokens": torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64), "weight": torch.ones(ROWS),
        }  # fmt: skip
        forget_peak()
        for _ in range(args.steps):
            optimizer.zero_grad()
            pipeline.train(batch)
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parameter_bytes = held_bytes([*parameters])
        kept = parameter_bytes + held_bytes(gradients) + held_bytes(states)
        mine = {
            "parameters_bytes": parameter_bytes, "kept_bytes": kept, "build_peak_bytes": build_peak,
            "train_peak_bytes": resident_bytes("VmHWM") - before,
            "largest_bytes": max(parameter.nbytes for parameter in parameters), "build_s": build_s,
        }  # fmt: skip
        everyone = [mine] * job.world.world_size
        dist.all_gather_object(everyone, mine)
        if job.world.rank == 0:
            line = {
                "question": "memory of building a model over a mesh", "way": args.way,
                "mesh": args.mesh, "schedule": args.schedule, "parameters": num_parameters,
                "world_size": job.world.world_size,
                **max(everyone, key=lambda each: each["build_peak_bytes"]),
                **describe_machine(Path.cwd()),
            }  # fmt: skip
            print(json.dumps(line))


if __name__ == "__main__":
    main()
