"""Shards to which others are appended while a job runs, as by another program."""

import os
from pathlib import Path

import numpy as np

from dataio import Loader, Shards
from tests.dataio.source.shards import write_tar
from tests.faults.samples import WIDTH, numbers, text


class Growth:
    """A directory of shards.

    Args:
        directory: To make.
        num_samples: Of the first two shards.

    Attributes:
        source: All of them.
        num_samples: That are there.
        lengths: Samples of each epoch, as the newest start that began it has it.
    """

    def __init__(self, directory: Path, num_samples: int) -> None:
        directory.mkdir(parents=True)
        self._directory, self._num_shards = directory, 0
        self.source = Shards(str(directory / "samples-*.tar"), grows=True)
        self.num_samples = 0
        self.lengths: dict[int, int] = {}
        for _ in range(2):
            self.append(num_samples // 2)

    def append(self, num_samples: int | None = None) -> None:
        """Append a shard, by default of some samples, all at once."""
        count = num_samples or 5 + 4 * (self._num_shards % 4)
        members = []
        for sample_id in range(self.num_samples, self.num_samples + count):
            row = numbers(np.array([sample_id]), WIDTH)
            name = f"{sample_id:06d}"
            members += [(f"{name}.x", row.tobytes()), (f"{name}.bin", text(sample_id, WIDTH))]
        partial = write_tar(self._directory / "partial", members)
        # The same in each course of the same events: a shard is known by it.
        os.utime(partial, (1.7e9, 1.7e9))
        os.replace(partial, self._directory / f"samples-{self._num_shards:03d}.tar")
        self._num_shards, self.num_samples = self._num_shards + 1, self.num_samples + count

    def check(self, loader: Loader, before: int, *, is_first: bool) -> None:
        """Check that the epoch that begins, or goes on, has the samples that it is promised.

        Args:
            loader: Of rank 0.
            before: Samples that were there as the last epoch ended, or the loader was opened.
            is_first: Whether it is the first after a restore.

        Raises:
            AssertionError: If it has others.
        """
        epoch, found = loader.epoch, loader.num_samples
        # On more ranks what was trained of it may be less than a step.
        goes_on = loader.step or (is_first and found == self.lengths.get(epoch))
        if goes_on:
            assert found == self.lengths[epoch], f"epoch {epoch}: {found} samples after a restore"
        assert goes_on or before <= found <= self.num_samples, (
            f"epoch {epoch}: {found} samples, {before} were there before, {self.num_samples} are"
        )
        self.lengths[epoch] = found
