"""Samples -> rows in columns."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.buffers import BufferRing
from dataio.rows.encoding import converted
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Raw, Stored, row_schema
from dataio.rows.rows import Rows, make_rows

BLOCK_BYTES = 8 << 20
WORTH_BYTES = BLOCK_BYTES // 4
"""From here on a block costs little beside its bytes."""

LONG_BYTES = 16 << 10
"""Values of this mean are copied one by one into reused memory; shorter ones are joined."""

BYTES = {bytes, memoryview}
WHOLE = 2.0**53
"""Below it float64 has each whole number of a text."""
ZERO = b"+-0. \t\r\n"
"""What is left of a text that spells zero is nothing; of a number too small for float64, digits."""
NPY_START = b"\x93NUMPY"


class RowBlock:
    """Collects encoded samples until they are worth a block.

    Args:
        fields: What each sample holds.
        buffers: Where memory for them comes from; by default its own.
    """

    def __init__(self, fields: Mapping[str, Field], buffers: BufferRing | None = None) -> None:
        self._buffers = buffers or BufferRing()
        self._fields = tuple(fields.items())
        self._schema = row_schema(fields)
        self._clear()

    def _clear(self) -> None:
        self._ids: list[NDArray[np.int64]] = []
        self._parts: dict[str, list[NDArray[np.uint8]]] = {name: [] for name, _ in self._fields}
        self._lengths: dict[str, list[int]] = {name: [] for name in self._schema.variable}
        self._num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._ids))

    @property
    def full(self) -> bool:
        """Whether it is time to take the rows."""
        return self._num_bytes >= WORTH_BYTES

    def add(self, sample_id: int, raw: Mapping[str, Raw], where: str) -> None:
        """Encode one sample.

        Args:
            sample_id: Its number.
            raw: For each field, by name, its value in the source.
            where: Shard and sample, for the message.
        """
        self.extend(
            np.array([sample_id]), {name: [raw[name]] for name, _ in self._fields}, lambda _: where
        )

    def extend(
        self,
        sample_ids: NDArray[np.int64],
        raws: Mapping[str, Sequence[Raw]],
        where: Callable[[int], str],
    ) -> None:
        """Encode samples. Nothing that was given is held when it returns.

        Args:
            sample_ids: int64[n]: Their numbers.
            raws: For each field, by name, n values in the source.
            where: Names shard and sample of the i-th, for the message.
        """
        for name, field in self._fields:
            values = _encoded(name, field, raws[name], where)
            part = self._joined(values)
            self._parts[name].append(part)
            self._num_bytes += len(part)
            if name in self._lengths:
                self._lengths[name] += map(len, values)
        self._ids.append(sample_ids)

    def take(self) -> Rows:
        """Turn what was added into rows, and begin again."""
        ids = np.concatenate(self._ids)
        joined = {
            name: parts[0] if len(parts) == 1 else self._joined([part.data for part in parts])
            for name, parts in self._parts.items()
        }
        fixed = [joined[c.name].reshape(len(ids), c.width_bytes) for c in self._schema.fixed]
        # int64[num_rows, num_variable]
        lengths = np.array([*self._lengths.values()], np.int64).reshape(-1, len(ids)).T
        rows = make_rows(
            self._schema,
            ids,
            fixed,
            np.ascontiguousarray(lengths),
            [joined[name] for name in self._schema.variable],
        )
        self._clear()
        return rows

    def _joined(self, values: Sequence[Stored]) -> NDArray[np.uint8]:
        """Copy values back to back, once."""
        num_bytes = sum(map(len, values))
        if num_bytes < LONG_BYTES * len(values):
            return np.frombuffer(b"".join(values), np.uint8)
        joined = self._buffers.take((num_bytes,), np.uint8)
        memory, at = joined.data, 0
        for value in values:
            memory[at : at + len(value)] = value
            at += len(value)
        return joined  # type: ignore[return-value]


def _encoded(
    name: str, field: Field, raws: Sequence[Raw], where: Callable[[int], str]
) -> Sequence[Stored]:
    """Encode a field of some samples, all at once where its kind allows."""
    if type(field) in (Int, Float):
        numbers = _numbers(field, raws)
        if numbers is not None:
            return [numbers]
    elif _is_kept_as_it_is(name, field, raws):
        return raws  # type: ignore[return-value]
    return [field.encode(raw, f"{where(row)}, field {name!r}") for row, raw in enumerate(raws)]


def _numbers(field: Field, raws: Sequence[Raw]) -> bytes | None:
    """Read text of numbers together; None if a value is anything else, which `encode` explains."""
    if not set(map(type, raws)) <= BYTES or b"_" in b"".join(raws):  # type: ignore[arg-type]
        return None
    try:
        if type(field) is Int:
            return np.array([*map(int, raws)], "<i8").tobytes()
        found = np.array([*map(float, raws)], "<f8")
    except (ValueError, OverflowError):
        return None
    if not (np.abs(found) < WHOLE).all() or any(
        bytes(raws[at]).strip(ZERO)  # type: ignore[arg-type]
        for at in np.flatnonzero(found == 0).tolist()
    ):
        return None
    stored, at = converted(found, np.dtype("<f4"))
    return stored.tobytes() if at < 0 else None


def _is_kept_as_it_is(name: str, field: Field, raws: Sequence[Raw]) -> bool:
    """Whether `encode` would return every value as it was given."""
    if not set(map(type, raws)) <= BYTES:
        return False
    if type(field) is Array:
        column = field.column(name)
        is_npy = field.key.rpartition(".")[2] == "npy"
        if is_npy or set(map(len, raws)) != {column.width_bytes}:  # type: ignore[arg-type]
            return False
        # An .npy of another shape may be as long.
        return not any(raw[:6] == NPY_START for raw in raws)  # type: ignore[index]
    return type(field) in (Bytes, Image) and field.column(name) is None
