"""A node's rows in memory, for tests of what carries them."""

import numpy as np

from dataio.rows.fields import Field, row_schema
from dataio.rows.rows import Rows, copy_rows
from tests.memory_source import FIELDS, MemorySource


class MemoryStore:
    """A `RowStore` over samples first..first + num_rows; what arrives is kept by slot."""

    def __init__(self, first: int, num_rows: int, fields: dict[str, Field] | None = None) -> None:
        self.schema = row_schema(fields or FIELDS)
        source = MemorySource(first + num_rows, block_rows=num_rows)
        (self.rows,) = source.read(np.arange(first, first + num_rows), fields or FIELDS)
        self.arrived: dict[int, tuple[int, bytes]] = {}
        self.read = 0

    def damage(self, slot: int) -> None:
        self.rows.fixed[0][slot] ^= 1

    def lengths(self, slots: np.ndarray) -> np.ndarray:
        return np.asarray(self.rows.lengths[slots], np.int64)

    def read_rows(self, slots: np.ndarray) -> Rows:
        ends = np.cumsum(self.rows.lengths[:, 0])
        begins = ends - self.rows.lengths[:, 0]
        parts = [self.rows.variable[0][begins[slot] : ends[slot]] for slot in slots.tolist()]
        return Rows(
            self.schema,
            self.rows.sample_id[slots],
            self.rows.checksum[slots],
            tuple(column[slots] for column in self.rows.fixed),
            self.lengths(slots),
            (np.concatenate([np.empty(0, np.uint8), *parts]),),
        )

    def read_into(self, slots: np.ndarray, into: Rows) -> None:
        self.read += len(slots)
        copy_rows(self.read_rows(slots), into)

    def write_arrivals(self, slots: np.ndarray, rows: Rows) -> None:
        ends = np.cumsum(rows.lengths[:, 0])
        for row, slot in enumerate(slots.tolist()):
            begin = ends[row] - rows.lengths[row, 0]
            data = rows.fixed[0][row].tobytes() + rows.variable[0][begin : ends[row]].tobytes()
            self.arrived[slot] = (int(rows.sample_id[row]), data)

    def keep_rows(self, slots: np.ndarray, *, held_in: np.ndarray) -> None:
        raise AssertionError("rows of this store leave or arrive")
