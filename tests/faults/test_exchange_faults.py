"""A rank that falls while rows travel: the others say who, and a restart loses nothing."""

import json
import os
import re
import select
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dataio.source.shards import numbered, write_tar
from tests.multirank import ROOT, python_command, run_job
from tonari.mpi import mpiexec_command

pytestmark = pytest.mark.multirank

NUM_SAMPLES, EPOCHS, RANKS = 150, 3, 4
TIMEOUT_S = 3.0


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """What `loader_job` is told."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        write_tar(shards / f"{number}.tar", numbered(50, first=50 * number, num_bytes=200))
    source, cache = str(shards / "{0..2}.tar"), str(tmp_path / "cache")
    return {"source": source, "cache": cache, "timeout_s": TIMEOUT_S}


def apart(logs: Path) -> list[str]:
    """Launch so that nobody but the ranks themselves can end them when one of them falls.

    A launcher sees at once that a rank was killed, and ends the others before they can speak. Here
    it sees a shell that lives on.
    """
    script = f'"$@" 2>"{logs}/$$.log"; ended=$?; [ $ended = 137 ] && exec sleep 60; exit $ended'
    return [*mpiexec_command(RANKS), "sh", "-c", script, "sh", *python_command()]


def has_ended(pid: int) -> bool:
    """Whether a process ends within the limit, whoever started it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5 * TIMEOUT_S)[0])
    finally:
        os.close(descriptor)


def trained_once(reports: list[dict[str, Any]]) -> bool:
    counted: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    for report in reports:
        for epoch, sample_id in report["trained"]:
            counted[epoch][sample_id] += 1
    return counted == [Counter(range(NUM_SAMPLES))] * EPOCHS


@pytest.mark.parametrize("ranks_per_node", [pytest.param("1", marks=pytest.mark.nightly), "2"])
def test_a_rank_killed_in_an_exchange_is_named_by_the_others_and_a_restart_goes_on(
    run_ranks, options, tmp_path, ranks_per_node
):
    environment = {"TONARI_RANKS_PER_NODE": ranks_per_node}
    script, started = str(ROOT / "tests/ranks/loader_job.py"), time.monotonic()
    status, _ = run_job(
        [*apart(tmp_path), script, str(tmp_path), json.dumps(options | {"killed": 1})],
        env=environment,
        timeout_s=60,
    )
    assert status != 0
    assert time.monotonic() - started < 45
    # Who waits for that rank in an exchange is missing too, and may itself not yet have said so.
    named = rf"waited {TIMEOUT_S:.0f} s for (rank 1|ranks 1[-, 0-9]+) while"
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert any(re.search(named, log) for log in logs), logs
    for path in set(tmp_path.glob("*.pid")) - {tmp_path / "1.pid"}:
        assert has_ended(int(path.read_text())), f"rank {path.stem} is still there"
    again = run_ranks("loader_job", RANKS, json.dumps(options), env=environment)
    assert trained_once(again.reports)
    assert sum(report["wrong"] for report in again.reports) == 0
    assert sum(report["stats"]["source_bytes"] for report in again.reports) == 0, "all lay there"
