"""Every state that a kill or a power cut can leave: recorded from the loader, opened by it again.

The files of all nodes are kept before each operation on them, as `recording.py` says. Each of these
states is written to a new directory; all ranks start there anew, from the last save if there is
one, and train the same samples as the run that nothing disturbed.
"""

import os
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shuffle
from dataio import Staging
from tests.faults.recording import KINDS, Recorder, State
from tests.faults.samples import (
    WIDE,
    Job,
    Trained,
    check_each_once,
    check_files,
    node_directory,
    train,
)

pytestmark = pytest.mark.thorough

EVERY = bool(os.environ.get("TONARI_LONG"))
DRAWN = 12
"""States opened of each scenario, unless all are."""
TO_THE_END = 5
"""One state in so many is trained to the end, the others for an epoch."""
FLIPPED = 200


@dataclass(frozen=True)
class Scenario:
    """Jobs one after the other on the same caches.

    Attributes:
        jobs: What is recorded; each goes on from the newest save.
        before: What makes the caches that the first one finds.
        least: States that it has at least, or the recorder has missed something.
    """

    jobs: tuple[Job, ...]
    before: Callable[[Job, Path], None] = lambda job, root: None
    least: int = 100


@dataclass(frozen=True)
class Mark:
    """Where a recorded run was: its job's number, and what was saved last."""

    job: int
    saved: Path | None


def stage(job: Job, root: Path) -> None:
    train(replace(job, saves=()), root, saves=root.with_name("unsaved"), num_epochs=1)


def stage_and_flip(job: Job, root: Path) -> None:
    """Damage rows on both nodes, where their fields lie."""
    stage(job, root)
    for node in range(len(job.nodes)):
        for name in ("heap-0.bin", "fixed-0.npy"):
            path = node_directory(root, node) / name
            if path.exists():
                data = bytearray(path.read_bytes())
                data[FLIPPED] ^= 1
                path.write_bytes(data)


def lose(job: Job, root: Path) -> None:
    """Train all epochs, then lose a node's cache: the other has rows that it is to give."""
    train(replace(job, saves=()), root, saves=root.with_name("unsaved"))
    shutil.rmtree(node_directory(root, 1))


PARTIAL = {"shuffle": shuffle.Partial(0.4)}
QUOTA = {"quota": 420_000}
MORE = {"quota": 620_000}


def resized(kind: str) -> tuple[Job, ...]:
    one, two = Job((2,), kind, options=PARTIAL), Job((1, 1), kind, options=PARTIAL)
    return (
        replace(two, until=1, saves=((0, 2), (0, 5))),
        replace(one, until=2, saves=((0, 5), (1, 3))),
        two,
    )


SCENARIOS = {
    "stage": lambda kind: Scenario((Job((2, 1), kind, epochs=1),), least=60),
    "stage beside training": lambda kind: Scenario(
        (Job((2, 1), kind, epochs=2, options=PARTIAL | {"staging": Staging(when="overlap")}),)
    ),
    "exchange": lambda kind: Scenario((Job((2, 1), kind, epochs=4, options=PARTIAL),)),
    "exchange and save": lambda kind: Scenario(
        (
            Job((1, 1), kind, options=PARTIAL, saves=((0, 3), (0, 5), (1, 2), (2, 1))),
        ),
    ),
    "deal all rows anew": lambda kind: Scenario(
        (Job((1, 1), kind, options={"shuffle": shuffle.Global(moves=True)}),)
    ),
    "repair": lambda kind: Scenario((Job((1, 1), kind, epochs=1),), stage_and_flip, least=3),
    "pull": lambda kind: Scenario((Job((1, 1), kind, epochs=4, options=PARTIAL),), lose),
    "resize": lambda kind: Scenario(resized(kind)),
    "windows": lambda kind: Scenario(
        (Job((1, 1), kind, epochs=2, width=WIDE, num_samples=120, cache=QUOTA),), least=40
    ),
    "refill": lambda kind: Scenario(
        (
            Job(
                (1, 1), kind, width=WIDE, num_samples=120, options=PARTIAL | {"batch_size": 3},
                cache=MORE,
            ),
        ),
        least=40,
    ),
}  # fmt: skip
DRIVEN: list[Any] = [(name, "both") for name in SCENARIOS] + [
    pytest.param(name, kind, marks=pytest.mark.nightly)
    for name in ("stage", "exchange", "repair", "pull", "windows")
    for kind in ("fixed", "variable")
]


def record(scenario: Scenario, place: Path) -> tuple[Recorder, list[Trained]]:
    """Run it, and return its states and what each job trained."""
    recorder = Recorder(place / "recorded" / "cache")
    recorder.root.mkdir(parents=True)
    scenario.before(scenario.jobs[0], recorder.root)
    recorder.mark = Mark(0, None)

    def saved(path: Path) -> None:
        recorder.mark = Mark(recorder.mark.job, path)

    trained: list[Trained] = []
    with recorder.recording():
        for number, job in enumerate(scenario.jobs):
            recorder.mark = Mark(number, recorder.mark.saved)
            trained.append(
                train(
                    job, recorder.root, saves=place / "saves" / str(number),
                    restored=recorder.mark.saved, saved=saved,
                )
            )  # fmt: skip
    return recorder, trained


def check_state(
    scenario: Scenario, state: State, expected: list[Trained], place: Path, *, to_the_end: bool
) -> None:
    """Open a state, go on from it, and compare with the run that nothing disturbed."""
    state.restore(root := place / "cache")
    restored = state.mark.saved
    for number in range(state.mark.job, len(scenario.jobs)):
        job, saves = scenario.jobs[number], list[int]()
        found = train(
            job, root, saves=place / str(number), restored=restored, saved=saves.append,
            num_epochs=None if to_the_end else 1,
        )  # fmt: skip
        assert found or job.until is not None, "nothing was left to train"
        assert found == {step: expected[number].get(step) for step in found}
        check_files(job, root)
        if not to_the_end:
            return
        missed = expected[number].keys() - found.keys()
        assert restored is not None or not missed, f"not trained: {sorted(missed)}"
        restored = saves[-1] if saves else restored


def drawn(states: list[State], *, seed: int) -> list[int]:
    """Choose the states to open: some of each kind of end, unless all are."""
    if EVERY:
        return list(range(len(states)))
    rng = np.random.default_rng(seed)
    chosen: list[int] = []
    for kind in KINDS:
        numbers = [number for number, state in enumerate(states) if state.kind == kind]
        share = DRAWN // 2 if kind == "kill" else DRAWN // 6
        chosen += rng.permutation(numbers)[:share].tolist()
    return sorted(chosen)


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch):
    monkeypatch.setattr("dataio.store.staging.SEAL_BYTES", 300)
    monkeypatch.setattr("dataio.store.commit_log.DELTAS_PER_BASE", 2)
    monkeypatch.setattr("dataio.store.commit_log.MOVED_PER_BASE", 0.9)
    monkeypatch.setattr("dataio.store.pull.ROUND_BYTES", 400)
    monkeypatch.setattr("dataio.store.files.store.HEAP_STEP_BYTES", 1 << 12)
    # What is flushed is known to the recorder; waiting for a disk would prove nothing.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)


@pytest.mark.timeout(3600 if EVERY else 120)
@pytest.mark.parametrize(("name", "kind"), DRIVEN)
def test_every_prefix_of_file_operations_opens_to_the_same_rows(name, kind, tmp_path):
    scenario = SCENARIOS[name](kind)
    recorder, expected = record(scenario, tmp_path)
    for job, trained in zip(scenario.jobs, expected, strict=True):
        if len(scenario.jobs) == 1:
            check_each_once(job, trained)
    kills = sum(state.kind == "kill" for state in recorder.states)
    assert kills >= scenario.least, f"{len(recorder.states)} states, {kills} after a kill"
    seed = sorted(SCENARIOS).index(name)
    wrong = []
    chosen = drawn(recorder.states, seed=seed)
    for count, number in enumerate(chosen):
        state, place = recorder.states[number], tmp_path / f"state-{number}"
        place.mkdir()
        try:
            check_state(scenario, state, expected, place, to_the_end=count % TO_THE_END == 0)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{number}: {state}: {at}: {type(error).__name__}: {str(error)[:1500]}")
        else:
            shutil.rmtree(place)
    print(f"{name} ({kind}): {recorder.num_operations} operations, {len(recorder.states)} states")
    assert not wrong, f"{len(wrong)} of {len(chosen)} states:\n" + "\n".join(wrong)
