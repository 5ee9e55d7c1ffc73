"""`dataio.live` by launchers other than torchrun: ranks that are left live on, or are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import dataio.job.connect as connect
from dataio.base.errors import StateError, WorldError
from dataio.base.lines import read_checked_lines
from dataio.job.numbers import making
from dataio.world.launchers import outliving_claim
from tests.dataio.job.live_ranks import EPOCHS, LIMIT_S, write_samples
from tests.dataio.job.test_live import Time, check, kills, run, said
from tests.multirank import ROOT, find_descendants, job_environ
from tests.trainer.digits import write_config

ULFM = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "a@1",
        "OMPI_MCA_mpi_ft_enable": "1"}  # fmt: skip
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_ID": "0",
         "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_KILL_BAD_EXIT": "0"}  # fmt: skip
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        (ULFM, "a@1"), (SLURM, "7.0.2"), (SLURM | ULFM, "a@1"), (SLURM | TORCHRUN, ""),
        (SLURM | {"PMI_RANK": "1", "PMI_SIZE": "3"}, "7.0.2"),
    ],
)  # fmt: skip
def test_a_rank_knows_who_it_is_and_which_start_is_its_own(environ, start):
    claim, found = outliving_claim(environ)
    assert (claim.rank, claim.world_size, found) == (1, 3, start)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "started by hand, expected .*; start them by torchrun, one on each node"),
        (HYDRA | SLURM, "started by mpiexec, expected .*; start them by torchrun"),
        (ULFM | {"OMPI_MCA_mpi_ft_enable": "0"}, "by mpirun --with-ft ulfm of Open MPI"),
        (SLURM | {"SLURM_KILL_BAD_EXIT": "1"}, "by SLURM_KILL_BAD_EXIT=0 srun --no-kil"),
        ({k: v for k, v in SLURM.items() if "BAD" not in k}, "by SLURM_KILL_BAD_EXIT=0 srun"),
    ],
)
def test_a_launcher_that_may_end_all_ranks_with_the_first_is_refused(environ, words):
    with pytest.raises(WorldError, match=f"live: the ranks were .*{words}.* or leave live out"):
        outliving_claim(environ)


def test_what_an_earlier_start_left_misleads_nobody(tmp_path, monkeypatch):
    file, clock = tmp_path / "start", Time()
    others, own = (
        TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False) for _ in range(2)
    )
    others.set("old-0", "")
    for key in ("new-0", "new-all"):
        own.set(key, "")
    contents = iter(
        ["127.0.0.1 1 gone", "half", *(f"127.0.0.1 {others.port} {word}" for word in ("no", "old")),
         f"127.0.0.1 {own.port} new"]
    )  # fmt: skip

    def sleep(seconds: float) -> None:
        clock.sleep(1)
        if text := next(contents, ""):
            file.write_text(text)

    monkeypatch.setattr(connect, "time", SimpleNamespace(monotonic=clock.clock, sleep=sleep))
    monkeypatch.setattr(connect, "ONE_TRY", timedelta(seconds=1))
    assert connect.find_store(file, 1, 2, 30.0).port == own.port
    assert others.check(["old-1"]), "it waited in the store of a start whose last rank never comes"
    file.unlink()
    with pytest.raises(
        WorldError, match=r"rank 1 has not found all others by .*; see that all hav"
    ):
        connect.find_store(file, 1, 2, 5.0)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"file cannot be made .*; give a directory"):
        with making(tmp_path / "file"):
            pass


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize("by", ["mpirun", pytest.param("srun", marks=pytest.mark.nightly)])
def test_ranks_meet_without_a_store_of_the_launcher_and_others_join_them(tmp_path, by):
    live = tmp_path / "live"
    live.mkdir()
    stale = live / ("start-a@0" if by == "mpirun" else "start-7.0.")
    stale.write_text("127.0.0.1 1 gone")
    statuses = run(tmp_path, 2, {"0": ["call", "forward", 9]}, units=[1], by=by)
    assert statuses == [0, 0, 0], said(tmp_path, 1)
    assert [ranks for ranks, _ in check(tmp_path, 3, left=[0, 1, 2])] == [[0, 1], [0, 1, 2]]
    assert not [*live.iterdir()]


PRTERUN = shutil.which("prterun")
open_mpi = pytest.mark.skipif(
    not PRTERUN, reason="needs Open MPI 5: put the folder of its prterun and mpirun on PATH"
)


@contextmanager
def mpirun(num_ranks: int, *command: str, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    """Start ranks of Python by Open MPI; those that are left live on when one is lost."""
    start = [str(Path(PRTERUN or "").with_name("mpirun")), "--oversubscribe", "--with-ft", "ulfm"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(
        [*start, "-n", str(num_ranks), sys.executable, *command], text=True, cwd=ROOT,
        env=job_environ({**root, "TONARI_RANKS_PER_NODE": "1", **environ}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            job.terminate()


def run_open_mpi(out: Path, num_ranks: int, faults: dict[str, list[Any]], **options: Any) -> str:
    """Train a loop of one's own; returns what all wrote."""
    write_samples(out / "samples.parquet")
    given = json.dumps({"timeout_s": 30.0, "patience_s": 6.0, **options})
    module = ["-m", "tests.dataio.job.live_ranks", str(out), str(num_ranks), json.dumps(faults)]
    with mpirun(num_ranks, *module, given) as job:
        wrote, _ = job.communicate(timeout=LIMIT_S + 60)
    assert job.returncode == 0, wrote
    return wrote


@open_mpi
@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_open_mpi_loses_a_rank_and_the_others_train_on(tmp_path):
    wrote = run_open_mpi(tmp_path, 3, kills("forward", 9, 1))
    assert check(tmp_path, 3, left=[0, 2])[-1] == [[0, 2], 8], wrote
    assert not [*(tmp_path / "live").iterdir()]


MOMENTS = {"batch": 20, "forward": 20, "gathered": 20, "averaged": 20, "epoch": EPOCHS,
           "epoch end": EPOCHS - 1, "evaluation": 15, "saving": EPOCHS - 1}  # fmt: skip
"""Where a rank may be lost, and how often it is there with steps to come."""


@open_mpi
@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(8))
def test_open_mpi_loses_a_rank_at_any_moment(tmp_path, seed):
    draw, place = np.random.default_rng(seed), [*MOMENTS][seed]
    lost, nth = int(draw.integers(3)), int(draw.integers(MOMENTS[place])) + 1
    fault = ["soon", place, nth, draw.random() / 20]
    wrote = run_open_mpi(tmp_path, 3, {str(lost): fault}, saves=True, copies=1 + seed % 2)
    left = [rank for rank in range(3) if rank != lost]
    assert check(tmp_path, 3, left=left)[-1][0] == left, f"{fault}: {wrote}"


@open_mpi
@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_a_run_of_open_mpi_loses_a_rank_and_trains_each_sample_once(tmp_path):
    config = write_config(tmp_path, num_samples=96)
    lines = tmp_path / "run" / "metrics.jsonl"
    given = ["run.live=true", "run.timeout_s=30", "run.epochs=12", "data.batch_size=8",
             f"run.directory={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]  # fmt: skip
    with mpirun(3, "-m", "tonari", "train", str(config), *given) as job:
        until_s = time.monotonic() + LIMIT_S
        while not lines.exists() or lines.read_text().count('"epoch_s"') < 1:
            assert time.monotonic() < until_s
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.05)
        pid = next(
            pid for pid in find_descendants(job.pid)
            if b"\0OMPI_COMM_WORLD_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        )  # fmt: skip
        os.kill(pid, signal.SIGKILL)
        wrote, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, wrote
    assert "live: ranks [0, 2] go on from step" in wrote
    # Not on the oldest torch.
    from tonari.certify.claims import exactly_once
    from tonari.rows.settings import open_run

    assert exactly_once(open_run(tmp_path / "run", (), log=None))["holds"]
    assert [*read_checked_lines(lines)][-1]["epoch"] == 11
