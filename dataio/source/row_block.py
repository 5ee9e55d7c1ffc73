"""Samples, one at a time -> rows in columns."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.fields import Field, Raw, Stored, row_schema
from dataio.rows import Rows, make_rows

BLOCK_BYTES = 8 << 20


class RowBlock:
    """Collects encoded samples until they are worth a block.

    Args:
        fields: What each sample holds.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = tuple(fields.items())
        self._schema = row_schema(fields)
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._values: dict[str, list[Stored]] = {name: [] for name, _ in self._fields}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def full(self) -> bool:
        """Whether it is time to take the rows."""
        return self._num_bytes >= BLOCK_BYTES

    def add(self, sample_id: int, raw: Mapping[str, Raw], where: str) -> None:
        """Encode one sample.

        Args:
            sample_id: Its number.
            raw: For each field, by name, its value in the source.
            where: Shard and sample, for the message.
        """
        for name, field in self._fields:
            value = field.encode(raw[name], f"{where}, field {name!r}")
            self._values[name].append(value)
            self._num_bytes += len(value)
        self._ids.append(sample_id)

    def take(self) -> Rows:
        """Turn what was added into rows, and begin again."""
        num_rows = len(self._ids)
        joined = {
            name: np.frombuffer(b"".join(values), np.uint8) for name, values in self._values.items()
        }
        fixed = [joined[c.name].reshape(num_rows, c.width_bytes) for c in self._schema.fixed]
        lengths: NDArray[np.int64] = np.array(
            [[len(value) for value in self._values[name]] for name in self._schema.variable],
            np.int64,
        )
        rows = make_rows(
            self._schema,
            np.array(self._ids, np.int64),
            fixed,
            # int64[num_rows, num_variable]
            np.ascontiguousarray(lengths.reshape(-1, num_rows).T),
            [joined[name] for name in self._schema.variable],
        )
        self._clear()
        return rows
