"""A training job as a user writes it, which writes down every row that it is given.

Each rank runs `run`; the shipped loader does everything else. What it reports of a row is a
function of the sample and the epoch, and so are the row's bytes of the sample.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import dataio.store.staging
import shuffle
from dataio import Array, Bytes, Field, Int, Loader, Mixture, NodeCache, Reports, Staging, Workers
from dataio.plan.policies import Importance, Shuffle
from dataio.world import World, discover_world
from importance import Full, InfoBatch, Kakurenbo, RandomPrune, SelectiveBackprop, Weighted
from tests.dataio.source.shards import write_tar
from tests.faults.kill.points import Kill, Log, Points

NUM_SAMPLES = {"large": 90, "small": 41}
SHARD_SAMPLES = 10
TIMEOUT_S = 90.0
SEAL_BYTES = 20_000
"""Staged rows become durable many times, as those of a dataset of real size do."""

FIELDS: dict[str, Field] = {
    "number": Int("cls"),
    "x": Array("x", (256,), "int32"),
    "data": Bytes("bin"),
}
KINDS = {"fixed": ("number", "x"), "variable": ("data",), "both": ("number", "x", "data")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the job does.

    Attributes:
        shuffle: ``"dealt"``: all dealt anew.
        importance: ``"full"`` keeps scores and hides nothing. ``"weighted"``: rows come as often as
            they weigh, other ones in each epoch; ``"pooled"``: each node draws from its own rows.
        mixed: Whether it draws from two datasets.
        saves: ``"own"``: each into a directory of its own; ``"same"``; ``"turns"``: two by turns.
        save_steps: Steps between two saves within an epoch.
        save_ends: Whether one more ends each epoch; else the last alone.
    """

    shuffle: Literal["local", "partial", "global", "dealt"] = "partial"
    importance: Literal[
        "none", "full", "kakurenbo", "infobatch", "selective", "random", "weighted", "pooled"
    ] = "none"
    stage: Literal["before", "overlap"] = "before"
    exchange: float = 0.1
    kind: Literal["fixed", "variable", "both"] = "both"
    quota: str | None = None
    mixed: bool = False
    num_threads: int = 0
    num_processes: int = 0
    saves: Literal["own", "same", "turns"] = "same"
    save_steps: int = 3
    save_ends: bool = True
    epochs: int = 3
    batch_size: int = 5


def contents(sample: int) -> dict[str, Any]:
    """What each field of a sample holds."""
    return {
        "number": sample,
        "x": (np.arange(256, dtype=np.int32) + 1) * (sample + 1),
        # Some are empty.
        "data": (sample + 1).to_bytes(4, "little") * (150 * (sample % 9)),
    }


def write_shards(directory: Path) -> None:
    """Write the datasets."""
    for name, num_samples in NUM_SAMPLES.items():
        for shard, first in enumerate(range(0, num_samples, SHARD_SAMPLES)):
            members = []
            for sample in range(first, min(first + SHARD_SAMPLES, num_samples)):
                held = contents(sample)
                members += [
                    (f"{sample:06d}.cls", str(held["number"]).encode()),
                    (f"{sample:06d}.x", held["x"].astype("<i4").tobytes()),
                    (f"{sample:06d}.bin", held["data"]),
                ]
            write_tar(directory / f"{name}-{shard}.tar", members)


def outcome(ids: NDArray[np.int64], epoch: int | NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What is reported of samples trained in an epoch: all told exactly by quantised scores."""
    return {
        "loss": ((ids * 37 + epoch * 61) % 101 / 16).astype(np.float32),
        "correct": (ids * 5 + epoch) % 7 != 0,
        "confidence": ((ids * 3 + epoch) % 8 / 8).astype(np.float32),
    }


def transform(sample: Any, rng: np.random.Generator) -> Any:
    """Keep the sample, and draw a number that depends on seed, epoch and sample alone."""
    return {**sample, "drawn": np.array(rng.integers(1 << 30))}


def weights(name: str, epoch: int) -> NDArray[np.int64]:
    """What the samples of a dataset weigh in an epoch: some come several times, some not at all."""
    return (np.arange(NUM_SAMPLES[name]) * 37 + epoch * 5) % 11


def policies(options: Options, name: str) -> tuple[Shuffle, Importance | None]:
    """Make what the loader of a dataset is handed."""
    shuffles: dict[str, Any] = {
        "local": shuffle.Local(), "partial": shuffle.Partial(options.exchange),
        "global": shuffle.Global(), "dealt": shuffle.Global(moves=True),
    }  # fmt: skip
    # A mixture does not say how long its loaders' runs are.
    delta = 1.0 if options.mixed else 0.875
    kakurenbo = Kakurenbo(0.4, tau=0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
    importances: dict[str, Importance | None] = {
        "none": None, "full": Full(columns=("loss", "forgotten")), "kakurenbo": kakurenbo,
        "infobatch": InfoBatch(0.5, delta=delta), "selective": SelectiveBackprop(0.4),
        "random": RandomPrune(0.3, delta=delta),
        "weighted": Weighted(partial(weights, name)),
        "pooled": Weighted(weights(name, 0), over="pool"),
    }  # fmt: skip
    return shuffles[options.shuffle], importances[options.importance]


def make_loader(options: Options, name: str, *, data: Path, place: Path, world: World) -> Loader:
    """Make one dataset's loader."""
    shuffled, policy = policies(options, name)
    with_transform = options.num_threads > 0 or options.num_processes > 0
    return Loader(
        str(data / f"{name}-*.tar"),
        batch_size=options.batch_size,
        fields={field: FIELDS[field] for field in KINDS[options.kind]},
        cache=NodeCache(place / "cache", quota=options.quota),
        shuffle=shuffled,
        importance=policy,
        transform=transform if with_transform else None,
        seed=7,
        world=world,
        workers=Workers(threads=options.num_threads, processes=options.num_processes),
        staging=Staging(when=options.stage),
        reports=Reports(progress=False),
    )


class Training:
    """One start of the job on one rank.

    Args:
        options: Of the job.
        data: Where the shards are.
        place: Where the job keeps its cache, its saves, and the name of the newest.
        log: Of this start and rank.
        points: Told what comes next.
        stop: Batches after which it ends; None: when all epochs are done.
        saves_at_stop: Whether it then saves first.
    """

    def __init__(
        self, options: Options, *, data: Path, place: Path, log: Log, points: Points,
        stop: int | None, saves_at_stop: bool,
    ) -> None:  # fmt: skip
        self.options, self.data, self.place = options, data, place
        self.log, self.points = log, points
        self.stop, self.saves_at_stop = stop, saves_at_stop

    def run(self) -> None:
        with discover_world(timeout_s=TIMEOUT_S) as world:
            self.world = world
            with self._make() as self.loader:
                self._restore()
                self._train()
                self.points.part = "close"
                self.points.passed("close")

    def _make(self) -> Loader | Mixture:
        names = list(NUM_SAMPLES) if self.options.mixed else ["large"]
        loaders = {
            name: make_loader(
                self.options, name, data=self.data, place=self.place, world=self.world
            )
            for name in names
        }
        if not self.options.mixed:
            return loaders["large"]
        return Mixture(loaders, {"large": 2, "small": 1}, steps=9, seed=3)

    def _restore(self) -> None:
        newest = self.place / "newest"
        if newest.exists():
            self.points.part = "restore"
            self.points.passed("restore")
            self.loader.restore(self.place / "saves" / newest.read_text())

    def _train(self) -> None:
        taken = 0
        self.points.part = "begin"
        for epoch in self.loader.epochs(self.options.epochs):
            self.points.part = "train"
            for batch in self.loader:
                self._take("step", batch, epoch, self.loader.step)
                taken += 1
                if taken == self.stop:
                    self.log.write("stop", saves=self.saves_at_stop)
                    if self.saves_at_stop:
                        self._save()
                    return
                if self.loader.step % self.options.save_steps == 0:
                    self._save()
            if isinstance(self.loader, Loader):
                self.points.part = "refresh"
                for number, batch in enumerate(self.loader.refresh()):
                    self._take("refresh", batch, epoch, number)
            if self.options.save_ends or epoch + 1 == self.options.epochs:
                self._save()
            self.points.part = "epoch end"
        self.log.write("end", state=self.loader.state_dict(), **self._told())

    def _take(self, kind: str, batch: Any, epoch: int, step: int) -> None:
        ids, slots = batch["sample_id"].numpy(), batch["slot"].numpy()
        loader = self.loader
        if isinstance(loader, Mixture):
            loader = loader.loaders[batch["dataset"]]
        self.log.write(
            kind, epoch=epoch, step=step, ids=ids.tolist(), slots=slots.tolist(),
            weights=batch["weight"].tolist(), dataset=batch.get("dataset", "large"),
            lap=loader.epoch, wrong=list(self._wrong(batch)),
            drawn=batch["drawn"].tolist() if "drawn" in batch else [], **self._told(),
        )  # fmt: skip
        self.points.passed(kind)
        told = outcome(ids, loader.epoch)
        self.loader.report(batch, *(torch.from_numpy(values) for values in told.values()))
        self.points.passed("report")

    def _wrong(self, batch: Any) -> Iterator[int]:
        """Samples of which any byte is not the sample's own."""
        for row, (sample, slot) in enumerate(
            zip(batch["sample_id"].tolist(), batch["slot"].tolist(), strict=True)
        ):
            if slot < 0:
                continue
            held = contents(sample)
            for name in KINDS[self.options.kind]:
                if not np.array_equal(np.asarray(batch[name][row]), np.asarray(held[name])):
                    yield sample
                    break

    def _told(self) -> dict[str, float]:
        stats = self.loader.stats()
        each = list(stats.values()) if self.options.mixed else [stats]
        return {
            name: sum(one[name] for one in each)  # type: ignore[index]
            for name in ("source_bytes", "pulled_rows")
        }

    def _save(self) -> None:
        part, self.points.part = self.points.part, "save"
        at = (self.loader.epoch, self.loader.step)
        newest = self.place / "newest"
        before = newest.read_text() if newest.exists() else ""
        name = {
            "own": f"at-{at[0]}-{at[1]}", "same": "last", "turns": "b" if before == "a" else "a"
        }[self.options.saves]  # fmt: skip
        self.loader.save(self.place / "saves" / name)
        # What a user does to know the newest.
        if self.world.rank == 0:
            (self.place / "newest.new").write_text(name)
            os.replace(self.place / "newest.new", newest)
            self.log.write("saved", name=name)
        # The other ranks read its name when they save next.
        self.world.barrier(doing="name the newest save")
        self.points.part = part


def run(argument: dict[str, Any]) -> None:
    """Run one start of the job on this rank.

    Args:
        argument: ``rank``, ``options``, ``data``, ``place``, ``attempt`` (a directory), ``kill``,
            ``slow``, ``stop``, ``saves_at_stop``, ``traced``.
    """
    attempt, rank = Path(argument["attempt"]), int(argument["rank"])
    (attempt / f"{rank}.pid").write_text(str(os.getpid()))
    log = Log(attempt / f"{rank}.log")
    kill = Kill(**argument["kill"]) if argument["kill"] else None
    slow = Kill(**argument["slow"]) if argument["slow"] else None
    points = Points(log, rank=rank, pids=attempt, kill=kill, slow=slow)
    assert hasattr(dataio.store.staging, "SEAL_BYTES"), (
        "name what says here how often staging seals"
    )
    dataio.store.staging.SEAL_BYTES = SEAL_BYTES
    points.install()
    Training(
        Options(**argument["options"]),
        data=Path(argument["data"]),
        place=Path(argument["place"]),
        log=log,
        points=points,
        stop=argument["stop"],
        saves_at_stop=argument["saves_at_stop"],
    ).run()
    if argument["traced"]:
        (attempt / f"{rank}.trace").write_text(json.dumps(points.trace))
