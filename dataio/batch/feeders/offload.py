"""Parts of batches, for whoever is free next: this rank's own threads, or a core of a feeder.

A feeder that ends, hangs or fails costs the parts that it has: they go back to the front, and what
it answers later is not read. An error is never a feeder's: the part is made here, and raises it.

A thread for each core sends parts and takes in what comes back; another looks for feeders. The
condition guards the parts, the costs and what is known of feeders.
"""

import contextlib
import logging
import select
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from dataio.base.errors import WorkerError
from dataio.base.network import connect_apart
from dataio.batch.assemble import Assembler
from dataio.batch.feeders.directory import (
    CPU,
    Announced,
    announced,
    check_directory,
    versions,
)
from dataio.batch.feeders.parts import MadeRows, Packer, find_room, sent_arguments, take_in
from dataio.batch.feeders.wire import (
    WrongMessageError,
    WrongSecretError,
    greet,
    receive,
    receive_bytes,
    receive_into,
    send,
)
from dataio.batch.job import BatchJob
from dataio.batch.process_checks import check_sendable, pickled
from dataio.batch.process_transform import WorkerArguments
from dataio.rows.samples import Batch
from dataio.store.files.reader import RowReader

CREDITS = 2
"""Parts that a core has at most: one that it makes, and the next."""
MOST_CORES = 32
"""That one rank uses: each takes a thread of it."""
LOOK_S, RETRY_S, GREETING_S = 1.0, 10.0, 5.0
"""Between two looks for feeders; between two tries of one; longest wait for one that is found."""
LEAST_LIMIT_S, FIRST_LIMIT_S, LIMIT = 0.25, 10.0, 6.0
"""A core hangs when a part takes longer than so many times the median, and this; before the first
few came back, longer than that."""
WORTH = 0.75
"""Of what a row takes to be made here, what sending it and taking it in may take."""
BUSY = 0.9
"""Of the time of a step, what a batch takes where this rank's own threads do not keep up."""
SOON_S = 0.05
"""That an answer which is late already has to be there."""
CPU_CURE = "ATEN_CPU_CAPABILITY"
TRIED_ROWS = 64
"""Until as many came back, nothing is known of the costs."""

log = logging.getLogger(__name__)
Work = Callable[[BatchJob, int, int], None]


class PartRows(NamedTuple):
    """Rows of a batch.

    Attributes:
        run: Has them made, by whatever it is given, and notes that they are.
        batch: Its number: of two, that with the smaller one is needed first.
        is_ours: No feeder makes it, as one has failed to.
    """

    job: BatchJob
    start: int
    stop: int
    run: Callable[[Work, BatchJob, int, int], None]
    batch: int
    is_ours: bool = False

    def made_by(self, work: Work) -> None:
        """Have it made."""
        self.run(work, self.job, self.start, self.stop)


@dataclass
class _Cost:
    """What rows took: of the newest few thousand."""

    rows: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, rows: int, cpu_s: float, wall_s: float = 0.0) -> None:
        if self.rows > 4096:
            self.rows, self.cpu_s, self.wall_s = self.rows // 2, self.cpu_s / 2, self.wall_s / 2
        self.rows, self.cpu_s = self.rows + rows, self.cpu_s + cpu_s
        self.wall_s += wall_s


class _RefusedError(Exception):
    """A feeder that is not used, and why."""


@dataclass(eq=False)
class _HeldRows:
    """A part that a core has.

    Attributes:
        sent: When.
        state: ``"there"``, ``"coming"`` in, or ``"here"``: it took too long, and is made here.
    """

    part: PartRows
    sent: float
    state: Literal["there", "coming", "here"] = "there"


@dataclass(eq=False)
class _Link:
    """A connection to a core of a feeder, and the parts that it has."""

    feeder: Announced
    port: int
    made: socket.socket
    parts: deque[_HeldRows] = field(default_factory=deque)
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    idle_from: float = 0.0
    try_at: float = 0.0

    def is_cut(self) -> bool:
        """Whether the feeder has ended it."""
        watched = select.poll()
        watched.register(self.made, select.POLLRDHUP)
        return bool(watched.poll(0))

    def usual_s(self) -> float:
        """How long a part takes."""
        return statistics.median(self.took_s) if self.took_s else LEAST_LIMIT_S

    def limit_s(self) -> float:
        """How long a part may take."""
        if len(self.took_s) < 2 * CREDITS:
            return FIRST_LIMIT_S
        return LEAST_LIMIT_S + LIMIT * self.usual_s()


class Feeders:
    """Has parts of batches made by this rank's threads and by feeders.

    Args:
        directory: In which feeders are found.
        arguments: What they make.
        reader: The cache's files.
        assembler: Of the batches.
        work: Makes a part here.
        threads: Of this rank.
        num_threads: Of them.
        replica: Its replica, for messages, and so that replicas begin with other feeders.

    Attributes:
        rows: That feeders made.
        sent_bytes: To feeders.
        received_bytes: From them.
        lost_parts: That a feeder had, and that were made here after all.
        busy_s: For which cores of feeders had parts, all together.

    Raises:
        WorkerError: If the directory cannot be used, or a feeder that is there would make other
            bytes, or does not find the transform.
        ValueError: If a feeder would not find the transform, or a field.
    """

    def __init__(
        self,
        directory: Path,
        arguments: WorkerArguments,
        *,
        reader: RowReader,
        assembler: Assembler,
        work: Work,
        threads: ThreadPoolExecutor,
        num_threads: int,
        replica: int,
    ) -> None:
        check_directory(directory)
        self._directory, self._assembler, self._work = directory, assembler, work
        self._threads, self._num_threads, self._replica = threads, num_threads, replica
        sent: dict[str, object] = {f"field {name!r}": f for name, f in arguments.fields.items()}
        check_sendable(
            sent | {"transform": arguments.transform}, instead="or give no feeders", by_feeders=True
        )
        arguments = sent_arguments(arguments)
        self._runs_code = arguments.transform is not None or bool(assembler.filler.own)
        self._sent = pickled(arguments)
        self._packer = Packer(reader, arguments.schema, assembler.filler.sizes)
        self._changed = threading.Condition()
        self._parts: deque[PartRows] = deque()
        self._made_here, self._made_there = _Cost(), _Cost()
        self._steps_s: deque[float] = deque(maxlen=15)
        self._try_at = 0.0
        self._batch_rows = self._num_batches = 0
        self._sends_none = False
        # Odd: the loop waits for a batch
        self._awaited = 0
        self._links: dict[tuple[str, int], _Link] = {}
        self._retry_at: dict[tuple[str, int], float] = {}
        self._told: set[str] = set()
        self._serving: list[threading.Thread] = []
        self.rows = self.sent_bytes = self.received_bytes = self.lost_parts = 0
        self.busy_s = 0.0
        self._closed = threading.Event()
        self._look(refuses=True)
        self._looking = threading.Thread(target=self._look_on, name="tonari-feeders", daemon=True)
        self._looking.start()

    @property
    def num_cores(self) -> int:
        """Cores of feeders that are connected now."""
        return len(self._links)

    @property
    def figures(self) -> dict[str, float]:
        """What feeders did, by the names that `dataio.stats` has."""
        return {
            "feeder_cores": len(self._links),
            "feeder_rows": self.rows,
            "feeder_sent_bytes": self.sent_bytes,
            "feeder_received_bytes": self.received_bytes,
            "feeder_lost_parts": self.lost_parts,
        }

    def paced(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass an epoch's batches on, and see how long a step takes."""
        coming = iter(batches)
        while True:
            awaited, has_parts = self._note_wait()
            for _ in range(self._num_threads if has_parts else 0):
                self._threads.submit(self._help, awaited)
            batch = next(coming, None)
            self._note_wait()
            if batch is None:
                return
            began = time.perf_counter()
            yield batch
            self._steps_s.append(time.perf_counter() - began)

    def _note_wait(self) -> tuple[int, bool]:
        """Note that the loop begins to wait for a batch, or has it.

        Returns:
            The new number, and whether feeders have parts.
        """
        with self._changed:
            self._awaited += 1
            has_parts = any(link.parts for link in self._links.values())
            if has_parts:  # who waits else waits for parts
                self._changed.notify_all()
            return self._awaited, has_parts

    def _help(self, awaited: int) -> None:
        """Make parts that feeders have longer than usual, as long as the loop waits for one batch.

        On a thread that would do nothing else.
        """
        while True:
            with self._changed:
                late: _HeldRows | None = None
                while late is None:
                    if self._awaited != awaited:
                        return
                    if self._parts:
                        self._threads.submit(self._help, awaited)
                        return
                    there = [
                        (held.part.batch, held.sent, link, held)
                        for link in self._links.values()
                        for held in link.parts
                        if held.state == "there"
                    ]
                    if not there:
                        return
                    _, sent, link, held = min(there, key=lambda one: one[:2])
                    took_s = time.perf_counter() - sent
                    if took_s >= link.usual_s():
                        late = held
                    else:
                        self._changed.wait(link.usual_s() - took_s)
                late.state = "here"
                link.took_s.append(took_s)
                self.lost_parts += 1
            late.part.made_by(self.run_here)

    def put(
        self,
        job: BatchJob,
        bounds: Sequence[int],
        run: Callable[[Work, BatchJob, int, int], None],
    ) -> None:
        """Have a batch's rows made.

        Args:
            job: The batch.
            bounds: Of its parts.
            run: See `PartRows`.
        """
        with self._changed:
            self._num_batches += 1
            for start, stop in pairwise(bounds):
                first = min(max(start, job.done), stop)
                self._parts.append(
                    PartRows(job, first, stop, run, self._num_batches, first == stop)
                )
            self._changed.notify_all()
        for _ in bounds[1:]:
            self._threads.submit(self._run_next)

    def _run_next(self) -> None:
        """Make the next part; where feeders have all, what they have for too long."""
        with self._changed:
            part, awaited = self._parts.popleft() if self._parts else None, self._awaited
        if part is not None:
            part.made_by(self.run_here)
        elif awaited % 2:
            self._help(awaited)

    def run_here(self, job: BatchJob, start: int, stop: int) -> None:
        """Make rows on a thread of this rank, and note what they take."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        self._work(job, start, stop)
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        with self._changed:
            self._made_here.add(stop - start, cpu_s, wall_s)

    def add_completed(self, cpu_s: float) -> None:
        """Add what the rest of rows took, on the loader's own thread."""
        with self._changed:
            self._made_here.add(0, cpu_s, cpu_s * self._num_threads)

    def add_made(self, num_rows: int, cpu_s: float, wall_s: float) -> None:
        """Add what rows took that were made here, past feeders."""
        with self._changed:
            self._made_here.add(num_rows, cpu_s, wall_s)

    def may_send(self, num_rows: int) -> bool:
        """Say whether a batch's rows may be sent; if not, it is made as without feeders."""
        with self._changed:
            self._batch_rows = num_rows
            if not self._links or self._sends_none:
                return False
            if self._is_tried and self._is_dear:
                return time.monotonic() >= self._try_at
            return not (self._is_tried and self._keeps_up)

    @property
    def _is_tried(self) -> bool:
        return min(self._made_here.rows, self._made_there.rows) >= TRIED_ROWS

    @property
    def _is_dear(self) -> bool:
        here, there = self._made_here, self._made_there
        return there.cpu_s / there.rows > WORTH * here.cpu_s / here.rows

    @property
    def _row_s(self) -> float:
        return self._made_here.wall_s / self._made_here.rows / self._num_threads

    @property
    def _keeps_up(self) -> bool:
        steps_s = self._steps_s
        return bool(steps_s) and self._batch_rows * self._row_s < BUSY * statistics.median(steps_s)

    def _pays(self, link: _Link) -> bool:
        """Whether a core gets the newest part: that saves time of this rank, which lacks it."""
        now = time.monotonic()
        if not self._is_tried:
            return True
        if self._is_dear:
            if now < self._try_at:
                return False
            # These few rows may have cost what others do not
            self._made_there, self._try_at = _Cost(), now + RETRY_S
            return True
        if self._keeps_up:
            return False
        row_s = self._row_s
        # It must be back before this rank has made all that is to be made before it
        newest = self._parts[-1]
        rows_ahead = sum(part.stop - part.start for part in self._parts if part is not newest)
        if not link.took_s or link.usual_s() <= row_s * rows_ahead or now > link.try_at:
            link.try_at = now + RETRY_S
            return True
        return False

    # What follows runs on the threads of cores, and on the one that looks for them.

    def _serve(self, link: _Link) -> None:
        """Give parts to a core, and take them in, until it is lost or all is over."""
        try:
            while True:
                while len(link.parts) < CREDITS and (part := self._next(link)):
                    # Noted first: a part that is sent in half is lost, too
                    with self._changed:
                        link.parts.append(_HeldRows(part, time.perf_counter()))
                    self._send(link, part)
                if not link.parts:
                    return
                self._take_in(link)
        except Exception as error:
            self._lose(link, error)
        finally:
            link.made.close()

    def _next(self, link: _Link) -> PartRows | None:
        """Take a part for a core; None: there is none now, or, where it has none, all is over."""
        with self._changed:
            while not self._closed.is_set():
                # The newest: its batch is needed last
                newest = self._parts[-1] if self._parts and not self._sends_none else None
                if newest and not newest.is_ours and self._pays(link):
                    return self._parts.pop()
                if link.parts:
                    break
                if link.is_cut():
                    raise EOFError("the connection was closed")
                self._changed.wait(LOOK_S)
        return None

    def _send(self, link: _Link, part: PartRows) -> None:
        cpu_s = time.thread_time()
        rows, pieces = self._packer.pack(part.job, part.start, part.stop)
        link.made.settimeout(link.limit_s())
        sent_bytes = send(link.made, tuple(rows), pieces)
        with self._changed:
            self.sent_bytes += sent_bytes
            self._made_there.add(0, time.thread_time() - cpu_s)

    def _take_in(self, link: _Link) -> None:
        held = link.parts[0]
        part = held.part
        now = time.perf_counter()
        until = max(held.sent + link.limit_s(), now + SOON_S)
        link.made.settimeout(until - now)
        cpu_s = time.thread_time()
        said, num_bytes, received_bytes = receive(link.made)
        made = MadeRows(*said)
        with self._changed:
            is_late = held.state == "here"
            held.state = held.state if is_late else "coming"
        if is_late:
            receive_bytes(link.made, num_bytes)
            link.parts.popleft()
            return
        if made.failure:
            self._sends_none |= made.has_no_form
            raise _RefusedError(made.failure)
        rooms = find_room(self._assembler, part.job, part.start, part.stop, made, num_bytes)
        if rooms is None:
            raise _RefusedError("it made rows of another form than those of their batch")
        receive_into(link.made, rooms, until=until)
        take_in(self._assembler, part.job, part.start, part.stop, made)
        came = time.perf_counter()
        with self._changed:
            link.parts.popleft()
            link.took_s.append(came - held.sent)
            self.rows += part.stop - part.start
            self.received_bytes += received_bytes
            self.busy_s += came - max(held.sent, link.idle_from)
            self._made_there.add(part.stop - part.start, time.thread_time() - cpu_s)
        link.idle_from = came
        part.made_by(_done)

    def _lose(self, link: _Link, error: Exception) -> None:
        """Make the parts of a core that is lost here."""
        with self._changed:
            parts = [one.part._replace(is_ours=True) for one in link.parts if one.state != "here"]
            self._drop(link)
            self._parts.extendleft(reversed(parts))
            self.lost_parts += len(parts)
        why = f"did not answer within {link.limit_s():.1f} s"
        if not isinstance(error, TimeoutError):
            why = f"has failed ({error or type(error).__name__})"
        then = f"it is tried again after {RETRY_S:.0f} s"
        if self._sends_none:
            then = (
                "so are all others; let the transform return arrays, tensors, numbers, text, bytes "
                "and lists, tuples and dicts of them, or give no feeders"
            )
        if not self._closed.is_set():
            self._tell(
                link.feeder, f"a core of it {why}; the rows that it had are made here, and {then}"
            )
        for _ in parts:
            self._threads.submit(self._run_next)

    def _drop(self, link: _Link) -> None:
        key = link.feeder.name, link.port
        self._links.pop(key, None)
        self._retry_at[key] = time.monotonic() + RETRY_S

    def _look_on(self) -> None:
        while not (self._closed.wait(LOOK_S) or self._sends_none):
            try:
                self._look()
            except Exception as error:  # the filesystem may fail: training goes on
                log.debug("feeders: %s", error)

    def _look(self, *, refuses: bool = False) -> None:
        """Connect to the cores of feeders that are new."""
        found = [(feeder, port) for feeder in announced(self._directory) for port in feeder.ports]
        first = self._replica * MOST_CORES % max(len(found), 1)
        for feeder, port in found[first:] + found[:first]:
            key, now = (feeder.name, port), time.monotonic()
            is_due = key not in self._links and self._retry_at.get(key, now) <= now
            if not is_due or len(self._links) >= MOST_CORES:
                continue
            try:
                link = _Link(feeder, port, self._connected(feeder, port))
            except (_RefusedError, WrongMessageError) as error:
                self._put_off(feeder)
                if refuses:
                    raise WorkerError(f"feeders: {feeder.words}: {error}") from error
                self._tell(feeder, str(error))
            except (OSError, EOFError):  # it has left, was killed, or its node is lost
                self._put_off(feeder)
            except WrongSecretError:
                self._put_off(feeder)
                self._tell(feeder, "another one answers there, and is not used; remove its file")
            else:
                self._begin_link(link)

    def _put_off(self, feeder: Announced) -> None:
        """Try none of its cores for a while: a file whose feeder was killed stays."""
        then = time.monotonic() + RETRY_S
        self._retry_at |= {(feeder.name, port): then for port in feeder.ports}

    def _begin_link(self, link: _Link) -> None:
        thread = threading.Thread(
            target=self._serve, args=(link,), name="tonari-feeder", daemon=True
        )
        with self._changed:
            if self._closed.is_set():
                link.made.close()
                return
            self._links[link.feeder.name, link.port] = link
            self._told.discard(link.feeder.name)
            self._serving = [one for one in self._serving if one.is_alive()] + [thread]
            thread.start()

    def _connected(self, feeder: Announced, port: int) -> socket.socket:
        """Connect to a core, and have it ready for what it is to make."""
        with contextlib.ExitStack() as undo:
            made = undo.enter_context(connect_apart(feeder.host, port, GREETING_S))
            greet(made, bytes.fromhex(feeder.secret), is_feeder=False)
            (theirs, *_), ours = receive(made), versions()
            names = [name for name in ours if name != CPU or self._runs_code]
            differ = next((name for name in names if theirs.get(name) != ours[name]), None)
            if differ is not None:
                cure = (
                    f"set {CPU_CURE} for both" if differ == CPU else "start it with this node's "
                    "environment"
                )  # fmt: skip
                raise _RefusedError(
                    f"it has {differ} {theirs.get(differ)}, but this node {ours[differ]}, expected "
                    f"the same, as bytes could differ; {cure}, or stop it"
                )
            send(made, [*map(str, sys.path)], [self._sent])
            if refused := receive(made)[0]:
                raise _RefusedError(
                    f"it cannot find the transform or a field ({refused}), expected what this node "
                    "imports; put the module where both see it, or stop the feeder"
                )
            undo.pop_all()
            return made

    def _tell(self, feeder: Announced, words: str) -> None:
        """Log it, once until it is connected again."""
        if feeder.name not in self._told:
            self._told.add(feeder.name)
            log.warning("[replica %d] %s: %s", self._replica, feeder.words, words)

    def close(self) -> None:
        """Leave the feeders; once nothing is being made. Idempotent."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            links, serving = [*self._links.values()], self._serving
            self._links = {}
        for link in links:
            with contextlib.suppress(OSError):
                link.made.shutdown(socket.SHUT_RDWR)
        for thread in (self._looking, *serving):
            thread.join()


def _done(job: BatchJob, start: int, stop: int) -> None:
    """Make nothing: all is there."""
