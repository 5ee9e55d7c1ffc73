"""A job of several processes that grows, is killed by SIGKILL, and goes on."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.dataio.growing.shards import Directory, write_shard
from tests.multirank import job_environ, python_command

EXAMPLE = Path(__file__).parents[3] / "examples" / "growing.py"


def test_the_example_takes_in_a_shard_each_epoch():
    done = subprocess.run(
        [*python_command(), str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=True,
        env=job_environ(),
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("epoch")] == [
        "epoch 0: 64 samples",
        "epoch 1: 96 samples",
        "epoch 2: 128 samples",
    ]
    assert "grew by 1 shard with 32 samples to 128 samples, from epoch 2 on" in done.stderr


@pytest.mark.multirank
@pytest.mark.thorough
@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 4]
)
def test_a_job_that_was_killed_after_it_grew_goes_on_byte_for_byte(tmp_path, run_ranks, n):
    """Shards came in epochs 0 and 1; the save is of epoch 2, and another came before the kill."""

    def prepare(name):
        directory = Directory(tmp_path / name / "shards")
        for epoch, (first, count) in enumerate([(61, 13), (74, 22), (96, 10)]):
            shard = directory.path / f"made-{epoch}.part"
            write_shard(shard, first, count)
            shard.rename(directory.path / f"wait-{epoch}")
        return directory

    def run(name, *, kill_at=None, goes_on=False):
        options = {
            "shards": str(tmp_path / name / "shards"),
            "cache": str(tmp_path / name / "cache"),
            "save": str(tmp_path / name / "save"),
            "save_at": [2, 1],
            "kill_at": kill_at,
            "goes_on": goes_on,
        }
        # Every rank a node of its own, so that rows travel.
        env = {"TONARI_RANKS_PER_NODE": "1"}
        return run_ranks("growing_job", n, json.dumps(options), env=env, check=kill_at is None)

    prepare("whole")
    whole = run("whole").reports
    prepare("killed")
    run("killed", kill_at=[3, 2])
    # The shard of epoch 2 came before the kill: the rest of that epoch is without it.
    rest = run("killed", goes_on=True).reports
    for rank in range(n):
        assert rest[rank]["seen"] == whole[rank]["seen"][whole[rank]["kept"] :]
    ids = sorted(i for report in rest for at, ids, _ in report["seen"] if at == 3 for i in ids)
    assert [i for i in ids if i >= 0] == list(range(106))
