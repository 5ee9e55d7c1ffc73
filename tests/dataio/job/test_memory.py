"""What a step frees is there for the next one, unless the user has it otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from dataio.job import launch

PROGRAM = """
import resource

import torch

from dataio.job.memory import keep_freed_memory


def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [torch.ones(1 << 17) for _ in range(64)]  # 32 MiB, in pieces of 512 KiB
    del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print(max(step() for _ in range(3)))
keep_freed_memory()
step()
print(max(step() for _ in range(3)))
"""


def faults(**env: str) -> tuple[int, int]:
    plain = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain | env, check=True, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    before, after = map(int, printed.stdout.split())
    return before, after


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_a_step_takes_the_pages_that_the_one_before_has_freed():
    before, after = faults()
    assert before > 4000  # 8,192 pages
    assert after < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=0")],
)
def test_what_the_user_has_set_holds(name: str, value: str):
    _, after = faults(**{name: value})
    assert after > 4000


def test_a_job_on_the_cpu_keeps_it(monkeypatch: pytest.MonkeyPatch):
    kept: list[bool] = []
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: kept.append(True))
    with launch.join(device="cpu"):
        assert kept == [True]
