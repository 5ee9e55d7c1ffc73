r"""How far is the memory that a trace of a step finds from what the step takes?

Each line is one configuration: a job of its ranks trains some steps, and each rank says the most
memory that it had in the last of them above that of the process before it built anything, as the
kernel counts it (``VmHWM``). ``oracle.trace_step`` says the same of each rank on no data. What
differs besides: pages of libraries that are first touched, and what malloc and gloo keep.

    python -m benchmarks.studies.step_memory [--only fsdp] [--json-file out.json]

With --limits, each job is run in a memory cgroup beneath DIR (of version 1 or 2, writable) that
allows 5 % more than what its processes had before they built anything and the trace together, which
must go well, and 7 % less, in which the kernel must end it:

    python -m benchmarks.studies.step_memory --limits /sys/fs/cgroup/memory --only "gpt, one"
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dataio.job.launch import Job, join
from tonari.bench.errors import BenchError
from tonari.mpi import mpiexec_command
from tonari.oracle import trace_step
from tonari.oracle.trace import NoReports, make_batch
from tonari.report.machine import describe_machine
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step

STEPS = 4
TIMEOUT_S = 600
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""Has malloc return what is freed: else what it keeps is counted, too."""

TEXT = """
[data]
kind = "text"
train = "none"
sequence_length = 128
batch_size = 8
[shuffle]
exchange = 0.1
[optimizer]
kind = "adamw"
clip = 1.0
[run]
device = "cpu"
"""
IMAGES = """
[data]
train = "none"
test = "none"
image_size = 64
batch_size = 32
[shuffle]
exchange = 0.1
[optimizer]
kind = "sgd"
momentum = 0.9
clip = 1.0
[run]
device = "cpu"
"""
GPT = ("model.kind=gpt", "model.width=512", "model.depth=8", "model.heads=8")
LLAMA = ("model.kind=llama", "model.width=512", "model.depth=8", "model.heads=8")
VIT = (
    "model.kind=vit", "model.width=384", "model.depth=6", "model.heads=8", "model.patch=8",
    "model.num_classes=10",
)  # fmt: skip
FULL = "mesh.checkpointing=full"
RESNET = ("model.kind=resnet50", "model.num_classes=10")


def resident_bytes(name: str) -> int:
    """Read ``VmRSS``, or ``VmHWM``: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Begin to count the most that is resident anew."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass(frozen=True)
class Case:
    """A configuration: its name, its ranks, what is trained, and how it is divided."""

    name: str
    ranks: int
    settings: tuple[str, ...]

    @property
    def is_text(self) -> bool:
        return self.settings[0] in ("model.kind=gpt", "model.kind=llama")


CASES = (
    Case("gpt, one", 1, GPT),
    Case("gpt, one, full recomputation", 1, (*GPT, FULL)),
    Case("gpt, one, selective recomputation", 1, (*GPT, "mesh.checkpointing=selective")),
    Case("gpt, one, bfloat16", 1, (*GPT, "mesh.dtype=bfloat16")),
    Case("gpt, dp 2", 2, (*GPT, "mesh.dp_replicate=2")),
    Case("gpt, fsdp 2", 2, (*GPT, "mesh.dp_shard=2")),
    Case("gpt, fsdp 4", 4, (*GPT, "mesh.dp_shard=4")),
    Case("gpt, tp 2", 2, (*GPT, "mesh.tp=2")),
    Case("gpt, tp 2, sequence", 2, (*GPT, "mesh.tp=2", "mesh.sequence_parallel=true")),
    Case("gpt, pp 2", 2, (*GPT, "mesh.pp=2", "mesh.microbatches=4")),
    Case("gpt, pp 2, gpipe", 2, (*GPT, "mesh.pp=2", "mesh.microbatches=4", "mesh.schedule=gpipe")),
    Case("gpt, pp 2, zbv", 2, (*GPT, "mesh.pp=2", "mesh.microbatches=4", "mesh.schedule=zbv")),
    Case("gpt, pp 2, fsdp 2", 4, (*GPT, "mesh.pp=2", "mesh.microbatches=4", "mesh.dp_shard=2")),
    Case("gpt, fsdp 2, tp 2", 4, (*GPT, "mesh.dp_shard=2", "mesh.tp=2")),
    Case("llama, fsdp 2", 2, (*LLAMA, "mesh.dp_shard=2")),
    Case("llama, fsdp 2, full recomputation", 2, (*LLAMA, "mesh.dp_shard=2", FULL)),
    Case("vit, one", 1, VIT),
    Case("vit, fsdp 2", 2, (*VIT, "mesh.dp_shard=2")),
    Case("resnet50, one", 1, RESNET),
    Case("resnet50, dp 2", 2, (*RESNET, "mesh.dp_replicate=2")),
)  # fmt: skip


SHOWN = (
    "{case:36} rank {rank}  measured {measured_bytes:13,}  traced {traced_bytes:13,}  {error:+.1%}"
)


MORE, LESS = 1.05, 0.93
LIMITED = "{case:36} needs {needed_bytes:13,}  with 5 % more: {more}  with 7 % less: {less}"


def run_rank(config: Config, out: Path) -> None:
    """Train some steps as a rank of a job, and write what the last one took."""
    with join(device="cpu", timeout_s=TIMEOUT_S / 2) as job:
        _train(load_small(config), job, steps=1)  # touches the libraries
        before, anonymous = resident_bytes("VmRSS"), resident_bytes("RssAnon")
        _train(config, job, steps=STEPS)
        found = {"peak_bytes": resident_bytes("VmHWM") - before, "before_bytes": anonymous}
        (out / f"{job.world.rank}.json").write_text(json.dumps(found))


def load_small(config: Config) -> Config:
    """Make the model as small as it gets, on the same mesh: what it leaves is not counted."""
    if config.model.kind == "resnet50":
        return replace(config, model=replace(config.model, kind="resnet"))
    return replace(config, model=config.model.with_settings(width=64))


def _train(config: Config, job: Job, *, steps: int) -> None:
    parallel = build_parallel(config, job)
    pipeline = parallel.pipeline
    optimizer = build_optimizer(config.optimizer, pipeline.parameters())
    batch = make_batch(config, Own(), parallel.task, pipeline.place)
    for number in range(steps):
        if number == steps - 1:
            forget_peak()
        train_step(
            pipeline, optimizer, NoReports(), [batch], clip=config.optimizer.clip, step=number
        )


def run(
    case: Case, settings: Path, *, within: Path | None = None
) -> tuple[int, list[dict[str, int]]]:
    """Run a job of the case, in a cgroup if there is one; its status, and what each rank says."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            *mpiexec_command(case.ranks), sys.executable, "-m", __spec__.name,
            "--rank", out, "--settings", str(settings), *case.settings,
        ]  # fmt: skip
        if within is not None:
            joined = f"echo $$ > {shlex.quote(str(within / 'cgroup.procs'))} && exec "
            command = ["sh", "-c", joined + shlex.join(command)]
        ended = subprocess.run(
            command, check=False, timeout=TIMEOUT_S, env={**os.environ, **MALLOC},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if within else None,
        )  # fmt: skip
        files = [Path(out, f"{rank}.json") for rank in range(case.ranks)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        return ended.returncode, found


def measure(case: Case, settings: Path) -> list[dict[str, int]]:
    """Run a job of the case; what each rank says."""
    status, found = run(case, settings)
    if status:
        raise BenchError(f"{case.name}: a job ended with {status}; its words stand above")
    return found


def limit(case: Case, directory: Path, cgroup: Path) -> dict[str, object]:
    """Run a case with a little more memory than it is predicted to need, and with a little less."""
    settings, config = load(case, directory)
    ranks = measure(case, settings)
    needed = sum(
        found["before_bytes"] + trace_step(config, world_size=case.ranks, rank=rank).peak_bytes
        for rank, found in enumerate(ranks)
    )
    ended = {}
    for share in (MORE, LESS):
        group = cgroup / f"tonari-{os.getpid()}"
        group.mkdir()
        try:
            is_v2 = (group / "memory.max").exists()
            (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(
                str(int(needed * share))
            )
            status, said = run(case, settings, within=group)
            ended[share] = status == 0 and len(said) == case.ranks
        finally:
            group.rmdir()
    return {"case": case.name, "needed_bytes": needed, "more": ended[MORE], "less": ended[LESS]}


def load(case: Case, directory: Path) -> tuple[Path, Config]:
    """Write down the settings of a case, and read them."""
    settings = directory / ("text.toml" if case.is_text else "images.toml")
    settings.write_text(TEXT if case.is_text else IMAGES)
    return settings, load_config(settings, case.settings)


def compare(case: Case, directory: Path) -> list[dict[str, object]]:
    """Hold a case's trace against a job of it, rank by rank."""
    settings, config = load(case, directory)
    lines = []
    for rank, said in enumerate(measure(case, settings)):
        found = said["peak_bytes"]
        traced = trace_step(config, world_size=case.ranks, rank=rank).peak_bytes
        lines.append({
            "case": case.name, "rank": rank, "measured_bytes": found, "traced_bytes": traced,
            "error": traced / found - 1,
        })  # fmt: skip
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the cases, or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--limits", type=Path, metavar="DIR", help="a memory cgroup's directory")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=Path, help=argparse.SUPPRESS)
    given, overrides = parser.parse_known_args(argv)
    if given.rank:
        run_rank(load_config(given.settings, overrides), given.rank)
        return
    if given.limits:
        with tempfile.TemporaryDirectory() as directory:
            for case in CASES:
                if given.only in case.name:
                    print(LIMITED.format(**limit(case, Path(directory), given.limits)), flush=True)
        return
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            if given.only in case.name:
                for line in compare(case, Path(directory)):
                    lines.append(line)
                    print(SHOWN.format(**line), flush=True)
    errors = [abs(float(str(line["error"]))) for line in lines]
    print(f"{len(lines)} ranks: mean error {statistics.mean(errors):.1%}, most {max(errors):.1%}")
    if given.json_file:
        given.json_file.write_text(
            json.dumps(
                {"machine": describe_machine(Path(tempfile.gettempdir())), "ranks": lines}, indent=1
            )
        )


if __name__ == "__main__":
    main()
