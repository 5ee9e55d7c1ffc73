"""kill -9 under a quota: what was there stays, and the batches are the same."""

import signal
import subprocess

import pytest

from dataio.base.atomic import read_table
from dataio.store.files.manifest import from_table
from dataio.world import single_world
from tests.dataio.store.test_quota import (
    SAMPLES,
    LargeShards,
    batches,
    held_bytes,
    make,
    run,
    train,
)
from tests.multirank import job_environ, python_command

QUOTA = 1_400_000
KILLED = """
import os, signal, sys
from pathlib import Path
import dataio.store.staging
from dataio.world import single_world
from tests.dataio.store.test_quota import LargeShards, make, train

def kill(source):
    if len(source.rows_read) >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

dataio.store.staging.SEAL_BYTES = 100_000
train(make(single_world(), Path(sys.argv[1]), "both", LargeShards(gate=kill), quota=1_400_000))
"""


def killed_at(root, num_rows):
    command = [*python_command(), "-c", KILLED, str(root), str(num_rows)]
    ended = subprocess.run(command, timeout=60, capture_output=True, check=False, env=job_environ())
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


@pytest.mark.parametrize("num_rows", [80, 120, 420])
def test_a_killed_job_goes_on_with_the_rows_that_were_sealed(tmp_path, num_rows):
    whole = batches(run([1], tmp_path / "whole", "both"))
    root = tmp_path / "limited"
    killed_at(root, num_rows)
    assert held_bytes(root) <= QUOTA
    sealed = set()
    for path in root.glob("*/node0/staged-*.arrow"):
        sealed |= set(from_table(read_table(path)).sample_id.tolist())
    source = LargeShards()
    with make(single_world(), root, "both", source, quota=QUOTA) as loader:
        assert loader.stats()["resident_fraction"] > 0
        if num_rows > SAMPLES:
            assert source.rows_read == []
        else:
            assert sealed
            assert not sealed & set(source.rows_read)
        assert train(loader) == whole[0]
    assert held_bytes(root) <= QUOTA
