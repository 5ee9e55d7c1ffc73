"""Ranks that train a loop of their own under `dataio.live`, some of which are lost.

python -m tests.dataio.job.live_ranks OUT NUM_RANKS FAULTS [OPTIONS]

FAULTS names for a rank what happens to it, where, and the how manieth time it is there:
``{"1": ["kill", "forward", 9]}``; ``soon`` is a kill some seconds later, which may be added.
OPTIONS are those of `dataio.live` and `Rank`, and ``units``: how many ranks join together, numbered
on, each time that a rank calls for some; ``by``: whose variables they have. Writes OUT/ended.json:
the ranks' exit statuses; each rank its steps into OUT/steps-RANK.jsonl, and what it has in the end
into OUT/end-RANK.json. Started by a launcher it is one rank; FIRST is the number of the first.
"""

import inspect
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
from dataio.job.generations import LOOK_S
from importance import Full

NUM_SAMPLES, BATCH, EPOCHS = 96, 4, 3
LIMIT_S, LOOKS = 120.0, 15
"""Longest run; fifths of a look within which each rank has looked."""
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "ask": signal.SIGTERM}


def samples(number: int = NUM_SAMPLES) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(number, 5))
    return inputs, inputs @ draw.normal(size=5)


def write_samples(path: Path, number: int = NUM_SAMPLES) -> None:
    """Write them as a source."""
    inputs, targets = samples(number)
    pq.write_table(pa.table({"x": inputs.tolist(), "y": targets}), path)


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
        number: Of all that are ever started.
        wrapped: Whether DDP averages the gradients.
        copies: Nodes that hold each row.
        shared: On a filesystem of all nodes: samples, and what `saves` writes.
        cache: Of its node.
        saves: Whether an epoch's end evaluates and saves, and rows are logged.
        until: Counted steps after which the ranks save all and end.
        begins_from: Directory of a run that did.
        scores: Whether a policy keeps what is reported of rows.
    """

    def __init__(
        self, out: Path, fault: list[Any], *, number: int, wrapped: bool = False, copies: Any = 1,
        shared: str = "", cache: str = "", saves: bool = False, until: int = 0,
        begins_from: str = "", scores: bool = False,
    ) -> None:  # fmt: skip
        self.importance = Full(columns=("loss", "wrong")) if scores else None
        self.out, self.fault, self.number = out, fault, number
        self.wrapped, self.copies, self.saves, self.until = wrapped, copies, saves, until
        self.shared, self.cache = Path(shared or out), Path(cache or out / "cache")
        self.begins_from = Path(begins_from) if begins_from else None
        self.been: Counter[str] = Counter()
        self.calls: list[tuple[list[int], int]] = []

    def at(self, place: str) -> None:
        self.been[place] += 1
        if self.fault[1:3] != [place, self.been[place]]:
            return
        if self.fault[0] == "raise":
            raise ValueError("planted")
        if self.fault[0] == "miss":  # as gloo says it where a rank alone does not get the sum
            raise RuntimeError("Connection closed by peer")
        if self.fault[0] == "call":
            call(self.out, self.number, self.shared / "live", meeting=len(self.calls))
            return
        if self.fault[0] == "soon":
            after_s = self.fault[3] if self.fault[3:] else 0.7
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        os.kill(os.getpid(), SIGNALS[self.fault[0]])

    def train(self, job: dataio.LiveJob) -> tuple[list[list[float]], float, float, list[int]]:
        self.calls.append(([*job.ranks], job.number))
        model, optimizer, schedule = make()
        fields = {key: dataio.Array(key, shape, "float64") for key, shape in SHAPES.items()}
        source = str(self.shared / "samples.parquet")
        rows = self.shared / "rows" if self.saves else None
        with dataio.Loader(
            source, batch_size=BATCH, fields=fields, world=job.world,
            cache=dataio.NodeCache(self.cache, copies=self.copies),
            shuffle=shuffle.Partial(0.3), importance=self.importance,
            reports=dataio.Reports(progress=False, rows=rows),
        ) as loader:  # fmt: skip
            kept: dict[str, Any] = {
                "model": model, "optimizer": optimizer, "schedule": schedule,
            }  # fmt: skip
            if not job.keep(loader, **kept) and self.begins_from:
                loader.restore(self.begins_from / "loader")
                states = torch.load(self.begins_from / "states", weights_only=True)
                for its, state in zip(kept.values(), states, strict=True):
                    its.load_state_dict(state)
            held_out: Any = loader.evaluation(source, fields=fields) if self.saves else []
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
                    loader.report(batch, batch["y"].abs())
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
                    rows_of = sorted(each for each in torch.cat(ids).tolist() if each >= 0)
                    self.note(job.number, epoch, rows_of, len(ids), total.item())
                    self.at("stepped")
                    if job.number == self.until:
                        return self.save(loader, kept), 0, 0, []
                self.at("epoch end")
                for batch in held_out:
                    self.at("evaluation")
                    loss_of(model, batch["x"], batch["y"])
                if self.saves:
                    self.at("saving")
                    loader.save(self.shared / f"epoch-{epoch}")
            weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
            stats = loader.stats()
            on = [*job.world.topology.node_of_rank]
            return weights, stats["source_bytes"], stats["staged_rows"], on

    def save(self, loader: dataio.Loader, kept: dict[str, Any]) -> list[list[float]]:
        loader.save(self.shared / "loader")
        if self.number == 0:
            torch.save([its.state_dict() for its in kept.values()], self.shared / "states")
        return []

    def note(self, *step: object) -> None:
        with open(self.out / f"steps-{self.number}.jsonl", "a") as file:
            file.write(json.dumps([*step, time.time()]) + "\n")


def call(out: Path, number: int, live: Path, *, meeting: int) -> None:
    """Call for newcomers, and wait until the ranks are to meet, for them or another reason.

    And until all have seen it: they look now and then, and the steps that are left may take less.
    """
    (out / f"called-{number}").touch()
    until_s, num_seen = time.monotonic() + LIMIT_S / 2, 0
    while num_seen < LOOKS and time.monotonic() < until_s:
        time.sleep(LOOK_S / 5)
        num_seen += any(live.glob(f"live-*/meeting-{meeting}"))


SHAPES: dict[str, tuple[int, ...]] = {"x": (5,), "y": ()}


def run_rank(out: Path, number: int, fault: list[Any], options: dict[str, Any]) -> None:
    """Be one rank."""
    names = inspect.signature(Rank).parameters
    own = {name: options.pop(name) for name in [*options] if name in names}
    rank = Rank(out, fault, number=number, **own)
    weights, *read = dataio.live(rank.train, directory=rank.shared / "live", **options)
    end = [weights, rank.calls, *read]
    (out / f"end-{number}.json").write_text(json.dumps(end))


RunRank = Callable[[Path, int, list[Any], dict[str, Any]], None]


def start(
    number: int, environ: dict[str, str], out: Path, fault: list[Any], options: Any,
    run: RunRank = run_rank,
) -> int:  # fmt: skip
    """Fork a rank: what was imported need not be again."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        said = os.open(out / f"said-{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ |= environ
        run(out, number, fault, options)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def start_unit(
    first: int, size: int, out: Path, faults: dict[str, list[Any]], options: Any, run: RunRank,
    by: str, **environ: str,
) -> dict[int, int]:  # fmt: skip
    """Start ranks that the launcher would start together; their numbers by their pids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_name, size_name, its = {
        "torchrun": (
            "RANK", "WORLD_SIZE", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ),
        "mpirun": (
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
            {"OMPI_MCA_mpi_ft_enable": "1", "PMIX_NAMESPACE": f"a@{first}"},
        ),
        "srun": (
            "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
            {"SLURM_KILL_BAD_EXIT": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(first)},
        ),
    }[by]  # fmt: skip
    environ |= {**its, size_name: str(size), "TONARI_RANKS_PER_NODE": "1"}
    return {
        start(
            first + rank, {**environ, rank_name: str(rank)}, out,
            faults.get(str(first + rank), []), options, run,
        ): first + rank
        for rank in range(size)
    }  # fmt: skip


def start_ranks(
    out: Path, num_ranks: int, faults: dict[str, list[Any]], options: dict[str, Any],
    run: RunRank = run_rank,
) -> None:  # fmt: skip
    """Start ranks, and wait until they have ended; a stopped one goes on when all others have."""
    units, by = options.pop("units", []), options.pop("by", "torchrun")
    pids = start_unit(0, num_ranks, out, faults, options, run, by)
    statuses: dict[int, int] = {}
    stopped = {int(rank) for rank, fault in faults.items() if fault[0] == "stop"}
    until_s, num_called = time.monotonic() + LIMIT_S, 0
    while len(statuses) < len(pids):
        if units and len([*out.glob("called-*")]) > num_called:
            num_called += 1
            environ = {"TONARI_LIVE_JOIN": "1"}
            pids |= start_unit(len(pids), units.pop(0), out, faults, options, run, by, **environ)
        late = time.monotonic() > until_s
        for pid, rank in pids.items():
            if rank not in statuses:
                if late:
                    os.kill(pid, signal.SIGKILL)
                elif {*statuses, *stopped} == {*pids.values()}:
                    os.kill(pid, signal.SIGCONT)
                ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    (out / "ended.json").write_text(json.dumps([statuses[rank] for rank in sorted(statuses)]))


if __name__ == "__main__":
    given = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    ranks = [os.environ[name] for name in RANKS if name in os.environ]
    if ranks:
        number = int(os.environ.get("FIRST", 0)) + int(ranks[0])
        run_rank(given[0], number, given[2].get(str(number), []), given[3])
    else:
        write_samples(given[0] / "samples.parquet")
        start_ranks(*given)
