"""How training touches storage: which files, in which order, by requests of which size."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.source.storage.window import READ_BYTES
from tonari.bench.storage.patterns.calls import TimedCalls
from tonari.bench.storage.patterns.files import WRITE_BYTES, OwnFiles, write_some
from tonari.bench.storage.patterns.threads import Deadline, ReadTask, TimedReads, run_tasks
from tonari.bench.storage.results.results import Temperature

SEQUENTIAL_BYTES = 1 << 20
SHARED_BY_ALL = 0
"""The rank whose shard is read where all clients read the same one."""


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Which client this is, and how it is to read.

    Attributes:
        client: In [0, clients).
        clients: That take part.
        threads: Of each.
        direct: Whether with O_DIRECT.
        rng: Of this client, for its orders.
    """

    client: int
    clients: int
    threads: int
    direct: bool
    rng: np.random.Generator


class Pattern(Protocol):
    """One way to touch storage."""

    @property
    def name(self) -> str: ...

    @property
    def temperatures(self) -> Sequence[Temperature]:
        """The temperatures that make sense for it."""
        ...

    def request_bytes(self, files: OwnFiles) -> int:
        """Bytes of one request; 0 where none moves data."""
        ...

    def paths(self, files: OwnFiles, part: FilePart) -> list[Path]:
        """List the files that the client will read."""
        ...

    def run(
        self, files: OwnFiles, part: FilePart, *, until: Deadline, least_s: float
    ) -> TimedReads:
        """Do it. Blocks.

        Args:
            files: The benchmark's own.
            part: Of the work.
            until: When to begin nothing new.
            least_s: How long to go on, from the start again.

        Raises:
            OSError: If the filesystem refuses, with the file's name.
            BenchError: If a file is not what it was.
        """
        ...


Order = Callable[[int, FilePart], list[NDArray[np.int64]]]
"""(requests in a shard, part) -> requests of each thread."""


def in_order(num_requests: int, part: FilePart) -> list[NDArray[np.int64]]:
    """Give each thread a contiguous part of the requests."""
    return np.array_split(np.arange(num_requests), part.threads)


def at_random(num_requests: int, part: FilePart) -> list[NDArray[np.int64]]:
    """Distribute all requests over the threads, in random order."""
    return np.array_split(part.rng.permutation(num_requests), part.threads)


def interleaved(num_requests: int, part: FilePart) -> list[NDArray[np.int64]]:
    """Give the readers of all clients one request each, in rounds; each skips the others'."""
    readers = part.clients * part.threads
    own = range(part.client * part.threads, (part.client + 1) * part.threads)
    return [np.arange(reader, num_requests, readers) for reader in own]


@dataclass(frozen=True)
class ShardReads:
    """Requests to one shard, which each thread opens.

    Attributes:
        order: Of the requests.
        by_sample: Whether a request is a sample, or 1 MiB.
        one_for_all: Whether all clients read the same shard, or each another.
    """

    name: str
    order: Order
    by_sample: bool
    one_for_all: bool = False
    temperatures: Sequence[Temperature] = ("cold", "warm")

    def request_bytes(self, files: OwnFiles) -> int:
        # No more than the shard has.
        whole = min(SEQUENTIAL_BYTES, files.footprint.shard_bytes)
        return files.footprint.sample_bytes if self.by_sample else whole

    def paths(self, files: OwnFiles, part: FilePart) -> list[Path]:
        return [files.shard(SHARED_BY_ALL if self.one_for_all else files.theirs)]

    def run(
        self, files: OwnFiles, part: FilePart, *, until: Deadline, least_s: float
    ) -> TimedReads:
        return run_tasks(self.tasks(files, part), until=until, least_s=least_s)

    def tasks(self, files: OwnFiles, part: FilePart) -> list[ReadTask]:
        """Divide the requests among threads."""
        length, num_bytes = self.request_bytes(files), files.footprint.shard_bytes
        (path,) = self.paths(files, part)
        return [
            ReadTask(
                calls=TimedCalls(length, direct=part.direct),
                work=partial(
                    read_requests, path=path, num_bytes=num_bytes, length=length, chosen=chosen
                ),
            )
            for chosen in self.order(-(-num_bytes // length), part)
        ]


def read_requests(
    calls: TimedCalls, *, path: Path, num_bytes: int, length: int, chosen: NDArray[np.int64]
) -> Iterator[None]:
    """Read some of a file's requests."""
    with calls.opened(path) as descriptor:
        for number in chosen.tolist():
            yield
            offset = number * length
            calls.read(descriptor, offset, min(length, num_bytes - offset), path)


@dataclass(frozen=True)
class FilePerSample:
    """Whole files in random order: open, stat, read, close."""

    name: str = "file_per_sample"
    temperatures: Sequence[Temperature] = ("cold", "warm")

    def request_bytes(self, files: OwnFiles) -> int:
        return files.footprint.sample_bytes

    def paths(self, files: OwnFiles, part: FilePart) -> list[Path]:
        return files.samples(files.theirs)

    def run(
        self, files: OwnFiles, part: FilePart, *, until: Deadline, least_s: float
    ) -> TimedReads:
        paths = self.paths(files, part)
        size = files.footprint.sample_bytes
        tasks = [
            ReadTask(
                calls=TimedCalls(size, direct=part.direct),
                work=partial(read_files, paths=[paths[number] for number in chosen.tolist()]),
            )
            for chosen in at_random(len(paths), part)
        ]
        return run_tasks(tasks, until=until, least_s=least_s)


def read_files(calls: TimedCalls, *, paths: Sequence[Path]) -> Iterator[None]:
    """Read whole files, each by one call, or by several where the buffer is smaller."""
    for path in paths:
        yield
        with calls.opened(path) as descriptor:
            size = calls.time("stat", os.fstat, descriptor).st_size
            for offset in range(0, size, calls.most_bytes):
                calls.read(descriptor, offset, min(calls.most_bytes, size - offset), path)


@dataclass(frozen=True)
class CheckpointBurst:
    """Each client writes and syncs a file, beside threads that read samples of a shard at random.

    ``checkpoint`` is the time of one whole, from its creation until it is durable.
    """

    name: str = "checkpoint_burst"
    temperatures: Sequence[Temperature] = ("cold",)

    def request_bytes(self, files: OwnFiles) -> int:
        return min(WRITE_BYTES, files.footprint.checkpoint_bytes)

    def paths(self, files: OwnFiles, part: FilePart) -> list[Path]:
        return [files.shard(files.theirs)]

    def run(
        self, files: OwnFiles, part: FilePart, *, until: Deadline, least_s: float
    ) -> TimedReads:
        writer = ReadTask(
            calls=TimedCalls(0),
            work=partial(
                write_checkpoint, path=files.checkpoint, num_bytes=files.footprint.checkpoint_bytes,
                block=memoryview(part.rng.bytes(self.request_bytes(files))),
            ),
            again=False,
        )  # fmt: skip
        readers = ShardReads("", at_random, by_sample=True).tasks(files, part)
        try:
            return run_tasks([writer, *readers], until=until)
        finally:
            files.checkpoint.unlink(missing_ok=True)


def write_checkpoint(
    calls: TimedCalls, *, path: Path, num_bytes: int, block: memoryview
) -> Iterator[None]:
    """Write a file and make it durable."""
    started = perf_counter()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = calls.time("create", os.open, path, flags, 0o600)
    try:
        left = num_bytes
        while left:
            yield
            done = calls.time("write", write_some, descriptor, block[:left], path)
            calls.num_bytes += done
            left -= done
        calls.time("fsync", os.fsync, descriptor)
    finally:
        os.close(descriptor)
    calls.seconds["checkpoint"].append(perf_counter() - started)


@dataclass(frozen=True)
class MetadataStorm:
    """What a job's start does to a metadata server: all clients list, stat, open the same files.

    Then each makes and removes files in a directory of its own.
    """

    name: str = "metadata_storm"
    temperatures: Sequence[Temperature] = ("cold",)

    def request_bytes(self, files: OwnFiles) -> int:
        return 0

    def paths(self, files: OwnFiles, part: FilePart) -> list[Path]:
        # No data is read, so there is none to be cold or warm.
        return []

    def run(
        self, files: OwnFiles, part: FilePart, *, until: Deadline, least_s: float
    ) -> TimedReads:
        paths = files.samples(SHARED_BY_ALL)
        tasks = [
            ReadTask(
                calls=TimedCalls(0),
                work=partial(
                    storm, folder=paths[0].parent,
                    paths=[paths[number] for number in chosen.tolist()], own=files.storm,
                ),
            )
            for chosen in in_order(len(paths), part)
        ]  # fmt: skip
        return run_tasks(tasks, until=until)


def storm(calls: TimedCalls, *, folder: Path, paths: Sequence[Path], own: Path) -> Iterator[None]:
    """List a directory, stat and open files, make and remove as many."""
    calls.time("list", os.listdir, folder)
    for path in paths:
        yield
        calls.time("stat", os.stat, path)
        with calls.opened(path):
            pass
    for path in paths:
        yield
        made = own / path.name
        os.close(calls.time("create", os.open, made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        calls.time("remove", os.unlink, made)


@dataclass(frozen=True)
class PatternFiles:
    """The user's own files, read as the loader stages them.

    Clients take neighbouring shards, which their threads read forwards in its requests; files that
    are samples are read whole, in their order.

    Attributes:
        files: All of them, in the loader's order, at least one; the same on every rank.
        most_bytes: That a client reads.
    """

    files: Sequence[Path]
    most_bytes: int
    name: str = "dataset"
    temperatures: Sequence[Temperature] = ("cold", "warm")

    def request_bytes(self, files: OwnFiles) -> int:
        return READ_BYTES

    def paths(self, files: OwnFiles, part: FilePart) -> list[Path]:
        own = np.array_split(np.arange(len(self.files)), part.clients)[part.client].tolist()
        # With fewer shards than clients some read the same one.
        own = own or [part.client % len(self.files)]
        sizes = np.array([self.files[number].stat().st_size for number in own])
        num_files = int(np.searchsorted(np.cumsum(sizes), self.most_bytes)) + 1
        return [self.files[number] for number in own[:num_files]]

    def run(
        self, files: OwnFiles, part: FilePart, *, until: Deadline, least_s: float
    ) -> TimedReads:
        paths = self.paths(files, part)
        tasks = [
            ReadTask(
                calls=TimedCalls(READ_BYTES),
                work=partial(read_files, paths=[paths[number] for number in chosen.tolist()]),
            )
            for chosen in in_order(len(paths), part)
        ]
        return run_tasks(tasks, until=until, least_s=least_s)


READS: Mapping[str, Pattern] = {
    "file_per_sample": FilePerSample(),
    "sequential_shard": ShardReads("sequential_shard", in_order, by_sample=False),
    "random_record": ShardReads("random_record", at_random, by_sample=True),
    "strided": ShardReads("strided", interleaved, by_sample=True, one_for_all=True),
    "many_readers": ShardReads("many_readers", in_order, by_sample=False, one_for_all=True),
}
"""Of the benchmark's own files, by name."""
