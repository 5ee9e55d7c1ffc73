"""The log on disk: a directory with a line for each attempt, and a file of selections a node.

    log.jsonl           a line of JSON for each loader and each attempt, with its checksum
    steps               attempt and step that rank 0 was delivered last, written over at each step
    node-K.bin          what an epoch hides, and weights, of the sampling group of node K
    padded-R.jsonl      a line for each batch of rank R of which some rows could not be read
    excluded-NAME.bin   samples that were left out for good
    costs-NAME.bin      what rows cost, where batches are made to cost alike

Rank 0 writes all but ``node-K.bin``, which the first rank of node K appends to, and
``padded-R.jsonl``, which rank R does.
"""

import json
import logging
import os
import re
import secrets
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dataio.base.atomic import write_file
from dataio.base.digest import digest
from dataio.base.errors import StateError
from dataio.plan.epoch import EpochPlan, SamplingGroups
from dataio.plan.exclusion import Exclusion, exclude_ids
from dataio.plan.policies import Selection
from dataio.plan.segment import Position
from dataio.rowlog.attempts import Attempt, Setup
from dataio.rowlog.packed import pack_selection, pack_shown, unpack_selection
from dataio.world import World
from dataio.world.agree import agree

LOG, STEPS = "log.jsonl", "steps"
HEAD = struct.Struct("<4sqqQ")
"""Of a selection: MAGIC, attempt, bytes that follow, their checksum."""
MAGIC = b"TRL1"
PLACE = struct.Struct("<qq")
WHOLE = re.compile(rb'"checksum": ".{18,19}$|checksum.{4}[0-9a-f]{16}"}$', re.DOTALL)
"""Matches the end of a line that was written to its end, though some byte of it has changed."""

log = logging.getLogger(__name__)

Place = tuple[str, int, int]
"""Name of a log, an attempt in it, and a step of the attempt's segment."""


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
        self._noted: tuple[int, int] | None = None
        # Lines that could not be written yet
        self._pending: list[dict[str, object]] = []
        self._has_begun = self._has_warned = False

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
            self._try(lambda: self._add_selection(number, plan.selection, sampling))
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
                _write_once(self._directory / f"excluded-{exclusion.name}.bin", exclusion.bits)
            self._append()
            os.fsync(self._file)
            self._note(position.running.steps)

        self._end(self._noted)
        self._pending.append(line)
        self._try(write)

    @property
    def here(self) -> tuple[str, int] | None:
        """The log's name and the attempt under way; None before the first."""
        return (self.name, self._next - 1) if self._has_begun else None

    def progress(self, step: int) -> None:
        """Note that a batch was delivered: as many of the attempt's segment were."""
        if self._world.rank == 0:
            self._try(lambda: self._note(step))

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
                _write_line(descriptor, line, is_apart=True)
            finally:
                os.close(descriptor)

        self._try(write)

    def skip(self, steps: range) -> None:
        """Note that steps of the attempt's segment are passed over, the next ones."""
        if self._world.rank:
            return

        def write() -> None:
            self._append()
            os.fsync(self._file)

        self._pending.append({"skipped": self._next - 1, "steps": [steps.start, steps.stop]})
        self._try(write)
        self.progress(steps.stop)

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        for descriptor in (self._file, self._steps):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._steps = -1

    def _begin(self, costs: NDArray[np.uint8] | None) -> tuple[str, int]:
        """Open the files, on rank 0; return the log's name and the next attempt's number."""
        path = self._directory
        try:
            path.mkdir(parents=True, exist_ok=True)
            lines = [*_read_lines(path / LOG)] if (path / LOG).exists() else []
            self._file = os.open(path / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._steps = os.open(path / STEPS, os.O_RDWR | os.O_CREAT, 0o666)
            if costs is not None:
                _write_once(path / f"costs-{self._setup.costs}.bin", costs)
            # A line that a kill cut off stands alone
            os.write(self._file, b"\n" if lines else b"")
            name = next((str(line["log"]) for line in lines if "log" in line), "")
            if not name:
                name = secrets.token_hex(8)
                self._pending.append({"log": name})
            numbers = [int(line["attempt"]) for line in lines if "attempt" in line]
            self._end(_read_place(path / STEPS))
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
            if not self._has_warned:
                log.warning(
                    "[rank %d] %s: the log of rows cannot be written (%s); it is tried again as "
                    "each epoch begins, and has a gap unless that helps: free some space",
                    self._world.rank, self._directory, error,
                )  # fmt: skip
            self._has_warned = True

    def _append(self) -> None:
        """Write the lines that wait, each whole or to be written again."""
        while self._pending:
            # After what a full disk has cut off, the line stands alone
            _write_line(self._file, self._pending[0], is_apart=self._has_warned)
            del self._pending[0]

    def _note(self, step: int) -> None:
        self._noted = (self._next - 1, step)
        if not self._pending:  # else its attempt would have no line
            os.pwrite(self._steps, PLACE.pack(*self._noted), 0)

    def _end(self, place: tuple[int, int] | None) -> None:
        """Note how far the attempt before this one came."""
        if place is not None:
            self._pending.append({"ended": place[0], "step": place[1]})

    def _add_selection(self, number: int, selection: Selection, sampling: SamplingGroups) -> None:
        data = pack_selection(selection, sampling.num_rows)
        path = self._directory / f"node-{sampling.mine}.bin"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Over what a kill left half written, or whole and without its attempt's line
            known = (stop for attempt, *_, stop in _heads(descriptor) if attempt < number)
            end = max(known, default=0)
            os.ftruncate(descriptor, end)
            whole = HEAD.pack(MAGIC, number, len(data), xxh3_64_intdigest(data)) + data
            done = 0
            while done < len(whole):
                done += os.pwrite(descriptor, memoryview(whole)[done:], end + done)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_line(descriptor: int, line: Mapping[str, object], *, is_apart: bool) -> None:
    """Append a line with its checksum, behind an empty one where it is to stand apart."""
    text = json.dumps({**line, "checksum": digest(json.dumps(line, sort_keys=True))})
    whole = (b"\n" if is_apart else b"") + text.encode() + b"\n"
    if os.write(descriptor, whole) < len(whole):
        raise OSError(f"no room for {len(whole)} bytes")


@dataclass(frozen=True)
class Logged:
    """A log as it lies on disk.

    Attributes:
        directory: Where.
        name: Of the log.
        attempts: By number.
    """

    directory: Path
    name: str
    attempts: tuple[Attempt, ...]

    def selection(self, attempt: Attempt, node: int) -> Selection:
        """Read what an attempt's epoch selected of a node's sampling group.

        Raises:
            StateError: If it is damaged.
        """
        if not attempt.setup.importance:
            return Selection()
        path = self.directory / f"node-{node}.bin"
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _damaged(path, f"it cannot be read ({error})") from error
        try:
            for number, start, checksum, stop in _heads(descriptor):
                if number == attempt.number:
                    data = os.pread(descriptor, stop - start, start)
                    if xxh3_64_intdigest(data) == checksum:
                        return unpack_selection(data)
        finally:
            os.close(descriptor)
        raise _damaged(
            path, f"what epoch {attempt.epoch} hid (attempt {attempt.number}) is not there whole"
        )

    def exclusion(self, name: str, num_samples: int) -> Exclusion:
        """Read a list of samples that were left out for good."""
        if not name:
            return Exclusion(num_samples)
        bits = _read_once(self.directory / f"excluded-{name}.bin")
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        exclusion = exclude_ids([ids], max(num_samples, len(bits) * 8)).of(num_samples)
        if exclusion.name != name:
            raise _damaged(
                self.directory / f"excluded-{name}.bin", f"it is the list {exclusion.name}"
            )
        return exclusion

    def costs(self, name: str) -> NDArray[np.uint8] | None:
        """Read what rows cost; None: alike."""
        return _read_once(self.directory / f"costs-{name}.bin") if name else None


def read_log(directory: Path) -> Logged:
    """Read a log; one that is being written is read as far as it is.

    Raises:
        StateError: If there is none, or it is damaged.
    """
    path = directory / LOG
    try:
        lines = [*_read_lines(path)]
    except OSError as error:
        raise StateError(
            f"{path}: found no log of rows ({error}), expected what a loader with "
            "reports=Reports(rows=DIRECTORY), or `tonari train`, writes; give that directory"
        ) from error
    name, setup, attempts = "", None, dict[int, Attempt]()
    stops: dict[int, int] = {}
    skipped: dict[int, list[tuple[int, int]]] = {}
    last: Attempt | None = None
    for line in lines:
        if "log" in line:
            name = name or str(line["log"])
        elif "setup" in line:
            setup = Setup.from_json(line["setup"])
        elif "ended" in line:
            stops[line["ended"]] = max(line["step"], stops.get(line["ended"], 0))
        elif "skipped" in line:
            first, stop = line["steps"]
            skipped.setdefault(line["skipped"], []).append((first, stop))
        elif setup is not None:
            attempt = _attempt_of(line, setup)
            if last is not None:
                attempt = _sharing_layout(attempt, last)
            last = attempts[attempt.number] = attempt
            if attempt.after is not None:
                number, step = attempt.after
                stops[number] = max(step, stops.get(number, 0))
    place = _read_place(directory / STEPS)
    if place is not None:
        if place[0] not in attempts:
            raise _damaged(path, f"attempt {place[0]} is missing")
        stops[place[0]] = max(place[1], stops.get(place[0], 0))
    padded = _read_padded(directory)
    ordered = [
        replace(
            attempt,
            stop=max(stops.get(number, 0), attempt.stop),
            skipped=tuple(skipped.get(number, ())),
            padded=tuple(padded.get(number, ())),
        )
        for number, attempt in sorted(attempts.items())
    ]
    return Logged(directory, name, tuple(ordered))


def _read_padded(directory: Path) -> Mapping[int, list[tuple[int, int, int]]]:
    """Read which rows became padding, by attempt: step, replica, place."""
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for path in sorted(directory.glob("padded-*.jsonl")):
        for line in _read_lines(path):
            rows = [(line["step"], line["replica"], place) for place in line["places"]]
            found[line["padded"]].extend(rows)
    return found


def _attempt_of(line: dict[str, Any], setup: Setup) -> Attempt:
    position, after = Position.from_json(line["position"]), line["after"]
    return Attempt(
        number=line["attempt"], setup=setup, after=None if after is None else (after[0], after[1]),
        begins=line["begins"], position=position, shown=line["shown"],
        stop=position.running.steps,
    )  # fmt: skip


def _sharing_layout(attempt: Attempt, last: Attempt) -> Attempt:
    """Let an attempt have the tuple of the one before it, if it is equal: compared at once."""
    running, known = attempt.position.running, last.position.running.replicas
    if running.replicas != known:
        return attempt
    segments = (*attempt.position.ended, replace(running, replicas=known))
    return replace(attempt, position=replace(attempt.position, segments=segments))


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the whole lines; what a kill or a full disk cut off is none."""
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            line = dict(json.loads(text))
            checksum = line.pop("checksum")
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ValueError) and text.startswith(b"{") and not WHOLE.search(text):
                continue
            raise _damaged(path, f"line {number} cannot be read ({error})") from error
        if checksum != digest(json.dumps(line, sort_keys=True)):
            raise _damaged(path, f"line {number} does not match its checksum")
        yield line


def _read_place(path: Path) -> tuple[int, int] | None:
    data = path.read_bytes() if path.exists() else b""
    if len(data) < PLACE.size:
        return None
    attempt, step = PLACE.unpack(data[: PLACE.size])
    return attempt, step


def _heads(descriptor: int) -> Iterator[tuple[int, int, int, int]]:
    """Walk through the whole selections of a file: attempt, first byte, checksum, end."""
    start, size = 0, os.fstat(descriptor).st_size
    while start + HEAD.size <= size:
        magic, attempt, num_bytes, checksum = HEAD.unpack(os.pread(descriptor, HEAD.size, start))
        stop = start + HEAD.size + num_bytes
        if magic != MAGIC or num_bytes < 0 or stop > size:
            return
        yield attempt, start + HEAD.size, checksum, stop
        start = stop


def _write_once(path: Path, values: NDArray[np.uint8]) -> None:
    if not path.exists():
        data = zlib.compress(values.tobytes(), 1)
        write_file(path, xxh3_64_intdigest(data).to_bytes(8, "little") + data)


def _read_once(path: Path) -> NDArray[np.uint8]:
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    data = whole[8:]
    if xxh3_64_intdigest(data).to_bytes(8, "little") != whole[:8]:
        raise _damaged(path, "it does not match its checksum")
    return np.frombuffer(zlib.decompress(data), np.uint8)


def _damaged(path: Path, why: str) -> StateError:
    return StateError(
        f"{path}: the log of rows is damaged: {why}, expected what Tonari wrote; bring the "
        "directory back from a copy"
    )
