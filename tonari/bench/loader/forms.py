"""Every contender's own form of a set, made once and kept while the set is measured."""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tonari.bench.loader.contenders import Contender
from tonari.bench.loader.environments import interpreter, versions
from tonari.bench.loader.figures import LoaderJob
from tonari.bench.loader.launch import prepare
from tonari.bench.loader.peers.harness import PeerTask
from tonari.bench.loader.peers.shards import write_tars
from tonari.bench.loader.sets import SampleSet, make_set, open_set
from tonari.bench.notify import Notify
from tonari.errors import CommandError


@dataclass(frozen=True)
class Form:
    """A contender whose form of the set is there."""

    contender: Contender
    python: Path
    directory: Path
    source: Path
    spec: SampleSet


def make_forms(
    job: LoaderJob, spec: SampleSet, deadline: float, notify: Notify
) -> tuple[dict[str, Form], dict[str, str]]:
    """Let every contender make its form of a set.

    Returns:
        The forms that are there, and why the others are not, each by the contender's name.
    """
    prepared: dict[str, Form] = {}
    problems: dict[str, str] = {}
    for contender in job.contenders:
        if spec.kind not in contender.sets:
            continue
        python = interpreter(contender, job.environments)
        if python is None:
            problems[contender.name] = "not installed"
            continue
        if time.monotonic() > deadline:
            problems[contender.name] = "the time limit had passed"
            continue
        notify(f"{spec.name}: preparing {contender.name}")
        try:
            prepared[contender.name] = _prepare(job, contender, python, spec)
        except CommandError as error:
            problems[contender.name] = str(error)
            notify(str(error))
    return prepared, problems


def _prepare(job: LoaderJob, contender: Contender, python: Path, spec: SampleSet) -> Form:
    own = spec.doubled() if contender.nodes > 1 else spec
    source = job.directory / f"{own.name}-set"
    make_set(own, source)
    directory = job.directory / f"{own.name}-{contender.name}"
    form = Form(contender, python, directory, source, own)
    report = Path(f"{directory}.json")
    stamp = Path(f"{directory}.of.json")
    made_of = json.dumps([str(own), versions(contender, job.environments)])
    if report.exists() and stamp.exists() and stamp.read_text() == made_of:
        return form
    for path in (directory, *job.directory.glob(f"{directory.name}.*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if contender.kind == "ours":
        _make_tars(source)
    task = PeerTask(source=str(source), prepared=str(directory), batch_size=own.batch_size)
    prepare(contender, python, task, timeout_s=job.settings.timeout_s)
    stamp.write_text(made_of)
    return form


def _make_tars(source: Path) -> None:
    tars, description = Path(f"{source}.tar"), (source / "set.json").read_text()
    stamp = tars / "set.json"
    if stamp.exists() and stamp.read_text() == description:
        return
    shutil.rmtree(tars, ignore_errors=True)
    write_tars(open_set(source), tars)
    stamp.write_text(description)


def own_directory(form: Form, workers: int) -> Path:
    """Find the directory that a contender with so many workers uses."""
    if form.contender.kind != "ours" or not workers:
        return form.directory
    # A cache is locked by the job that uses it: the one with threads gets a copy.
    copy = Path(f"{form.directory}.{workers}")
    if not copy.exists():
        shutil.copytree(form.directory, copy)
    return copy
