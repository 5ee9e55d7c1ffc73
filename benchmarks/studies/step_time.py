r"""How far is the predicted time of a step from the time that the step takes?

Each case is a configuration. The prediction knows it from `tonari.oracle.probe`: what its ranks
compute with nobody at the other end, and messages of the machine timed by themselves, anew for each
case; nothing is fitted. The same ranks train steps on made-up batches. They take turns, some
seconds each: a few steps of the job, a round of the probe, steps again, so that a machine whose
speed changes from one minute to the next is as fast in the one as in the other.

How far the even turns of the job are from the odd ones is what no prediction can be better than.
Two others predict, too: ParaDL's equations (from the step of one rank), and floating-point
operations over the rate that one rank reaches.

    python -m benchmarks.studies.step_time [--only fsdp] [--keep DIR] [--rounds 4]

What was measured is kept in DIR, so that a study that was cut goes on where it was.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from scipy.stats import spearmanr

from benchmarks.studies.step_memory import Case, load
from dataio.base.atomic import write_json
from dataio.job.launch import join
from tonari.mpi import mpiexec_command
from tonari.oracle import Operator, trace_step
from tonari.oracle.machine import OneNode
from tonari.oracle.paradl import price, probed_link
from tonari.oracle.probe.messages import SIZES
from tonari.oracle.probe.probe import Probe, joined, load_probe, probe, save_probe
from tonari.oracle.programs import programs
from tonari.oracle.simulate import simulate
from tonari.oracle.trace import NoReports, make_batch
from tonari.report.machine import describe_machine
from tonari.report.pictures import COLOURS, render
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.build import build_parallel, lay_out
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM_UP_STEPS, TIMED_STEPS = 2, 4
"""Of a turn of the job."""
PROBED_STEPS = 3
"""Of a round of the probe: with a clock in them, and without."""
SIMULATED_STEPS = 21
TIMEOUT_S = 600

SMALL = ("model.num_classes=10", "data.image_size=32")
GPT = ("model.kind=gpt", "model.width=256", "model.depth=6", "model.heads=8")
LLAMA = ("model.kind=llama", "model.width=256", "model.depth=4", "model.heads=8")
VIT = (
    "model.kind=vit", "model.width=192", "model.depth=6", "model.heads=8", "model.patch=4",
    *SMALL,
)  # fmt: skip
RESNET = ("model.kind=resnet", "model.depth=14", *SMALL)
PP = ("mesh.pp=2", "mesh.microbatches=4")
FULL = "mesh.checkpointing=full"


def _cases() -> list[Case]:
    models = {"gpt": GPT, "llama": LLAMA, "vit": VIT, "resnet": RESNET}
    cases = []
    for name, model in models.items():
        cases += [
            Case(f"{name}, one", 1, model),
            Case(f"{name}, dp 2", 2, (*model, "mesh.dp_replicate=2")),
            Case(f"{name}, fsdp 2", 2, (*model, "mesh.dp_shard=2")),
            Case(f"{name}, dp 4", 4, (*model, "mesh.dp_replicate=4")),
            Case(f"{name}, hsdp 2 x 2", 4, (*model, "mesh.dp_shard=2", "mesh.dp_replicate=2")),
        ]
        if name == "resnet":
            continue
        cases += [
            Case(f"{name}, one, full recomputation", 1, (*model, FULL)),
            Case(f"{name}, tp 2", 2, (*model, "mesh.tp=2")),
            Case(f"{name}, pp 2", 2, (*model, *PP)),
            Case(f"{name}, pp 2, zbv", 2, (*model, *PP, "mesh.schedule=zbv")),
            Case(f"{name}, pp 2, dp 2", 4, (*model, *PP, "mesh.dp_replicate=2")),
        ]
    for name, model in (("gpt", GPT), ("llama", LLAMA)):
        cases += [
            Case(f"{name}, pp 2, gpipe", 2, (*model, *PP, "mesh.schedule=gpipe")),
            Case(f"{name}, fsdp 2, full recomputation", 2, (*model, "mesh.dp_shard=2", FULL)),
            Case(f"{name}, fsdp 2, tp 2", 4, (*model, "mesh.dp_shard=2", "mesh.tp=2")),
            Case(f"{name}, pp 2, fsdp 2", 4, (*model, *PP, "mesh.dp_shard=2")),
            Case(
                f"{name}, tp 2, sequence", 2, (*model, "mesh.tp=2", "mesh.sequence_parallel=true")
            ),
        ]
    cases += [
        Case("gpt, cp 2", 2, (*GPT, "mesh.cp=2")),
        Case("gpt, pp 2, interleaved", 2, (*GPT, *PP, "mesh.schedule=interleaved")),
        Case("gpt, one, bfloat16", 1, (*GPT, "mesh.dtype=bfloat16")),
    ]
    return cases


CASES = _cases()
SHOWN = (
    "{case:34} measured {measured_s:7.3f} s, again {again:+6.1%}   predicted {predicted:+6.1%}   "
    "ParaDL {paradl:+6.0%}   flops {flops:+6.0%}"
)


def take_turns(config: Config, ranks: int, rounds: int) -> tuple[list[list[float]], Probe]:
    """Train some steps and probe the same, by turns; the first and the last turn train. Collective.

    Returns:
        Seconds of each step, by turn; and what all rounds of the probe found together.
    """
    runs_s, found = [train(config, TIMED_STEPS)], []
    for number in range(rounds):
        # Messages take as long as the rest of a round: once, in the middle of all
        sizes = SIZES if number == rounds // 2 else ()
        found.append(probe(config, world_size=ranks, steps=PROBED_STEPS, sizes=sizes))
        runs_s.append(train(config, TIMED_STEPS))
    return runs_s, replace(joined(found), messages=found[rounds // 2].messages)


def train(config: Config, steps: int) -> list[float]:
    """Train some steps on made-up batches: the seconds of each. Collective."""
    with join(device="cpu", timeout_s=TIMEOUT_S / 2) as job:
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        batch = make_batch(config, Own(), parallel.task, pipeline.place)
        ends = []
        for number in range(WARM_UP_STEPS + steps):
            train_step(
                pipeline, optimizer, NoReports(), [batch], clip=config.optimizer.clip, step=number
            )
            ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends[WARM_UP_STEPS - 1 :])]


def run_rank(config: Config, given: argparse.Namespace) -> None:
    """Be a rank of a case, or of a job that only trains; the first one writes what was measured."""
    if given.rank:
        steps_s = train(config, given.steps)
        if is_first():
            write_json(given.rank, steps_s)
        return
    runs_s, found = take_turns(config, given.ranks, given.rounds)
    if is_first():
        save_probe(found, given.probe)
        # Last, and whole or not at all: a case that was cut is measured again
        write_json(given.case, {"machine": describe_machine(given.case.parent), "runs_s": runs_s})


def is_first() -> bool:
    """Whether this is the first of MPICH's ranks."""
    return os.environ.get("PMI_RANK", "0") == "0"


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the cases, or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--most-ranks", type=int, default=4, help="leave larger cases out")
    parser.add_argument("--plot", type=Path, help="draw predictions over measurements, as a PNG")
    parser.add_argument("--rounds", type=int, default=4, help="of the probe, for each case")
    parser.add_argument("--keep", type=Path, help="keep cases and probes in this directory")
    for hidden in ("--rank", "--case", "--probe", "--settings"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    for hidden in ("--ranks", "--steps"):
        parser.add_argument(hidden, type=int, default=1, help=argparse.SUPPRESS)
    given, overrides = parser.parse_known_args(argv)
    if given.rank or given.case:
        run_rank(load_config(given.settings, overrides), given)
        return
    cases = [
        case for case in CASES if given.only in case.name and case.ranks <= given.most_ranks
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        study = StepStudy(given.keep or Path(directory), given.rounds)
        lines = [study.compare(case) for case in cases]
    if given.plot:
        given.plot.write_bytes(draw(lines))
    print("\n".join(summary(lines)))


def draw(lines: Sequence[dict[str, object]]) -> bytes:
    """Draw what each way predicts over what was measured, as a PNG."""

    def scatter(figure: "Figure") -> None:
        axes = figure.subplots()
        measured = [float(str(line["measured_s"])) for line in lines]
        ends = min(measured) / 2, max(measured) * 2
        axes.plot(ends, ends, color="gray", linewidth=1)
        ways = {"flops": "operations over a rate", "paradl": "ParaDL", "predicted": "tonari plan"}
        for (name, words), colour in zip(ways.items(), COLOURS[2::-1], strict=True):
            predicted = [
                m * (1 + float(str(line[name]))) for m, line in zip(measured, lines, strict=True)
            ]
            axes.scatter(measured, predicted, s=24, color=colour, label=words)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ticks = [at for at in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if ends[0] <= at <= ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, list(map("{:g}".format, ticks)))
            axis.minorticks_off()
        axes.set_xlabel("measured, seconds of a step")
        axes.set_ylabel("predicted")
        axes.set_title(f"{len(lines)} configurations, none of them fitted")
        axes.legend()

    return render(scatter, inches=(6.4, 5.6), kind="png")


class StepStudy:
    """Compares cases one by one, and keeps what was measured in a directory."""

    def __init__(self, directory: Path, rounds: int) -> None:
        directory.mkdir(exist_ok=True, parents=True)
        self._directory, self._rounds = directory, rounds
        # By model: of one rank that trains all of it, the seconds of a step and its operations
        self._serial: dict[str, tuple[float, float]] = {}

    def compare(self, case: Case) -> dict[str, object]:
        """Measure a case, if it is not there yet, and predict it."""
        settings, config = load(case, self._directory)
        kept, probed = (self._directory / f"{case.name}.{kind}.json" for kind in ("case", "probe"))
        if not kept.exists():
            command = [
                *mpiexec_command(case.ranks), sys.executable, "-W", "ignore", "-m",
                __spec__.name, "--case", str(kept), "--probe", str(probed),
                "--settings", str(settings), "--ranks", str(case.ranks),
                "--rounds", str(self._rounds), *case.settings,
            ]  # fmt: skip
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(
                command, check=True, timeout=TIMEOUT_S, env=env, stdout=subprocess.DEVNULL
            )
        runs_s = json.loads(kept.read_text())["runs_s"]
        line = self._predict(case, config, load_probe(probed), runs_s)
        print(SHOWN.format(**line), flush=True)
        return line

    def _predict(
        self, case: Case, config: Config, found: Probe, runs_s: list[list[float]]
    ) -> dict[str, object]:
        measured_s, odd_s, even_s = (
            statistics.median(chain.from_iterable(runs))
            for runs in (runs_s, runs_s[::2], runs_s[1::2])
        )
        sizes = lay_out(config, case.ranks).sizes
        machine = OneNode(found.messages, found.slowdowns, cores=found.cores)
        simulated = simulate(
            programs(found.steps, found.world_size, sizes), machine, steps=SIMULATED_STEPS
        )
        self._know_serial(case, config, found)
        return {
            "case": case.name,
            "measured_s": measured_s,
            "again": even_s / odd_s - 1,
            "predicted": simulated.step_s / measured_s - 1,
            "paradl": self._paradl(case, config, found) / measured_s - 1,
            "flops": self._by_flops(case, config) / measured_s - 1,
        }

    # What others would say

    def _know_serial(self, case: Case, config: Config, found: Probe) -> None:
        if case.ranks == 1 and _model(case) not in self._serial:
            self._serial[_model(case)] = (found.steps[0].computing_s, _flops(config, 1))

    def _by_flops(self, case: Case, config: Config) -> float:
        """Take operations of the busiest rank over the rate of one rank alone."""
        seconds, flops = self._serial.get(_model(case), (float("nan"), 1.0))
        return _flops(config, case.ranks) * seconds / flops

    def _paradl(self, case: Case, config: Config, found: Probe) -> float:
        """Price a step by ParaDL's equations, from the computation of one rank alone."""
        seconds, _ = self._serial.get(_model(case), (float("nan"), 1.0))
        layout = lay_out(config, case.ranks)
        pp, _, _, cp, tp = layout.sizes
        terms = price(
            found.steps[0].events, computation_s=seconds / (pp * cp * tp), sizes=layout.sizes,
            microbatches=layout.microbatches,
            link_of=lambda _: probed_link(found.messages),
        )  # fmt: skip
        return terms.step_s


def _model(case: Case) -> str:
    return case.name.split(",")[0]


def _flops(config: Config, world_size: int) -> float:
    pp = lay_out(config, world_size).sizes[0]
    ranks = [coordinate * (world_size // pp) for coordinate in range(pp)]
    return max(
        sum(
            event.flops
            for event in trace_step(config, world_size=world_size, rank=rank).events
            if isinstance(event, Operator)
        )
        for rank in ranks
    )


def summary(lines: Sequence[dict[str, object]]) -> list[str]:
    """Say in words how far off each way to predict is."""
    said = []
    measured = [float(str(line["measured_s"])) for line in lines]
    for name in ("again", "predicted", "paradl", "flops"):
        errors = [float(str(line[name])) for line in lines]
        sizes = sorted(map(abs, errors))
        tail = sizes[min(int(0.95 * len(sizes)), len(sizes) - 1)]
        ranked = spearmanr(measured, [m * (1 + e) for m, e in zip(measured, errors, strict=True)])
        said.append(
            f"{name:10} error: mean {statistics.mean(sizes):.1%}, 95 % within {tail:.1%}, most "
            f"{sizes[-1]:.1%}; rank correlation {ranked.statistic:.3f}"
        )
    return said


if __name__ == "__main__":
    main()
