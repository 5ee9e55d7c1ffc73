"""A log of rows as it lies on disk, read."""

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dataio.base.errors import StateError
from dataio.plan.exclusion import Exclusion, exclude_ids
from dataio.plan.policies import Selection
from dataio.plan.segment import Position
from dataio.rowlog.attempts import Attempt, Setup
from dataio.rowlog.files import LOG, STEPS, damaged, heads, read_lines, read_once, read_place
from dataio.rowlog.packed import unpack_selection

ROWS = "rows"
"""The log's name beside a run's checkpoints."""


@dataclass(frozen=True)
class RowLogRead:
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
            raise damaged(path, f"it cannot be read ({error})") from error
        try:
            for number, start, checksum, stop in heads(descriptor):
                if number == attempt.number:
                    data = os.pread(descriptor, stop - start, start)
                    if xxh3_64_intdigest(data) == checksum:
                        return unpack_selection(data)
        finally:
            os.close(descriptor)
        raise damaged(
            path, f"what epoch {attempt.epoch} hid is not there whole; the disk may have been full"
        )

    def exclusion(self, name: str, num_samples: int) -> Exclusion:
        """Read a list of samples that were left out for good."""
        if not name:
            return Exclusion(num_samples)
        bits = read_once(self.directory / f"excluded-{name}.bin")
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        exclusion = exclude_ids([ids], max(num_samples, len(bits) * 8)).of(num_samples)
        if exclusion.name != name:
            raise damaged(
                self.directory / f"excluded-{name}.bin", f"it is the list {exclusion.name}"
            )
        return exclusion

    def costs(self, name: str) -> NDArray[np.uint8] | None:
        """Read what rows cost; None: alike."""
        return read_once(self.directory / f"costs-{name}.bin") if name else None


def find_log(run: str | os.PathLike[str], *, log: str | os.PathLike[str] | None) -> RowLogRead:
    """Read the log that belongs to a run.

    Args:
        run: A run's directory, its log, a checkpoint, or what `Loader.save` wrote.
        log: The log's directory, where it is elsewhere than beside these.

    Raises:
        StateError: If there is none, or it is damaged.
    """
    path = Path(run)
    if log is not None:
        return read_log(Path(log))
    near = [path, path / ROWS, *(parent / ROWS for parent in path.absolute().parents[:3])]
    for place in near:
        if (place / LOG).exists():
            return read_log(place)
    raise StateError(
        f"{path}: found no log of rows, expected the directory of a run of `tonari train`, a "
        "checkpoint in it, what Reports(rows=DIRECTORY) was given, or with log= what loader.save "
        "wrote; give one of these"
    )


def read_log(directory: Path) -> RowLogRead:
    """Read a log; one that is being written is read as far as it is.

    Raises:
        StateError: If there is none, or it is damaged.
    """
    path = directory / LOG
    try:
        lines = [*read_lines(path)]
    except OSError as error:
        raise StateError(
            f"{path}: found no log of rows ({error}), expected what a loader with "
            "reports=Reports(rows=DIRECTORY), or `tonari train`, writes; give that directory"
        ) from error
    name, setup, attempts = "", None, dict[int, Attempt]()
    stops: dict[int, int] = {}
    skipped: dict[int, list[tuple[int, int]]] = {}
    num_padded: dict[int, int] = {}
    last: Attempt | None = None
    for line in lines:
        if "log" in line:
            name = name or str(line["log"])
        elif "setup" in line:
            setup = Setup.from_json(line["setup"])
        elif "ended" in line:
            stops[line["ended"]] = max(line["step"], stops.get(line["ended"], 0))
        elif "num_padded" in line:
            num_padded[line["attempt_ended"]] = line["num_padded"]
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
    # A log that was killed as it began may have no name, no attempt, and no file of steps.
    has_steps = attempts or (name and (directory / STEPS).exists())
    place = read_place(directory / STEPS, name) if has_steps else None
    if place is not None:
        if place[0] not in attempts:
            raise damaged(path, f"attempt {place[0]} is missing")
        stops[place[0]] = max(place[1], stops.get(place[0], 0))
    padded = _read_padded(directory)
    for number, expected in num_padded.items():
        if len(padded.get(number, ())) < expected:
            raise damaged(
                directory / "padded-*.jsonl",
                f"of attempt {number} they list {len(padded.get(number, ()))} rows that could not "
                f"be read, and {LOG} counts {expected}",
            )
    ordered = [
        replace(
            attempt,
            stop=max(stops.get(number, 0), attempt.stop),
            skipped=tuple(skipped.get(number, ())),
            padded=tuple(padded.get(number, ())),
        )
        for number, attempt in sorted(attempts.items())
    ]
    return RowLogRead(directory, name, tuple(ordered))


def _read_padded(directory: Path) -> Mapping[int, list[tuple[int, int, int]]]:
    """Read which rows became padding, by attempt: step, replica, place."""
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for path in sorted(directory.glob("padded-*.jsonl")):
        for line in read_lines(path):
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
