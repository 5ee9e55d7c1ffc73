"""A run that Weights & Biases and MLflow follow: calls held by stand-ins, and each one itself."""

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataio.base.lines import read_checked_lines
from tests.trainer.run.runs import run
from tonari.trainer.errors import ConfigError
from tonari.trainer.watch.metrics import numbers
from tonari.trainer.watch.record import read_run

Calls = dict[str, list[Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for both modules, of the interface that is used; what they were called with."""
    kept: Calls = defaultdict(list)

    def keep(name: str) -> Any:
        return lambda *args, **kwargs: kept[name].append((*args, kwargs))

    def init(**given: Any) -> SimpleNamespace:
        kept["init"].append(given)
        return SimpleNamespace(id=given["id"] or "w1", log=keep("log"), finish=keep("finish"))

    def start_run(**given: Any) -> SimpleNamespace:
        kept["start_run"].append(given)
        return SimpleNamespace(info=SimpleNamespace(run_id=given["run_id"] or "m1"))

    names = (
        "set_tracking_uri", "set_experiment", "log_params", "log_metrics", "flush_async_logging",
        "end_run",
    )  # fmt: skip
    modules = {
        "wandb": {"init": init},
        "mlflow": {"start_run": start_run, **{name: keep(name) for name in names}},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    return kept


BOTH = ("run.wandb=mine", "run.mlflow=http://tracker:5000")


def test_both_get_each_line_as_the_metrics_have_it_and_go_on_with_their_run(
    config: Path, calls: Calls
) -> None:
    run(config, "run", "run.epochs=1", *BOTH)
    run(config, "run", "run.epochs=2", *BOTH)
    directory = config.parent / "run"
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    expected = [(numbers(line), line["step"]) for line in lines]
    assert [(figures, given["step"]) for figures, given in calls["log"]] == expected
    assert [(figures, given["step"]) for figures, given in calls["log_metrics"]] == expected
    assert {"step/loss", "epoch/accuracy"} <= {name for figures, _ in expected for name in figures}
    assert [given["id"] for given in calls["init"]] == [None, "w1"]
    assert [given["run_id"] for given in calls["start_run"]] == [None, "m1"]
    assert calls["init"][0]["config"]["data"]["batch_size"] == 16
    assert [params["data.batch_size"] for params, _ in calls["log_params"]] == [16], "once"
    assert [given for (given,) in calls["finish"]] == [{"exit_code": 0}] * 2
    assert [how for how, _ in calls["end_run"]] == ["FINISHED"] * 2
    assert read_run(directory).ids == {"wandb": "w1", "mlflow": "m1"}


def test_an_evaluation_that_comes_late_stands_at_the_newest_step_with_its_own(
    config: Path, calls: Calls
) -> None:
    run(config, "run", "run.epochs=1", "run.evaluation=beside", "run.evaluate_steps=3", BOTH[0])
    steps = [given["step"] for _, given in calls["log"]]
    assert steps == sorted(steps)
    judged = {
        figures.get("evaluation/step", given["step"]): figures["evaluation/evaluation_loss"]
        for figures, given in calls["log"] if "evaluation/evaluation_loss" in figures
    }  # fmt: skip
    lines = read_checked_lines(config.parent / "run" / "metrics.jsonl")
    of_lines = [line for line in lines if line["kind"] == "evaluation"]
    assert judged == {line["step"]: line["evaluation_loss"] for line in of_lines}
    assert [*judged] == [3, 6, 7]


def test_an_error_of_theirs_ends_no_run_and_is_named_once(
    config: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(sys.modules["mlflow"], "log_metrics", fail)
    run(config, "run", "run.epochs=1", *BOTH)
    warned = [r.getMessage() for r in caplog.records if "cannot send" in r.getMessage()]
    assert warned == [
        "[rank 0] run.mlflow: cannot send (ConnectionError: no route); training goes on: "
        "metrics.jsonl has all figures"
    ]
    assert calls["log"], "the other one gets its lines"


def test_a_run_that_cannot_be_begun_there_is_refused(
    config: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError("api_key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(ConfigError, match=r"run\.wandb is 'mine'.*api_key.*leave run\.wandb out"):
        run(config, "run", *BOTH)


@pytest.mark.usefixtures("unstaged")
@pytest.mark.parametrize(("key", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_one_that_is_not_installed_is_named_before_staging(
    key: str, package: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, key, None)
    with pytest.raises(ConfigError, match=rf"run\.{key} is 'x'.*pip install {package}, or leave"):
        run(config, "run", f"run.{key}=x")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Neither asks for a server."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri("")


def installed(name: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed")


@installed("mlflow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("offline")
def test_mlflow_itself_keeps_one_run_in_a_directory(config: Path) -> None:
    store = config.parent / "ml"
    run(config, "run", "run.epochs=1", f"run.mlflow=file:{store}")
    run(config, "run", "run.epochs=2", f"run.mlflow=file:{store}")
    directory = config.parent / "run"
    (losses,) = store.glob("*/*/metrics/step/loss")
    kept = [line.split() for line in losses.read_text().splitlines()]
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    assert [(float(value), int(step)) for _, value, step in kept] == [
        (line["loss"], line["step"]) for line in lines if line["kind"] == "step"
    ]
    assert (losses.parents[2] / "params" / "data.batch_size").read_text() == "16"
    assert losses.parents[2].name == read_run(directory).ids["mlflow"]


def scan(data: bytes) -> Iterator[bytes]:
    """Read the records of a file of LevelDB's log format: blocks of 32 KiB, after 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


@installed("wandb")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("offline")
def test_wandb_itself_keeps_one_run_without_a_network(config: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run(config, "run", "run.epochs=1", "run.wandb=mine")
    run(config, "run", "run.epochs=2", "run.wandb=mine")
    directory = config.parent / "run"
    known = read_run(directory).ids["wandb"]
    files = sorted(directory.glob(f"wandb/offline-run-*-{known}/run-{known}.wandb"))
    steps: list[int] = []
    for path in files:
        for data in scan(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {"/".join(i.nested_key) or i.key for i in record.history.item}
            if "step/loss" in items:
                steps.append(record.history.step.num)
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    assert len(files) == 2, "both of one id, which wandb sync puts together"
    assert steps == [line["step"] for line in lines if line["kind"] == "step"]
