"""The run's side: hands weights over, has a process evaluate them, and takes the results.

Rank 0 starts the process, `tonari evaluate --attached`, and looks after it: one that ends is
started again, and finds what is left to do in the run's directory. It ends with rank 0, however
that ends, as it reads from a pipe that rank 0 holds.
"""

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import Self

from dataio.base.location import bare_within
from dataio.job.launch import LATER_S, Job
from dataio.world.launchers import without_ranks
from tonari.trainer.checkpoint.agree import from_rank_0
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import EVALUATIONS, Progress
from tonari.trainer.config.config import Config
from tonari.trainer.config.settings import as_tables
from tonari.trainer.errors import ConfigError, EvaluationError
from tonari.trainer.run.beside.evaluator import check_mesh
from tonari.trainer.run.beside.records import (
    BEAT,
    HandedOver,
    evaluated_steps,
    line_of,
    results,
    settings_digest,
    waiting,
)
from tonari.trainer.run.own import Own
from tonari.trainer.run.words import evaluation_words
from tonari.trainer.watch.metrics import Line, MetricsLog

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks for results."""
MOST_WAITING = 8
"""Weights that may wait before training does: each lies on disk."""
MOST_ENDS = 3
"""So often the process may end without a result in between, before it is given up."""
LOG = "evaluator.log"
GRACE_S, POLL_S = 5.0, 0.2
LAST_BYTES = 600
"""Of the log, in a message."""
NICENESS = 10


def check_evaluation(config: Config, own: Own) -> None:
    """Refuse settings with which no other process can evaluate. Before anything is staged.

    Raises:
        ConfigError: Names what is in the way.
    """
    words = f'run.evaluation is "{config.run.evaluation}"'
    given = [its.name for its in dataclasses.fields(own) if getattr(own, its.name) is not None]
    if given:
        raise ConfigError(
            f"{words}, and train was given {given[0]}=, which another process does not see; name "
            "it in the settings, by [recipe] or model.kind, or leave run.evaluation out"
        )
    if not (config.data.test or config.data.test_fraction):
        raise ConfigError(
            f"{words}, but there is nothing to evaluate on; give data.test, or for text "
            "data.test_fraction"
        )
    check_mesh(config)
    on_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    if config.run.evaluation == "beside" and on_gpu:
        raise ConfigError(
            f'{words} and run.device is "{config.run.device}" where there is a GPU, which an '
            "evaluator beside the ranks would have to share: not built; give "
            "run.evaluation=elsewhere with `tonari evaluate --follow --device cuda` on another "
            "node, or leave run.evaluation out"
        )
    tables = as_tables(config)
    if json.dumps(bare_within(tables)) != json.dumps(tables):
        raise ConfigError(
            f"{words}, and a URL of the settings holds a secret, which another process would have "
            "to read from a file; give credentials by variables of the environment, or leave "
            "run.evaluation out"
        )


class Evaluations:
    """The evaluations of a run that another process makes.

    Args:
        config: The settings, as they lie in the run's directory.
        job: This rank.
        checkpoints: Writes the weights.
        num_replicas: That train.
        batch_size: Of each.
        logs: Of this rank: who writes the metrics looks after the process.
        take: Called there with each result, as a line of the metrics.
        say: Called there with words.
        stops: Whether a rank was asked to stop; the same on all of them. Collective.
    """

    def __init__(
        self, config: Config, job: Job, checkpoints: Checkpoints, *, num_replicas: int,
        batch_size: int, logs: Sequence[object], take: Callable[[Line], None],
        say: Callable[[str], None], stops: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._config, self._job, self._checkpoints = config, job, checkpoints
        self._run, self._steps = Path(config.run.directory), 0
        self._replicas, self._batch_size = num_replicas, batch_size
        self._settings = settings_digest(config)
        self._take, self._say, self._stops = take, say, stops
        paths = (log.path for log in logs if isinstance(log, MetricsLog))
        self._metrics = next(paths, None)
        self._known, self._cores = set[int](), set[int]()
        self._process: subprocess.Popen[bytes] | None = None
        self._ends, self._most, self._has_come, self._failure = 0, 0, False, ""
        self._next_s = self._beat_s = 0.0
        self._beat = 0

    def __enter__(self) -> Self:
        """Start the process. Collective."""
        world = self._job.world
        cores = json.dumps([*os.sched_getaffinity(0)]).encode()
        said = world.allgather(cores, doing="looking for spare cores")
        ranks = world.topology.ranks_of_node[world.node]
        self._cores = {core for rank in ranks for core in json.loads(said[rank])}
        if self._metrics is not None:
            self._known = evaluated_steps(self._metrics)
            (self._run / EVALUATIONS).mkdir(exist_ok=True)
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whatever it is about: weights stay for a later one."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        try:
            self._process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def hand_over(
        self, parts: Sequence[nn.Module], progress: Progress, *, epoch: int,
        average: Mapping[str, Tensor] | None,
    ) -> None:  # fmt: skip
        """Have the weights of a step evaluated. Collective.

        Blocks until weights under way are written. Beside the run no more than `MOST_WAITING` wait:
        then training does.
        """
        if self._config.run.evaluation == "beside":
            self.wait(most=MOST_WAITING - 1)
        handed = HandedOver(
            epoch=epoch, step=progress.steps, replicas=self._replicas,
            batch_size=self._batch_size, threads=torch.get_num_threads(), settings=self._settings,
        )  # fmt: skip
        # Ranks that are lost take with them what they have not written.
        self._checkpoints.hand_over(
            self._run / EVALUATIONS, parts, progress, average=average, notes=asdict(handed),
            background=not self._config.run.live,
        )  # fmt: skip

    def look(self, *, steps: int) -> None:
        """Take the results that have come, and start a process again that has ended. On rank 0.

        Args:
            steps: That the run has done.

        Raises:
            EvaluationError: If the process refuses what it was given.
        """
        self._steps, now = steps, time.monotonic()
        if self._metrics is None or now < self._next_s:
            return
        self._next_s = now + LOOK_S
        new = [*results(self._run, known=self._known)][::-1]
        left = len(waiting(self._run))
        for each in new:
            late = {"late_steps": steps - each["step"], "waiting_evaluations": left}
            self._known.add(each["step"])
            line = line_of(each) | late
            self._take(line)
            self._say(evaluation_words(line))
        if new:
            self._ends, self._has_come = 0, True
        if self._has_come and left > 2 * max(self._most, 1):
            self._most = left
            logger.warning(
                "[rank 0] %s: %d evaluations wait: more are due than one process makes; training "
                "waits where %d do: give a larger run.evaluate_epochs or run.evaluate_steps",
                self._run, left, MOST_WAITING,
            )  # fmt: skip
        self._look_after(now, idle=not left)

    def complete(self) -> bool:
        """Wait for all that a process beside the run has left; say whether no signal cut it.

        Collective; raises as `wait`.
        """
        left, beside = self._agree()[0], self._config.run.evaluation == "beside"
        if left and self._metrics is not None:
            then = "waiting for them" if beside else f"tonari evaluate {self._run}"
            self._say(f"trained; {left} evaluations are left: {then}")
        return self.wait(most=0 if beside else left)

    def wait(self, *, most: int = 0) -> bool:
        """Wait until no more than so many wait to be evaluated. Collective.

        Returns:
            Whether it is so; False: a rank was asked to stop, or nobody evaluates any more and some
            may wait.

        Raises:
            EvaluationError: If nobody evaluates any more, and none may wait.
        """
        while (found := self._agree())[0] > most:
            left, failure = found
            if failure and not most:
                raise EvaluationError(
                    f"{self._run}: all steps are trained, and {left} evaluations are left, as the "
                    f"process that evaluates {failure}; `tonari evaluate {self._run}` makes them"
                )
            if failure or self._stops():
                return False
            self._job.watchdog.rest()
            time.sleep(POLL_S)
            self.look(steps=self._steps)
        self._next_s = 0.0
        self.look(steps=self._steps)
        return True

    def _agree(self) -> tuple[int, str]:
        """Count what waits, and say why nobody evaluates any more; the same on all ranks."""
        self._checkpoints.flush()
        mine = (0, "") if self._metrics is None else (len(waiting(self._run)), self._failure)
        left, failure = json.loads(from_rank_0(json.dumps(mine)))
        return left, failure

    def _start(self) -> None:
        if self._config.run.evaluation != "beside":
            return
        (self._run / EVALUATIONS / BEAT).unlink(missing_ok=True)
        command = [sys.executable, "-m", "tonari", "evaluate", str(self._run), "--attached"]
        with open(self._run / EVALUATIONS / LOG, "ab") as log:
            self._process = subprocess.Popen(
                command, env=without_ranks(os.environ), stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        _spare(self._process.pid, self._cores)

    def _look_after(self, now: float, *, idle: bool) -> None:
        """Start a process anew that has ended; end one that makes no batch for too long."""
        if self._process is None:
            return
        path = self._run / EVALUATIONS / BEAT
        beat = path.stat().st_mtime_ns if path.exists() else 0
        if idle or not beat or beat != self._beat:
            self._beat, self._beat_s = beat, now
        elif now - self._beat_s > self._config.run.timeout_s + LATER_S:
            self._process.kill()
            self._process.wait()
        if (status := self._process.poll()) is None:
            return
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        self._process, self._ends = None, self._ends + 1
        log = (self._run / EVALUATIONS / LOG).read_bytes()[-LAST_BYTES:]
        words = f"ended with status {status}, and said last: {log.decode(errors='replace').strip()}"
        if status == 1 and not self._has_come:
            raise EvaluationError(
                f"{self._run}: the process that evaluates {words}; mend that, and the same command "
                "goes on, or give run.evaluation=inline"
            )
        if self._ends > MOST_ENDS:
            self._failure = words
        logger.warning(
            "[rank 0] %s: the process that evaluates %s; it is %s, and no evaluation is lost",
            self._run, words, "given up" if self._failure else "started again",
        )  # fmt: skip
        if not self._failure:
            self._start()


def _spare(process: int, taken: set[int]) -> None:
    """Move a process to cores that no rank is bound to, if it may have some; ranks come first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, NICENESS)
        os.sched_setaffinity(process, range(os.cpu_count() or 1))
        allowed = os.sched_getaffinity(process)
        os.sched_setaffinity(process, allowed - taken or allowed)
