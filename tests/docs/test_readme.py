"""The README: its blocks run, its links lead somewhere, and it stays short."""

import re
import subprocess
import sys

import pytest

from tests.docs.blocks import blocks_of
from tests.multirank import ROOT, launch_command, run_job

README = ROOT / "README.md"
LOOP, SHELL = (
    [block.text for block in blocks_of(README) if block.language == language]
    for language in ("python", "sh")
)


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_every_link_of_the_readme_leads_to_a_file():
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_two_commands_are_targets_of_make():
    targets = re.findall(r"^make ([\w-]+)", "".join(SHELL), re.MULTILINE)
    assert targets == ["demo", "test"]
    planned = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "tonari demo" in planned.stdout


def check(printed: str) -> None:
    found = re.findall(r"^epoch (\d): loss ([\d.]+), (\d+)% of the rows hidden$", printed, re.M)
    assert [int(epoch) for epoch, _, _ in found] == [*range(6)]
    losses, hidden = ([float(line[column]) for line in found] for column in (1, 2))
    assert losses[-1] < losses[0] / 3
    assert hidden[0] == 0 < max(hidden) <= 30


def test_the_loop_runs_as_pasted(capsys, tmp_path, monkeypatch):
    (loop,) = LOOP
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tonari.trainer", None)  # which takes no old torch
    exec(compile(loop, "README.md", "exec"), {"__name__": "__main__"})
    check(capsys.readouterr().out)


@pytest.mark.multirank
def test_the_loop_runs_as_pasted_on_two_ranks(tmp_path):
    (loop,) = LOOP
    (tmp_path / "loop.py").write_text(
        loop + "\n    has = next(net.parameters()).double().sum().item()\n"
        '    print(f"rank {job.world.rank} of {job.world.world_size} has {has!r}", flush=True)\n'
    )
    command = [*launch_command("mpiexec", 2), str(tmp_path / "loop.py")]
    env = {"TONARI_RANKS_PER_NODE": "1"}
    status, printed = run_job(command, env=env, timeout_s=120)
    assert status == 0, printed
    check(printed)
    models = dict(re.findall(r"rank (\d of 2) has (\S+)", printed))
    assert [*sorted(models)] == ["0 of 2", "1 of 2"]
    assert len({*models.values()}) == 1, "they train one model"
