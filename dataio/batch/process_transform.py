"""Batches decoded and transformed in other processes, for transforms that hold the interpreter.

Torch's own DataLoader starts, feeds and watches the processes (forkserver: nothing of an MPI or
CUDA process is inherited). They map the cache themselves and receive where a batch's rows lie, so
they hold nothing that changes from epoch to epoch. Batches come back through a pipe: no shared
memory, no descriptor a batch, whatever `/dev/shm` and `ulimit -n` allow.
"""

import multiprocessing
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset

from dataio.base.buffers import BufferRing
from dataio.base.errors import About, DataioError, FieldError, StallError, WorkerError
from dataio.batch.assemble import Assembler
from dataio.batch.job import BatchWork
from dataio.batch.process_checks import STARTED, check_sendable, why_ended
from dataio.batch.stack import packed, unpacked
from dataio.batch.watch import TransformWatch
from dataio.rows.fields import Field
from dataio.rows.rows import RowSchema
from dataio.rows.samples import NothingDecodesError, OnError, Sample, Transform, Value
from dataio.store.files.fetch import Fetcher
from dataio.store.files.reader import RowReader, exceeds_memory
from dataio.store.files.store import FixedFile

ENVIRONMENT = {"MPI4PY_RC_INITIALIZE": "0", STARTED: "1"}
"""A user's module that imports mpi4py must not join the job a second time."""

CHECK_S = 5.0
"""How often a wait for a batch looks whether the processes live."""


@dataclass(frozen=True)
class Failure:
    """An error in a process. Most errors cannot be made again from what a pipe takes.

    Attributes:
        kind: Its class.
        text: Its message, and the traceback of what the transform raised.
        about: The sample that it is about; see `DataioError`.
    """

    kind: type[DataioError]
    text: str
    about: About | None = None


@dataclass(frozen=True)
class Made:
    """What a process sends back: values or samples, and the rows that did not decode; or an error.

    Attributes:
        channels_last: Values that travel as they lie in memory, [batch, height, width, channels].
        failure: The error, if there was one.
    """

    values: Mapping[str, Value] | None = None
    samples: list[Sample] | None = None
    bad: frozenset[int] = frozenset()
    channels_last: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class WorkerArguments:
    """All that a process needs to make batches of a cache; see `Assembler` and `TransformWatch`."""

    schema: RowSchema
    directory: Path
    paths: tuple[Path, ...]
    fields: Mapping[str, Field]
    transform: Transform | None
    keep_samples: bool
    seed: int
    on_error: OnError
    trusts_pictures: bool = False
    logs: bool = True
    num_tiles: int = 1


class WorkerRows(Dataset[Made]):
    """Batches by `BatchWork`, in a process of torch's."""

    def __init__(self, arguments: WorkerArguments) -> None:
        self._arguments = arguments
        self._assembler: Assembler | None = None
        self._fetcher: Fetcher | None = None
        self._num_positions = 0

    def __getitem__(self, work: BatchWork) -> Made:
        try:
            return self._made(work)
        except Exception as error:
            return Made(failure=_described(error))

    def _made(self, work: BatchWork) -> Made:
        most = int(work.located.position.max())
        if self._assembler is None or most >= self._num_positions:
            reader = _reader(self._arguments)
            self._assembler = make_assembler(self._arguments, reader)
            self._num_positions = min((len(file.rows) for file in reader.fixed), default=0)
            if self._fetcher is not None:
                self._fetcher.close()
            num_tiles = self._arguments.num_tiles
            self._fetcher = Fetcher(reader) if exceeds_memory(reader, num_tiles=num_tiles) else None
        if self._fetcher is not None:
            parts = self._assembler.filler.parts(work)
            fetch = self._fetcher.fetch(work.located, work.small, parts)
            work.reader, work.located = fetch.result()
        assembler = self._assembler
        job = assembler.prepare(work)
        assembler.run(job, 0, len(work.located.position))
        if self._arguments.keep_samples:
            return Made(samples=packed(assembler.samples(job)), bad=work.bad)
        values = assembler.finish(job)
        turned = {
            # A strided array would be packed into plain order: slowly, and then lie otherwise.
            name: value.transpose(0, 2, 3, 1)
            for name, value in values.items()
            if isinstance(value, np.ndarray) and value.ndim == 4 and not value.flags.c_contiguous
        }
        lists = {name: packed(value) for name, value in values.items() if isinstance(value, list)}
        return Made(values=values | turned | lists, bad=work.bad, channels_last=tuple(turned))


def _reader(arguments: WorkerArguments) -> RowReader:
    files = [
        FixedFile(path, column)
        for path, column in zip(arguments.paths, arguments.schema.fixed, strict=True)
    ]
    for file in files:
        file.map(writable=False)
    return RowReader(arguments.schema, files, arguments.directory)


def make_assembler(arguments: WorkerArguments, reader: RowReader) -> Assembler:
    """Make what makes rows in a process that does nothing else."""
    return Assembler(
        reader,
        arguments.fields,
        ring=BufferRing(),
        transform=arguments.transform,
        keep_samples=arguments.keep_samples,
        seed=arguments.seed,
        on_error=arguments.on_error,
        trusts_pictures=arguments.trusts_pictures,
        watch=TransformWatch(
            "transform", unit="sample", cure="", logs=arguments.logs, is_alone=True
        ),
    )


def _described(error: Exception) -> Failure:
    if isinstance(error, FieldError):
        kind = NothingDecodesError if isinstance(error, NothingDecodesError) else FieldError
        return Failure(kind, str(error), error.about)
    cause = error.__cause__
    if isinstance(error, WorkerError) and cause is not None:
        # The user's own frames alone.
        frames = "".join(traceback.format_exception(cause))
        return Failure(WorkerError, f"{error}:\n{frames}", error.about)
    frames = "".join(traceback.format_exception(error))
    return Failure(WorkerError, f"transform: its process failed, expected a batch:\n{frames}")


class HasWork(Protocol):
    """Something that carries the work of a batch."""

    @property
    def work(self) -> BatchWork: ...


P = TypeVar("P", bound=HasWork)


class _Feed(Sized):
    """What torch calls a sampler: hands out work, and remembers the order."""

    def __init__(self) -> None:
        self.pending: Iterator[HasWork] = iter(())
        self.sent: deque[HasWork] = deque()

    def __iter__(self) -> Iterator[BatchWork]:
        for one in self.pending:
            self.sent.append(one)
            yield one.work

    def __len__(self) -> int:
        return 0


class WorkerProcesses:
    """Processes that make batches; started at first use, kept until `close`.

    Args:
        arguments: What they make.
        num_processes: How many.
        prefetch: Batches under way beside the one asked for.
        timeout_s: Longest wait for one batch.

    Raises:
        ValueError: If a process would not find the transform, or a field.
    """

    def __init__(
        self, arguments: WorkerArguments, *, num_processes: int, prefetch: int, timeout_s: float
    ) -> None:
        sent: dict[str, object] = {f"field {name!r}": f for name, f in arguments.fields.items()}
        check_sendable(sent | {"transform": arguments.transform})
        self._arguments = arguments
        self._num_processes = num_processes
        self._depth = -(-max(prefetch, 1) // num_processes)
        self._timeout_s = timeout_s
        self._feed = _Feed()
        self._loader: DataLoader[Made] | None = None
        self._coming: Iterator[Made] | None = None

    def make(self, pending: Iterator[P]) -> Iterator[tuple[P, Made]]:
        """Make batches in order; one of which no row decodes comes back with that failure.

        Raises:
            FieldError: If a row does not decode, or the transform returned what it may not.
            WorkerError: If the transform raised, or a process ended.
            StallError: If a batch took too long.
        """
        self._finish_abandoned()
        self._feed.pending, self._feed.sent = pending, deque()
        try:
            self._coming = iter(self._started())
        except (OSError, EOFError) as error:
            # One ended before it had read what it was sent.
            self.close()
            raise self._ended([1]) from error
        except RuntimeError as error:
            statuses = [one.exitcode for one in self._processes()]
            if not any(status is not None for status in statuses):
                raise
            # One ended since the last batches.
            self.close()
            raise self._ended(statuses) from error
        while (made := self._next()) is not None:
            if made.failure is not None and made.failure.kind is not NothingDecodesError:
                raise made.failure.kind(made.failure.text, about=made.failure.about)
            yield self._feed.sent.popleft(), _turned_back(made)  # type: ignore[misc]

    def _finish_abandoned(self) -> None:
        """Take in what an iteration left in the middle had asked for."""
        self._feed.pending = iter(())
        while self._next() is not None:
            pass

    def _next(self) -> Made | None:
        """Take the next batch, or None after the last. Blocks until it is there."""
        deadline = time.monotonic() + self._timeout_s
        while self._coming is not None:
            try:
                return next(self._coming)
            except StopIteration:
                self._coming = None
            except RuntimeError as error:
                if "timed out" not in str(error):
                    statuses = [one.exitcode for one in self._processes()]
                    self.close()
                    raise self._ended(statuses) from None
                # No batch, but all processes live.
                if time.monotonic() > deadline:
                    self.close()
                    raise self._stalled() from error
        return None

    def _processes(self) -> list[BaseProcess]:
        # Torch keeps them where the batches come from, also between two iterations.
        kept = self._coming or getattr(self._loader, "_iterator", None)
        return list(getattr(kept, "_workers", []))

    def _ended(self, statuses: Sequence[int | None]) -> WorkerError:
        return WorkerError(
            f"transform: of {self._num_processes} processes not all run on, as they should until "
            f"the loader is closed: {why_ended(statuses)}"
        )

    def _stalled(self) -> StallError:
        return StallError(
            f"transform: no batch came from its {self._num_processes} processes within "
            f"{self._timeout_s:.0f} s; the transform or the cache's disk hangs: look at the "
            "processes with py-spy dump, or raise timeout_s"
        )

    def _started(self) -> DataLoader[Made]:
        if self._loader is None:
            with environment(ENVIRONMENT):
                # Torch and we are imported once there, not once a process.
                forkserver.set_forkserver_preload([__name__])
                forkserver.ensure_running()
            self._loader = DataLoader(
                WorkerRows(self._arguments),
                batch_size=None,
                sampler=self._feed,
                num_workers=self._num_processes,
                prefetch_factor=self._depth,
                collate_fn=_same,
                worker_init_fn=end_with_parent,
                multiprocessing_context="forkserver",
                persistent_workers=True,
                # Torch looks only then whether the processes live.
                timeout=CHECK_S,
            )
        return self._loader

    def close(self) -> None:
        """End the processes; idempotent."""
        self._loader = self._coming = None


def _turned_back(made: Made) -> Made:
    if made.samples is not None:
        return replace(made, samples=unpacked(made.samples))
    values = {
        name: unpacked(value) if isinstance(value, list) else value
        for name, value in (made.values or {}).items()
    }
    for name in made.channels_last:
        # [batch, channels, height, width]
        values[name] = values[name].transpose(0, 3, 1, 2)
    return replace(made, values=values)


def end_with_parent(worker_id: int = 0) -> None:
    """End this process with the one that started it, however that ends.

    Torch looks for the end of its parent, and that is the forkserver, which waits for this one.
    """
    threading.Thread(target=_await_parent, name="tonari-parent", daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by another process"
    parent.join()
    os._exit(1)


def _same(made: object) -> object:
    return made


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
