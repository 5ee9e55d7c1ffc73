"""The log as it is written while a run trains; see `files`."""

import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dataio.base.errors import StateError
from dataio.plan.epoch import EpochPlan, SamplingGroups
from dataio.plan.exclusion import Exclusion
from dataio.plan.segment import Position
from dataio.rowlog.attempts import Setup
from dataio.rowlog.files import (
    HEAD,
    LOG,
    MAGIC,
    NOTHING,
    STEPS,
    heads,
    pack_place,
    read_lines,
    read_place,
    write_line,
    write_once,
)
from dataio.rowlog.packed import pack_selection, pack_shown
from dataio.world import World
from dataio.world.agree import agree

log = logging.getLogger(__name__)

Place = tuple[str, int, int]
"""Name of a log, an attempt in it, and a step of the attempt's segment."""


MOST_FLUSHES = 2
"""Files on their way to the disk that an epoch does not wait for: those of its own beginning."""


class RowLog:
    """Writes what a loader trains. Collective: construction.

    A line that cannot be written costs a warning, not the run; what reads the log names the gap.

    Args:
        directory: Made if need be; on a filesystem that all nodes see.
        setup: What the loader was made with.
        costs: uint8[num_samples]: What rows cost; None: alike.
        world: All ranks.

    Attributes:
        name: Of the log, the same for all loaders that write it.

    Raises:
        StateError: On all ranks, if it cannot be written.
    """

    def __init__(
        self, directory: Path, setup: Setup, costs: NDArray[np.uint8] | None, world: World
    ) -> None:
        self._directory, self._setup, self._world = directory, setup, world
        self._file = self._steps = -1
        self._leads = world.rank == 0
        self._noted: tuple[int, int] | None = None
        # Lines, and selections of attempts, that could not be written yet
        self._pending: list[dict[str, object]] = []
        self._selections: deque[tuple[Path, int, bytes]] = deque()
        self._has_begun = self._has_warned = False
        # One thread brings files to the disk; ours alone hands them over and asks how it went
        self._flusher = ThreadPoolExecutor(1, "tonari-rows")
        self._flushes: deque[Future[None]] = deque()

        def begin() -> bytes:
            return b"" if world.rank else json.dumps(self._begin(costs)).encode()

        self.name, self._next = json.loads(agree(world, begin, doing="open the log of rows")[0])

    def begin(
        self,
        position: Position,
        plan: EpochPlan,
        sampling: SamplingGroups,
        exclusion: Exclusion,
        *,
        after: Place | None,
        begins: bool,
    ) -> None:
        """Note that an attempt begins. To be called on every rank.

        Args:
            position: Where.
            plan: The epoch's batches.
            sampling: All sampling groups.
            exclusion: What is left out for good.
            after: What it goes on from; None: it begins the run, or goes on from what is in no log.
            begins: Whether the run begins.
        """
        if after is not None and after[0] == self.name:  # whose own line may be in a gap
            self._next = max(self._next, after[1] + 1)
        number, self._next = self._next, self._next + 1
        self._has_begun = True
        world = self._world
        leads = (world.rank if len(sampling.sizes) == 1 else world.local_rank) == 0
        if self._setup.importance and leads:
            path = self._directory / f"node-{sampling.mine}.bin"
            data = pack_selection(plan.selection, sampling.num_rows)
            self._selections.append((path, number, data))
            self._try(self._add_selections)
        if world.rank:
            return
        width = np.array(sampling.replicas, np.int64)
        starts = np.cumsum(width) - width
        shown = np.add.reduceat(plan.dealt, starts)
        line = {
            "attempt": number,
            "after": after[1:] if after is not None and after[0] == self.name else None,
            "begins": begins,
            "position": position.to_json(),
            "shown": None if np.array_equal(shown, sampling.sizes) else pack_shown(shown),
        }

        def write() -> None:
            if exclusion.name:
                write_once(self._directory / f"excluded-{exclusion.name}.bin", exclusion.bits)
            self._append()
            self._flush(self._file)

        self._end(self._noted)
        self._noted = (number, position.running.steps)
        self._pending.append(line)
        self._try(write)

    @property
    def here(self) -> tuple[str, int] | None:
        """The log's name and the attempt under way; None before the first."""
        return (self.name, self._next - 1) if self._has_begun else None

    def progress(self, step: int) -> None:
        """Note that a batch was delivered: as many of the attempt's segment were."""
        if self._leads:  # between steps all code is cold: as little of it as there can be
            try:
                self._note(step)
            except OSError as error:
                self._warn(error)

    def pad(self, step: int, places: Sequence[int]) -> None:
        """Note which rows of this rank's batch could not be read and became padding.

        Args:
            step: Of the attempt's segment.
            places: In the batch.
        """
        rank, replica = self._world.rank, self._world.replica
        line = {"padded": self._next - 1, "step": step, "replica": replica, "places": [*places]}

        def write() -> None:
            path = self._directory / f"padded-{rank}.jsonl"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                # What a kill or a full disk has cut off before stands alone
                write_line(descriptor, line, is_apart=True)
            finally:
                os.close(descriptor)

        self._try(write)

    def count_padded(self, num_rows: int) -> None:
        """Note how many rows of all ranks became padding in the attempt, as its epoch ends.

        Only these are counted that `pad` noted in a file of their rank: a file that is lost later
        is missed.
        """
        if self._world.rank or not num_rows:
            return
        self._pending.append({"num_padded": num_rows, "attempt_ended": self._next - 1})
        self._try(self._append)

    def skip(self, steps: range) -> None:
        """Note that steps of the attempt's segment are passed over, the next ones."""
        if self._world.rank:
            return

        def write() -> None:
            self._append()
            self._flush(self._file)

        self._pending.append({"skipped": self._next - 1, "steps": [steps.start, steps.stop]})
        self._try(write)
        self.progress(steps.stop)

    def flush(self) -> None:
        """Bring all to the disk, so that what is saved next is known whole after a power cut."""

        def write() -> None:
            self._add_selections()
            if self._pending:
                self._append()
                self._flush(self._file)
            self._check_flushes(most=0)

        self._try(write)

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._try(self._add_selections)
        self._selections.clear()
        self._flusher.shutdown()
        self._try(lambda: self._check_flushes(most=0))
        for descriptor in (self._file, self._steps):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._steps = -1

    def _begin(self, costs: NDArray[np.uint8] | None) -> tuple[str, int]:
        """Open the files, on rank 0; return the log's name and the next attempt's number."""
        path = self._directory
        try:
            path.mkdir(parents=True, exist_ok=True)
            lines = [*read_lines(path / LOG)] if (path / LOG).exists() else []
            self._file = os.open(path / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._steps = os.open(path / STEPS, os.O_RDWR | os.O_CREAT, 0o666)
            if costs is not None:
                write_once(path / f"costs-{self._setup.costs}.bin", costs)
            # A line that a kill cut off stands alone
            os.write(self._file, b"\n" if lines else b"")
            name = next((str(line["log"]) for line in lines if "log" in line), "")
            if not name:
                name = secrets.token_hex(8)
                self._pending.append({"log": name})
            if not any("attempt" in line for line in lines):
                os.pwrite(self._steps, pack_place(name, *NOTHING), 0)
                os.fsync(self._steps)  # after a power cut an old step is there, but no zeros
            numbers = [int(line["attempt"]) for line in lines if "attempt" in line]
            self._end(read_place(path / STEPS, name))
            self._pending.append({"setup": self._setup.to_json()})
            self._append()
        except OSError as error:
            raise StateError(
                f"reports.rows: {path} cannot be written ({error}); give a directory that can, on "
                "a filesystem that every node sees"
            ) from error
        return name, max(numbers, default=-1) + 1

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            log.warning(
                "[rank %d] %s: the log of rows cannot be written (%s); it is tried again with "
                "each epoch and save, and has a gap unless that helps: free some space",
                self._world.rank, self._directory, error,
            )  # fmt: skip
        self._has_warned = True

    def _flush(self, descriptor: int) -> None:
        """Bring a file to the disk beside training, as one that others use may take long over it.

        A kill loses nothing of it meanwhile, a machine that fails may.
        """
        self._flushes.append(self._flusher.submit(_fsync, os.dup(descriptor)))
        self._check_flushes(most=MOST_FLUSHES)

    def _check_flushes(self, *, most: int) -> None:
        """Raise what went wrong with files handed over, and wait until few are under way."""
        while self._flushes and (len(self._flushes) > most or self._flushes[0].done()):
            self._flushes.popleft().result()

    def _append(self) -> None:
        """Write the lines that wait, each whole or to be written again; then how far they came."""
        while self._pending:
            # After what a full disk has cut off, the line stands alone
            write_line(self._file, self._pending[0], is_apart=self._has_warned)
            del self._pending[0]
        if self._noted is not None:
            os.pwrite(self._steps, pack_place(self.name, *self._noted), 0)

    def _note(self, step: int) -> None:
        self._noted = (self._next - 1, step)
        if not self._pending:  # else its attempt would have no line
            self._append()

    def _end(self, place: tuple[int, int] | None) -> None:
        """Note how far the attempt before this one came."""
        if place is not None:
            self._pending.append({"ended": place[0], "step": place[1]})

    def _add_selections(self) -> None:
        """Write the selections that wait, each whole or to be written again."""
        while self._selections:
            path, number, data = self._selections[0]
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # Over what a kill left half written, or whole and without its attempt's line
                known = (stop for attempt, *_, stop in heads(descriptor) if attempt < number)
                end = max(known, default=0)
                os.ftruncate(descriptor, end)
                whole = HEAD.pack(MAGIC, number, len(data), xxh3_64_intdigest(data)) + data
                done = 0
                while done < len(whole):
                    done += os.pwrite(descriptor, memoryview(whole)[done:], end + done)
                self._flush(descriptor)
            finally:
                os.close(descriptor)
            self._selections.popleft()


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
