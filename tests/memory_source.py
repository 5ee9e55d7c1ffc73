"""A source without files, for tests of what lies behind it."""

from collections.abc import Iterator, Mapping

import numpy as np

from dataio.plan.layout import Layout
from dataio.plan.placement import Placement
from dataio.plan.policies import Shuffle
from dataio.rows.fields import Bytes, Field, Int, row_schema
from dataio.rows.rows import Rows, make_rows, row_offsets

FIELDS: Mapping[str, Field] = {"label": Int("cls"), "data": Bytes("bin")}


def payload(sample_id: int) -> bytes:
    """The variable field of a sample: its number some times over, or nothing."""
    return sample_id.to_bytes(4, "little") * (sample_id % 7)


class MemorySource:
    """Samples whose fields are functions of their ids; counts what is read."""

    made_as = "MemorySource"
    total_bytes = 0

    def __init__(self, num_samples: int, *, name: str = "memory", block_rows: int = 16) -> None:
        self.name = name
        self.num_samples = num_samples
        self.fingerprint = f"memory-{num_samples}"
        self.shard_starts = np.zeros(1, np.int64)
        self.bytes_read = 0
        self.rows_read: list[int] = []
        self.block_rows = block_rows

    @staticmethod
    def payload(sample_id: int) -> bytes:
        """The variable field of a sample."""
        return payload(sample_id)

    def read(self, sample_ids: np.ndarray, fields: Mapping[str, Field]) -> Iterator[Rows]:
        schema = row_schema(fields)
        for first in range(0, len(sample_ids), self.block_rows):
            ids = np.asarray(sample_ids[first : first + self.block_rows], np.int64)
            self.rows_read += ids.tolist()
            fixed, columns, lengths = [], [], np.empty((len(ids), 0), np.int64)
            if any(isinstance(field, Int) for field in fields.values()):
                fixed = [(ids % 10).astype("<i8").view(np.uint8).reshape(len(ids), 8)]
            if any(isinstance(field, Bytes) for field in fields.values()):
                data = [self.payload(i) for i in ids.tolist()]
                lengths = np.array([[len(d)] for d in data], np.int64).reshape(len(ids), 1)
                columns = [np.frombuffer(b"".join(data), np.uint8)]
                assert row_offsets(lengths[:, 0])[-1] == len(columns[0])
            self.bytes_read += sum(column.size for column in (*fixed, *columns))
            yield make_rows(schema, ids, fixed, lengths, columns)


def placed(sample_ids: np.ndarray, epoch: int = 0) -> Placement:
    """These samples, slot by slot, as a pool is told it."""
    return Placement(f"placed {sample_ids.tolist()}", epoch, len(sample_ids), lambda: sample_ids)


def placement_of(policy: Shuffle, layout: Layout, *, node: int, epoch: int, seed: int) -> Placement:
    """A policy's placement, as a pool is told it."""

    def sample_ids() -> np.ndarray:
        return policy.placement(layout, node=node, epoch=epoch, seed=seed)

    name = f"{policy} {layout} {node} {seed}"
    return Placement(name, epoch, layout.pool_rows(node), sample_ids)
