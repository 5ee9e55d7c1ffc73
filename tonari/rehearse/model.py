"""A long run whose nodes fail, again and again in virtual time, from a seed. Pure.

Nodes fail independently, after times that are exponential. A job that loses one ends, waits in the
queue, starts with another node, and goes on from its last checkpoint. Or it goes on live, with what
its nodes have in memory, and one node fewer until another has come.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import key, uniform

CAUSES = ("queue", "start", "staging", "reload", "trained", "checkpoint", "repeated", "ending")
"""What time goes into, in the order in which it does from one start to the next."""
STAGING, BEFORE = CAUSES.index("staging"), CAUSES.index("trained")
LOST, LIMIT, FULL, DONE, BEGUN = range(5)
"""How a start ends: a node failed, time limit, full disk, all is trained; none has begun."""

MOST_STARTS = 3000
MOST_DAYS = 4.0
"""A run that takes so many times its days, or so many starts, is given up."""
DAY_S = 86400.0

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """What a run takes; all times in seconds.

    Attributes:
        work_s: Of the run without a failure or checkpoint, by what it goes into; "steps" is one.
        days: In which it is to end.
        nodes: Of the job.
        mtbf_s: Mean time between failures of a node.
        interval_s: Of training, from one checkpoint to the next; the last is at the end.
        checkpoint_s: For which training waits for one.
        reload_s: To read one.
        start_s: From the end of the queue until rows are staged or found.
        staging_s: To fill the caches of nodes.
        keeps_caches: Whether nodes that stay find what they had staged.
        queue_s: In which the job waits for nodes, at each start.
        ending_s: From a failure until the job has ended.
        limit_s: Time limit of a job; infinite: none.
        signal_s: Before the limit, when the job begins a checkpoint and ends; 0: it is killed.
        full_fraction: Chance of a start to find a full disk, which ends it when rows are staged.
        live_s: For which training stops when a node is lost, if the others go on live.
        copies: Of each row in such a run; if it is one, a lost node's are read from the source. 0:
            the job starts again when a node is lost.
    """

    work_s: Mapping[str, float]
    days: float
    nodes: int
    mtbf_s: float
    interval_s: float
    checkpoint_s: float
    reload_s: float
    start_s: float
    staging_s: float
    keeps_caches: bool
    queue_s: float
    ending_s: float
    limit_s: float
    signal_s: float
    full_fraction: float
    live_s: float
    copies: int = 0

    @property
    def whole_s(self) -> float:
        """Compute the time that is to be trained."""
        return sum(self.work_s.values())

    @property
    def piece_s(self) -> float:
        """Compute what is trained between checkpoints: all of it, where they are further apart."""
        return min(self.interval_s, self.whole_s)

    @property
    def young_daly_s(self) -> float:
        """Compute the best interval between checkpoints, to first order.

        Source: Young, CACM 1974; Daly, A higher order estimate of the optimum checkpoint interval,
        FGCS 2006.
        """
        return math.sqrt(2 * self.checkpoint_s * self.mtbf_s / self.nodes)


@dataclass(frozen=True)
class RehearsedRuns:
    """What became of some runs.

    Attributes:
        ended_s: float64[run]: from the first queueing to the end; infinite: given up.
        spent_s: float64[cause, run].
        times: int64[how, run]: starts that ended so.
        cost_s: float64[how, run]: what such ends cost: steps trained again, and all that comes
            before training goes on.
        followed: Of one of the runs, each start: its time by cause, and how it ended.
    """

    ended_s: Array
    spent_s: Array
    times: Numbers
    cost_s: Array
    followed: list[tuple[list[float], int]]

    def goodput(self, run: LongRun) -> float:
        """Compute the share of node hours that trained steps which counted; queues hold no node."""
        counted_s = self.spent_s[BEFORE].sum() * run.work_s["steps"] / run.whole_s
        return float(counted_s / (self.spent_s[1:].sum() or 1.0))

    @property
    def pace(self) -> float:
        """Compute the training that counted, over all time that has passed."""
        return float(self.spent_s[BEFORE].sum() / self.spent_s.sum())

    def day(self, share: float) -> float:
        """Find the day by which a share of the runs had ended; infinite: that many never did."""
        return float(np.quantile(self.ended_s, share, method="inverted_cdf")) / DAY_S


def simulate(run: LongRun, *, runs: int, seed: int, follow: int = 0) -> RehearsedRuns:
    """Let runs go on from start to start until they end, or are given up.

    Args:
        run: What each takes.
        runs: How many, >= 1; each has failures of its own, which are the same for another `run`.
        seed: Of these.
        follow: Number of the run whose starts are listed.
    """
    each = np.arange(runs)
    saved_s, unstaged_s, how = np.zeros(runs), np.full(runs, run.staging_s), np.full(runs, BEGUN)
    unsaved_s, held_s, is_up = np.zeros(runs), np.zeros(runs), np.zeros(runs, bool)
    spent_s, cost_s = np.zeros((len(CAUSES), runs)), np.zeros((BEGUN + 1, runs))
    times = np.zeros((BEGUN + 1, runs), np.int64)
    followed = []
    for number in range(MOST_STARTS):
        chances = uniform(key(seed, "rehearsed failures", step=number), each, 2).T
        fails_s = -np.log1p(-chances[0]) * run.mtbf_s / run.nodes
        goes_on = (how != DONE) & (spent_s.sum(axis=0) < MOST_DAYS * run.days * DAY_S)
        if not goes_on.any():
            break
        before_s = np.where(is_up, go_on(run)[:, None], restart(run, saved_s, unstaged_s))
        is_full = (chances[1] < run.full_fraction) & ~is_up
        start = JobStart(before_s, saved_s, unsaved_s, held_s, is_up)
        spent, now, unsaved_s, is_up = train(run, start, fails_s=fails_s, is_full=is_full)
        # Nothing more of runs that have ended
        spent *= goes_on
        spent_s += spent
        cost_s[how, each] += spent[:BEFORE].sum(axis=0)
        cost_s[now, each] += spent[BEFORE + 2 :].sum(axis=0)
        times[now, each] += goes_on
        saved_s = saved_s + start.unsaved_s + spent[BEFORE] - unsaved_s
        held_s = np.where(is_up, held_s + spent[1:].sum(axis=0), 0.0)
        keeps = (now == LIMIT) & run.keeps_caches
        unstaged_s = np.where(keeps, unstaged_s - spent[STAGING], run.staging_s)
        how = np.where(goes_on, now, how)
        if goes_on[follow]:
            followed.append((spent[:, follow].tolist(), int(how[follow])))
    ended_s = np.where(how == DONE, spent_s.sum(axis=0), math.inf)
    return RehearsedRuns(ended_s, spent_s, times, cost_s, followed)


def restart(run: LongRun, saved_s: Array, unstaged_s: Array) -> Array:
    """Recover by starting the job again: what comes before it trains.

    Args:
        run: What each run takes.
        saved_s: float64[run]: training that checkpoints hold.
        unstaged_s: float64[run]: staging that the job's nodes still need.

    Returns:
        float64[4, run]: of the first `CAUSES`. The first, the queue, is before nodes are held.
    """
    same, reload_s = np.ones(len(saved_s)), np.where(saved_s > 0, run.reload_s, 0.0)
    return np.stack([run.queue_s * same, run.start_s * same, unstaged_s, reload_s])


def go_on(run: LongRun) -> Array:
    """Recover by going on live: what comes before it trains again, as `restart` gives it.

    Another node comes after the queue and a start. Until then training is slower by one node,
    which is as if all waited for that part of the time.
    """
    read_s = run.staging_s / max(run.nodes - 1, 1) if run.copies == 1 else 0.0
    return np.array([run.queue_s / run.nodes, run.live_s + run.start_s / run.nodes, read_s, 0.0])


@dataclass(frozen=True)
class JobStart:
    """Where some runs begin to train, from the beginning, or again after a loss.

    Attributes:
        before_s: float64[4, run]: what comes before it, see `restart`.
        saved_s: float64[run]: training that checkpoints hold.
        unsaved_s: float64[run]: training beyond it that is in memory.
        held_s: float64[run]: for which the job has held its nodes.
        is_up: bool[run]: whether it goes on live.
    """

    before_s: Array
    saved_s: Array
    unsaved_s: Array
    held_s: Array
    is_up: NDArray[np.bool_]


def train(
    run: LongRun, start: JobStart, *, fails_s: Array, is_full: NDArray[np.bool_]
) -> tuple[Array, Numbers, Array, NDArray[np.bool_]]:
    """Train from a start until all is trained, or something ends it.

    Args:
        run: What each run takes.
        start: Where each begins.
        fails_s: float64[run]: when a node fails, from the end of the queue on.
        is_full: bool[run]: whether a disk is full.

    Returns:
        float64[cause, run]; int64[run]: how it ended; float64[run]: training that memory holds and
        no checkpoint; bool[run]: whether the job goes on live.
    """
    before_s, unsaved_s = start.before_s, start.unsaved_s
    ready_s = before_s[1:].cumsum(axis=0)
    left_s = run.whole_s - start.saved_s
    # A sum of pieces misses the whole by rounding, which is no piece more.
    pieces = np.maximum(np.ceil(left_s / run.piece_s - 1e-9), 1)
    ends_s = np.empty((BEGUN, len(left_s)))
    ends_s[LOST] = fails_s
    ends_s[LIMIT] = np.maximum(run.limit_s - run.signal_s - start.held_s, 0.0)
    ends_s[FULL] = np.where(is_full, ready_s[1], math.inf)
    ends_s[DONE] = ready_s[-1] + left_s - unsaved_s + pieces * run.checkpoint_s
    how, stop_s = ends_s.argmin(axis=0), ends_s.min(axis=0)
    # As if what memory holds had been trained since this start.
    training_s = np.maximum(stop_s - ready_s[-1], 0.0) + unsaved_s
    whole = np.minimum(training_s // (run.piece_s + run.checkpoint_s), pieces - 1)
    rest_s = training_s - whole * (run.piece_s + run.checkpoint_s)
    trained_s = np.minimum(rest_s, np.minimum(run.piece_s, left_s - whole * run.piece_s))
    writing_s = rest_s - trained_s
    # At the signal a checkpoint is begun or finished; the limit, or a failure, may be faster.
    missing_s = np.where((how == LIMIT) & (trained_s > 0), run.checkpoint_s - writing_s, 0.0)
    grace_s = np.minimum(np.minimum(missing_s, run.signal_s), fails_s - stop_s)
    is_saved = (how == DONE) | (how == LIMIT) & (grace_s >= missing_s) & (run.signal_s > 0)
    is_up = (how == LOST) & (start.is_up | (stop_s > ready_s[-1])) & (run.copies > 0)
    how = np.where((how == LIMIT) & (grace_s < np.minimum(missing_s, run.signal_s)), LOST, how)
    kept_s = whole * run.piece_s + np.where(is_saved | is_up, trained_s, 0.0)
    how = np.where(is_saved & (kept_s > left_s - 1e-9 * run.whole_s), DONE, how)
    spent_s = np.stack(
        [
            before_s[0],
            *np.clip(stop_s - ready_s + before_s[1:], 0.0, before_s[1:]),
            kept_s - unsaved_s,
            whole * run.checkpoint_s + writing_s + grace_s,
            np.where(is_saved | is_up, 0.0, trained_s),
            np.where((how == LOST) & ~is_up, run.ending_s, 0.0),
        ]
    )
    return spent_s, how, np.where(is_up, trained_s, 0.0), is_up
