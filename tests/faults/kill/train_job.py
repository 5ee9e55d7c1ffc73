"""`tonari train` on one rank, with every batch that its loader gives written down.

Nothing of the trainer is replaced: the loader's iterators and a few public methods are watched.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dataio.store.staging
import tonari.trainer.watch.stop
from dataio import Loader
from tests.faults.kill.job import TIMEOUT_S
from tests.faults.kill.points import Kill, Log, Points
from tests.trainer.digits import write_config
from tonari import cli
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import latest, read_progress

NUM_SAMPLES = 70
SEAL_BYTES = 700


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run's configuration says beside the data.

    Attributes:
        overrides: As on the command line.
    """

    stage: str = "before"
    overrides: tuple[str, ...] = ()
    epochs: int = 3
    quota: None = None
    mixed: bool = False


def write_data(directory: Path) -> None:
    """Write the data and the configuration."""
    write_config(directory, num_samples=NUM_SAMPLES)


class Watch:
    """Writes down what a loader gives, and says which part of the run comes next.

    Args:
        log: Of this start and rank.
        points: Told the part.
    """

    def __init__(self, log: Log, points: Points) -> None:
        self._log, self._points = log, points

    def install(self) -> None:
        """Watch every loader and all checkpoints of this process."""
        self._iterate("__iter__", "step", lambda loader, number: loader.step)
        self._iterate("refresh", "refresh", lambda loader, number: number)
        self._within(Checkpoints, "save", "save")
        self._within(Loader, "restore", "restore")
        self._within(Loader, "close", "close")

    def _iterate(self, name: str, kind: str, step: Callable[[Loader, int], int]) -> None:
        original = getattr(Loader, name)

        def watched(loader: Loader) -> Iterator[Any]:
            for number, batch in enumerate(original(loader)):
                self._points.part = "train" if kind == "step" else kind
                self._log.write(
                    # A loader counts a batch when the next one is asked for.
                    kind, epoch=loader.epoch, step=step(loader, number), dataset="train",
                    ids=batch["sample_id"].tolist(), slots=batch["slot"].tolist(),
                    weights=batch["weight"].tolist(), lap=loader.epoch, wrong=[], drawn=[],
                    **{name: loader.stats()[name] for name in ("source_bytes", "pulled_rows")},
                )  # fmt: skip
                self._points.passed(kind)
                yield batch
            self._points.part = "epoch end"

        setattr(Loader, name, watched)

    def _within(self, owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before, self._points.part = self._points.part, part
            self._points.passed(part)
            try:
                return original(*args, **kwargs)
            finally:
                self._points.part = before

        setattr(owner, name, watched)


def run(argument: dict[str, Any]) -> None:
    """Run the command once on this rank; see `tests.faults.kill.job.run`."""
    attempt, rank = Path(argument["attempt"]), int(argument["rank"])
    (attempt / f"{rank}.pid").write_text(str(os.getpid()))
    log = Log(attempt / f"{rank}.log")
    kill = Kill(**argument["kill"]) if argument["kill"] else None
    points = Points(log, rank=rank, pids=attempt, kill=kill)
    for module, name, value in (
        (dataio.store.staging, "SEAL_BYTES", SEAL_BYTES),
        # A signal is noticed after each step, however short.
        (tonari.trainer.watch.stop, "ASK_S", 0),
    ):
        assert hasattr(module, name), f"{module.__name__} has no {name}: name what is so now"
        setattr(module, name, value)
    points.install()
    Watch(log, points).install()
    options, place = TrainOptions(**argument["options"]), Path(argument["place"])
    argv = [
        "train", str(Path(argument["data"]) / "run.toml"), f"run.directory={place}/run",
        f"data.cache={place}/cache", f"data.staging.when={options.stage}",
        f"run.epochs={options.epochs}",
        f"run.timeout_s={TIMEOUT_S}", *options.overrides,
    ]  # fmt: skip
    status = cli.main(argv)
    if status:
        sys.exit(status)
    newest = latest(place / "run/checkpoints")
    if newest is not None and read_progress(newest).epochs == options.epochs:
        log.write("end", state=None)
    if argument["traced"]:
        (attempt / f"{rank}.trace").write_text(json.dumps(points.trace))
