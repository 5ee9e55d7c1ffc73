"""What must hold of every rehearsed job, as `docs/guarantees.md` lists it."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataio.base.atomic import read_record
from dataio.plan.layout import Layout
from dataio.rowlog.answers import Answers
from dataio.rowlog.attempts import find_course
from dataio.rowlog.reading import read_log
from dataio.state.snapshot import load_scores
from dataio.store.state import Head, judge
from importance import InfoBatch
from tests.faults.kill.job import outcome
from tests.faults.samples import check_files, node_directory
from tests.rehearsal.schedules import Schedule


class Delivered(NamedTuple):
    """A batch of one rank.

    Attributes:
        kind: ``"train"`` or ``"refresh"``.
        dataset: Which of a mixture's.
        epoch: Of the job.
        lap: Of the dataset.
        step: As the loader counts it.
        ids: Samples; -1 is padding.
    """

    kind: str
    dataset: str
    epoch: int
    lap: int
    step: int
    ids: tuple[int, ...]


Course = list[list[Delivered]]
"""Batches of each rank."""


def check_steps(course: Course) -> None:
    """Check that all ranks have the same steps, as far as each came.

    Raises:
        AssertionError: If not.
    """
    longest = max(course, key=len)
    for rank, batches in enumerate(course):
        for mine, its in zip(batches, longest, strict=False):
            assert mine[:5] == its[:5], f"rank {rank} is at {mine[:5]}, another one at {its[:5]}"


def check_same(course: Course, expected: Course, first: int) -> None:
    """Check that a start trained what an undisturbed run does from a batch on.

    Raises:
        AssertionError: If not.
    """
    for rank, (batches, wanted) in enumerate(zip(course, expected, strict=True)):
        assert len(batches) <= len(wanted) - first, f"rank {rank} trains on after the end"
        for found, its in zip(batches, wanted[first:], strict=False):
            assert found == its, f"rank {rank} got {found}, undisturbed it gets {its}"


def check_again(before: Course, course: Course) -> None:
    """Check that what is trained again after a restore, of its epoch, is the same.

    Args:
        before: What was trained before the restore and behind its save, on the same ranks.
        course: What was trained after the restore.

    Raises:
        AssertionError: If not.
    """
    for rank, (batches, again) in enumerate(zip(before, course, strict=True)):
        for wanted, found in zip(batches, again, strict=False):
            if wanted.epoch != batches[0].epoch or batches[0].step == 1:
                break  # more samples may have come meanwhile
            assert found == wanted, f"rank {rank} got {found}, before the restore {wanted}"


def check_whole(
    schedule: Schedule,
    parts: Sequence[Course],
    expected: Course | None,
    *,
    lengths: Mapping[int, int],
) -> None:
    """Check a run in whole: each sample once an epoch, or those that an undisturbed run has.

    Args:
        schedule: What was drawn.
        parts: What stayed of each start.
        expected: Of an undisturbed run, on any ranks.
        lengths: Samples of each epoch, where that changes.

    Raises:
        AssertionError: If a sample was left out or came twice.
    """
    for part in parts:
        assert len({len(batches) for batches in part}) == 1, "ranks have unequal steps"
    found = _samples(batch for part in parts for batches in part for batch in batches)
    if expected is not None:
        wanted = _samples(batch for batches in expected for batch in batches)
        for at in wanted.keys() | found.keys():
            more, less = found[at] - wanted[at], wanted[at] - found[at]
            assert not more + less, f"{at}: trained once more {dict(more)}, less {dict(less)}"
    importance = schedule.job.options.get("importance")
    for at, ids in list(found.items()):
        kind, dataset, lap = at
        num_samples = lengths.get(lap, schedule.job.num_samples)
        every = set(range(20 if dataset == "others" else num_samples))
        assert ids.keys() <= every, f"{at}: {ids.keys() - every} are of no sample"
        assert max(ids.values(), default=1) == 1, f"{at}: twice {ids}"
        goes_on = schedule.mixed and ("train", dataset, lap + 1) not in found
        if kind == "train" and not isinstance(importance, InfoBatch) and not goes_on:
            scored = ids.keys() | found["refresh", dataset, lap].keys()
            assert scored == every, f"{at}: not trained, nor scored anew: {every - scored}"
        if kind == "refresh":
            assert not ids.keys() & found["train", dataset, lap].keys(), f"{at}: trained, hidden"


def _samples(batches: Any) -> defaultdict[tuple[str, str, int], Counter[int]]:
    found: defaultdict[tuple[str, str, int], Counter[int]] = defaultdict(Counter)
    for batch in batches:
        found[batch.kind, batch.dataset, batch.lap].update(i for i in batch.ids if i >= 0)
    return found


def check_scores(path: Path, parts: Sequence[Course]) -> None:
    """Check that each sample's score is what was last reported of it.

    Raises:
        AssertionError: If one is older, or another sample's.
    """
    scores = load_scores(path)
    last = np.full(len(scores), -1)
    for part in parts:
        for batch in (batch for batches in part for batch in batches):
            for sample_id in filter(lambda each: each >= 0, batch.ids):
                last[sample_id] = max(last[sample_id], batch.lap)
    late = np.flatnonzero(scores["epoch"] != last)
    assert not len(late), f"samples {late}: scores of {scores['epoch'][late]}, not {last[late]}"
    known = np.flatnonzero(last >= 0)
    for column, values in outcome(known, last[known]).items():
        if column in (scores.dtype.names or ()):
            wrong = known[scores[column][known] != values]
            assert not len(wrong), f"samples {wrong}: {column} was reported of others"


def check_row_log(directory: Path, shuffle: Any, parts: Sequence[Course]) -> None:
    """Check that the log of rows answers what was trained, and in which order.

    Raises:
        AssertionError: If it says otherwise.
    """
    wanted: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for part in parts:
        for rank, batches in enumerate(part):
            for batch in batches:
                if batch.kind == "train":
                    wanted[batch.epoch, rank] += [i for i in batch.ids if i >= 0]
    logged = read_log(directory)
    answers = Answers(find_course(logged.attempts), logged, shuffle)
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in answers.course.kept:
        rows = answers.at(piece, piece.steps)
        for replica, sample_id in zip(rows.replica.tolist(), rows.sample_id.tolist(), strict=True):
            found[piece.attempt.epoch, replica].append(sample_id)
    assert answers.course.is_whole, "the log of rows has a gap"
    differ = sorted(at for at in wanted.keys() | found.keys() if wanted[at] != found[at])
    assert not differ, f"the log of rows differs in (epoch, rank) {differ}"


def check_storage(schedule: Schedule, root: Path, last: Any) -> None:
    """Check what a job that ended has left: no litter, rows that prove themselves, and no more.

    Args:
        schedule: What was drawn.
        root: Of caches and saves.
        last: The job on the last ranks.

    Raises:
        AssertionError: If there is more or less.
    """
    if "quota" not in schedule.job.cache:
        check_files(last, root / "cache")
    for node in range(len(last.nodes)):
        directory = node_directory(root / "cache", node)
        names = {path.name for path in directory.iterdir()}
        verdict = judge(names, Head.from_record(read_record(directory / "manifest.json")))
        assert not verdict.litter, f"{directory}: litter {verdict.litter}"
        if schedule.same_nodes and not last.cache and "fixed-0.npy" in names:
            layout = Layout(tuple(last.nodes), last.num_samples)
            leaving = (
                last.options["shuffle"].num_leaving(layout) if "shuffle" in last.options else 0
            )
            rows = len(np.load(directory / "fixed-0.npy", mmap_mode="r"))
            most = int(layout.pool_sizes[node]) + 2 * leaving * last.nodes[node]
            if last.options.get("shuffle") is None or not last.options["shuffle"].holds_all:
                assert rows <= most, f"{directory}: {rows} rows, at most {most} are promised"
    left = [path for path in (root / "saves").iterdir() if path.suffix in (".partial", ".previous")]
    assert not left, f"saves: litter {left}"


def check_quota(directory: Path, quota_bytes: int) -> None:
    """Check that a cache takes no more than it may.

    Raises:
        AssertionError: If it does.
    """
    held = sum(512 * path.lstat().st_blocks for path in directory.iterdir())
    assert held <= quota_bytes, f"{directory}: {held} bytes, the quota is {quota_bytes}"
