"""What is known of the training data where nothing was timed, or was."""

import math
from dataclasses import dataclass

from dataio.base.errors import DataioError
from dataio.base.sizes import parse_bytes
from dataio.rows.fields import row_schema
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.windows import Pieces
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import make_fields, training_source
from tonari.trainer.run.own import Own

FILES = "files"
"""In place of numbers: count the rows of the config's own files."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The training data, and what it takes to make batches of it.

    Attributes:
        num_rows: All of them.
        row_bytes: As rows lie in the cache; mean.
        probed_row_bytes: Read from the source for one, as it was counted; None: as many.
        core_s: That a core takes to decode and transform a row; None: by the machine's file.
        epoch_end_s: To the next epoch.
        read_bytes_per_s: That one node reads from the source.
        pieces: As of `DataTimes`.
        guessed_row_bytes: Likewise.
    """

    num_rows: int
    row_bytes: float
    probed_row_bytes: float | None = None
    core_s: float | None = None
    epoch_end_s: float = 0.0
    read_bytes_per_s: float = math.inf
    pieces: Pieces | None = None
    guessed_row_bytes: float | None = None

    @property
    def source_row_bytes(self) -> float:
        """Read from the source for one; mean."""
        return self.row_bytes if self.probed_row_bytes is None else self.probed_row_bytes

    def times(self, *, batch_s: float, cores: float) -> DataTimes:
        """Make what a probe of one reader would time, whose batch takes so long on so many cores.

        Nothing is evaluated, and no checkpoint written.
        """
        return DataTimes(
            readers=1, num_rows=self.num_rows, evaluated_rows=0, row_bytes=self.row_bytes,
            source_row_bytes=self.source_row_bytes, batch_s=batch_s, batch_cores=cores,
            staging_bytes_per_s=self.read_bytes_per_s, epoch_end_s=self.epoch_end_s,
            write_bytes_per_s=0.0, pieces=self.pieces, guessed_row_bytes=self.guessed_row_bytes,
        )  # fmt: skip


def facts_of_probe(data: DataTimes, *, batch_size: int) -> DataFacts:
    """Take what a probe timed, in batches of so many rows."""
    return DataFacts(
        num_rows=data.num_rows,
        row_bytes=data.row_bytes,
        probed_row_bytes=data.source_row_bytes,
        core_s=data.batch_s * data.batch_cores / batch_size,
        epoch_end_s=data.epoch_end_s,
        read_bytes_per_s=data.staging_bytes_per_s,
        pieces=data.pieces,
        guessed_row_bytes=data.guessed_row_bytes,
    )


def read_facts(words: str, config: Config, own: Own | None = None) -> DataFacts:
    """Take ``ROWSxBYTES``, such as ``1281167x110KB``, or count the config's own files.

    Of rows that all have one size, such as text, ``ROWS`` is enough.

    Raises:
        OracleError: If the words are neither, or the files do not show it.
    """
    rows, times, size = words.partition("x")
    schema = None if config.text.is_packed else row_schema(make_fields(config, own or Own()))
    one_bytes = 0 if schema is None or schema.variable else schema.fixed_bytes
    if words == FILES:
        return _count_files(config, one_bytes)
    try:
        given_bytes = parse_bytes(size) if times else one_bytes
        found = DataFacts(num_rows=int(rows), row_bytes=float(given_bytes))
    except ValueError as error:
        raise OracleError(f'--data is "{words}", expected {EXPECTED}') from error
    if found.num_rows < 1 or found.row_bytes < 1:
        raise OracleError(f'--data is "{words}", expected {EXPECTED}')
    if one_bytes and given_bytes != one_bytes:
        raise OracleError(
            f'--data is "{words}", but each row of these settings has {one_bytes:,} bytes; leave '
            f"the size out: --data {rows}"
        )
    return found


EXPECTED = (
    f'rows and the bytes of one, such as 1281167x110KB, or "{FILES}" to count those of the settings'
)


def _count_files(config: Config, one_bytes: int) -> DataFacts:
    try:
        source = training_source(config)
    except (DataioError, ConfigError) as error:
        raise OracleError(
            f"--data {FILES}: {error}; or give rows and the bytes of one, such as 1281167x110KB"
        ) from error
    total_bytes = one_bytes * source.num_samples or source.total_bytes
    if not total_bytes:
        raise OracleError(
            f"--data {FILES}: {source.name} has {source.num_samples:,} rows, and does not know "
            f"their bytes; give both, such as --data {source.num_samples}x110KB"
        )
    return DataFacts(num_rows=source.num_samples, row_bytes=total_bytes / source.num_samples)
