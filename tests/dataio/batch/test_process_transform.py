"""Processes make the same batches as threads, and what goes wrong there is told here."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataio import FieldError, StallError, WorkerError
from tests.dataio.batch.gather_pool import FIELDS, gathered, open_pool, pick_in_turn, value
from tests.dataio.batch.test_gather import PLAIN, assert_same, stack
from tests.multirank import ROOT
from tests.opened import make_gather

LIMIT_S = 20.0

# What runs in a process stands at module level, where it is found again.


def jitter(sample, rng):
    return sample | {"noise": rng.normal(size=3).astype(np.float32)}


def draw(sample, rng):
    return sample | {"drawn": torch.rand(2)}


def tell_where(sample, rng):
    modules = {name.split(".")[0] for name in sys.modules}
    return {"pid": os.getpid(), "mpi": int("mpi4py" in modules)}


def fail(sample, rng):
    if sample["label"] == 3:
        raise ArithmeticError("three is too many")
    return sample


def die(sample, rng):
    os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_processes_make_the_batches_that_threads_make(tmp_path):
    with open_pool(tmp_path) as pool:
        threads = gathered(pool, transform=jitter, num_threads=2)
        for num_processes in (1, 2):
            processes = gathered(pool, transform=jitter, num_processes=num_processes)
            assert_same(threads, processes)


def test_samples_come_back_for_collate_and_bad_ones_are_padding(tmp_path):
    with open_pool(tmp_path, broken=frozenset([3])) as pool:
        options: dict[str, Any] = {"collate": stack, "on_error": "skip"}
        assert_same(gathered(pool, **options), gathered(pool, **options, num_processes=1))
        with pytest.raises(FieldError, match="sample 3, field 'image'"):
            gathered(pool, num_processes=1)


def test_torchs_own_draws_depend_on_the_sample_alone(tmp_path):
    def drawn(batches):
        ids = [int(i) for batch in batches for i in batch["sample_id"]]
        return dict(zip(ids, (row for batch in batches for row in batch["drawn"]), strict=True))

    with open_pool(tmp_path, PLAIN) as pool:
        one = drawn(gathered(pool, PLAIN, transform=draw, num_processes=1))
        two = drawn(gathered(pool, PLAIN, transform=draw, num_processes=2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[i], two[i]) for i in one)
    assert len({tuple(row.tolist()) for row in one.values()}) == 40


def test_processes_are_kept_hold_no_mpi_and_end_with_the_gather(tmp_path):
    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=0, num_processes=2, transform=tell_where)
        pids: set[int] = set()
        for epoch in range(3):
            # The second epoch is left in the middle.
            batches = gather.batches(pick_in_turn(40), range(5), epoch=epoch)
            for step, batch in enumerate(batches):
                pids |= set(batch["pid"].tolist())
                assert not batch["mpi"].any()
                if (epoch, step) == (1, 1):
                    break
            else:
                assert step == 4
        assert os.getpid() not in pids
        assert len(pids) == 2
        gather.close()
        del batches
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_error_in_a_process_names_the_sample(tmp_path):
    with open_pool(tmp_path, PLAIN) as pool:
        message = r"(?s)sample \d*3, epoch 1: raised ArithmeticError: three is too many.* in fail\n"
        with pytest.raises(WorkerError, match=message):
            gathered(pool, PLAIN, transform=fail, num_processes=1)


def test_a_killed_process_is_an_error_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("dataio.batch.process_transform.CHECK_S", 0.2)
    with open_pool(tmp_path, PLAIN) as pool:
        with pytest.raises(
            WorkerError, match=r"one was killed \(SIGKILL\).*memory.*fewer processes"
        ):
            gathered(pool, PLAIN, transform=die, num_processes=1)


def big(sample, rng):
    return {"x": np.full(1 << 18, sample["label"], np.uint8)}


def test_batches_larger_than_shared_memory_and_many_kept_ones_come(tmp_path):
    """No batch takes shared memory or a descriptor: /dev/shm may be small, ulimit -n low."""
    used: list[int] = []
    descriptors: list[int] = []
    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=0, num_processes=1, transform=big)
        kept: list[Any] = []
        for epoch in range(4):
            for batch in gather.batches(pick_in_turn(40), range(5), epoch=epoch):
                kept.append(batch)
                used.append(sum(f.stat().st_size for f in Path("/dev/shm").glob("torch_*")))
                descriptors.append(len([*Path("/proc/self/fd").iterdir()]))
        gather.close()
    assert max(used) == min(used)
    # What earlier tests left open may be closed meanwhile: only growth counts.
    assert max(descriptors) <= descriptors[0] + 2
    assert all((batch["x"][:, 0] == batch["sample_id"] % 10).all() for batch in kept)


def wait_for_ever(sample, rng):
    threading.Event().wait()
    return sample


def test_a_hanging_process_is_an_error_after_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("dataio.batch.process_transform.CHECK_S", 0.2)
    with open_pool(tmp_path, PLAIN) as pool:
        with pytest.raises(StallError, match=r"within 1 s.*py-spy"):
            gathered(pool, PLAIN, transform=wait_for_ever, num_processes=1, timeout_s=1)


def test_values_keep_their_kind(tmp_path):
    with open_pool(tmp_path) as pool:
        batch = gathered(pool, FIELDS, num_processes=1)[0]
    ids = batch["sample_id"].tolist()
    assert batch["text"] == [value("text", i) for i in ids]
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)


ALONE = """
import sys
from pathlib import Path
from tests.opened import make_gather
from tests.dataio.batch.gather_pool import open_pool, pick_in_turn
from tests.dataio.batch.test_gather import PLAIN
from tests.dataio.batch.test_process_transform import jitter

with open_pool(Path(sys.argv[1]), PLAIN) as pool:
    gather = make_gather(pool, PLAIN, num_threads=0, num_processes=2, transform=jitter)
    next(iter(gather.batches(pick_in_turn(40), range(5), epoch=0)))
    print("ready", flush=True)
    sys.stdin.read()
"""


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, by itself or through others."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def semaphores(pid: int) -> set[str]:
    """Named semaphores and shared memory that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r"/dev/shm/\S+", maps))


def test_killed_a_process_leaves_none_of_its_processes_nor_semaphores(tmp_path):
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": str(ROOT)}) as main:
        assert main.stdout is not None
        assert main.stdout.readline() == b"ready\n"
        left = descendants(main.pid)
        assert len(left) == 4, "two workers, what starts them, what counts their semaphores"
        named = set().union(*map(semaphores, left))
        assert named
        opened = [os.pidfd_open(pid) for pid in left]
        main.kill()
    ends = select.poll()
    for process in opened:
        ends.register(process, select.POLLIN)
    try:
        while opened:
            ended = ends.poll(LIMIT_S * 1000)
            assert ended, f"{len(opened)} of {len(left)} processes are still there"
            for process, _ in ended:
                ends.unregister(process)
                opened.remove(process)
                os.close(process)
    finally:
        for process in opened:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
    assert not [name for name in named if Path(name).exists()]
