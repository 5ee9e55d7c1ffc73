"""A pool of a few rows with every kind of field, and a gather over it."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PillowImage

from dataio.plan.order import StepsBlock
from dataio.plan.placement import Placement
from dataio.rows.fields import Array, Bytes, Field, Image, Int, Text, Tokens, row_schema
from dataio.rows.rows import Rows, make_rows
from dataio.store.pool import Pool
from dataio.world import single_world
from tests.opened import make_gather, make_pool

FIELDS: Mapping[str, Field] = {
    "image": Image("png"),
    "grid": Array("grid", (5, 7), "float32"),
    "data": Bytes("bin"),
    "text": Text("txt"),
    "tokens": Tokens("tok", "int32", length=4, pad=-1),
    "ragged": Tokens("tok", "int32"),
    "label": Int("cls"),
}


def pixels(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)


def png(i: int) -> bytes:
    buffer = io.BytesIO()
    PillowImage.fromarray(pixels(i)).save(buffer, "PNG")
    return buffer.getvalue()


def value(field: str, i: int) -> Any:
    """What a sample holds in a field, before it is stored."""
    return {
        "image": png,
        "grid": lambda i: np.full((5, 7), i, "<f4"),
        "pair": lambda i: np.array([i, i + 1], "<f4"),
        "wide": lambda i: np.full(3000, i, "|u1"),
        "data": lambda i: bytes([i % 256]) * (i % 9),
        "text": lambda i: f"größe {i}" * (i % 3),
        "tokens": lambda i: np.arange(i % 7, dtype="<i4") + i,
        "ragged": lambda i: np.arange(i % 7, dtype="<i4") + i,
        "label": lambda i: np.int64(i % 10),
    }[field](i)


def stored(field: str, i: int) -> bytes:
    raw = value(field, i)
    if isinstance(raw, str):
        return raw.encode()
    return raw if isinstance(raw, bytes) else np.asarray(raw).tobytes()


class EveryKind:
    """Samples whose fields are functions of their ids; ``broken`` ones hold no image."""

    made_as = "EveryKind"
    total_bytes = 0

    def __init__(self, num_samples: int, broken: frozenset[int] = frozenset()) -> None:
        self.name = self.fingerprint = f"kinds-{num_samples}-{sorted(broken)}"
        self.num_samples = num_samples
        self.shard_starts = np.zeros(1, np.int64)
        self.bytes_read = 0
        self.broken = broken

    def stored(self, name: str, i: int) -> bytes:
        return b"no image" if name == "image" and i in self.broken else stored(name, i)

    def read(self, sample_ids: Any, fields: Mapping[str, Field]) -> Iterator[Rows]:
        schema = row_schema(fields)
        ids = np.asarray(sample_ids, np.int64)
        fixed = [
            np.frombuffer(b"".join(stored(c.name, i) for i in ids.tolist()), np.uint8)
            for c in schema.fixed
        ]
        variable = [[self.stored(name, i) for i in ids.tolist()] for name in schema.variable]
        lengths = np.array([[len(v[row]) for v in variable] for row in range(len(ids))], np.int64)
        yield make_rows(
            schema,
            ids,
            [column.reshape(len(ids), -1) for column in fixed],
            lengths.reshape(len(ids), len(variable)),
            [np.frombuffer(b"".join(column), np.uint8) for column in variable],
        )


@contextmanager
def open_pool(
    root: Path,
    fields: Mapping[str, Field] = FIELDS,
    *,
    num_samples: int = 40,
    broken: frozenset[int] = frozenset(),
    num_leaving: int = 0,
) -> Iterator[Pool]:
    source = EveryKind(num_samples, broken)
    pool = make_pool(
        source,
        fields,
        world=single_world(),
        root=root,
        num_slots=num_samples,
        num_leaving=num_leaving,
    )
    try:
        pool.ensure(Placement("all", 0, num_samples, lambda: np.arange(num_samples)))
        yield pool
    finally:
        pool.close()


def pick_in_turn(num_samples: int, batch_size: int = 8, num_valid: int | None = None) -> Any:
    """Batches of a fixed shuffled order; the last row of each is padding if so asked."""
    order = np.random.default_rng(1).permutation(num_samples)

    def pick(first: int, count: int) -> StepsBlock:
        slots = order[first * batch_size : (first + count) * batch_size].reshape(count, -1).copy()
        valid = np.full(count, batch_size if num_valid is None else num_valid)
        weight = (np.arange(batch_size) < valid[:, None]).astype(np.float32)
        return StepsBlock(slots, valid, weight)

    return pick


def gathered(pool: Pool, fields: Mapping[str, Field] = FIELDS, **options: Any) -> list[Any]:
    """One epoch of batches of 8."""
    chosen = {"num_threads": 0} | options
    gather = make_gather(pool, fields, **chosen)
    try:
        steps = range(pool.cache.num_slots // 8)
        return list(gather.batches(pick_in_turn(pool.cache.num_slots), steps, epoch=1))
    finally:
        gather.close()
