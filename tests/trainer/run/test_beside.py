"""Evaluations by another process: the same figures, later, whatever becomes of who makes them."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataio.base.atomic import read_record, write_record
from dataio.base.lines import checked_line, read_checked_lines
from dataio.base.seeding import generator, key
from tests.multirank import ends, find_descendants, job_environ, launch_command, run_job
from tests.trainer.run.runs import run, stop_after
from tonari import cli
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import ConfigError, EvaluationError
from tonari.trainer.run.beside import evaluations, records
from tonari.trainer.run.beside.evaluations import Evaluations
from tonari.trainer.run.beside.evaluator import evaluate_run
from tonari.trainer.run.beside.records import results, waiting
from tonari.trainer.run.loop import train
from tonari.trainer.watch.history import read_history

Figures = dict[int, tuple[Any, ...]]
OFTEN = ("run.evaluate_steps=3", "optimizer.ema=0.9")
BESIDE = ("run.evaluation=beside", *OFTEN)
VIT = (
    "data.label=cls", "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4",
    "model.heads=2",
)  # fmt: skip
JUDGED = ("epoch", "accuracy", "evaluation_loss", "ema_accuracy", "ema_evaluation_loss")


def judged(run: Path) -> Figures:
    """Read the figures of a run's evaluations, by step, as they lie in its metrics."""
    found = Figures()
    for line in read_checked_lines(run / "metrics.jsonl"):
        if line.get("evaluation_loss") is not None:
            assert line["step"] not in found, "a step is judged once"
            found[line["step"]] = tuple(line.get(name) for name in JUDGED)
    return found


@pytest.mark.multirank
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (1, ()),
        (2, ("mesh.dtype=float64", "data.batch_size=8")),
        pytest.param(3, ("mesh.dtype=float64", "data.batch_size=5"), marks=pytest.mark.nightly),
        pytest.param(4, ("data.batch_size=3",), marks=pytest.mark.nightly),
        (2, ("mesh.dp_shard=2", "data.batch_size=8")),
        (2, (*VIT, "mesh.pp=2", "mesh.dtype=float64")),
        pytest.param(2, (*VIT, "mesh.pp=2", "mesh.schedule=zbv"), marks=pytest.mark.nightly),
        pytest.param(4, (*VIT, "mesh.pp=2", "data.batch_size=8"), marks=pytest.mark.nightly),
    ],
)
def test_the_figures_are_those_of_an_evaluation_in_line_to_the_last_digit(config, ranks, given):
    for name in ("inline", "beside"):
        directory = config.parent / name
        ends = [f"run.directory={directory}", f"run.evaluation={name}", "run.epochs=2"]
        status, said = run_job(
            [*launch_command("mpiexec", ranks), "-m", "tonari", "train", str(config),
             *OFTEN, *given, *ends],
            env={"TONARI_RANKS_PER_NODE": "2", "TONARI_CACHE": str(config.parent / "c")},
            timeout_s=130,
        )  # fmt: skip
        assert status == 0, said
    inline, beside = (judged(config.parent / name) for name in ("inline", "beside"))
    assert len(inline) >= 4
    assert beside == inline


@pytest.fixture
def inline(config: Path) -> Figures:
    """What the training ranks find themselves."""
    run(config, "inline", *OFTEN)
    return judged(config.parent / "inline")


def evaluators(pid: int) -> list[int]:
    """Find the evaluators that a process has started."""
    found = []
    for child in find_descendants(pid):
        with contextlib.suppress(OSError):
            if b"--attached" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@contextlib.contextmanager
def at_looks(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None], *, most: int = 10**6
) -> Iterator[None]:
    """Act as a run looks after its evaluator, with the number of the look."""
    looks, look = [0], Evaluations.look

    def counted(self: Evaluations, *, steps: int) -> None:
        self._next_s = 0.0
        looks[0] += 1
        act(looks[0])
        look(self, steps=steps)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluations, "look", counted)
        yield


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 8))]
)
def test_a_killed_evaluator_costs_nothing_but_lateness(config, inline, monkeypatch, caplog, seed):
    moments = {*generator(key(seed, "moments")).integers(1, 60, 3).tolist()}
    killed: list[int] = []

    def kill(look: int) -> None:
        if look in moments:
            for process in evaluators(os.getpid()):
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    with at_looks(monkeypatch, kill):
        assert run(config, "run", *BESIDE).finished
    assert killed
    assert caplog.text.count("started again") >= len(killed) - 1
    assert judged(config.parent / "run") == inline
    assert not waiting(config.parent / "run")


def test_a_result_of_which_the_evaluator_was_killed_counts_once(config, inline, monkeypatch):
    directory = config.parent / "run"
    run(config, "run", "run.evaluation=elsewhere", *OFTEN)
    with monkeypatch.context() as patched:
        patched.setattr(records, "remove", interrupt)
        with pytest.raises(KeyboardInterrupt):
            [*evaluate_run(directory)]
    assert len([*results(directory)]) == 1
    assert cli.main(["evaluate", str(directory)]) == 0
    assert judged(directory) == inline
    assert sorted(path.suffix for path in (directory / "evaluations").iterdir()) == sorted(
        [".beat", ".lock", *[".json"] * len(inline)]
    )


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.timeout(200)
def test_a_killed_run_leaves_no_process_and_a_resumed_one_judges_all(config, inline):
    directory = config.parent / "run"
    given = [f"run.directory={directory}", *BESIDE, "run.checkpoint_steps=2"]
    command = [sys.executable, "-m", "tonari", "train", str(config), *given]
    training = subprocess.Popen(command, env=job_environ(), stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: len([*results(directory)]) > 0)
        (evaluator,) = evaluators(training.pid)
    finally:
        training.kill()
        training.wait()
    has_ended = ends(evaluator)
    with contextlib.suppress(ProcessLookupError):
        os.kill(evaluator, signal.SIGKILL)
    assert has_ended
    assert run(config, "run", *BESIDE).finished
    assert judged(directory) == inline


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds; the test's own limit ends it."""
    while not holds():
        time.sleep(0.01)


@pytest.mark.timeout(200)
def test_a_run_that_is_stopped_waits_for_nothing_and_a_resumed_one_judges_all(
    config, inline, monkeypatch
):
    directory = config.parent / "run"
    with monkeypatch.context() as patched:
        stop_after(patched, 10)
        assert not run(config, "run", *BESIDE).finished
    left = waiting(directory)
    assert left, "an evaluator takes longer to start than 10 steps do"
    assert not evaluators(os.getpid())
    with at_looks(
        monkeypatch, lambda look: os.kill(os.getpid(), signal.SIGTERM) if look == 25 else None
    ):
        assert not run(config, "run", *BESIDE).finished
    assert not evaluators(os.getpid())
    assert run(config, "run", *BESIDE).finished
    assert judged(directory) == inline


def test_a_run_that_goes_on_from_an_earlier_step_judges_later_ones_anew(config, inline):
    directory = config.parent / "run"
    given = (*OFTEN, "run.evaluation=elsewhere", "run.keep_checkpoints=9")
    run(config, "run", *given)
    assert cli.main(["evaluate", str(directory)]) == 0
    checkpoint = directory / "checkpoints" / "step-00000007"
    run(config, "run", *given, resume=str(checkpoint))
    assert {int(path.name[5:]) for path in waiting(directory)} == {n for n in inline if n > 7}
    assert max(judged(directory)) == 7, "no step is judged before it is trained"
    assert cli.main(["evaluate", str(directory)]) == 0
    assert judged(directory) == inline


@pytest.mark.timeout(200)
def test_another_process_follows_a_run_to_its_end(config, inline, capsys):
    directory = config.parent / "run"
    run(config, "run", "run.evaluation=elsewhere", *OFTEN, "run.epochs=1")
    command = [sys.executable, "-m", "tonari", "evaluate", str(directory), "--follow"]
    followed = []

    def follow(look: int) -> None:
        if look == 1:
            followed.append(subprocess.Popen(command, env=job_environ(), stdout=subprocess.PIPE))
            wait_for(lambda: len([*results(directory)]) > 1)
            assert cli.main(["evaluate", str(directory)]) == 1

    with pytest.MonkeyPatch.context() as patched, at_looks(patched, follow):
        assert run(config, "run", "run.evaluation=elsewhere", *OFTEN).finished
    said, _ = followed[0].communicate(timeout=100)
    assert followed[0].returncode == 0
    assert said.count(b"evaluation loss") == 2 * len(inline) + 1
    assert f"process {followed[0].pid} on" in capsys.readouterr().err
    assert judged(directory) == inline


def test_checkpoints_are_judged_where_training_ranks_judged_other_steps(config, capsys):
    for name, every in (("all", 1), ("run", 9)):
        run(config, name, f"run.evaluate_epochs={every}", "run.keep_checkpoints=9")
    everything = judged(config.parent / "all")
    assert len(judged(config.parent / "run")) == 1
    assert cli.main(["evaluate", str(config.parent / "run")]) == 0
    assert judged(config.parent / "run") == everything
    capsys.readouterr()
    assert cli.main(["evaluate", str(config.parent / "run")]) == 0
    assert "nothing waits to be evaluated" in capsys.readouterr().out


def test_what_comes_late_is_on_the_page_and_no_newer_than_it_is(config, inline, capsys):
    directory = config.parent / "run"
    run(config, "run", "run.evaluation=elsewhere", *OFTEN)
    before = (directory / "run.html").read_text()
    assert cli.main(["evaluate", str(directory)]) == 0
    history = read_history(directory / "metrics.jsonl")
    assert [step for step, _ in history.curve("test", "accuracy", "test").points] == [*inline]
    assert "Accuracy on the test data" not in before
    assert "Accuracy on the test data" in (directory / "run.html").read_text()
    # A result of an earlier step, as its last line.
    with (directory / "metrics.jsonl").open("a") as file:
        line = {"kind": "evaluation", "epoch": 0, "step": 2, "evaluation_loss": 1.0}
        file.write(checked_line(line) + "\n")
    assert read_history(directory / "metrics.jsonl").last["step"] == max(inline)
    capsys.readouterr()
    assert cli.main(["runs", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["steps"] == max(inline)


def test_what_another_process_cannot_evaluate_is_refused_before_staging(config, unstaged):
    def refused(match: str, *given: str, **own: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            train(load_config(config, ("run.evaluation=beside", *given)), **own)

    refused(r"there is nothing to evaluate on; give data\.test", 'data.test=""')
    refused(r"train was given loss=, which another process does not see", loss=lambda a, b: a)
    refused(r"mesh\.tp is 2, whose ranks share a sample's sums", "mesh.tp=2")
    refused(r"mesh\.tiles is \[2\], whose", "mesh.tiles=[2]")
    refused(r"a URL of the settings holds a secret", "data.train=s3://key:secret@x/y.tar")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"model": {"image_size": 16}}, "is of a run with other settings of the model or the data"),
        ({"optimizer": {"ema": 0.5}}, "is of a run with other settings"),
    ],
)
def test_an_evaluator_of_another_model_or_data_is_refused(config, changed, match):
    directory = config.parent / "run"
    run(config, "run", "run.evaluation=elsewhere", "run.epochs=1")
    settings = read_record(directory / "config.json")
    for section, table in changed.items():
        settings[section] |= table
    write_record(directory / "config.json", settings)
    with pytest.raises(ConfigError, match=match):
        [*evaluate_run(directory)]
    assert waiting(directory)


def test_pictures_kept_otherwise_are_evaluated_by_the_same_settings(config):
    directory = config.parent / "run"
    run(config, "run", "run.evaluation=elsewhere", "run.epochs=1")
    settings = read_record(directory / "config.json")
    settings["data"]["decoded"] = "auto"
    write_record(directory / "config.json", settings)
    assert len([*evaluate_run(directory)]) == 1


def test_another_number_of_test_samples_is_refused(config, tmp_path, monkeypatch):
    directory = config.parent / "run"
    run(config, "run", "run.evaluation=elsewhere", *OFTEN, "run.epochs=1")
    next(evaluate_run(directory))
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "another node's"))
    (tmp_path / "test.parquet").replace(tmp_path / "was.parquet")
    (tmp_path / "train.parquet").replace(tmp_path / "test.parquet")
    shutil.copy(tmp_path / "test.parquet", tmp_path / "train.parquet")
    with pytest.raises(
        ConfigError, match=r"was evaluated on 33 samples, and here data\.test has 100"
    ):
        [*evaluate_run(directory)]


def test_a_result_that_cannot_be_written_is_made_again(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, "run", "run.evaluation=elsewhere", "run.epochs=1")
    directory = config.parent / "run"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(records, "write_record", refuse)
        with pytest.raises(
            EvaluationError, match=r"written \(No space left on device\); make room"
        ):
            [*evaluate_run(directory)]
    assert len([*evaluate_run(directory)]) == 1


def test_an_evaluator_that_cannot_live_ends_no_training(config, inline, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", script(tmp_path, "kill -9 $$"))
    with at_looks(monkeypatch, lambda look: None), pytest.raises(EvaluationError) as raised:
        run(config, "run", *BESIDE)
    assert "evaluations are left, as the process that evaluates ended with status -9" in str(
        raised.value
    )
    assert cli.main(["evaluate", str(config.parent / "run")]) == 0
    assert judged(config.parent / "run") == inline


def test_an_evaluator_that_refuses_ends_the_run_with_its_words(config, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", script(tmp_path, "echo no such data; exit 1"))
    with (
        at_looks(monkeypatch, lambda look: time.sleep(0.05)),
        pytest.raises(
            EvaluationError, match=r"ended with status 1, and said last: no such data; mend that"
        ),
    ):
        run(config, "run", *BESIDE)


def script(directory: Path, does: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.timeout(200)
def test_an_evaluator_that_stands_still_is_started_again(config, inline, monkeypatch, caplog):
    directory, stopped, look = config.parent / "run", list[int](), Evaluations._look_after

    def stop(self: Evaluations, now: float, *, idle: bool) -> None:
        if stopped and evaluators(os.getpid()) == stopped:
            self._beat_s -= 400  # so much time has passed
        elif not stopped and (directory / "evaluations" / "evaluator.beat").exists() and not idle:
            stopped.extend(evaluators(os.getpid()))
            os.kill(stopped[0], signal.SIGSTOP)
        look(self, now, idle=idle)

    monkeypatch.setattr(Evaluations, "_look_after", stop)
    with at_looks(monkeypatch, lambda look: None):
        assert run(config, "run", *BESIDE).finished
    assert "ended with status -9" in caplog.text
    assert judged(directory) == inline


@pytest.mark.timeout(200)
def test_no_more_weights_wait_than_may(config, inline, monkeypatch):
    directory, most, waited = config.parent / "run", 2, list[int]()
    monkeypatch.setattr(evaluations, "MOST_WAITING", most)
    with at_looks(monkeypatch, lambda look: waited.append(len(waiting(directory)))):
        run(config, "run", *BESIDE)
    assert max(waited) == most
    assert judged(directory) == inline


def test_the_evaluator_runs_on_cores_that_no_rank_is_bound_to(config, monkeypatch):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core")
    mine, found = min(cores), list[set[int]]()

    def look(number: int) -> None:
        found.extend(os.sched_getaffinity(process) for process in evaluators(os.getpid()))

    os.sched_setaffinity(0, {mine})
    try:
        with at_looks(monkeypatch, look):
            run(config, "run", "run.evaluation=beside", "run.epochs=1")
    finally:
        os.sched_setaffinity(0, cores)
    assert found
    assert all(each == cores - {mine} for each in found)
