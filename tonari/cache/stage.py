"""`tonari cache stage`: fill this node's cache before a job."""

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from dataio import (
    Array,
    ArrayFiles,
    Bytes,
    Field,
    Float,
    Image,
    ImageSize,
    Int,
    Mask,
    NodeCache,
    Staging,
    Text,
    Tokens,
    Workers,
    discover_world,
    open_source,
)
from dataio.base.filesystem import cache_directory
from dataio.rows.fields import row_schema
from dataio.store.share import consecutive, lay_out
from dataio.store.tools.report import inspect_cache
from tonari.cache.list import print_details


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Read a dataset into this node's cache; under mpiexec or srun, each node its part.

    A job that is later started with the same source and fields, on as many ranks a node, starts
    warm. What is there already is not read again: a staging that was killed goes on, but for what
    it read in its last 20 s.
    """

    source: Annotated[str, tyro.conf.Positional]
    """Pattern of shards, such as "shards/train-{000000..000127}.tar"."""
    fields: tuple[str, ...]
    """What to keep, as NAME=KIND:KEY; KIND is image, mask, image_size, int, float, text, bytes,
    tokens:DTYPE, or array:DTYPE:SHAPE. Example: --fields image=image:jpg label=int:cls"""
    cache: str = "auto"
    """Cache directory of this node; auto is TONARI_CACHE, else a node-local directory."""
    staging_readers: int = 2
    """Shards that each rank reads at once."""
    staging_bandwidth: str | None = None
    """Most bytes a second that this node reads from the source, such as 500MB."""
    quota: str | None = None
    """Most bytes that this node's cache may take, such as 200GB; a job reads what does not fit
    from the source in every epoch, if it is given the same quota."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        _ = self._node_cache, self._staging

    @property
    def _node_cache(self) -> NodeCache:
        return NodeCache(self.cache, quota=self.quota)

    @property
    def _staging(self) -> Staging:
        return Staging(readers=self.staging_readers, bandwidth=self.staging_bandwidth or 0.0)

    def run(self) -> int:
        """Run the command."""
        # They import torch, which takes seconds: other commands of `tonari cache` need none.
        from dataio.arguments import Arguments
        from dataio.session import Session
        from dataio.store.open import NodeRows

        try:
            fields = parse_fields(self.fields)
        except ValueError as error:
            sys.stderr.write(f"tonari cache stage: {error}\n")
            return 2
        with discover_world() as world:
            source = open_source(self.source, world=world)
            share = consecutive(lay_out(source, world), node=world.node, named="local")
            arguments = Arguments(
                source=self.source, batch_size=1, fields=fields, cache=self._node_cache,
                staging=self._staging, workers=Workers(threads=0),
            )  # fmt: skip
            root = cache_directory(self.cache)
            session = Session(NodeRows(source, fields, share, arguments, world, root))
            with contextlib.closing(session):
                assert share.wanted is not None
                session.pool.ensure(share.wanted)
                read = np.array([source.bytes_read])
                read = world.allreduce(read, op="sum", doing="count bytes")
                session.pool.checked_source.raise_refused()
            if world.local_rank == 0:
                report = inspect_cache(session.pool.cache.directory)
                print_details([report], as_json=self.json, extra={"source_bytes": int(read[0])})
        return 0


SIMPLE: dict[str, Callable[[str], Field]] = {
    "bytes": Bytes, "float": Float, "image": Image, "image_size": ImageSize, "int": Int,
    "mask": Mask, "text": Text, "tokens": Tokens,
}  # fmt: skip
"""Kinds that need no more than a key."""


def parse_field(text: str) -> tuple[str, Field]:
    """Read NAME=KIND:KEY.

    Raises:
        ValueError: If it is none of the known kinds.
    """
    name, _, rest = text.partition("=")
    kind, _, key = rest.partition(":")
    dtype, _, tail = key.partition(":")
    if name and kind == "tokens" and tail:
        return name, Tokens(tail, dtype)
    if name and key and kind in SIMPLE:
        return name, SIMPLE[kind](key)
    shape, _, array_key = tail.partition(":")
    if name and kind == "array" and array_key and re.fullmatch(r"\d+(x\d+)*", shape):
        return name, Array(array_key, tuple(int(size) for size in shape.split("x")), dtype)
    raise ValueError(
        f"--fields {text}: expected NAME=KIND:KEY, such as image=image:jpg, label=int:cls, "
        f"ids=tokens:uint16:npy or x=array:float32:3x4:npy, with a KIND of "
        f"{', '.join(SIMPLE)}, array"
    )


def along(names: str | Sequence[str], axis: str | None) -> str | Sequence[str] | ArrayFiles:
    """Take samples of array files along an axis, its name or number; None: as a loader does."""
    if axis is None:
        return names
    return ArrayFiles(names, axis=int(axis) if axis.isdecimal() else axis)


def parse_fields(texts: Sequence[str]) -> dict[str, Field]:
    """Read several.

    Raises:
        ValueError: If one is wrong, two have one name, or a batch could not hold them.
    """
    fields: dict[str, Field] = {}
    for text in texts:
        name, field = parse_field(text)
        if name in fields:
            raise ValueError(f"--fields {text}: {name!r} was given before; choose another name")
        fields[name] = field
    row_schema(fields)
    return fields
