"""A whole run of `train`, and what its loader gave each rank and read for it."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.rows.samples import Batch
from dataio.source import NumpySource, Source
from dataio.source.base import ShardedSource
from tonari.trainer.config.config import load_config
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.run.loop import train

Step = tuple[int, str, list[int]]
"""Epoch, "train" or "refresh", samples without padding, ascending."""


class Watched(ReplicaLoader):
    """Notes what it gives, and sends its process a SIGTERM in a step."""

    made: ClassVar[list["Watched"]] = []
    stop_in: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[Step] = []
        self.columns: set[tuple[str, ...]] = set()
        self.figures: dict[str, float] = {}
        self._num_trained = 0
        Watched.made.append(self)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            self._num_trained += 1
            if self._num_trained == self.stop_in:
                os.kill(os.getpid(), signal.SIGTERM)
            self._note("train", batch)
            yield batch

    def refresh(self) -> Iterator[Batch]:
        for batch in super().refresh():
            self._note("refresh", batch)
            yield batch

    def close(self) -> None:
        if self._loader is not None and not self.figures:
            # Rows that were given, and stored bytes of those that were read from the cache.
            cache_bytes = self._loader._session.gather.num_bytes
            # A scorer that reads its labels leaves the rows to the reader, to count them once.
            self.figures = {"rows": self.stats().get("rows", 0), "cache_bytes": cache_bytes}
        super().close()

    def _note(self, kind: str, batch: Batch) -> None:
        self.columns.add(tuple(sorted(batch)))
        if self._place.rank == self._place.scorer:
            ids = batch["sample_id"]
            self.steps.append((self.epoch, kind, sorted(ids[ids >= 0].tolist())))

    def report_on(self, rows_read: Mapping[str, int]) -> dict[str, Any]:
        """Tell what this rank saw."""
        source = "" if self._loader is None else self._loader._session.pool.source.name
        return {
            "replica": self._place.replica, "steps": self.steps, "columns": sorted(self.columns),
            "held_bytes": self.held_bytes, "source_rows": rows_read.get(source, 0), **self.figures,
        }  # fmt: skip


def train_watched(config: Path, *given: str) -> dict[str, Any]:
    """Train by a configuration and overrides; say how it ended and what this rank saw. Collective.

    Args:
        config: The file.
        given: Settings. ``"stop=STEPS"`` is none: a SIGTERM comes in that step of this start, and
            ranks ask for signals after every one.
    """
    rows_read: dict[str, int] = {}
    stops = [int(each.removeprefix("stop=")) for each in given if each.startswith("stop=")]
    overrides = [each for each in given if not each.startswith("stop=")]
    with pytest.MonkeyPatch.context() as patch:
        for kind in (ShardedSource, NumpySource):
            patch.setattr(kind, "read", _counted(kind.read, rows_read))
        patch.setattr("tonari.trainer.run.build.ReplicaLoader", Watched)
        patch.setattr(Watched, "made", [])
        if stops:
            patch.setattr(Watched, "stop_in", stops[0])
            patch.setattr("tonari.trainer.watch.stop.ASK_S", 0)
        summary = train(load_config(config, overrides))
        (loader,) = Watched.made
    seen = loader.report_on(rows_read)
    return {"num_steps": summary.progress.steps, "finished": summary.finished, **seen}


def _counted(read: Any, rows_read: dict[str, int]) -> Any:
    def counted(
        source: Source, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]
    ) -> Iterator[Rows]:
        for rows in read(source, sample_ids, fields):
            rows_read[source.name] = rows_read.get(source.name, 0) + len(rows)
            yield rows

    return counted


def merged(reports: list[dict[str, Any]]) -> list[Step]:
    """The samples of each step over all replicas, as their scorers saw them."""
    scorers = [report["steps"] for report in reports if report["steps"]]
    return [
        (epoch, kind, sorted(i for *_, ids in steps for i in ids))
        for steps in zip(*scorers, strict=True)
        for epoch, kind, _ in steps[:1]
    ]
