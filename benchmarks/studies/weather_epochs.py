"""How long are epochs of an anemoi-style Zarr through Lightning, from a slow shared filesystem?

``ours`` is `dataio.Anemoi` in the data module of `tonari.frameworks.lightning`, which stages each
date once. ``direct`` reads the dates of each sample from the Zarr as it is trained, in random
order, by a DataLoader with two workers. Both train the model of `examples/anemoi_fit.py` in one
process. The filesystem lets so many bytes a second pass, keeps none of them in the page cache, and
counts them. The two take turns; given are medians over the repeats, for each epoch, of its seconds
(opening and staging belong to the first) and of the megabytes that were read.

    pip install lightning
    OMP_NUM_THREADS=1 python -m benchmarks.studies.weather_epochs [--megabytes-per-s 10]
"""

import argparse
import itertools
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import zarr
from torch.utils.data import DataLoader, Dataset

import dataio
from examples.anemoi_data import MISSING, write_dataset
from examples.anemoi_fit import MULTISTEP, ROLLOUT, Forecaster, open_dates
from tests.slowfs import SlowDirectory, slowfs
from tonari.frameworks.lightning import DataModule
from tonari.report.machine import describe_machine

NUM_DATES, NUM_POINTS, BATCH_SIZE = 120, 40_000, 2
LENGTH = MULTISTEP + ROLLOUT


class Direct(Dataset[dict[str, torch.Tensor]]):
    """Reads the dates of a sample from the store each time."""

    def __init__(self, store: Path) -> None:
        self._store = store
        starts = np.arange(NUM_DATES - LENGTH + 1)
        self._starts = [s for s in starts if not set(range(s, s + LENGTH)) & {*MISSING}]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start = self._starts[number]
        data: Any = zarr.open_array(self._store / "data", mode="r")
        values = torch.from_numpy(data[start : start + LENGTH])
        return {"data": values.movedim(1, -1), "weight": torch.ones(())}


class EpochEnds(lightning.Callback):  # type: ignore[misc]
    """Notes when epochs end, and what was read by then."""

    def __init__(self, slow: SlowDirectory) -> None:
        self._slow = slow
        self.marks: list[tuple[float, int]] = []
        self.on_train_epoch_end()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.marks.append((time.perf_counter(), self._slow.counts()["read_bytes"]))


def fit(slow: SlowDirectory, way: str, epochs: int) -> list[tuple[float, float]]:
    """Train; give seconds and megabytes of each epoch."""
    store = slow.path / "weather.zarr"
    lightning.seed_everything(0, verbose=False)
    model, ends = Forecaster(open_dates(store)), EpochEnds(slow)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = lightning.Trainer(
            max_epochs=epochs, reload_dataloaders_every_n_epochs=int(way == "ours"),
            use_distributed_sampler=False,
            callbacks=[ends], logger=False, enable_progress_bar=False, accelerator="cpu",
            enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        if way == "ours":
            train = open_dates(store)
            trainer.fit(model, datamodule=DataModule(
                train, fields=train.fields, batch_size=BATCH_SIZE, saved=scratch,
                cache=Path(scratch, "cache"), reports=dataio.Reports(progress=False),
            ))  # fmt: skip
        else:
            trainer.fit(model, DataLoader(
                Direct(store), BATCH_SIZE, shuffle=True, num_workers=2, drop_last=True,
                persistent_workers=True,
            ))  # fmt: skip
    return [(s - t, (b - a) / 1e6) for (t, a), (s, b) in itertools.pairwise(ends.marks)]


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes-per-s", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as source:
        write_dataset(Path(source, "weather.zarr"), num_dates=NUM_DATES, num_points=NUM_POINTS)
        per_s = given.megabytes_per_s * 1e6
        turns: dict[str, list[Any]] = {"ours": [], "direct": []}
        with slowfs(Path(source), bytes_per_s=per_s, cache="direct_io") as slow:
            for number in range(given.repeats):
                for way in sorted(turns, reverse=bool(number % 2)):
                    turns[way].append(fit(slow, way, given.epochs))
        figures: dict[str, object] = {"question": "epochs of weather", **vars(given)}
        for way, found in turns.items():
            # float64[repeats, epochs, seconds and megabytes]
            medians = np.median(np.array(found), axis=0).round(2).T.tolist()
            figures |= {f"{way}_s": medians[0], f"{way}_mb": medians[1]}
        print(json.dumps(figures | describe_machine(Path(source))))


if __name__ == "__main__":
    main()
