"""Whole runs in which a rank falls: all end in time, the message names it, the same run goes on.

Limits are as a user has them; only a hang, which nothing but ``run.timeout_s`` ends, gets a shorter
one.
"""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataio.base.lines import read_checked_lines
from tests.multirank import ROOT, Launcher, RunRanks, ends, launch_command, read_reports, run_job
from tests.trainer.digits import write_config
from tonari.trainer.checkpoint.directory import latest
from tonari.trainer.checkpoint.export import read_checkpoint

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(1200)]

LIMIT_S = 30.0
HANG_S = 6.0
VIT = (
    "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4", "model.heads=2",
    "mesh.dtype=float64", "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.clip=1.0",
    "importance.kind=kakurenbo", "importance.fraction=0.4", "importance.tau=0",
    "data.workers.threads=2", "run.checkpoint_async=true",
)  # fmt: skip
MESHES = {
    "pp4": ("mesh.pp=4", "mesh.microbatches=4"),
    "pp2 tp2": ("mesh.pp=2", "mesh.tp=2", "mesh.microbatches=4"),
}
WORDS = {
    "kill": r"is silent after \d+ steps: its process was killed",
    "stop": r"is silent after \d+ steps: its process was killed or stopped",
    "twice": r"is silent after \d+ steps: its process was killed",
    "raise": r"failed: (Value|Config|Checkpoint)Error: .*this rank is on fire",
    "spin": r"hangs after \d+ steps in .*falls.py:\d+ \(fall\): look there",
    "sleep": r"hangs after \d+ steps in .*\(Condition.wait\): look there",
}
OF_THE_LAUNCHER = {
    # Both end the other ranks, maybe before those have looked around; mpiexec then names any of the
    # processes that it ended.
    ("mpiexec", "kill"): r"the process of rank {rank} \({role}\) has ended|EXIT CODE: 9",
    ("torchrun", "kill"): r"rank +: {rank} \(local_rank: {rank}\)\n *exitcode +: -9",
    ("mpiexec", "twice"): r"the process of rank {rank} \({role}\) has ended|signal 15|CODE: 15",
    ("torchrun", "twice"): r"rank +: {rank} \(local_rank: {rank}\)\n *exitcode +: -15",
}
STOPS = {"term": "SIGTERM", "usr1": "SIGUSR1", "launcher": "SIGTERM"}


@dataclass(frozen=True)
class Fall:
    """Which rank falls, how and where."""

    mesh: str
    rank: int
    way: str
    where: str = "forward"
    launcher: Launcher = "mpiexec"

    @property
    def name(self) -> str:
        return f"{self.mesh}-{self.rank}-{self.way}-{self.where}-{self.launcher}".replace(" ", "")

    @property
    def role(self) -> str:
        if self.mesh == "pp4":
            return f"pp {self.rank}"
        return f"pp {self.rank // 2}, tp {self.rank % 2}"


FEW = (
    Fall("pp4", 1, "kill", "forward", "torchrun"),
    Fall("pp4", 2, "spin", "evaluation"),
    Fall("pp4", 2, "term", "forward"),
)
MORE = (Fall("pp2 tp2", 3, "raise", "backward"), Fall("pp2 tp2", 2, "term", "forward"))
ALL = {
    "kill": (
        Fall("pp4", 0, "kill", "decode"),
        Fall("pp4", 1, "kill", "evaluation", "torchrun"),
        Fall("pp4", 2, "kill", "backward"),
        Fall("pp4", 3, "kill", "delivery", "torchrun"),
        Fall("pp2 tp2", 0, "kill", "checkpoint", "torchrun"),
        Fall("pp2 tp2", 1, "kill", "forward"),
        Fall("pp2 tp2", 2, "kill", "opening", "torchrun"),
        Fall("pp2 tp2", 3, "kill", "backward"),
        Fall("pp4", 0, "kill", "staging"),
        Fall("pp4", 3, "kill", "opening"),
    ),
    "raise": (
        Fall("pp4", 0, "raise", "delivery", "torchrun"),
        Fall("pp4", 1, "raise", "backward"),
        Fall("pp4", 2, "raise", "evaluation", "torchrun"),
        Fall("pp4", 3, "raise", "opening"),
        Fall("pp2 tp2", 0, "raise", "staging", "torchrun"),
        Fall("pp2 tp2", 1, "raise", "delivery"),
        Fall("pp2 tp2", 2, "raise", "checkpoint", "torchrun"),
        Fall("pp2 tp2", 2, "raise", "forward"),
        Fall("pp4", 0, "raise", "checkpoint"),
    ),
    "stop": (
        Fall("pp4", 0, "stop", "forward"),
        Fall("pp4", 1, "stop", "checkpoint", "torchrun"),
        Fall("pp4", 2, "stop", "evaluation"),
        Fall("pp4", 3, "stop", "backward", "torchrun"),
        Fall("pp2 tp2", 0, "stop", "decode", "torchrun"),
        Fall("pp2 tp2", 1, "stop", "backward"),
        Fall("pp2 tp2", 2, "stop", "delivery", "torchrun"),
        Fall("pp2 tp2", 3, "stop", "forward"),
        Fall("pp4", 0, "stop", "staging"),
    ),
    "hang": (
        Fall("pp4", 0, "spin", "forward", "torchrun"),
        Fall("pp4", 1, "sleep", "backward", "torchrun"),
        Fall("pp4", 2, "spin", "evaluation"),
        Fall("pp4", 3, "sleep", "delivery"),
        Fall("pp2 tp2", 0, "spin", "delivery"),
        Fall("pp2 tp2", 1, "spin", "backward", "torchrun"),
        Fall("pp2 tp2", 2, "spin", "forward"),
        Fall("pp2 tp2", 3, "sleep", "evaluation", "torchrun"),
    ),
    "signal": (
        Fall("pp4", 1, "usr1", "backward", "torchrun"),
        Fall("pp4", 3, "term", "delivery"),
        Fall("pp4", 2, "launcher", "forward", "torchrun"),
        Fall("pp2 tp2", 1, "launcher", "forward"),
        Fall("pp2 tp2", 3, "twice", "forward"),
        Fall("pp2 tp2", 0, "twice", "backward", "torchrun"),
    ),
}


def settings(root: Path, name: str, mesh: str) -> list[str]:
    """Set a mesh, and a run directory with a cache of its own."""
    where = (f"run.directory={root / name}", f"data.cache={root / name / 'cache'}")
    return [*VIT, *MESHES[mesh], *where]


def start(config: Path, report: Path, launcher: Launcher, case: str) -> tuple[int, str, float]:
    """Run one case on four ranks: status, output, and seconds from the fall to the end of all."""
    report.mkdir()
    over = threading.Event()
    program = str(ROOT / "tests/ranks/trainer/falls.py")
    command = [*launch_command(launcher, 4), program, str(report), str(config), case]
    with ThreadPoolExecutor(1) as watcher:
        ended = watcher.submit(last_end, report, over)
        try:
            status, said = run_job(command, env=None, timeout_s=300)
        finally:
            over.set()
    fallen = report / "fallen"
    pids = [path.read_text() for path in report.glob("*.pid")]
    assert all(ends(int(pid)) for pid in pids if pid), f"a rank is still there\n{said}"
    return status, said, ended.result() - fallen.stat().st_mtime if fallen.exists() else 0.0


def last_end(report: Path, over: threading.Event) -> float:
    """Say when the last rank was seen: launchers take some time more to end themselves."""
    seen = 0.0
    while not over.wait(0.1):
        if any(is_there(path) for path in report.glob("*.pid")):
            seen = time.time()
    return seen


def is_there(pid: Path) -> bool:
    """Say whether a rank's process lives, or is at least not buried."""
    number = pid.read_text()
    return not number or Path("/proc", number).exists()


def check_fall(fall: Fall, config: Path, root: Path) -> None:
    """Let a rank fall and look at what its job did."""
    report = root / f"{fall.name}-report"
    case = settings(root, fall.name, fall.mesh)
    hangs = fall.way in ("spin", "sleep")
    limit = (f"run.timeout_s={HANG_S}",) if hangs else ()
    planted = f"fall={fall.way}:{fall.where}:{fall.rank}"
    status, said, ended_s = start(config, report, fall.launcher, "|".join([*case, *limit, planted]))
    if fall.way in STOPS:
        check_stop(fall, report, status, said)
        return
    assert status != 0, said
    assert (report / "fallen").exists(), f"{fall}: nobody fell\n{said}"
    assert ended_s < LIMIT_S, f"{fall}: {ended_s:.0f} s\n{said}"
    checkpoint = latest(root / fall.name / "checkpoints")
    named = rf"rank {fall.rank} \({fall.role}\):? {WORDS[fall.way]}"
    launcher = OF_THE_LAUNCHER.get((fall.launcher, fall.way), "never")
    found = re.search(named, said) or re.search(
        launcher.format(rank=fall.rank, role=fall.role), said
    )
    print(
        f"| {fall.mesh} | {fall.rank} ({fall.role}) | {fall.way} in {fall.where} | {fall.launcher} "
        f"| {ended_s:.1f} s | {checkpoint.name if checkpoint else 'none'} "
        f"| {found.group() if found else None!r} |",
        flush=True,
    )
    assert found, f"{fall}\n{said}"
    others = "".join(str(other) for other in range(4) if other != fall.rank)
    blamed = re.search(rf"rank [{others}] \(pp [^)]*\):? (is silent|hangs|failed)", said)
    assert not blamed, f"{fall}\n{said}"


def check_stop(fall: Fall, report: Path, status: int, said: str) -> None:
    """See that all ranks stopped at the same step, by the signal that one of them got."""
    reports: Any = read_reports(report, 4)
    ended = [case for (case,) in reports]
    print(f"| {fall.mesh} | {fall.rank} | {fall.way} | {fall.launcher} | {status} | {ended} |")
    assert len(ended) == 4, f"{fall}\n{said}"
    assert all(case == ended[0] for case in ended)
    assert (ended[0]["finished"], ended[0]["by"]) == (False, STOPS[fall.way]), fall
    # A launcher that was told to end the job says that it did.
    assert status == 0 or fall.way == "launcher", f"{fall}\n{said}"


def check_rest(falls: tuple[Fall, ...], run_ranks: RunRanks, config: Path, root: Path) -> None:
    """Start every fallen run again, beside one of each mesh that nothing happened to."""
    meshes = sorted({fall.mesh for fall in falls})
    names = {fall.name: fall.mesh for fall in falls} | {mesh: mesh for mesh in meshes}
    cases = ["|".join(settings(root, name, mesh)) for name, mesh in names.items()]
    ended = run_ranks("trainer/falls", 4, str(config), *cases, timeout_s=400)
    of_cases: Any = ended.reports[0]
    assert all(case["finished"] for case in of_cases)
    rings = [*root.glob("*-report/rings"), ended.directory / "rings"]
    left = [line for ring in rings if ring.exists() for line in ring.read_text().splitlines()]
    assert left
    assert not [path for path in left if Path(path).exists()]
    for fall in falls:
        # Sums over tp differ in their last bits from start to start.
        assert told(root / fall.name) == pytest.approx(told(root / fall.mesh), rel=1e-9), fall
        again, whole = weights(root / fall.name), weights(root / fall.mesh)
        assert again.keys() == whole.keys()
        for name, weight in whole.items():
            torch.testing.assert_close(again[name], weight, rtol=1e-9, atol=1e-12)


def told(directory: Path) -> list[float]:
    """Read each step's number and loss, and the hidden rows of each epoch."""
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    names = {"step": "loss", "epoch": "hidden_fraction"}
    return [line[name] for line in lines for name in ("step", names[line["kind"]])]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read the last checkpoint's weights."""
    newest = latest(directory / "checkpoints")
    assert newest is not None
    model = read_checkpoint(newest)["model"]
    return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    "falls", [FEW, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["pp4", "pp2tp2"]
)
def test_a_rank_of_any_stage_falls_and_the_same_run_goes_on_to_the_same_weights(
    run_ranks: RunRanks, tmp_path: Path, falls: tuple[Fall, ...]
) -> None:
    config = write_config(tmp_path)
    for fall in falls:
        check_fall(fall, config, tmp_path)
    check_rest(falls, run_ranks, config, tmp_path)


def test_a_damaged_image_ends_all_ranks_and_is_named_with_the_rank_that_read_it(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path)
    rows = pq.read_table(tmp_path / "train.parquet").to_pydict()
    rows["png"][37] = rows["png"][37][:20] + b"damaged"
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    case = "|".join(settings(tmp_path, "run", "pp2 tp2"))
    status, said, _ = start(config, tmp_path / "report", "mpiexec", case)
    assert status != 0
    assert re.search(r"rank 0 \(pp 0, tp 0\) failed: FieldError: .*sample 37\b", said), said


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL)
def test_every_role_falls_in_every_way_and_the_same_run_goes_on_to_the_same_weights(
    run_ranks: RunRanks, tmp_path: Path, way: str
) -> None:
    config = write_config(tmp_path)
    for fall in ALL[way]:
        check_fall(fall, config, tmp_path)
    check_rest(ALL[way], run_ranks, config, tmp_path)
