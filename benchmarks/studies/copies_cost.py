"""What do copies of pieces cost a step of FSDP, while no node is lost?

Ranks as nodes of their own train blocks of a transformer by torch's `fully_shard`, on random
tokens. The same processes take a few steps with copies and a few without, in turns; a ratio is
taken within a turn, and what is given is the median and the quarters about it. Copies are of
``run.live`` with ``mesh.dp_shard`` alone: the gradients of a rank's piece are sent, and the ranks
take the optimizer's step twice. Loopback is a fast network, and cores are shared by the ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.copies_cost [--ranks 2] [--rows 8] [--turns 9]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.studies.live_cost import quarters
from tonari.report.machine import describe_machine
from tonari.trainer.mesh.clip import clip_gradients
from tonari.trainer.mesh.mesh import AXES
from tonari.trainer.run.next_door import PieceCopies

WIDTH, DEPTH, TOKENS, STEPS = 256, 4, 64, 5


def run_rank(rows: int, turns: int) -> None:
    """Be a rank: print a turn's seconds with copies and without, and those of the two parts."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, 1, size, 1, 1), mesh_dim_names=AXES)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(DEPTH)
    ]
    model = nn.Sequential(*layers)
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    world = SimpleNamespace(
        rank=rank, world_size=size, topology=SimpleNamespace(node_of_rank=tuple(range(size)))
    )
    job: Any = SimpleNamespace(world=world, ranks=tuple(range(size)))
    copies = PieceCopies(job, [model], optimizer, None)
    copies.begin(None, [])
    spent = {"share": 0.0, "step": 0.0}

    def step(with_copies: bool) -> None:
        model(torch.randn(rows, TOKENS, WIDTH)).square().mean().backward()
        began_s = time.perf_counter()
        if with_copies:
            copies.share_gradients()
        spent["share"] += time.perf_counter() - began_s
        norm = clip_gradients(model.parameters(), mesh, max_norm=1.0, on_all=True)
        optimizer.step()
        began_s = time.perf_counter()
        if with_copies:
            copies.step(norm, clip=1.0, steps=1)
        spent["step"] += time.perf_counter() - began_s
        optimizer.zero_grad()

    for turn in range(turns + 1):
        took = {}
        spent.update(share=0.0, step=0.0)
        for with_copies in (True, False) if turn % 2 else (False, True):
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(STEPS):
                step(with_copies)
            took["copies" if with_copies else "plain"] = (time.perf_counter() - began_s) / STEPS
        took |= {name: seconds / STEPS for name, seconds in spent.items()}
        if turn and not rank:
            print(json.dumps(took), flush=True)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="of a batch of a rank")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args.rows, args.turns)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = os.environ | {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port)}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.studies.copies_cost", *sys.argv[1:]],
            env=environ | {"RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
        ) for rank in range(args.ranks)
    ]  # fmt: skip
    said = [each.communicate()[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise SystemExit("a rank failed")
    turns = [cast(dict[str, float], json.loads(line)) for line in said[0].splitlines()]
    num_weights = DEPTH * (12 * WIDTH * WIDTH + 13 * WIDTH)
    medians = {f"{name}_s": statistics.median(turn[name] for turn in turns) for name in turns[0]}
    print(json.dumps({
        "question": "cost of copies of pieces while no node is lost", "ranks": args.ranks,
        "rows": args.rows, "turns": args.turns, "load": os.getloadavg()[0],
        "sent_bytes_per_step": 4 * num_weights // args.ranks, **medians,
        "copies of plain": quarters([turn["copies"] / turn["plain"] for turn in turns]),
    } | describe_machine(Path())))  # fmt: skip


if __name__ == "__main__":
    main()
