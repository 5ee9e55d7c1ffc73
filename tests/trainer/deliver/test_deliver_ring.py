"""Shared memory of batches is gone when nobody needs it, whatever became of who made it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tonari.trainer.deliver.ring import NUM_SLOTS, Ring


def test_the_batches_under_way_lie_apart() -> None:
    ring = Ring.create(100)
    peer = Ring(ring.path, 100, writes=False)
    ring.unlink()
    for first in (1, 3):
        numbers = range(first, first + NUM_SLOTS)
        for number in numbers:
            ring.slot(number)[:] = number
        assert [set(peer.slot(number).tolist()) for number in numbers] == [{n} for n in numbers]


def test_what_a_killed_reader_left_is_removed_by_the_next_and_what_is_in_use_stays() -> None:
    used = Ring.create(100)
    program = (
        "import os, signal; from tonari.trainer.deliver.ring import Ring\n"
        "print(Ring.create(100).path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    left = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL
    assert left.exists()
    another = Ring.create(100)
    assert not left.exists()
    assert used.path.exists()
    assert another.path.exists()
    for ring in (used, another):
        ring.unlink()
        ring.unlink()
        assert not ring.path.exists()
