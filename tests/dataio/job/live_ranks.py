"""Ranks that train a loop of their own under `dataio.live`, some of which are lost.

python -m tests.dataio.job.live_ranks OUT NUM_RANKS FAULTS [OPTIONS]

FAULTS names for a rank what happens to it, where, and the how manieth time it is there:
``{"1": ["kill", "forward", 9]}``. OPTIONS are those of `dataio.live`, and ``wrapped``: whether DDP
averages the gradients; ``copies``: of each row. Writes OUT/ended.json: the ranks' exit statuses;
each rank its steps into OUT/steps-RANK.jsonl, and what it has in the end into OUT/end-RANK.json.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

import dataio
import shuffle

NUM_SAMPLES, BATCH, EPOCHS = 96, 4, 3
LIMIT_S = 120.0


def samples() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(NUM_SAMPLES, 5))
    return inputs, inputs @ draw.normal(size=5)


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    """Make what is trained, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum squared errors, over the rows of a full batch."""
    errors: torch.Tensor = model(x).squeeze(1) - y
    return errors.square().sum() / BATCH


class Rank:
    """One rank: what happens to it, and what it trained.

    Args:
        out: Where it writes.
        fault: What happens to it, where, at which time; empty: nothing.
        wrapped: Whether DDP averages the gradients.
        copies: Nodes that hold each row.
    """

    def __init__(self, out: Path, fault: list[Any], *, wrapped: bool, copies: Any) -> None:
        self.out, self.fault = out, fault
        self.wrapped, self.copies = wrapped, copies
        self.number = int(os.environ["RANK"])
        self.been: Counter[str] = Counter()
        self.calls: list[tuple[list[int], int]] = []

    def at(self, place: str) -> None:
        self.been[place] += 1
        if self.fault[1:] != [place, self.been[place]]:
            return
        if self.fault[0] == "raise":
            raise ValueError("planted")
        if self.fault[0] == "miss":  # as gloo says it where a rank alone does not get the sum
            raise RuntimeError("Connection closed by peer")
        if self.fault[0] == "soon":
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        os.kill(os.getpid(), signal.SIGKILL if self.fault[0] == "kill" else signal.SIGSTOP)

    def train(self, job: dataio.LiveJob) -> tuple[list[list[float]], float]:
        self.calls.append(([*job.ranks], job.number))
        model, optimizer, schedule = make()
        fields = {key: dataio.Array(key, shape, "float64") for key, shape in SHAPES.items()}
        with dataio.Loader(
            str(self.out / "samples.parquet"), batch_size=BATCH, fields=fields, world=job.world,
            cache=dataio.NodeCache(self.out / "cache", copies=self.copies),
            shuffle=shuffle.Partial(0.3), reports=dataio.Reports(progress=False),
        ) as loader:  # fmt: skip
            job.keep(loader, model=model, optimizer=optimizer, schedule=schedule)
            trained: nn.Module = (
                nn.parallel.DistributedDataParallel(model) if self.wrapped else model
            )
            self.at("kept")
            for epoch in loader.epochs(EPOCHS):
                self.at("epoch")
                for batch in loader:
                    self.at("batch")
                    optimizer.zero_grad()
                    valid = batch["sample_id"] >= 0
                    loss = loss_of(trained, batch["x"][valid], batch["y"][valid])
                    self.at("forward")
                    loss.backward()
                    ids = [torch.empty_like(batch["sample_id"]) for _ in job.ranks]
                    dist.all_gather(ids, batch["sample_id"])
                    self.at("gathered")
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    if not self.wrapped:
                        job.average(model.parameters())
                    self.at("averaged")
                    with job.step():
                        optimizer.step()
                        schedule.step()
                    rows = sorted(each for each in torch.cat(ids).tolist() if each >= 0)
                    self.note(job.number, epoch, rows, len(ids), total.item())
                    self.at("stepped")
                self.at("epoch end")
            weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
            return weights, loader.stats()["source_bytes"]

    def note(self, *step: object) -> None:
        with open(self.out / f"steps-{self.number}.jsonl", "a") as file:
            file.write(json.dumps(step) + "\n")


SHAPES: dict[str, tuple[int, ...]] = {"x": (5,), "y": ()}


def run_rank(out: Path, fault: list[Any], options: dict[str, Any]) -> None:
    """Be one rank."""
    own = {"wrapped": options.pop("wrapped", False), "copies": options.pop("copies", 1)}
    rank = Rank(out, fault, **own)
    weights, source_bytes = dataio.live(rank.train, directory=out / "live", **options)
    end = [weights, rank.calls, source_bytes]
    (out / f"end-{rank.number}.json").write_text(json.dumps(end))


RunRank = Callable[[Path, list[Any], dict[str, Any]], None]


def start(
    rank: int, num_ranks: int, port: int, out: Path, fault: list[Any], options: Any, run: RunRank
) -> int:  # fmt: skip
    """Fork a rank: what was imported need not be again."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        said = os.open(out / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "TONARI_RANKS_PER_NODE": "1",
        }  # fmt: skip
        run(out, fault, options)
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def start_ranks(
    out: Path, num_ranks: int, faults: dict[str, list[Any]], options: dict[str, Any], run: RunRank
) -> None:
    """Start ranks, and wait until they have ended; a stopped one goes on when all others have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = {
        start(rank, num_ranks, port, out, faults.get(str(rank), []), options, run): rank
        for rank in range(num_ranks)
    }
    statuses: dict[int, int] = {}
    stopped = {int(rank) for rank, fault in faults.items() if fault[0] == "stop"}
    until_s = time.monotonic() + LIMIT_S
    while len(statuses) < num_ranks:
        late = time.monotonic() > until_s
        for pid, rank in pids.items():
            if rank not in statuses:
                if late:
                    os.kill(pid, signal.SIGKILL)
                elif {*statuses, *stopped} == {*range(num_ranks)}:
                    os.kill(pid, signal.SIGCONT)
                ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    (out / "ended.json").write_text(json.dumps([statuses[rank] for rank in range(num_ranks)]))


def main(out: Path) -> None:
    """Write the data, and start ranks that train on it."""
    inputs, targets = samples()
    pq.write_table(pa.table({"x": inputs.tolist(), "y": targets}), out / "samples.parquet")
    start_ranks(out, int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]), run_rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
