"""What is known of the training data where nothing was timed."""

import math

from dataio.base.errors import DataioError
from dataio.base.sizes import parse_bytes
from dataio.rows.fields import row_schema
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.data import DataTimes
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_fields, training_source
from tonari.trainer.run.own import Own, own_of

FILES = "files"
"""In place of numbers: count the rows of the config's own files."""


def untimed(*, num_rows: int, row_bytes: float) -> DataTimes:
    """Make data whose batches, reading and epoch ends take no time."""
    return DataTimes(
        readers=1, num_rows=num_rows, evaluated_rows=0, row_bytes=row_bytes,
        source_row_bytes=row_bytes, batch_s=0.0, batch_cores=0.0, staging_bytes_per_s=math.inf,
        epoch_end_s=0.0, write_bytes_per_s=0.0,
    )  # fmt: skip


def read_data(words: str, config: Config, own: Own | None = None) -> DataTimes:
    """Take ``ROWSxBYTES``, such as ``1281167x110KB``, or count the config's own files.

    Of rows that all have one size, such as text, ``ROWS`` is enough.

    Raises:
        OracleError: If the words are neither, or the files do not show it.
    """
    rows, times, size = words.partition("x")
    schema = None if config.text.is_packed else row_schema(make_fields(config, own_of(config, own)))
    one_bytes = 0 if schema is None or schema.variable else schema.fixed_bytes
    if words == FILES:
        return _count_files(config, one_bytes)
    try:
        given_bytes = parse_bytes(size) if times else one_bytes
        found = untimed(num_rows=int(rows), row_bytes=float(given_bytes))
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


def _count_files(config: Config, one_bytes: int) -> DataTimes:
    try:
        source = training_source(config)
    except DataioError as error:
        raise OracleError(
            f"--data {FILES}: {error}; or give rows and the bytes of one, such as 1281167x110KB"
        ) from error
    total_bytes = one_bytes * source.num_samples or source.total_bytes
    if not total_bytes:
        raise OracleError(
            f"--data {FILES}: {source.name} has {source.num_samples:,} rows, and does not know "
            f"their bytes; give both, such as --data {source.num_samples}x110KB"
        )
    return untimed(num_rows=source.num_samples, row_bytes=total_bytes / source.num_samples)
