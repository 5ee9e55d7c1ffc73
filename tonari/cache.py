"""`tonari cache stage|inspect`: fill this node's cache before a job; see what lies in caches."""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from dataio import Array, Bytes, Field, Float, Image, Int, discover_world, open_source
from dataio.cache_report import CacheReport, find_caches, inspect_cache, verify_cache
from dataio.fields import row_schema
from dataio.filesystem import cache_directory, find_directory
from dataio.placement import Placement
from dataio.pool import Pool, lay_out
from dataio.progress import Progress
from tonari.errors import CommandError


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Read a dataset into this node's cache; under mpiexec or srun, each node its part.

    A job that is later started with the same source and fields, on as many ranks a node, starts
    warm.
    """

    source: Annotated[str, tyro.conf.Positional]
    """Pattern of shards, such as "shards/train-{000000..000127}.tar"."""
    fields: tuple[str, ...]
    """What to keep, as NAME=KIND:KEY; KIND is image, int, float, bytes, or array:DTYPE:SHAPE.
    Example: --fields image=image:jpg label=int:cls"""
    cache: str = "auto"
    """Cache directory of this node; auto is TONARI_CACHE, else a node-local directory."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """List the caches below a directory: what they hold, how whole they are, who uses them."""

    directory: Annotated[str, tyro.conf.Positional] = "auto"
    """Cache directory."""
    verify: bool = False
    """Read every row and compare it with its checksum."""
    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command."""
    options = tyro.extras.subcommand_cli_from_dict(
        {"stage": Stage, "inspect": Inspect},
        args=argv,
        prog="tonari cache",
        description="Fill and look at node-local caches.",
    )
    return _stage(options) if isinstance(options, Stage) else _inspect(options)


def parse_field(text: str) -> tuple[str, Field]:
    """Read NAME=KIND:KEY.

    Raises:
        ValueError: If it is none of the known kinds.
    """
    name, _, rest = text.partition("=")
    kind, _, key = rest.partition(":")
    simple = {"image": Image, "int": Int, "float": Float, "bytes": Bytes}
    if name and key and kind in simple:
        return name, simple[kind](key)
    dtype, _, tail = key.partition(":")
    shape, _, array_key = tail.partition(":")
    if name and kind == "array" and array_key and re.fullmatch(r"\d+(x\d+)*", shape):
        return name, Array(array_key, tuple(int(size) for size in shape.split("x")), dtype)
    raise ValueError(
        f"--fields {text}: expected NAME=KIND:KEY, such as image=image:jpg, label=int:cls or "
        f"x=array:float32:3x4:npy"
    )


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


def _stage(options: Stage) -> int:
    try:
        fields = parse_fields(options.fields)
    except ValueError as error:
        sys.stderr.write(f"tonari cache stage: {error}\n")
        return 2
    with discover_world() as world:
        source = open_source(options.source, world=world)
        layout = lay_out(source, world)
        pool = Pool(
            source,
            fields,
            world=world,
            root=cache_directory(options.cache),
            num_slots=layout.pool_rows(world.node),
            num_leaving=0,
        )
        with contextlib.closing(pool):
            first, rows = layout.pool_start(world.node), layout.pool_rows(world.node)
            pool.ensure(Placement(f"local from {first}", 0, rows, lambda: first + np.arange(rows)))
            read = world.allreduce(np.array([source.bytes_read]), op="sum", doing="count bytes")[0]
        if world.local_rank == 0:
            report = inspect_cache(pool.cache.directory)
            _print([report], as_json=options.json, extra={"source_bytes": int(read)})
    return 0


def _inspect(options: Inspect) -> int:
    root = find_directory(options.directory)
    if not root.is_dir() and options.directory != "auto":
        raise CommandError(
            f"{root}: no such directory, expected one that holds caches; check the path, or leave "
            "it out to look where jobs on this node put theirs"
        )
    reports = [inspect_cache(directory) for directory in find_caches(root)]
    if not reports and not options.json:
        print(f"{root}: no caches")
    corrupt = {r.directory: _verified(r) for r in reports} if options.verify else {}
    _print(
        reports, as_json=options.json, extra={"corrupt_samples": corrupt} if options.verify else {}
    )
    bad = {directory: samples for directory, samples in corrupt.items() if samples}
    for directory, samples in bad.items():
        sys.stderr.write(
            f"{directory}: {len(samples)} rows do not match their checksums, the first is sample "
            f"{samples[0]}; remove the directory: the next job stages it again\n"
        )
    return 1 if bad else 0


def _verified(report: CacheReport) -> list[int]:
    bar = Progress("verifying", report.num_slots - report.num_missing, shown=True)
    corrupt: list[int] = []
    before = 0
    for done, samples in verify_cache(Path(report.directory)):
        corrupt += samples.tolist()
        bar.add(done - before)
        before = done
    bar.close()
    return corrupt


def _print(reports: list[CacheReport], *, as_json: bool, extra: dict[str, object]) -> None:
    if as_json:
        print(json.dumps({"caches": [asdict(report) for report in reports], **extra}))
        return
    for report in reports:
        state = f"in use by {report.in_use_by}" if report.in_use_by else "not in use"
        print(
            f"{report.directory}\n  of {report.source}\n  {report.num_slots:,} rows, "
            f"{report.num_missing:,} missing, fields {', '.join(report.fields)}, epoch "
            f"{report.epoch}\n  {report.payload_bytes / 1e6:,.1f} MB of rows on "
            f"{report.disk_bytes / 1e6:,.1f} MB of disk, {state}"
        )
