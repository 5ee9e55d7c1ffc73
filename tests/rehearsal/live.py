"""A job under `dataio.live` rehearsed: ranks are lost at any point, the others train on. Audited.

What runs is the shipped `live`, its meetings, and the loader. Its sums and its connections are the
rehearsal's (`gloo`). Weights depend on each row, and on how often each was counted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from dataio import LiveJob, Loader, live
from dataio.base.errors import CacheBusyError, DataioError
from dataio.job.meeting import LeftOutError
from tests.dataio.job.live_ranks import BATCH, make, samples
from tests.faults.kill.job import outcome
from tests.rehearsal.disks import Disks
from tests.rehearsal.gloo import Gloo
from tests.rehearsal.rehearsal import Audited
from tests.rehearsal.scheduler import Scheduler, Task
from tests.rehearsal.schedules import LiveFault, LiveSchedule
from tests.rehearsal.threads import rehearsed

TIMEOUT_S, PATIENCE_S = 4.0, 1.5
HUNG_S = 3 * TIMEOUT_S
BEGINS_S, RECOVERS_S = 30.0, 60.0
"""Virtual time that a job may take without a fault, and after each."""
INPUTS, TARGETS = map(torch.from_numpy, samples())


class Step(NamedTuple):
    """A step that one group of ranks began: of the groups one after the other, one counted it."""

    number: int
    group: int


class Given(NamedTuple):
    """What a rank gave to a step: rows and their weights, of an epoch."""

    epoch: int
    ids: list[int]
    weights: list[float]


class Decided(NamedTuple):
    """What an epoch decided of one node's rows: how often each comes, and weighs.

    Attributes:
        times: By sample; 0: it is hidden.
        weights: By sample.
        lr_factor: Of the epoch.
    """

    times: dict[int, int]
    weights: dict[int, float]
    lr_factor: float


class Counting(nn.Module):
    """A model whose output depends on how often it was called: on a buffer."""

    seen: torch.Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.model(x) * (1 + self.seen / 100)
        return found


class LiveStart:
    """One start of a job under `live`.

    Args:
        schedule: What was drawn.
        disks: Its files.
        scheduler: Of the rehearsal.

    Attributes:
        given: What each rank gave to a step.
        decided: What epochs decided, by epoch and group, of each rank's node.
        taken: The ranks that took it.
        kept: Steps that counted as a group began, by its number.
        ends: What each rank returned.
        errors: What each raised.
        disturbed: Ranks that were killed, stood still, did not see files, left or came: they may
            end.
        met: Ranks that called the training function.
        happened: The faults that did happen.
    """

    def __init__(self, schedule: LiveSchedule, disks: Disks, scheduler: Scheduler) -> None:
        self.job, self._schedule, self._disks, self._scheduler = (
            schedule.job,
            schedule,
            disks,
            scheduler,
        )
        self._faults = list(schedule.faults)
        self._last = 0
        self.gloo = Gloo(scheduler, schedule.job.nodes, timeout_s=TIMEOUT_S)
        self._living = set(range(sum(schedule.job.nodes)))
        self.given: defaultdict[Step, dict[int, Given]] = defaultdict(dict)
        self.decided: defaultdict[tuple[int, int], dict[int, Decided]] = defaultdict(dict)
        self.taken: defaultdict[Step, set[int]] = defaultdict(set)
        self.kept: dict[int, int] = {}
        self.ends: dict[int, list[Any]] = {}
        self.errors: dict[int, BaseException] = {}
        self.disturbed: set[int] = set()
        self._ask: dict[int, Callable[[], None]] = {}
        self.met = self._ask.keys()
        self.happened: list[str] = []

    def run(self) -> None:
        """Run all ranks, until each has ended."""
        scheduler = self._scheduler
        with self.gloo.instead():
            for rank in sorted(self._living):
                self._start(rank)
            scheduler.run(until=lambda: not self._living, latest_s=BEGINS_S)

    def _start(self, rank: int) -> None:
        self._living.add(rank)
        self._scheduler.spawn(lambda: self._rank(rank), name=f"rank {rank}", rank=rank)

    def pass_point(self, task: Task, what: str) -> None:
        """Let happen what is to happen at this point.

        Raises:
            OSError: If it is an operation on a file that is to fail.
        """
        fault = self._faults[0] if self._faults else None
        passed = self._scheduler.num_points - self._last
        if fault is None or task.rank < 0 or passed < fault.point or fault.where not in what:
            return
        if fault.how != "error" or " live/" in what or " cache/" in what:
            self._last = self._scheduler.num_points
            self._happen(self._faults.pop(0), task.rank, what)

    def _happen(self, fault: LiveFault, rank: int, what: str) -> None:
        scheduler, gloo = self._scheduler, self.gloo
        self.happened.append(fault.how)
        scheduler.latest_s = max(scheduler.latest_s, scheduler.now) + RECOVERS_S
        node = [r for r, its in enumerate(gloo.node_of_rank) if its == gloo.node_of_rank[rank]]
        if fault.how not in ("slow", "part", "error", "join"):
            self.disturbed |= {*node}
        if fault.how in ("kill", "power"):
            self._kill([rank] if fault.how == "kill" else node, silently=fault.how == "power")
            # As torchrun ends the other processes of a node.
            after_s = scheduler.random.choice([0.0, 0.7])

            def end_node() -> None:
                scheduler.sleep(after_s)
                self._kill(node, silently=False)

            scheduler.spawn(end_node, name="torchrun", rank=-1)
        elif fault.how == "hang":
            scheduler.suspend(rank, HUNG_S)
        elif fault.how == "pause":
            scheduler.suspend(rank, scheduler.random.choice([0.4, 0.9]) * TIMEOUT_S)
        elif fault.how == "part":
            half = frozenset(r for r in range(len(gloo.node_of_rank)) if r % 2 == rank % 2)
            gloo.halves = half, scheduler.now + scheduler.random.choice([0.3, 4.0]) * TIMEOUT_S
        elif fault.how == "late":
            for each in node:
                gloo.late_s[each] = scheduler.now + scheduler.random.choice([0.5, 1.0, 6.0])
        elif fault.how == "join":
            self._start(self.gloo.add_node())
        elif fault.how == "leave":
            self._ask.get(rank, lambda: None)()
        elif fault.how == "slow":
            scheduler.sleep(TIMEOUT_S / 4)
        else:
            raise OSError(5, f"a broken disk, as rehearsed: {what}")

    def has_trained(self, rank: int) -> bool:
        return any(rank in ranks for ranks in self.taken.values())

    def _kill(self, ranks: list[int], *, silently: bool) -> None:
        for rank in ranks:
            if rank in self._living:
                self._living.discard(rank)
                self.gloo.kill(rank, silently=silently)
                self._disks.close_all(rank)
                self._scheduler.freeze(rank)

    def _rank(self, rank: int) -> None:
        try:
            self.ends[rank] = live(
                self._train, directory=self._disks.root / "live", patience_s=PATIENCE_S,
                timeout_s=TIMEOUT_S,
            )  # fmt: skip
        except BaseException as error:
            self.errors[rank] = error
        self._scheduler.wait(
            lambda: sum(task.rank == rank for task in self._scheduler.tasks) == 1,
            "wait for its threads", timeout_s=RECOVERS_S,
        )  # fmt: skip
        self.gloo.kill(rank, silently=False)
        self._living.discard(rank)

    def _train(self, job: LiveJob) -> list[Any]:
        rank, group = self.gloo.rank(), self.gloo.group().number
        self._ask[rank] = job._after_step.__self__.ask_to_leave  # type: ignore[attr-defined]
        plain, optimizer, _ = make()
        model = Counting(plain)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        node = self._disks.root / "cache" / f"machine-{self.gloo.node_of_rank[rank]}"
        with self._schedule.job.make(job.world, node) as loader:
            job.keep(loader, model=model, optimizer=optimizer, schedule=schedule)
            assert self.kept.setdefault(group, job.number) == job.number, "ranks go on apart"
            for epoch in loader.epochs(self._schedule.job.epochs):
                self._check_scores(loader)
                self.decided[epoch, group][rank] = _decided(loader)
                for batch in loader:
                    rows = self._check_rows(batch)
                    ids = batch["sample_id"][rows].tolist()
                    weights = batch["weight"][rows]
                    given = Given(epoch, ids, weights.tolist())
                    self.given[Step(job.number + 1, group)][rank] = given
                    optimizer.zero_grad()
                    weighed_loss(model, ids, weights).backward()
                    if not self._schedule.late_reports:
                        self._report(loader, batch)
                    self._scheduler.point("averages")
                    job.average(model.parameters())
                    self._scheduler.point("has averaged")
                    with job.step():
                        optimizer.step()
                        schedule.step()
                    self.taken[Step(job.number, group)].add(rank)
                    self._scheduler.point("has stepped")
                    if self._schedule.late_reports:
                        self._report(loader, batch)
                for batch in loader.refresh():
                    self._check_rows(batch)
                    self._report(loader, batch)
                    self._scheduler.point("has refreshed")
        return [each.detach().clone() for each in model.state_dict().values()]

    def _check_rows(self, batch: Any) -> list[int]:
        valid: list[int] = np.flatnonzero(batch["slot"].numpy() >= 0).tolist()
        for row in valid:
            self._schedule.job.check_row(batch, row)
        return valid

    def _report(self, loader: Loader, batch: Any) -> None:
        told = outcome(batch["sample_id"].numpy(), loader.epoch)
        loader.report(batch, **{name: torch.from_numpy(each) for name, each in told.items()})

    def _check_scores(self, loader: Loader) -> None:
        """Check that each row has what was last reported of it, once an epoch."""
        pool = loader._session.pool
        scores, names = pool.scores, pool.scores.dtype.names or ()
        told = outcome(pool.sample_ids, scores["epoch"])
        known = scores["epoch"] >= 0
        for name in {*names} & {*told}:
            assert np.array_equal(scores[name][known], told[name][known]), f"others' {name}"
        if "wrong" in names:
            assert (scores["wrong"] <= scores["epoch"] + 1).all(), "reports count twice"
        if len(self.kept) == 1 and pool.keeps_scores and loader.epoch:
            assert known.all(), "scores are gone"


def _decided(loader: Loader) -> Decided:
    """Read what the running epoch decided of the rows of this rank's node."""
    pool, selection = loader._session.pool, loader._run.running.plan.selection
    times, weights = selection.counts, selection.weights
    if times is None:
        times = np.ones(pool.num_slots, np.int64)
        times[selection.hidden] = 0
    if weights is None:
        weights = np.ones(pool.num_slots, np.float32)
    ids = pool.sample_ids.tolist()
    return Decided(
        dict(zip(ids, times.tolist(), strict=True)),
        dict(zip(ids, weights.tolist(), strict=True)),
        selection.lr_factor,
    )


def weighed_loss(model: nn.Module, ids: list[int], weights: torch.Tensor) -> torch.Tensor:
    """Sum the weighted losses of rows, over those of a full batch."""
    errors: torch.Tensor = model(INPUTS[ids]).squeeze(1) - TARGETS[ids]
    return (weights * errors.square()).sum() / BATCH


def rehearse_live(schedule: LiveSchedule, root: Path) -> Audited:
    """Run a job under `live` as drawn, and audit it.

    Raises:
        AssertionError: If an invariant does not hold.
    """
    start: LiveStart
    scheduler = Scheduler(schedule.seed, on_point=lambda task, what: start.pass_point(task, what))
    disks = Disks(root / "rehearsed", scheduler)
    disks.root.mkdir()
    start = LiveStart(schedule, disks, scheduler)
    with rehearsed(scheduler), disks.recording():
        start.run()
    ended = check_ends(start)
    check_counted(start, schedule.job.num_samples, schedule.job.epochs)
    return Audited(scheduler.digest(), scheduler.num_points, ended, tuple(start.happened))


def check_ends(start: LiveStart) -> tuple[str, ...]:
    """Check that whoever was left alone has come to the end, and say how each rank ended.

    Raises:
        AssertionError: If not.
    """
    for error in start.errors.values():
        if not isinstance(error, (DataioError, OSError, RuntimeError, SystemExit)):
            raise error
    excused = {"part", "error"} & {*start.happened} or not start.kept
    for rank, error in start.errors.items():
        # Whoever comes may find that the job has ended, or ends.
        came = rank >= sum(start.job.nodes) and not start.has_trained(rank)
        # Or those that see its files late go on without it.
        came |= isinstance(error, LeftOutError) and "late" in start.happened
        # Or a rank is lost before all have met: only those that have met go on.
        came |= bool(start.disturbed) and rank not in start.met
        # Or one stands still that stages for its node (docs/live.md, what does not hold).
        came |= "hang" in start.happened and isinstance(error, CacheBusyError)
        assert rank in start.disturbed or excused or came, (
            f"rank {rank} ended, nobody knows why: {error}"
        )
        assert type(error) is not RuntimeError or not start.kept, f"rank {rank}: no words: {error}"
    return tuple(
        f"{rank}: {type(start.errors[rank]).__name__ if rank in start.errors else 'end'}"
        for rank in sorted({*start.errors, *start.ends})
    )


def check_counted(start: LiveStart, num_samples: int, epochs: int) -> None:
    """Check that each step counted once, each sample once an epoch, and weights are of that.

    Raises:
        AssertionError: If not.
    """
    groups = sorted(start.kept)
    counted: dict[int, int] = {}
    for number, group in sorted(start.taken):
        # What a group had counted when a later one began without it does not count.
        if all(number <= start.kept[later] for later in groups if later > group):
            assert counted.setdefault(number, group) == group, f"step {number} counted twice"
    assert [*counted] == [*range(1, len(counted) + 1)], f"steps {[*counted]} counted"
    rows: defaultdict[int, list[int]] = defaultdict(list)
    first_group, last_group = dict[int, int](), dict[int, int]()
    plain, optimizer, _ = make()
    model = Counting(plain)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    for number, group in counted.items():
        given = start.given[Step(number, group)]
        members = start.gloo.groups[group].members.values()
        assert {*given} == {*members}, f"step {number} counted without all of {[*members]}"
        (epoch,) = {each.epoch for each in given.values()}
        ids = [sample_id for each in given.values() for sample_id in each.ids]
        weights = torch.tensor([weight for each in given.values() for weight in each.weights])
        rows[epoch] += ids
        last_group[epoch] = group
        first_group.setdefault(epoch, group)
        optimizer.zero_grad()
        (weighed_loss(model, ids, weights) / len(given)).backward()
        optimizer.step()
        schedule.step()
    for epoch, ids in rows.items():
        begun, last = (_of_all(start, epoch, each[epoch]) for each in (first_group, last_group))
        trained = Counter(ids)
        for sample_id, times in trained.items():
            assert times <= last.times[sample_id], f"epoch {epoch}: {sample_id} came {times} times"
        for sample_id in range(num_samples):
            # Hidden rows may come to fill the last steps
            assert begun.times[sample_id] <= last.times[sample_id], f"{sample_id} is hidden now"
            if begun.times[sample_id]:
                assert begun.weights[sample_id] == last.weights[sample_id], f"{sample_id} weighs"
        assert begun.lr_factor == last.lr_factor, f"epoch {epoch}: another rate"
        missing = [each for each, times in last.times.items() if trained[each] != times]
        assert not (start.ends and missing), f"epoch {epoch}: {missing} did not come"
    if start.ends:
        assert sorted(rows) == [*range(epochs)], f"epochs {sorted(rows)} were trained"
    first = next(iter(start.ends.values()), [])
    for rank, ended in start.ends.items():
        for mine, its, known in zip(ended, first, model.state_dict().values(), strict=True):
            assert torch.equal(mine, its), f"rank {rank} ends with other weights"
            assert mine.flatten().tolist() == pytest.approx(known.flatten().tolist(), rel=1e-9), (
                f"rank {rank}: weights are not those of the steps that counted"
            )


def _of_all(start: LiveStart, epoch: int, group: int) -> Decided:
    """Put together what an epoch decided of all nodes' rows."""
    found = Decided({}, {}, 1.0)
    for each in start.decided[epoch, group].values():
        for sample_id, times in each.times.items():
            assert found.times.get(sample_id, times) == times, f"{sample_id}: ranks differ"
        found = Decided(found.times | each.times, found.weights | each.weights, each.lr_factor)
    rates = {each.lr_factor for each in start.decided[epoch, group].values()}
    assert len(rates) == 1, f"epoch {epoch}: rates {rates}"
    return found
