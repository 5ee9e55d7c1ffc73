"""A job of several ranks rehearsed: ended where a seed says, started again, and audited.

What runs is the shipped loader with its plan, cache, exchange and saves. The seed draws the job,
the order of all threads, how long messages take, when and how the job ends, what the disks keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from importance import InfoBatch
from shuffle import Local
from tests.rehearsal import audit
from tests.rehearsal.audit import Course
from tests.rehearsal.disks import Disks
from tests.rehearsal.growth import Growth
from tests.rehearsal.scheduler import Scheduler, Task
from tests.rehearsal.schedules import Nodes, Planned, Schedule
from tests.rehearsal.start import Saved, Start
from tests.rehearsal.threads import rehearsed


@dataclass(frozen=True)
class Audited:
    """A rehearsal that went well.

    Attributes:
        digest: A hash of all that happened.
        num_points: Passed, of all its starts.
        ended: What was being done where starts were ended.
        happened: The faults that did happen.
    """

    digest: str
    num_points: int
    ended: tuple[str, ...]
    happened: tuple[str, ...]


def rehearse(schedule: Schedule, root: Path) -> Audited:
    """Run a job as drawn, and audit it.

    Args:
        schedule: What is drawn.
        root: A new directory.

    Raises:
        AssertionError: If an invariant does not hold.
    """
    expected, most_bytes = None, None
    if schedule.same_nodes:
        undisturbed = _run_undisturbed(schedule, schedule.starts[0].nodes, root / "undisturbed")
        expected, most_bytes = undisturbed.course, sum(undisturbed.read_bytes)
    alone = expected
    hides_alike = isinstance(schedule.job.options.get("importance"), InfoBatch)
    if hides_alike and not (schedule.job.cache or schedule.grows):
        # It hides the same samples on any ranks: none of them tops a step up.
        alone = _run_undisturbed(schedule, (1,), root / "alone").course
    growth = Growth(root / "shards", schedule.job.num_samples) if schedule.grows else None
    start: Start

    def on_point(task: Task, what: str) -> None:
        start.pass_point(task, what)

    scheduler = Scheduler(schedule.seed, on_point=on_point)
    disks = Disks(root / "rehearsed", scheduler, quota_bytes=schedule.job.cache.get("quota"))
    (disks.root / "saves").mkdir(parents=True)
    newest: list[Saved] = []
    ended: list[str] = []
    happened: list[str] = []
    parts: list[tuple[int, Course]] = []
    with rehearsed(scheduler), disks.recording():
        for number, planned in enumerate(schedule.starts):
            path = newest[0].path if newest else None
            start = Start(
                schedule, planned, disks.root, scheduler, path=path, number=number, growth=growth
            )
            start.run()
            if schedule.same_nodes and not schedule.job.cache:
                read_bytes = sum(start.read_bytes)
                assert read_bytes <= (most_bytes or 0), f"{read_bytes} bytes of the source are read"
                has_all = _has_staged(start, schedule) and "second" not in start.happened
                most_bytes = 0 if has_all else most_bytes
            if any(start.course):
                begun = _find_begun(newest, start.course, expected)
                first = begun.num_batches if begun else 0
                if begun is not None and len({each.nodes for each in schedule.starts}) == 1:
                    at, part = parts[-1]
                    audit.check_again([each[max(first - at, 0) :] for each in part], start.course)
                parts = [(at, [each[: max(first - at, 0)] for each in part]) for at, part in parts]
                parts.append((first, start.course))
                if schedule.same_nodes and expected is not None:
                    audit.check_same(start.course, expected, first)
                newest = _find_newest(start, begun, first)
            ended.append(start.ended or "the end")
            happened += start.happened
            disks.close_all()
            if start.ended:
                disks.crash(planned.kept)
                for file in disks.root.glob(f"cache/*/node{planned.lost}/*"):
                    file.unlink()
    courses = [course for _, course in parts]
    audit.check_whole(schedule, courses, alone, lengths=growth.lengths if growth else {})
    final = disks.root / "saves" / "final"
    if "importance" in schedule.job.options:
        audit.check_scores(final, courses)
    if schedule.logs_rows:
        audit.check_row_log(
            disks.root / "rows", schedule.job.options.get("shuffle", Local()), courses
        )
    audit.check_storage(schedule, disks.root, start.job)
    return Audited(scheduler.digest(), scheduler.num_points, tuple(ended), tuple(happened))


def _has_staged(start: Start, schedule: Schedule) -> bool:
    """Whether all nodes hold all their rows, so that no later start reads the source."""
    overlaps = "staging" in schedule.job.options
    reached = any(batch.lap >= overlaps for batches in start.course for batch in batches)
    return reached


def _run_undisturbed(schedule: Schedule, nodes: Nodes, root: Path) -> Start:
    scheduler = Scheduler(0)
    (root / "saves").mkdir(parents=True)
    with rehearsed(scheduler):
        start = Start(schedule, Planned(nodes), root, scheduler)
        start.run()
    return start


def _find_begun(newest: Sequence[Saved], course: Course, expected: Course | None) -> Saved | None:
    """Find which save a start went on from, where one was replacing another as it ended."""
    for saved in newest[1:]:
        for batches, wanted in zip(course, expected or [], strict=True):
            if batches[:1] == wanted[saved.num_batches :][:1] != []:
                return saved
    return newest[0] if newest else None


def _find_newest(start: Start, begun: Saved | None, first: int) -> list[Saved]:
    """Find the saves of which the next start finds one: two, if they have the same name."""
    here = [each for each in (start.saved, start.saving) if each is not None]
    found = [saved._replace(num_batches=saved.num_batches + first) for saved in here]
    if start.saved is None and begun is not None:
        found.insert(0, begun)
    if start.saved is None and begun is None:
        return []
    return [saved for saved in found if saved.path == found[0].path]
