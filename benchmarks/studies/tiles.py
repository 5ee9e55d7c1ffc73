"""How much of a step's memory and traffic has a rank whose samples are cut into tiles?

Each line is a training step of two samples: forward, backward and optimizer, with what it began
with (weights, momentum, the samples). ``peak`` is the most bytes of tensors at a time on the rank
that has most, beside that of one process; ``kept`` is what its forward pass keeps for the backward
pass, each memory counted once; ``sent`` is what the rank sends to others, but for sums. Ranks are
played one after the other in this process. What they would receive is not there, so that no numbers
come out, but all sizes do.

With ``--resident`` each line is a job of real ranks, and ``peak`` is what the kernel counts: the
most that was resident in two steps above what was before there was a model. So what torch's
operators allocate for themselves is in it, and what gloo and malloc keep. ``messages`` is the share
of the time of more steps in which the rank sends, receives, adds up and waits for others, on the
rank with the largest share: all ranks share this machine's cores, and gloo its loopback.

    python -m benchmarks.studies.tiles [--resident]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.studies.step_memory import MALLOC, TIMEOUT_S, forget_peak, resident_bytes
from dataio.job.launch import join
from examples.tiles.cosmoflow import CosmoFlow
from examples.tiles.unet2d import PictureUNet
from examples.tiles.unet3d import VolumeUNet
from examples.tiles.vit import PictureViT
from tonari.mpi import mpiexec_command
from tonari.oracle.record import Recorder
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.private.fakes import FakeStore
from tonari.trainer.tiles import Grid, tile_model

Make = Callable[[], nn.Module]
How = Callable[[str, tuple[int, ...]], dict[str, float]]
CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "CosmoFlow": (lambda: CosmoFlow(side=64, width=8), (4, 64, 64, 64)),
    "U-Net, volumes": (lambda: VolumeUNet(width=8), (1, 48, 48, 48)),
    "U-Net, pictures": (lambda: PictureUNet(width=16), (3, 192, 256)),
    "ViT, pictures": (lambda: PictureViT(10, (192, 256), dropout=0.0), (3, 192, 256)),
}
PARTS = [(1,), (2,), (4,), (2, 2)]
LINE = "{case:16} parts {parts:6}  peak {peak_bytes:11,} bytes, {peak_fraction:.3f} of one"
RESIDENT = LINE + "  messages {messages_share:.2f} of the time"
PLAYED = LINE + "  kept {kept_fraction:.3f}  sent {sent_bytes:9,} bytes"


@contextmanager
def played(ranks: int, rank: int) -> Iterator[dist.ProcessGroup | None]:
    """Be a rank of a job whose messages go nowhere."""
    if ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def train(
    make: Make, shape: Sequence[int], grid: Grid, num_steps: int = 2,
    live: Callable[[], int] = lambda: 0,
) -> int:  # fmt: skip
    """Train some steps on two samples; count the bytes that a forward pass keeps, by ``live``."""
    torch.manual_seed(0)
    model = tile_model(make(), grid, shape, try_it=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sizes = [part.stop - part.start for part in grid.slices(shape[1:])]
    sample = torch.rand(2, shape[0], *sizes)
    for _ in range(num_steps):
        before = live()
        loss = model(sample).mean()
        found = live() - before
        loss.backward()
        if grid.group is not None:
            average_gradients(model.parameters(), grid.group)
        optimizer.step()
        optimizer.zero_grad()
    return found


@cache
def play(case: str, parts: tuple[int, ...]) -> dict[str, float]:
    """Play all ranks of a step; what the one says that has most."""
    found = []
    for rank in range(math.prod(parts)):
        with played(math.prod(parts), rank) as group, Recorder() as recorder:
            grid = Grid(parts, group)
            kept = train(*CASES[case], grid, live=lambda: recorder.live_bytes)
            found.append((recorder.peak_bytes, kept, grid.sent_bytes // 2))
    return dict(zip(("peak_bytes", "kept_bytes", "sent_bytes"), max(found), strict=True))


@cache
def run_job(case: str, parts: tuple[int, ...]) -> dict[str, float]:
    """Run a job of real ranks; what the one says that has most."""
    ranks = math.prod(parts)
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [*mpiexec_command(ranks), sys.executable, "-m", __spec__.name,
             "--rank", json.dumps([out, case, parts])],
            check=True, timeout=TIMEOUT_S, env={**os.environ, **MALLOC},
        )  # fmt: skip
        found = [json.loads(file.read_text()) for file in Path(out).iterdir()]
        return {name: max(each[name] for each in found) for name in found[0]}


def run_rank(out: str, case: str, parts: Sequence[int]) -> None:
    """Train as a rank of a job; write what it took but for the first time."""
    spent_s = 0.0

    def timed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent_s
            began = time.perf_counter()
            given = plain(*args)
            spent_s += time.perf_counter() - began
            return given

        return call

    with join(device="cpu", timeout_s=TIMEOUT_S / 2) as job:
        grid = Grid(parts, dist.group.WORLD if math.prod(parts) > 1 else None)
        train(*CASES[case], grid)  # touches the libraries
        before = resident_bytes("VmRSS")
        forget_peak()
        train(*CASES[case], grid)
        found = {"peak_bytes": resident_bytes("VmHWM") - before, "messages_share": 0.0}
        if grid.group is not None:
            began = time.perf_counter()
            with (
                mock.patch.object(grid, "exchange", timed(grid.exchange)),
                mock.patch.object(grid, "add_up", timed(grid.add_up)),
            ):
                train(*CASES[case], grid, num_steps=6)
            found["messages_share"] = spent_s / (time.perf_counter() - began)
        Path(out, str(job.world.rank)).write_text(json.dumps(found))


def measure(case: str, parts: tuple[int, ...], how: How = play) -> dict[str, Any]:
    """Hold the rank that has most against one process."""
    found, one = how(case, parts), how(case, (1,))
    counted = [key for key in one if key.endswith("_bytes") and one[key]]
    shares = {key.replace("_bytes", "_fraction"): found[key] / one[key] for key in counted}
    return {"case": case, "parts": " x ".join(map(str, parts)), **found, **shares}


def main() -> None:
    """Print the lines, or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(*given.rank)
        return
    for case in CASES:
        for parts in PARTS:
            line, how = (RESIDENT, run_job) if given.resident else (PLAYED, play)
            print(line.format(**measure(case, parts, how)), flush=True)


if __name__ == "__main__":
    main()
