"""`dataio.live` under drawn courses of events: ranks die, come and leave anywhere, in virtual time.

The code that ships runs, a thread for each rank, under the scheduler of the rehearsal. In place of
gloo is `Group`: whoever waits for a rank that is lost or has shut its connections fails.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import traceback
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dataio
from dataio.base.errors import DataioError, WorldError
from dataio.job import generations, live, meeting, numbers
from tests.rehearsal.apart import in_process
from tests.rehearsal.planted_live import COURSES_PLANTED
from tests.rehearsal.scheduler import Scheduler, Task
from tests.rehearsal.threads import rehearsed, replaced

NUM_STEPS = 12
TIMEOUT_S = 40.0
PATIENCE_S = 6.0
ENTRY_S = 6.0
UNTROUBLED_S = 60.0
"""In which all is over if nobody is killed: nobody has patience then."""


class Group:
    """What ranks are connected by: one object for all of them."""

    def __init__(self, course: "Course", size: int) -> None:
        self.course, self.size = course, size
        self.given: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.members: dict[int, int] = {}
        self.shut: set[int] = set()
        self.passed: dict[int, set[int]] = defaultdict(set)
        self.sent: dict[tuple[int, int], list[bytes]] = defaultdict(list)

    def lost(self, count: int) -> bool:
        gone = self.shut | (self.course.killed & self.members.keys())
        return not gone <= self.passed[count]


class GroupWorld:
    """One rank's side of a group, as `World` has it."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.world_size = group, rank, group.size
        self._count = 0

    def allgather(self, data: bytes, *, doing: str) -> list[bytes]:
        group, count = self.group, self._count
        self._count += 1
        given, scheduler = group.given[count], group.course.scheduler
        if not group.shut:
            given[self.rank] = data
            scheduler.point("given")
        scheduler.wait(
            lambda: len(given) == group.size or group.lost(count), doing, timeout_s=TIMEOUT_S
        )
        # When all have given their part, one rank may have all of it and another lack it.
        if len(given) < group.size or (group.lost(count) and scheduler.random.random() < 0.5):
            raise WorldError("gloo: Connection closed by peer")
        group.passed[count].add(group.course.process())
        return [given[rank] for rank in range(group.size)]

    def barrier(self, *, doing: str) -> None:
        scheduler = self.group.course.scheduler
        self.group.course.ends_s.append(scheduler.now)
        scheduler.sleep(scheduler.random.uniform(0.0, 4.0))
        self.allgather(b"", doing=doing)


class CourseSockets:
    """In place of `Sockets`: those of the rank that runs."""

    def __init__(self, course: "Course") -> None:
        self._course, self._process = course, course.process()

    def noting(self, *, watched: bool = False) -> Any:
        return self

    def are_cut(self) -> bool:
        world = self._course.worlds.get(self._process)
        if world is None or self._process in world.group.shut:
            return False
        gone = world.group.shut | (self._course.killed & world.group.members.keys())
        return bool(gone)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def shut(self) -> None:
        if world := self._course.worlds.get(self._process):
            world.group.shut.add(self._process)


class SteppedLoader:
    """Has a place, and no rows."""

    lost_with_ranks = ""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place}

    def remember(self) -> None: ...

    def count(self, state: dict[str, Any]) -> None: ...

    def go_on(self, state: dict[str, Any], remembered: Sequence[Any]) -> None:
        self.place = state["place"]


class Course:
    """One course of events: who starts when, and what happens to it.

    A process has a number of its own; `starts` has which ones begin together.
    """

    def __init__(self, seed: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.killed: set[int] = set()
        self.ended: dict[int, str] = {}
        self.ends_s: list[float] = []
        self.seen_s: dict[meeting.Meeting, float] = {}
        self.called: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        self.taken: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self.linked: dict[tuple[str, str], Any] = {}
        self.worlds: dict[int, GroupWorld] = {}
        self.groups: dict[Any, Group] = {}
        self.scheduler = Scheduler(seed, on_point=self._at_point)
        draw = self.scheduler.random
        self.slow = draw.choice([0.0, 0.3])
        sizes = [draw.randint(2, 4), *(draw.randint(1, 2) for _ in range(draw.randint(0, 2)))]
        self.starts: list[range] = []
        self.start_of: dict[int, int] = {}
        for number, size in enumerate(sizes):
            first = sum(sizes[:number])
            self.starts.append(range(first, first + size))
            self.start_of |= dict.fromkeys(self.starts[-1], number)
        latest_s = draw.choice([5.0, 14.0])
        self.begins_s = [0.0, *(draw.uniform(0.5, latest_s) for _ in sizes[1:])]
        everyone = range(sum(sizes))
        # Who is killed at which of its points, and who is asked to leave at which of its steps.
        share = draw.choice([0.0, 0.3])
        self.kills = {
            p: draw.choice([("", draw.randint(1, 700)), ("given", draw.randint(1, 20))])
            for p in everyone if draw.random() < share
        }  # fmt: skip
        self.leaves = {p: draw.randint(1, NUM_STEPS) for p in everyone if draw.random() < 0.2}
        self.patience_s = PATIENCE_S if self.kills else 10 * UNTROUBLED_S
        self._points: dict[tuple[int, str], int] = defaultdict(int)
        self._put_in_place(monkeypatch)

    def process(self) -> int:
        task = self.scheduler.task()
        return -1 if task is None else task.rank

    def _at_point(self, task: Task, what: str) -> None:
        for where in ("", what):
            self._points[task.rank, where] += 1
            if self.kills.get(task.rank) == (where, self._points[task.rank, where]):
                self.killed.add(task.rank)
                self.scheduler.freeze(task.rank)

    def _put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        point = self.scheduler.point

        def write_file(path: Path, data: bytes) -> None:
            point("write")
            partial = path.with_name(f"{path.name}.partial")
            partial.write_bytes(data)
            point("replace")
            partial.replace(path)

        def link(source: Path, target: Path) -> None:
            point("link")
            os_link(source, target)
            self.linked[target.parent.name, target.name] = json.loads(target.read_bytes())
            point("linked")

        os_link, named, read = os.link, meeting.Meeting.named, meeting.Meeting.read
        before: dict[tuple[meeting.Meeting, str], set[int]] = {}

        def late_named(its: meeting.Meeting, prefix: str) -> set[int]:
            point(f"list {prefix}")
            if (its, prefix) not in before or self.scheduler.random.random() >= self.slow:
                before[its, prefix] = named(its, prefix)
            return before[its, prefix]

        def late_read(its: meeting.Meeting) -> list[int] | None:
            point("read")
            met = read(its)
            if met is not None and self.scheduler.random.random() < self.slow:
                # Seen late, as on a filesystem that keeps for a while that there is no such file.
                seen_s = self.seen_s.setdefault(its, self.scheduler.now + 1.0)
                return met if self.scheduler.now >= seen_s else None
            return met

        def begin(*_: object, **__: object) -> None:
            return None

        def first_world(*, timeout_s: float) -> GroupWorld:
            start = self.start_of[self.process()]
            processes = self.starts[start]
            return self.connect(start, processes.index(self.process()), len(processes))

        def connect(file: Path, *, rank: int, world_size: int, timeout_s: float) -> GroupWorld:
            self.scheduler.sleep(self.scheduler.random.uniform(0.0, 1.5))
            world = self.connect(file, rank, world_size)
            world.allgather(b"", doing="connecting")
            return world

        environs: list[dict[str, str]] = [
            {name: "1" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
            | ({numbers.JOIN: "1"} if start else {})
            for start in range(len(self.starts))
        ]

        class Environ:
            def __contains__(its, name: str) -> bool:
                return name in environs[self.start_of[self.process()]]

            def get(its, name: str) -> str | None:
                return environs[self.start_of[self.process()]].get(name)

        monkeypatch.setattr(os, "link", link)
        for module in (meeting, numbers, generations):
            monkeypatch.setattr(module, "write_file", write_file, raising=False)
        monkeypatch.setattr(meeting.Meeting, "named", late_named)
        monkeypatch.setattr(meeting.Meeting, "read", late_read)
        clocks = {"clock": lambda: self.scheduler.now, "sleep": self.scheduler.sleep}
        monkeypatch.setattr(meeting.Meeting.__init__, "__kwdefaults__", {"unit": None, **clocks})
        monkeypatch.setattr(generations, "os", SimpleNamespace(environ=Environ()))
        monkeypatch.setattr(generations, "Sockets", lambda: CourseSockets(self))
        monkeypatch.setattr(generations, "torch_world", first_world)
        monkeypatch.setattr(generations, "connect", connect)
        monkeypatch.setattr(
            generations,
            "dist",
            SimpleNamespace(init_process_group=begin, is_initialized=lambda: False),
        )
        monkeypatch.setattr(gc, "collect", lambda: 0)
        monkeypatch.setattr(live, "dist", SimpleNamespace(send=self.send, recv=self.recv))

    def connect(self, key: Any, rank: int, size: int) -> GroupWorld:
        group = self.groups.setdefault(key, Group(self, size))
        assert group.size == size, "two lists of one meeting"
        assert rank not in group.members.values(), "two lists of one meeting"
        group.members[self.process()] = rank
        self.worlds[self.process()] = GroupWorld(group, rank)
        return self.worlds[self.process()]

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        world = self.worlds[self.process()]
        self.scheduler.point("send")
        if world.group.shut:
            raise RuntimeError("gloo: Connection closed by peer")
        world.group.sent[world.rank, dst].append(tensor.numpy().tobytes())

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        world = self.worlds[self.process()]
        sent = world.group.sent[src, world.rank]
        if not self.scheduler.wait(
            lambda: bool(sent) or world.group.lost(-1), "receive", timeout_s=TIMEOUT_S
        ) or not sent:  # fmt: skip
            raise RuntimeError("gloo: Connection closed by peer")
        tensor.copy_(torch.frombuffer(bytearray(sent.pop(0)), dtype=torch.uint8))

    def train(self, job: dataio.LiveJob) -> None:
        process, loader, model = self.process(), SteppedLoader(), torch.nn.Linear(1, 1, bias=False)
        self.called[process].append((job.ranks, job.number))
        torch.nn.init.zeros_(model.weight)
        job.keep(loader, model=model)
        while loader.place < NUM_STEPS:
            self.scheduler.sleep(self.scheduler.random.uniform(0.05, 0.9))
            given = job.world.allgather(b"%d" % loader.place, doing="step")
            assert {*given} == {b"%d" % loader.place}, "the ranks are at one step"
            loader.place += 1
            with torch.no_grad():
                model.weight += loader.place
            if self.leaves.get(process) == loader.place:
                job._after_step.__self__.ask_to_leave()  # type: ignore[attr-defined]
            with job.step():
                assert loader.place == job.number + 1
                self.taken[process][loader.place] = job.ranks
        assert model.weight.item() == sum(range(NUM_STEPS + 1)), "weights of other steps"

    def be(self, process: int) -> None:
        self.scheduler.sleep(self.begins_s[self.start_of[process]] + self.scheduler.random.random())
        try:
            dataio.live(
                self.train, directory=self.root, patience_s=self.patience_s, timeout_s=TIMEOUT_S
            )
            self.ended[process] = "done"
        except SystemExit:
            self.ended[process] = "left"
        except DataioError as error:
            self.ended[process] = str(error)

    def run(self) -> None:
        everyone = {*self.start_of}
        with rehearsed(self.scheduler), torch.random.fork_rng():
            for process in everyone:
                self.scheduler.spawn(
                    functools.partial(self.be, process), name=f"rank{process}", rank=process
                )
            self.scheduler.run(
                until=lambda: everyone <= {*self.ended} | self.killed, latest_s=300.0
            )


def check(course: Course) -> None:
    """Check what must hold in any course of events."""
    for process, how in course.ended.items():
        # Who has not begun yet fails if a rank of its start dies, or the job does.
        assert how in ("done", "left") or process not in course.called, f"{process}: {how}"
    done = [process for process, how in course.ended.items() if how == "done"]
    # Of those that are left, all that took a step took it with the same ranks.
    for step in range(1, NUM_STEPS + 1):
        assert len({course.taken[each][step] for each in done if step in course.taken[each]}) <= 1
    lists = [course.linked[key] for key in sorted(course.linked) if key[1] == "members"]
    for (_, name), size in course.linked.items():
        first = int(name.partition("-")[2]) if name.startswith("numbers-") else 0
        if first:  # newcomers come all, or none of them
            unit = {*range(first, first + size)}
            assert unit <= {*next((each for each in lists if unit & {*each}), unit)}
    for calls in course.called.values():
        assert all([*ranks] in lists for ranks, _ in calls[1:])
    for before, after in itertools.pairwise([[*course.starts[0]], *lists]):
        assert {*before} & {*after}, "newcomers went on without the job"
    if not course.kills | course.leaves:
        assert all(number < NUM_STEPS for calls in course.called.values() for _, number in calls)
    if not course.kills:
        assert course.scheduler.now < UNTROUBLED_S
        # Who came in time, and not before the job, was let in.
        for process, start in course.start_of.items():
            came_s = course.begins_s[start] + ENTRY_S
            is_early = 0.0 < course.begins_s[start] < 1.0
            assert process in course.called or is_early or came_s > min(course.ends_s, default=0.0)
    if done:
        assert not [*course.root.iterdir()]


@pytest.mark.parametrize(
    "seed",
    [
        *range(12),
        133,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in range(12, 200) if n != 133),
    ],
)
def test_ranks_that_are_lost_come_and_leave_anywhere_never_part_and_never_wait_for_ever(
    tmp_path, seed
):
    def run() -> str:
        with pytest.MonkeyPatch.context() as monkeypatch:
            course = Course(seed, tmp_path / "live", monkeypatch)
            try:
                course.run()
                check(course)
            except BaseException:
                return traceback.format_exc()
        return "all is well"

    # Killed ranks leave threads that never end, beside which tracemalloc may crash a process.
    assert in_process(run) == "all is well"


@pytest.mark.nightly
@pytest.mark.parametrize("name", COURSES_PLANTED)
def test_a_planted_bug_is_found(tmp_path, name):
    def run(seed: int) -> str:
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(AssertionError):
            course = Course(seed, tmp_path / f"{seed}", monkeypatch)
            course.run()
            check(course)
            return "all is well"
        return ""

    with replaced(COURSES_PLANTED[name]):
        # Each in a process of its own: what has failed leaves threads that never end.
        found = [seed for seed in range(60) if not in_process(functools.partial(run, seed))]
    print(f"{name}: found by seeds {found}")
    assert found
