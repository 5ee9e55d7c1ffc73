"""What must hold of a job that was interrupted, beside one that was not."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataio.state.snapshot import load_scores
from tests.faults.kill.job import NUM_SAMPLES, Options, outcome
from tests.faults.kill.train_job import NUM_SAMPLES as NUM_TRAINED
from tests.faults.kill.train_job import TrainOptions
from tests.trainer.run.runs import lines
from tonari.trainer.checkpoint.directory import latest
from tonari.trainer.checkpoint.export import read_checkpoint

Record = dict[str, Any]
AnyOptions = Options | TrainOptions

TRAINED = ("ids", "slots", "weights", "dataset", "lap", "drawn")
"""What is equal at the same epoch and step, bit for bit."""

ALWAYS = (
    "meta.json", "manifest.json", "lock", "bandwidth", "fixed-*.npy", "headers.npy", "heap-*.bin"
)  # fmt: skip
"""Files of a cache's directory beside those that its manifest names: `docs/cache_format.md`."""


@dataclass(frozen=True)
class Start:
    """One start of a job, as its ranks logged it.

    Attributes:
        logs: Of each rank.
        statuses: Exit status of each rank.
    """

    logs: Sequence[Sequence[Record]]
    statuses: Sequence[int]

    @property
    def interrupted(self) -> bool:
        """Whether it ended as the schedule wanted, before all epochs were done."""
        kinds = {record["kind"] for log in self.logs for record in log}
        return "kill" in kinds or "stop" in kinds

    @property
    def ended(self) -> bool:
        """Whether all ranks came to the end."""
        return not any(self.statuses) and all(
            any(record["kind"] == "end" for record in log) for log in self.logs
        )


def read_log(path: Path) -> list[Record]:
    """Read what a rank logged; nothing if it was ended before that."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(record: Record) -> tuple[int, str, int]:
    """Where in the run a batch came."""
    return record["epoch"], record["kind"], record["step"]


def batches(log: Sequence[Record]) -> list[Record]:
    """Keep what was trained, or got a new score."""
    return [record for record in log if record["kind"] in ("step", "refresh")]


def faults_of_batches(whole: Start, starts: Sequence[Start]) -> Iterator[str]:
    """Compare each batch of every start with the one that an undisturbed run had there."""
    for rank, log in enumerate(whole.logs):
        expected = batches(log)
        places = {key(record): number for number, record in enumerate(expected)}
        reached = 0
        for number, start in enumerate(starts):
            found = batches(start.logs[rank])
            begin = places.get(key(found[0])) if found else reached
            where = f"start {number}, rank {rank}"
            if begin is None or begin > reached:
                yield f"{where}: goes on at {key(found[0])}, after {reached} batches"
                continue
            for record, wanted in zip(found, expected[begin:], strict=False):
                yield from _faults_of(record, wanted, where)
            if len(found) > len(expected) - begin:
                yield f"{where}: has {len(found)} batches from number {begin} on, too many"
            saved = [n for n, record in enumerate(start.logs[rank]) if record["kind"] == "saved"]
            if saved and number + 1 < len(starts):
                # All that came before the save is kept.
                kept = begin + len(batches(start.logs[rank][: saved[-1]]))
                after = [b for s in starts[number + 1 :] for b in batches(s.logs[rank])]
                if after and places.get(key(after[0]), 0) < kept:
                    yield f"{where}: saved {kept} batches, but {key(after[0])} came again"
            reached = max(reached, begin + len(found)) if found else reached
        if reached != len(expected):
            yield f"rank {rank}: {reached} of {len(expected)} batches in all"


def _faults_of(record: Record, wanted: Record, where: str) -> Iterator[str]:
    where = f"{where}, epoch {record['epoch']}, {record['kind']} {record['step']}"
    if key(record) != key(wanted):
        yield f"{where}: expected {key(wanted)}"
    if record["wrong"]:
        yield f"{where}: samples {record['wrong']} have other samples' bytes"
    for name in TRAINED:
        if record[name] != wanted[name]:
            yield f"{where}: {name} are {record[name]}, expected {wanted[name]}"


def faults_of_whole(whole: Start, *, shows_all: bool, repeats: bool = False) -> Iterator[str]:
    """Check an undisturbed run by itself: no sample of a lap is trained twice or left out.

    Args:
        whole: The run.
        shows_all: Whether each epoch trains as many rows as the dataset has.
        repeats: Whether a sample may come several times in a lap.
    """
    seen: dict[tuple[str, int, str], list[int]] = {}
    for log in whole.logs:
        for record in batches(log):
            ids = [i for i, slot in zip(record["ids"], record["slots"], strict=True) if slot >= 0]
            seen.setdefault((record["dataset"], record["lap"], record["kind"]), []).extend(ids)
            if record["wrong"]:
                yield f"undisturbed: samples {record['wrong']} have other samples' bytes"
    for (dataset, lap, kind), ids in seen.items():
        if not repeats and len(set(ids)) != len(ids):
            yield f"undisturbed: lap {lap} of {dataset} has {len(ids) - len(set(ids))} {kind} twice"
        num_samples = {**NUM_SAMPLES, "train": NUM_TRAINED}[dataset]
        if kind == "refresh" and {*ids, *seen[dataset, lap, "step"]} != set(range(num_samples)):
            yield f"undisturbed: lap {lap} left samples out that it did not hide"
        if kind == "step" and shows_all and len(ids) != num_samples:
            yield f"undisturbed: lap {lap} of {dataset} trained {len(ids)} samples"


def faults_of_end(whole: Start, last: Start) -> Iterator[str]:
    """Compare where the runs stand at their ends."""
    for rank, (expected, found) in enumerate(zip(whole.logs, last.logs, strict=True)):
        states = [[r["state"] for r in log if r["kind"] == "end"] for log in (expected, found)]
        if states[0] != states[1]:
            yield f"rank {rank}: ends as {states[1]}, expected {states[0]}"


def faults_of_scores(options: Options, whole: Path, found: Path) -> Iterator[str]:
    """Compare the last save's scores, sample by sample, with the other run's and the truth."""
    for name in NUM_SAMPLES if options.mixed else ("large",):
        below = name if options.mixed else ""
        expected = load_scores(newest(whole) / below)
        scores = load_scores(newest(found) / below)
        if expected.dtype != scores.dtype or expected.tobytes() != scores.tobytes():
            differ = np.flatnonzero(expected != scores)
            yield f"{name}: scores of samples {differ.tolist()} differ: {scores[differ]}"
        names = set(scores.dtype.names or ())
        known = np.flatnonzero(scores["epoch"] >= 0)
        told = outcome(known, scores["epoch"][known])
        for column in names.intersection(told):
            wrong = known[scores[column][known] != told[column]]
            if len(wrong):
                yield f"{name}: {column} of samples {wrong.tolist()} are those of others"


def faults_of_training(whole: Path, found: Path) -> Iterator[str]:
    """Compare the metrics, line by line, and the weights in the last checkpoints."""
    expected, told = lines(whole / "run"), lines(found / "run")
    for number, (line, wanted) in enumerate(zip(told, expected, strict=False)):
        if line != wanted:
            names = [name for name in wanted if line.get(name) != wanted[name]]
            pairs = ", ".join(f"{name} {line.get(name)} not {wanted[name]}" for name in names)
            place = f"{wanted['kind']} of epoch {wanted['epoch']}, step {wanted['step']}"
            yield f"metrics, line {number + 1} ({place}): {pairs}"
    if len(told) != len(expected):
        yield f"metrics: {len(told)} lines, expected {len(expected)}"
    states = [latest(place / "run/checkpoints") for place in (whole, found)]
    if None in states or states[0].name != states[1].name:  # type: ignore[union-attr]
        yield f"checkpoints: the newest are {states}"
        return
    weights = [read_checkpoint(state)["model"] for state in states if state is not None]
    for name, values in weights[0].items():
        if not torch.as_tensor(values).equal(torch.as_tensor(weights[1][name])):
            yield f"checkpoints: {name} differs"


def newest(place: Path) -> Path:
    """Find the newest save as the job's user does."""
    return place / "saves" / (place / "newest").read_text()


def faults_of_source(options: AnyOptions, warm: Start, starts: Sequence[Start]) -> Iterator[str]:
    """What was staged once is not read again: no more than a start with whole caches reads."""
    if options.quota:
        return
    is_whole = False
    for number, start in enumerate(starts):
        for rank, log in enumerate(start.logs):
            read = max((record.get("source_bytes", 0) for record in log), default=0)
            most = max(record.get("source_bytes", 0) for record in warm.logs[rank])
            if is_whole and read > most:
                yield f"start {number}, rank {rank}: read {read} bytes of the source, not {most}"
        is_whole = is_whole or any(_has_staged_all(options, log) for log in start.logs)


def _has_staged_all(options: AnyOptions, log: Sequence[Record]) -> bool:
    """Whether a rank came past the collective end of all staging."""
    taken = batches(log)
    if options.mixed and options.stage == "overlap":
        return {"large", "small"} <= {r["dataset"] for r in taken if r["lap"] >= 1}
    return any(options.stage == "before" or record["epoch"] >= 1 for record in taken)


def litter(options: AnyOptions, place: Path, starts: Sequence[Start]) -> Iterator[str]:
    """Name every file that a job which was closed has no use for."""
    found = []
    for directory in sorted((place / "cache").glob("*/node*")):
        head = json.loads((directory / "manifest.json").read_text())
        named = {*_words(head), f"base-{head['serial']}.arrow"}
        dataset = directory.parent.name.partition("-")[0]
        always = (*ALWAYS, *(["staged-*"] if _is_staging(options, dataset, starts) else []))
        for path in sorted(directory.iterdir()):
            if path.name not in named and not any(path.match(pattern) for pattern in always):
                found.append(path)
    for directory in (place / "saves", place / "run", place / "cache"):
        for path in sorted(directory.rglob("*")):
            ends = path.suffix in (".partial", ".previous") or path.name.startswith(".partial")
            if ends and path not in found:
                found.append(path)
    if found:
        names = [str(path.relative_to(place)) for path in found]
        yield f"litter: {len(names)} files: {', '.join(names[:6])}"


def _is_staging(options: AnyOptions, dataset: str, starts: Sequence[Start]) -> bool:
    """Whether all starts ended within a dataset's first epoch, beside which it is staged."""
    taken = [record for start in starts for log in start.logs for record in batches(log)]
    laps = [record["lap"] for record in taken if record["dataset"] == dataset]
    return options.stage == "overlap" and max(laps, default=0) == 0


def _words(document: object) -> set[str]:
    if isinstance(document, dict):
        return set().union(*map(_words, document.values()))
    if isinstance(document, list):
        return set().union(*map(_words, document))
    return {document} if isinstance(document, str) else set()
