"""The scripts of examples/slurm on a real Slurm of four nodes, as they are."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataio.base.lines import read_checked_lines
from tests.lab.site import (
    CONFIG,
    NUM_NODES,
    SCRIPTS,
    Site,
    has_epochs,
    open_site,
    read_epochs,
    what_is_missing,
)
from tonari.bench.storage.results.document import read_document

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
PARQUET_END_BYTES = 64 << 10
EPOCHS, START_S = 8, 200

Line = dict[str, Any]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := what_is_missing():
        pytest.skip(reason)
    with open_site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="module")
def whole(site: Site) -> list[Line]:
    """The epochs of a run that nothing disturbed."""
    run, _ = site.train(f"run.epochs={EPOCHS}")
    return read_epochs(run)


def source_bytes(run: Path) -> list[int]:
    lines = [*read_checked_lines(run / "metrics.jsonl")]
    return [line["source_bytes"] for line in lines if line["kind"] == "epoch"]


def test_every_launcher_trains_cifar10_on_four_nodes_in_the_same_order(
    site: Site, whole: list[Line]
) -> None:
    end = f"run.epochs={EPOCHS}"
    assert len(whole) == EPOCHS
    assert whole[1]["exchanged_rows"] == NUM_NODES * (500 // 10)
    assert whole[-1]["loss"] < whole[0]["loss"]
    for launcher in ("torchrun", "mpiexec"):
        run, log = site.train(end, LAUNCHER=launcher)
        assert read_epochs(run) == whole, log
    site.call(
        "srun", "--nodes=4", "--ntasks=4", "--mpi=pmi2", "python", "-m", "tonari", "train", CONFIG,
        end, "run.directory=runs/direct", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert read_epochs(site.home / "runs/direct") == whole


def test_what_is_staged_first_is_trained_without_another_read_of_the_source(
    site: Site, whole: list[Line]
) -> None:
    cache = str(site.lab.scratch / "staged")
    run, log = site.train(
        f"run.epochs={EPOCHS}", script="stage_then_train.sbatch", TONARI_CACHE=cache, PRUNE="7d"
    )
    assert read_epochs(run) == whole, log
    first, *others = source_bytes(run)
    # The file's end, which one rank reads, says whether it is what was staged.
    assert first <= PARQUET_END_BYTES, log
    assert others == [0] * (EPOCHS - 1), log


def test_a_cut_link_ends_the_job_with_the_nodes_name_and_queued_again_it_comes_to_the_same(
    site: Site, whole: list[Line]
) -> None:
    job = site.submit("train.sbatch", f"run.epochs={EPOCHS}", "run.timeout_s=20")
    run = site.home / f"runs/tonari-{job}"
    site.wait_for(lambda: has_epochs(run, 3), "three epochs are trained", job, START_S)
    site.lab.cut("node2")
    ended = r"rank 2 on node2\b.*is silent after \d+ steps"
    try:
        # 20 s for a sign of life, 8 to look twice at the others.
        what = "the ranks end, and say which node is gone"
        site.wait_for(lambda: bool(re.search(ended, site.log(job))), what, job, 40)
        # srun waits for the node until Slurm takes it for down.
        site.await_state(job, "PENDING", within_s=60)
    finally:
        site.lab.mend("node2")
    before = len(read_epochs(run))
    assert before < EPOCHS, "it was cut in the middle"
    site.start_now(job)
    site.await_state(job, "COMPLETED")
    assert read_epochs(run) == whole, site.log(job)


def test_the_signal_before_the_time_limit_writes_a_checkpoint_and_queues_the_job_again(
    site: Site, whole: list[Line]
) -> None:
    # Slurm looks at limits twice a minute.
    limits = {"SBATCH_TIMELIMIT": "2", "SBATCH_SIGNAL": "B:USR1@80"}
    job = site.submit("train.sbatch", "run.epochs=10000", **limits)
    run = site.home / f"runs/tonari-{job}"
    site.wait_for(lambda: has_epochs(run, 2), "two epochs are trained", job, START_S)
    site.await_state(job, "PENDING", "FAILED", "TIMEOUT", "COMPLETING", within_s=150)
    said = site.log(job)
    stopped = re.search(r"stopped by SIGUSR1 after (\d+) epochs, (\d+) steps", said)
    assert stopped, said
    assert f"status 0, queued again to go on from runs/tonari-{job}/checkpoints/" in said, said
    assert f"step-{int(stopped[2]):08}" in said, "what the signal asked for is the newest"
    done = int(stopped[1])
    site.start_now(job)
    site.wait_for(lambda: has_epochs(run, done + 3), "training goes on", job, START_S)
    site.call("scancel", job)
    site.await_state(job, "CANCELLED", "COMPLETED")
    trained = read_epochs(run)
    assert [line["epoch"] for line in trained] == list(range(len(trained))), "each once"
    hashes = [line["order_hash"] for line in trained]
    common = min(len(hashes), EPOCHS)
    assert hashes[:common] == [line["order_hash"] for line in whole[:common]]


def test_torchrun_hands_the_signal_on_and_what_fails_at_once_is_not_queued_again(
    site: Site,
) -> None:
    job = site.submit("train.sbatch", "run.epochs=10000", LAUNCHER="torchrun")
    run = site.home / f"runs/tonari-{job}"
    site.wait_for(lambda: has_epochs(run, 2), "two epochs are trained", job, START_S)
    site.call("scancel", "--batch", "--signal=USR1", job)
    site.await_state(job, "PENDING")
    assert "stopped by SIGUSR1 after" in site.log(job), site.log(job)
    site.call("scancel", job)
    wrong = site.submit("train.sbatch", "data.train=absent.parquet")
    site.await_state(wrong, "FAILED")
    assert "absent.parquet" in site.log(wrong)
    assert "no checkpoint after the start: not queued again" in site.log(wrong)


def test_a_loop_of_ones_own_saves_at_the_signal_and_goes_on_behind_that_step(site: Site) -> None:
    data = str(site.home / "data" / "cifar10-train.parquet")
    step = re.compile(r"^epoch \d+, step (\d+): loss", re.MULTILINE)

    def steps(job: str) -> list[int]:
        return [*map(int, step.findall(site.log(job)))]

    loop = str(SCRIPTS / "loop.py")
    job = site.submit("loop.sbatch", data, "--epochs=100000", LOOP=loop)
    site.wait_for(lambda: len(steps(job)) > 20, "twenty steps are trained", job, START_S)
    site.call("scancel", "--batch", "--signal=USR1", job)
    site.await_state(job, "PENDING", "FAILED", "COMPLETING")
    stopped = steps(job)[-1]
    saved = f"queued again to go on from runs/loop-{job}/{stopped:08d}\n"
    assert f"status 0, {saved}" in site.log(job), site.log(job)
    site.start_now(job)
    site.wait_for(lambda: steps(job)[-1] > stopped + 20, "training goes on", job, START_S)
    site.call("scancel", job)
    site.await_state(job, "CANCELLED", "COMPLETED")
    assert steps(job) == [*range(1, len(steps(job)) + 1)], "each once"


def test_a_shared_directory_is_measured_from_four_nodes(site: Site) -> None:
    job = site.submit("bench_io.sbatch", str(site.home), "--size", "4MB", OUT="io.json")
    state = site.await_state(job, "COMPLETED", "FAILED")
    assert state == "COMPLETED", site.log(job)
    assert read_document(site.home / "io.json").environment["nodes"] == NUM_NODES
    assert not list(site.home.glob(".tonari-bench-io-*"))
