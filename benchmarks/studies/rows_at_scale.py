"""What does it cost to log which rows are trained, and to ask, at 65,536 ranks?

The log of a run of a billion samples is written by the code that a loader calls, as rank 0 of 8,192
nodes of 8 ranks would, then opened and asked: when was a sample trained in 90 epochs, and which
rows had a step on all ranks. One process; nothing is trained or read. What an epoch hides is packed
apart, for one node's rows, as each node does it for its own.

    python -m benchmarks.studies.rows_at_scale [--shuffle partial] [--batch-size 32]
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import shuffle
from dataio.base.seeding import ORDER_VERSION
from dataio.plan.epoch import Counts, find_sampling_groups, plan_epoch
from dataio.plan.exclusion import Exclusion
from dataio.plan.layout import Layout
from dataio.plan.policies import Selection, Shuffle
from dataio.plan.segment import Position, Segment
from dataio.rowlog.answers import Answers
from dataio.rowlog.attempts import Setup, find_course
from dataio.rowlog.log import RowLog
from dataio.rowlog.packed import pack_selection
from dataio.rowlog.reading import read_log
from dataio.world import single_world
from tonari.report.machine import describe_machine

SHUFFLES: Mapping[str, Shuffle] = {
    "local": shuffle.Local(), "partial": shuffle.Partial(0.1), "moves": shuffle.Global(moves=True),
    "global": shuffle.Global(),
}  # fmt: skip
NODES, WIDTH, NUM_SAMPLES, EPOCHS, QUERIES = 8192, 8, 10**9, 90, 20


@dataclass(frozen=True)
class Written:
    """What writing the log took.

    Attributes:
        epoch_s: Median of an epoch's line, the plan made beforehand.
        step_s: Of a step's note.
        num_bytes: Of the log.
    """

    epoch_s: float
    step_s: float
    num_bytes: int


def write_log(directory: Path, policy: Shuffle, batch_size: int) -> Written:
    """Write the log of the run."""
    setup = Setup(
        seed=1, num_samples=NUM_SAMPLES, shuffle=repr(policy), importance="",
        holds_all=policy.holds_all, drop_last=False, accumulate=1, source="counted", made_as="x",
        fingerprint="x", costs="", order_version=ORDER_VERSION,
    )  # fmt: skip
    layout = Layout((WIDTH,) * NODES, NUM_SAMPLES)
    sampling = find_sampling_groups(layout, replica=0, holds_all=policy.holds_all)
    counts = Counts(sampling.sizes, sampling.sizes)
    stream = sampling.stream(1, "order", epoch=0)
    plan = plan_epoch(sampling, Selection(), counts, stream=stream, batch_size=batch_size)
    log = RowLog(directory, setup, None, single_world())
    times = []
    for epoch in range(EPOCHS):
        position = Position(epoch, (Segment(layout.replicas, batch_size, 0),))
        after = None if log.here is None else (*log.here, plan.order.steps)
        started = time.perf_counter()
        log.begin(
            position, plan, sampling, Exclusion(NUM_SAMPLES), after=after, begins=after is None
        )
        times.append(time.perf_counter() - started)
        log.progress(plan.order.steps)
    started = time.perf_counter()
    for _ in range(10_000):
        log.progress(plan.order.steps)
    step_s = (time.perf_counter() - started) / 10_000
    log.close()
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    return Written(statistics.median(times), step_s, num_bytes)


def ask(directory: Path, policy: Shuffle, batch_size: int) -> dict[str, object]:
    """Open the log and ask for samples, and for steps on all ranks."""
    started = time.perf_counter()
    logged = read_log(directory)
    answers = Answers(find_course(logged.attempts), logged, policy)
    found: dict[str, object] = {"open_s": time.perf_counter() - started}
    before = _peak_bytes()
    times, cpu = [], []
    for sample_id in np.random.default_rng(0).integers(0, NUM_SAMPLES, QUERIES).tolist():
        started, used = time.perf_counter(), time.process_time()
        asked = np.array([sample_id])
        trained = [answers.of(piece, asked).rows for piece in answers.course.kept]
        assert sum(len(rows.step) for rows in trained) == EPOCHS
        times.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    found |= {"sample_s": statistics.median(times), "sample_p90_s": sorted(times)[-QUERIES // 10]}
    found |= {"sample_cpu_s": statistics.median(cpu), "sample_bytes": _peak_bytes() - before}
    for epoch in (0, EPOCHS // 2, EPOCHS - 1):
        started, used = time.perf_counter(), time.process_time()
        rows = answers.at(answers.course.kept[epoch], range(100, 101))
        assert len(rows.step) == NODES * WIDTH * batch_size
        found[f"step_of_epoch_{epoch}_s"] = time.perf_counter() - started
        found[f"step_of_epoch_{epoch}_cpu_s"] = time.process_time() - used
    return found


def pack() -> list[dict[str, float | str]]:
    """Pack what an epoch hides of one node's rows."""
    num_rows = NUM_SAMPLES // NODES
    rng = np.random.default_rng(0)
    shown: list[dict[str, float | str]] = []
    for name, share, kinds in (
        ("1 % hidden", 0.01, 1), ("30 % hidden", 0.3, 1), ("50 % hidden", 0.5, 1),
        ("30 % hidden, 2 weights", 0.3, 2), ("30 % hidden, a weight each", 0.3, num_rows),
    ):  # fmt: skip
        hidden = np.sort(rng.permutation(num_rows)[: int(share * num_rows)])
        weights: NDArray[np.float32] | None = None
        if kinds > 1:
            weights = rng.integers(1, kinds + 1, num_rows).astype(np.float32)
        started = time.perf_counter()
        data = pack_selection(Selection(hidden, weights), num_rows)
        shown.append(
            {
                "what": name, "bytes_per_row": round(len(data) / num_rows, 4),
                "s_per_million_rows": (time.perf_counter() - started) * 1e6 / num_rows,
            }
        )  # fmt: skip
    return shown


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shuffle", choices=[*SHUFFLES], default="partial")
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        written = write_log(Path(name), SHUFFLES[given.shuffle], given.batch_size)
        answers = ask(Path(name), SHUFFLES[given.shuffle], given.batch_size)
        machine = describe_machine(Path(name))
    line = {
        "question": "rows_at_scale", "machine": machine, "shuffle": given.shuffle,
        "batch_size": given.batch_size, "ranks": NODES * WIDTH, "num_samples": NUM_SAMPLES,
        "epochs": EPOCHS, "log_bytes": written.num_bytes, "log_epoch_s": written.epoch_s,
        "log_step_s": written.step_s, **answers, "packed": pack(),
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
