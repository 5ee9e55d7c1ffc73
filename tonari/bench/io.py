"""`tonari bench io`: what a filesystem costs training, by patterns, with proof of cold and warm."""

import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import numpy as np
import tyro
from msgspec.structs import replace

from dataio.base.filesystem import cache_directory
from dataio.base.sizes import parse_bytes
from dataio.source import open_some, open_source
from dataio.source.formats.grids.source import ArrayFilesSource
from dataio.world import World, leave_together
from tonari.bench.errors import BenchError
from tonari.bench.notify import notify_in_place
from tonari.bench.storage.patterns.measure import dataset_files, measure_storage
from tonari.bench.storage.patterns.options import PATTERNS, StorageOptions
from tonari.bench.storage.patterns.threads import Deadline
from tonari.bench.storage.patterns.together import TogetherError, agree
from tonari.bench.storage.report.report import write_html, write_png
from tonari.bench.storage.report.summary import summary
from tonari.bench.storage.results.csv import write_csv
from tonari.bench.storage.results.dlio import write_summaries
from tonari.bench.storage.results.document import to_document, write_document
from tonari.bench.storage.results.results import Results
from tonari.bench.storage.training.pipeline import PipelineOptions, cut_short, run_ways
from tonari.cache.stage import along, parse_fields
from tonari.errors import CommandError
from tonari.meet import meet
from tonari.outputs import check_output, check_plot, check_report, make_directory
from tonari.probes import join
from tonari.terminal import show, wrote

GRACE_S = 120.0
"""Beyond the time limit: what began before it may last as long, and files are removed after it."""

PatternName = Literal[
    "file_per_sample", "sequential_shard", "random_record", "strided", "many_readers",
    "checkpoint_burst",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class IO:
    """Measure what a shared filesystem costs training, beside the node's own disk and the network.

    Alone on a node, or on many: `srun tonari bench io DIR`, `mpiexec -n 8 tonari bench io DIR`, or
    by hand on each node, with its number: `tonari bench io DIR --node 0 --nodes 4 --meet
    node0:29400`. It needs no root, no ssh, and no file of yours. Ranks are clients; each writes a
    few files into a directory of its own below DIR, reads those that another node has written, and
    removes them at the end, also after an error or a signal.

    Every figure is measured: bytes are those that read calls returned, times go from a common start
    to the end of the last client. A phase is made cold (its files dropped from the client's memory)
    or warm (read before), and what was seen of it, in memory and by counters, shows whether it was:
    "seen: cold", "warm", or "unknown", with the reason in the JSON. A server's own cache cannot be
    seen from a client.

    Patterns: file_per_sample opens, stats, reads and closes a file a sample; sequential_shard reads
    a shard from its start; random_record reads samples of a shard in random order; strided lets all
    clients read one shard, each every nth sample; many_readers lets all read all of one shard;
    checkpoint_burst writes and syncs a file beside random reads.

    First `tonari bench io DIR --time-limit 30 --size 16MiB` for an impression.

    Exit status: 0; 1 with one message if it cannot be measured.
    """

    directory: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]]
    """On the filesystem to measure; all nodes must see the same one."""
    scratch: Path | None = None
    """The node's own directory, measured beside it; defaults to where the loader makes caches."""
    size: str | None = None
    """Written by each rank in either, such as 256MiB; defaults to 64MiB, 1GiB in all at most. For
    figures that no client's memory can flatter, more than a node's memory."""
    sample: str = "128KiB"
    """Of a sample; a multiple of 4 KiB."""
    patterns: tuple[PatternName, ...] = PATTERNS  # type: ignore[assignment]
    """Which to measure."""
    threads: tuple[int, ...] = (1, 4)
    """Of each client; each number is measured."""
    clients: tuple[int, ...] = ()
    """Ranks that take part; each number is measured; defaults to 1, 2, 4, ... all."""
    temperatures: tuple[Literal["cold", "warm"], ...] = ("cold", "warm")
    """What to make of the client's cache before."""
    repeats: int = 3
    """Of each."""
    time_limit: float = 300.0
    """Seconds after which nothing new is begun, but the second epoch of a way to train; where it
    trains, the patterns have half of them."""
    dataset: tuple[str, ...] = ()
    """Your own shards or directories of files, read as the loader stages them; with --fields also
    what is trained on."""
    fields: tuple[str, ...] = ()
    """Of the dataset's samples, to train on them, as in `tonari cache stage`: image=image:jpg
    label=int:cls, or x=array:float32:64x64:t2m; defaults to the numbers of array files, and for
    others to a dataset of the benchmark's own."""
    axis: str | None = None
    """Of a dataset of array files: the axis whose places are the samples, as in `tonari stats`."""
    direct: bool = False
    """Read cold with O_DIRECT, where the filesystem takes it."""
    metadata_storm: bool = False
    """List, stat, open, make and remove many files from all ranks: this hurts others."""
    seed: int = 0
    """Of contents and orders."""
    node: int | None = None
    """By hand: number of this node, from 0."""
    nodes: int | None = None
    """By hand: how many there are."""
    meet: str | None = None
    """By hand: HOST:PORT where they meet, on node 0."""
    step_ms: float | None = None
    """Also train with steps of so many milliseconds of emulated compute, fed in every way: from
    memory, by a DataLoader on DIR, staged, with an exchange, with hidden rows beside it; each is
    predicted before it is run. Unless --fields are given, the dataset is written below DIR, and
    removed."""
    calibrate: Path | None = None
    """Instead: a script whose `make_step(batch_size)` returns a step of your model, to be timed."""
    batch_size: int = 32
    """Of a rank, in training."""
    samples: int = 2048
    """Of the benchmark's own dataset."""
    epochs: int = 4
    """Of every way but the DataLoader."""
    dataloader_epochs: int = 4
    """Of the DataLoader, whose first is cold."""
    workers: int = 2
    """Processes of each rank's DataLoader."""
    exchange: float = 0.1
    """Part of a rank's rows that an epoch exchanges."""
    hidden: float = 0.3
    """Part of the rows that an epoch leaves out."""
    json: bool = False
    """Print one JSON document, nothing else on stdout."""
    json_file: Path | None = None
    """Write that document here: what `tonari bench compare` reads."""
    csv: Path | None = None
    """Write a line a phase and operation here."""
    dlio_summaries: Path | None = None
    """Write WAY/summary.json below this directory for each way that was trained, with the keys of
    the DLIO benchmark: give --step-ms or --calibrate, too."""
    html: Path | None = None
    """Write the report here. Needs the `report` extra."""
    png: Path | None = None
    """Draw it here. Needs the `report` extra."""

    def __post_init__(self) -> None:
        given = [self.node is not None, self.nodes is not None, self.meet is not None]
        if any(given) and not all(given):
            raise ValueError("--node, --nodes and --meet go together")
        if self.nodes is not None and not 0 <= (self.node or 0) < self.nodes:
            raise ValueError(f"--node is {self.node}, must be in [0, {self.nodes}), by --nodes")
        if self.step_ms is not None and self.calibrate is not None:
            raise ValueError(
                "--step-ms and --calibrate: give one, the time of a step or its script"
            )
        if self.fields and not (self.dataset and self.training_wanted):
            raise ValueError(
                "--fields: names what of --dataset to train on: give that, and --step-ms or "
                "--calibrate"
            )
        if self.dlio_summaries and not self.training_wanted:
            raise ValueError(
                "--dlio-summaries: of training, which nothing asks for: give --step-ms or "
                "--calibrate"
            )
        self.wanted()
        self.training()

    @property
    def training_wanted(self) -> bool:
        return self.step_ms is not None or self.calibrate is not None

    def training(self) -> PipelineOptions | None:
        """Choose what to train; None: nothing."""
        if not self.training_wanted:
            return None
        return PipelineOptions(
            step_s=None if self.step_ms is None else self.step_ms / 1e3, calibrate=self.calibrate,
            batch_size=self.batch_size, num_samples=self.samples,
            sample_bytes=parse_bytes(self.sample), exchange=self.exchange,
            hidden_fraction=self.hidden, epochs=self.epochs,
            dataloader_epochs=self.dataloader_epochs, workers=self.workers, seed=self.seed,
            dataset=self.dataset if self.fields else None,
            fields=parse_fields(self.fields) if self.fields else {}, axis=self.axis,
        )  # fmt: skip

    def find_fields(self) -> tuple[str, ...]:
        """Open a part of the dataset, and read its first sample.

        Returns:
            The fields as they are given; of array files without any, all their numbers.

        Raises:
            DataioError: If a loader could not.
        """
        if not self.dataset:
            return ()
        if not self.training_wanted:
            dataset_files(self.dataset)
            return ()
        data, fields = along(self.dataset, self.axis), self.fields
        source = open_source(data) if self.axis else open_some(self.dataset, num_shards=1)
        if isinstance(source, ArrayFilesSource) and not fields:
            fields = tuple(
                f"{key.replace('/', '_')}=array:{its.dtype}:{'x'.join(map(str, its.shape))}:{key}"
                for key, its in source.number_fields().items() if its.shape
            )  # fmt: skip
        if fields:
            next(source.read(np.zeros(1, np.int64), parse_fields(fields)))
        return fields

    def wanted(self) -> StorageOptions:
        """Choose what to measure."""
        return StorageOptions(
            size_bytes=None if self.size is None else parse_bytes(self.size),
            sample_bytes=parse_bytes(self.sample), patterns=self.patterns, threads=self.threads,
            clients=self.clients, repeats=self.repeats, time_limit_s=self.time_limit,
            metadata_storm=self.metadata_storm, direct=self.direct,
            temperatures=self.temperatures, dataset=self.dataset or None, seed=self.seed,
        )  # fmt: skip


def bench_io(options: IO) -> int:
    """Run the command. Collective, whatever started the ranks."""
    with ended_by_signals():
        world = _join(options)
        try:
            found = agree(world, lambda: () if world.rank else _check(options), doing="looking")
            fields = world.allgather(json.dumps(found).encode(), doing="naming fields")[0]
            options = dataclasses.replace(options, fields=tuple(json.loads(fields)))
            results = measure(world, options)
            agree(world, lambda: None if world.rank else write(options, results), doing="writing")
        except TogetherError as error:
            return _give_up(world, error)
    return 0


def measure(world: World, options: IO) -> Results:
    """Measure all that was asked for. Collective."""
    scratch = options.scratch or agree(
        world, lambda: cache_directory("auto"), doing="choosing the node's directory"
    )
    until = Deadline(options.time_limit)

    def notify(line: str) -> None:
        left_s = max(until.end - time.monotonic(), 0.0)
        notify_in_place(line and f"{left_s:.0f} of {options.time_limit:g} s left, {line}")

    directory, scratch = options.directory.absolute(), scratch.absolute()
    try:
        wanted, training = options.wanted(), options.training()
        if training is not None:
            wanted = dataclasses.replace(wanted, time_limit_s=options.time_limit / 2)
        results = measure_storage(world, directory, scratch, wanted, notify)
        if training is None:
            return results
        ways = run_ways(world, directory, scratch, training, results, notify, until=until)
        short = cut_short(ways, training)
        return replace(
            results, end_to_end=ways, problems=[*results.problems, *short],
            complete=results.complete and not short,
        )  # fmt: skip
    finally:
        notify("")


def write(options: IO, results: Results) -> None:
    """Write what was found: the one place where results become documents."""
    if options.json_file is not None:
        write_document(results, options.json_file)
    if options.csv is not None:
        write_csv(results, options.csv)
    if options.dlio_summaries is not None:
        write_summaries(results, options.dlio_summaries)
    if options.html is not None:
        write_html(results, options.html)
    if options.png is not None:
        write_png(results, options.png)
    if options.json:
        print(json.dumps(to_document(results)))
        return
    files = (options.json_file, options.csv, options.dlio_summaries, options.html, options.png)
    show([*summary(results), *wrote(*files)])


def _check(options: IO) -> tuple[str, ...]:
    try:
        check_output("--json-file", options.json_file)
        check_output("--csv", options.csv)
        check_report("--html", options.html)
        check_plot("--png", options.png)
        if options.dlio_summaries is not None:
            make_directory("--dlio-summaries", options.dlio_summaries)
        return options.find_fields()
    except CommandError as error:
        raise BenchError(str(error)) from error


def _join(options: IO) -> World:
    timeout_s = options.time_limit + GRACE_S
    if options.node is None or options.meet is None or options.nodes in (None, 1):
        return join(timeout_s=timeout_s)
    return meet(options.node, options.nodes, options.meet, timeout_s=timeout_s, meet_s=GRACE_S)


def _give_up(world: World, error: TogetherError) -> int:
    """End all ranks with one message."""
    if world.rank == 0:
        print(f"tonari bench: {error}", file=sys.stderr, flush=True)
    world.barrier(doing="ending")
    leave_together()
    return 1


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the program as an error would: what it made is removed on the way out."""

    def end(number: int, frame: FrameType | None) -> None:
        # Launchers repeat signals: removing files goes on.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
