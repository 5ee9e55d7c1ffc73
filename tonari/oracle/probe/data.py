"""How long this node takes to feed its ranks: batches, staging, the end of an epoch."""

import contextlib
import itertools
import math
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataio import Array, NodeCache
from dataio.base.filesystem import cache_directory
from dataio.base.network import listen
from dataio.base.sizes import parse_bytes
from dataio.batch.feeders.wire import receive, receive_bytes, receive_into, send
from dataio.job.launch import Job
from dataio.rows.fields import row_schema
from dataio.source.base import ReadsTiles
from dataio.source.counts import own_directory
from dataio.world import World
from tonari.oracle.probe.pieces import count_pieces
from tonari.oracle.windows import Pieces
from tonari.trainer.config.config import Config, MeshConfig
from tonari.trainer.config.importance import ImportanceConfig
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.mesh.place import tile_of
from tonari.trainer.run.build import (
    RunLayout,
    build_loader,
    build_place,
    lay_out,
    make_evaluation_fields,
    make_fields,
    make_task,
    training_source,
)
from tonari.trainer.run.images import with_keys
from tonari.trainer.run.own import Own, own_of
from tonari.trainer.run.tiled import are_tiled, of_tile, uncut

QUOTA = "1GB"
"""Of the rows that are staged to see how long it takes."""
FIRST_BATCHES = 4
"""That are not counted: threads start."""
MOST_BATCHES = 40
TIMED_ENDS = 3
"""Of epochs."""
WRITTEN_BYTES = 64 << 20
TRADES, TRADED_ROWS = 15, 8
"""Messages to a feeder that are timed, and their rows."""


@dataclass(frozen=True, kw_only=True)
class DataTimes:
    """What feeding the ranks of a node takes.

    Attributes:
        readers: Ranks that read at a time.
        num_rows: Of the training data; where each tile of a sample is read by itself, of tiles: all
            else is then of one, by the times and bytes of whole samples.
        evaluated_rows: Of what is evaluated on, padding included; 0: nothing is.
        row_bytes: As rows lie in the cache, with their place in its manifest; mean.
        source_row_bytes: What is read from the source to stage one, with its part of headers;
            mean. Of a source that is read when it is opened, such as text, ``row_bytes``.
        batch_s: From one batch to the next, where nobody trains on them.
        batch_cores: Processors that a rank uses for that.
        staging_bytes_per_s: Of the node, read from the source into its cache.
        epoch_end_s: Between two epochs in which nothing is exchanged, where all ranks come to it at
            once, as from the last step's messages; the median of some.
        write_bytes_per_s: Of a file, flushed, where checkpoints go.
        pieces: Of the source, that are read whole; None: its rows can be read alone.
        guessed_row_bytes: Of the source's files, for each row, headers and all: what a loader
            takes a row for when it divides a quota; 0: nobody counted them; None: nobody looked.
        made_row_bytes: In a batch; None: nobody looked.
        trade_row_s: Of a core, to send a row to a feeder and take in what it made of it; None:
            nobody looked.
    """

    readers: int
    num_rows: int
    evaluated_rows: int
    row_bytes: float
    source_row_bytes: float
    batch_s: float
    batch_cores: float
    staging_bytes_per_s: float
    epoch_end_s: float
    write_bytes_per_s: float
    pieces: Pieces | None = None
    guessed_row_bytes: float | None = None
    made_row_bytes: float | None = None
    trade_row_s: float | None = None

    def core_s(self, *, batch_size: int) -> float:
        """Compute what a core takes to decode and transform a row, of so many in a batch."""
        return self.batch_s * self.batch_cores / batch_size


def data_times(document: Mapping[str, Any]) -> DataTimes:
    """Make them of what `dataclasses.asdict` made of them."""
    pieces = document.get("pieces")
    return DataTimes(**{**document, "pieces": pieces and Pieces(**pieces)})


def time_data(
    config: Config, job: Job, *, readers: int, own: Own | None = None
) -> DataTimes | None:
    """Stage some rows in a directory of its own, and make batches of them. Collective.

    Indexes of the source are read whole, as a run reads them.

    Args:
        config: The job's settings.
        job: The ranks of a node.
        readers: How many of them read.
        own: What the caller of `trainer.train` would bring.

    Returns:
        What this rank saw; None if it does not read, rank 0 does.

    Raises:
        ConfigError: If a setting does not fit the data.
        DataioError: If the data cannot be read, or nothing can be written.
    """
    found = None
    with _directory(config, job.world) as directory:
        if job.world.rank < readers:
            team = replace(job, world=job.world.part(range(readers)))
            own = given = own_of(config, own)
            if by_tile := are_tiled(config, make_fields(config, own)):
                own = replace(
                    own,
                    fields=uncut(own.fields or {}),
                    evaluation_fields=own.evaluation_fields and uncut(own.evaluation_fields),
                )
            plain = with_keys(_plain(config, directory), own, team.world)
            found = _time_loader(plain, team, own)
            found = _of_tiles(config, given, found) if by_tile else found
        job.world.barrier(doing="timing the loader")
    return found


def reads(config: Config, layout: RunLayout, rank: int, own: Own | None = None) -> bool:
    """Whether a rank reads rows, or where each tile is read by itself, its tiles of them."""
    place = build_place(config, layout, rank)
    if are_tiled(config, make_fields(config, own_of(config, own))):
        place = tile_of(place)
    return place.reads


def _of_tiles(config: Config, own: Own, found: DataTimes) -> DataTimes:
    """Make of the times of whole samples those of their tiles, which are a rank's rows."""
    fields, num_tiles = make_fields(config, own), math.prod(config.mesh.tiles)
    source = training_source(config, index_cache=own_directory(Path(config.data.cache.path)))
    kept_bytes = read_bytes = whole_bytes = 0
    for field in of_tile(fields, 0).values():
        if isinstance(field, Array) and field.tiles is not None:
            its = [field.column(""), replace(field, tiles=None).column("")]
            here, of_all = (np.dtype(one.dtype).itemsize * math.prod(one.shape) for one in its)
            kept_bytes, whole_bytes = kept_bytes + here, whole_bytes + of_all
            read_bytes += (
                source.tile_bytes(field, field.tiles)[0]
                if isinstance(source, ReadsTiles)
                else of_all
            )
    return replace(
        found,
        num_rows=found.num_rows * num_tiles,
        evaluated_rows=found.evaluated_rows * num_tiles,
        row_bytes=found.row_bytes - whole_bytes + kept_bytes,
        source_row_bytes=found.source_row_bytes * min(read_bytes / whole_bytes, 1.0),
        batch_s=found.batch_s * kept_bytes / whole_bytes,
    )


def _plain(config: Config, directory: Path) -> Config:
    """Let every rank read, all of its rows, from a cache of its own."""
    data = config.data
    quota = min(parse_bytes(QUOTA), data.cache.quota_bytes or parse_bytes(QUOTA))
    cache = NodeCache(directory, quota=quota, verify=data.cache.verify)
    staging, workers = replace(data.staging, when="before"), replace(data.workers, feeders=None)
    return replace(
        config, data=replace(data, cache=cache, staging=staging, workers=workers),
        importance=ImportanceConfig(), mesh=MeshConfig(),
    )  # fmt: skip


@contextlib.contextmanager
def _directory(config: Config, world: World) -> Iterator[Path]:
    """Make a directory that all ranks know, where caches would lie, and remove it."""
    with contextlib.ExitStack() as opened:
        name = b""
        if world.rank == 0:
            root = cache_directory(str(config.data.cache.path))
            made = tempfile.TemporaryDirectory(
                prefix="probe-", dir=root, ignore_cleanup_errors=True
            )
            name = opened.enter_context(made).encode()
        yield Path(world.allgather(name, doing="timing the loader")[0].decode())


def _time_loader(config: Config, job: Job, own: Own) -> DataTimes:
    place = build_place(config, lay_out(config, job.world.world_size), job.world.rank)
    started = time.perf_counter()
    loader, test = build_loader(config, job, place=place, task=make_task(config, own), own=own)
    opened_s = time.perf_counter() - started
    with loader:
        stats = loader.stats()
        evaluated_rows = 0
        if test is not None:
            given = make_evaluation_fields(config, own)
            evaluation = loader.evaluation(test, fields=given, transform=own.evaluation_transform)
            evaluated_rows = len(evaluation) * config.data.batch_size * job.world.world_size
        batch_s, batch_cores, epoch_end_s = _time_epochs(loader, job.world)
        tensors = (each for each in next(iter(loader)).values() if isinstance(each, torch.Tensor))
        made_row_bytes = sum(each.nbytes for each in tensors) / config.data.batch_size
        streamed = loader.stats()
        # Each rank stages its part of the node's rows, and streams those of its own batches that
        # the quota leaves no room for
        amounts = np.array([
            stats["disk_bytes_written"], stats["staging_bytes"],
            streamed["streamed_rows"], streamed["streamed_bytes"],
        ])  # fmt: skip
        written_bytes, read_bytes, streamed_rows, streamed_bytes = map(
            float, job.world.allreduce(amounts, op="sum", doing="timing the loader")
        )
        fields = make_fields(config, own)
        staged_rows = stats["resident_fraction"] * loader.num_samples
        staged_s = min(max(stats["staging_s"], 1e-6), opened_s)
        row_bytes = written_bytes / max(staged_rows, 1)
        if streamed_rows:
            # What was staged has a place for each row of the others too
            row_bytes = streamed_bytes / streamed_rows + row_schema(fields).position_bytes
        read_bytes = read_bytes or staged_rows * row_bytes
        source_row_bytes = read_bytes / staged_rows if staged_rows else row_bytes
        if not staged_rows:
            read_bytes, staged_s = streamed_bytes, max(streamed["streamed_s"], 1e-6)
        pieces, guessed_row_bytes = None, None
        if job.world.rank == 0:
            index_cache = own_directory(Path(config.data.cache.path))
            source = training_source(config, index_cache=index_cache)
            pieces = count_pieces(source, fields, source_row_bytes=source_row_bytes)
            guessed_row_bytes = source.total_bytes / source.num_samples
            if pieces is not None and not staged_rows:
                source_row_bytes = pieces.read_bytes / pieces.rows
        return DataTimes(
            readers=job.world.world_size,
            num_rows=loader.num_samples,
            evaluated_rows=evaluated_rows,
            row_bytes=row_bytes,
            source_row_bytes=source_row_bytes,
            batch_s=batch_s,
            batch_cores=batch_cores,
            staging_bytes_per_s=read_bytes / staged_s,
            epoch_end_s=epoch_end_s,
            write_bytes_per_s=_time_writing(Path(config.run.directory)),
            pieces=pieces,
            guessed_row_bytes=guessed_row_bytes,
            made_row_bytes=made_row_bytes,
            trade_row_s=_time_trade(round(row_bytes), round(made_row_bytes)),
        )


def _time_trade(row_bytes: int, made_row_bytes: int) -> float:
    """Time what a core takes to send a row, and to take in what was made of it."""
    rows, made = np.zeros((TRADED_ROWS, row_bytes), np.uint8), np.zeros(made_row_bytes, np.uint8)
    took_s = []
    with listen("127.0.0.1") as listening:
        here = socket.create_connection(listening.getsockname()[:2])
        there, _ = listening.accept()

    def answer() -> None:
        for _ in range(TRADES):
            _, num_bytes, _ = receive(there)
            receive_bytes(there, num_bytes)
            send(there, None, [made] * TRADED_ROWS)

    with here, there:
        other = threading.Thread(target=answer)
        other.start()
        for _ in range(TRADES):
            began = time.thread_time()
            send(here, None, list(rows))
            receive(here)
            receive_into(here, [made] * TRADED_ROWS)
            took_s.append((time.thread_time() - began) / TRADED_ROWS)
        other.join()
    return statistics.median(took_s)


def _time_epochs(loader: ReplicaLoader, world: World) -> tuple[float, float, float]:
    """Take batches of an epoch, and go to the next: seconds of a batch, processors, an end."""
    epochs = loader.epochs(1 + TIMED_ENDS)
    next(epochs)
    num_batches = min(len(loader), FIRST_BATCHES + MOST_BATCHES)
    first = min(FIRST_BATCHES, num_batches - 1)
    at = {0: _now(loader)}
    for number, _ in enumerate(itertools.islice(loader, num_batches), 1):
        if number in (first, num_batches):
            at[number] = _now(loader)
    took_s, cpu_s, waited_s = (at[num_batches] - at[first]).tolist()
    took_s = max(took_s - waited_s, 1e-9)
    ends_s = []
    for _ in range(TIMED_ENDS):
        # In a run ranks meet in their last step; here one may be batches ahead of the other
        world.barrier(doing="timing the end of an epoch")
        started = time.perf_counter()
        next(epochs)
        ends_s.append(time.perf_counter() - started)
        next(iter(loader))
    return took_s / (num_batches - first), cpu_s / took_s, statistics.median(ends_s)


def _now(loader: ReplicaLoader) -> NDArray[np.float64]:
    """Read the clock, processor time, and how long batches have waited for windows of rows."""
    waited_s = loader.stats()["window_wait_s"]
    return np.array([time.perf_counter(), time.process_time(), waited_s])


def _time_writing(directory: Path) -> float:
    """Write a file where checkpoints would lie, in bytes/s; 0 where nothing may be written."""
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    data = os.urandom(WRITTEN_BYTES)
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            started = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return WRITTEN_BYTES / (time.perf_counter() - started)
    except OSError:
        return 0.0
