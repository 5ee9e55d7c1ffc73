"""The first rows of a dataset as one of its own."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

import dataio
from dataio.rows.rows import Rows
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import open_alone, open_data
from tonari.trainer.run.own import Own


class FirstRows:
    """The first samples of a source.

    Args:
        source: Of all.
        count: How many.
    """

    made_as = "FirstRows"
    total_bytes = 0

    def __init__(self, source: dataio.Source, count: int) -> None:
        self._source = source
        self.num_samples = min(count, source.num_samples)
        self.name = source.name
        self.shard_starts: NDArray[np.int64] = np.zeros(1, np.int64)

    @property
    def fingerprint(self) -> str:
        return f"{self._source.fingerprint}-{self.num_samples}"

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def read(
        self, sample_ids: NDArray[np.int64], fields: Mapping[str, dataio.Field]
    ) -> Iterator[Rows]:
        """Read samples; see `dataio.Source`."""
        return self._source.read(sample_ids, fields)


def first_rows(config: Config, own: Own, count: int) -> FirstRows:
    """Open the first rows that a run trains on.

    Raises:
        ConfigError: If a text cannot be read.
        DataioError: If the data cannot.
    """
    train, _ = own.sources or open_data(config)
    return FirstRows(open_alone(train), count)
