"""A rank that falls while rows travel: the others say who, and a restart loses nothing."""

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dataio.source.shards import numbered, write_tar
from tests.multirank import ROOT, launch_command, run_job

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


def without_cleanup(logs: Path) -> list[str]:
    """A launcher that leaves the other ranks alone when one falls: they must end by themselves.

    MPICH's tells them of it by a signal, which ends who does not expect it: ignored here. What they
    say goes to files, because it may drop the last lines.
    """
    launcher, *number, python = launch_command("mpiexec", RANKS)
    apart = f'trap "" USR1; exec "$@" 2>"{logs}/$PMI_RANK.log"'
    return [launcher, "-disable-auto-cleanup", *number, "sh", "-c", apart, "sh", python]


def trained_once(reports: list[dict[str, Any]]) -> bool:
    counted: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    for report in reports:
        for epoch, sample_id in report["trained"]:
            counted[epoch][sample_id] += 1
    return counted == [Counter(range(NUM_SAMPLES))] * EPOCHS


@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
def test_a_rank_killed_in_an_exchange_is_named_by_the_others_and_a_restart_goes_on(
    run_ranks, options, tmp_path, ranks_per_node
):
    environment = {"TONARI_RANKS_PER_NODE": ranks_per_node}
    script, started = str(ROOT / "tests/ranks/loader_job.py"), time.monotonic()
    status, said = run_job(
        [*without_cleanup(tmp_path), script, str(tmp_path), json.dumps(options | {"killed": 1})],
        env=environment,
        timeout_s=60,
    )
    if "-disable-auto-cleanup" in said:
        pytest.skip("this launcher always ends all ranks")
    assert status != 0
    assert time.monotonic() - started < 45
    named = rf"(waited {TIMEOUT_S:.0f} s for rank 1 while|ranks \[1\] did not answer within)"
    logs = [path.read_text() for path in tmp_path.glob("[0-9].log")]
    assert any(re.search(named, log) for log in logs), logs
    for path in tmp_path.glob("*.pid"):
        assert not Path("/proc", path.read_text()).exists(), f"rank {path.stem} is still there"
    again = run_ranks("loader_job", RANKS, json.dumps(options), env=environment)
    assert trained_once(again.reports)
    assert sum(report["wrong"] for report in again.reports) == 0
    assert sum(report["stats"]["source_bytes"] for report in again.reports) == 0, "all lay there"
