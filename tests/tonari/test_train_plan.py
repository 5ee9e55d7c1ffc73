"""`tonari train --plan`: a run beside what was planned of it; and what a plan learns from it."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dataio.base.lines import read_checked_lines
from tests.oracle.test_learned import write_metrics
from tests.oracle.test_trace import GPT
from tonari.cli import main


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    """A tiny GPT on made-up text."""
    directory = tmp_path_factory.mktemp("planned")
    path, text = directory / "run.toml", directory / "text.txt"
    path.write_text(GPT)
    text.write_bytes(bytes(range(97, 122)) * 64 + b"a")
    return [
        str(path), f"data.train={text}", "data.test_fraction=0.2", "model.depth=1",
        "data.workers.threads=0", f"data.cache={directory}", "run.epochs=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def probe(settings, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("probed") / "probe.json")
    assert main(["probe", *settings, "--steps", "1", "--out", path]) == 0
    return path


@pytest.fixture(scope="module")
def planned(settings, probe) -> str:
    """What `tonari plan --json` prints for it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", *settings, "--probe", probe, "--json"]) == 0
    return printed.getvalue()


@pytest.fixture
def document(planned) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(planned)
    return made


@pytest.fixture
def given(settings, tmp_path) -> list[str]:
    cache = tmp_path / "cache"
    cache.mkdir()
    return [*settings, f"data.cache={cache}", f"run.directory={tmp_path / 'run'}"]


@pytest.fixture
def train(given, tmp_path):
    """Train beside a plan."""

    def run(document: object, *overrides: str) -> int:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document))
        return main(["train", *given, *overrides, "--plan", str(path)])

    return run


def epochs(tmp_path: Path) -> list[dict[str, Any]]:
    lines = read_checked_lines(tmp_path / "run/metrics.jsonl")
    return [line for line in lines if line["kind"] == "epoch"]


@pytest.mark.parametrize(
    ("part", "words"),
    [("train_s", "steps"), ("evaluation_s", "evaluation"), ("epoch_end_s", "epoch end")],
)
def test_each_epoch_stands_beside_the_plan_and_the_part_that_is_off_is_named(
    document, train, tmp_path, capsys, part, words
):
    document["epoch"][part] += 500.0
    assert train(document) == 0
    shown = capsys.readouterr().out
    first, second = epochs(tmp_path)
    assert second["most_off"] == part
    assert f"were planned; {words} -" in shown
    parts = ("train_s", "exchange_s", "epoch_end_s", "refresh_s", "evaluation_s", "checkpoint_s")
    for name in parts:
        assert second[f"planned_{name}"] == pytest.approx(document["epoch"][name])
        assert 0 <= second[name] < 400
    assert second["planned_s"] == pytest.approx(document["epoch"]["epoch_s"] + 500.0)
    assert second["measured_s"] > second["epoch_s"] + second["evaluation_s"]
    assert first["planned_staging_s"] == document["epoch"]["staging_s"]
    assert "planned_staging_s" not in second
    assert shown.count("; staging ") == 1


def test_a_plan_of_another_run_is_refused_before_anything_is_staged(
    document, train, tmp_path, capsys
):
    assert train(document, "shuffle.exchange=0.5", "data.drop_last=true") == 1
    error = capsys.readouterr().err
    assert "a plan for other settings: data.drop_last is false there and true here" in error
    assert "shuffle.exchange is 0.1 there and 0.5 here; give the same settings, or plan" in error
    assert train(document | {"world_size": 4}) == 1
    assert "a plan for 4 ranks on 1 nodes, and the run has 1 on 1; plan this run: tonari" in (
        capsys.readouterr().err
    )
    assert train(document | {"epoch": document["epoch"] | {"num_nodes": 2}}) == 1
    assert "a plan for 1 ranks on 2 nodes" in capsys.readouterr().err
    assert train(document | {"epoch": None}) == 1
    assert "a plan of steps alone, without an epoch; probe without --no-data" in (
        capsys.readouterr().err
    )
    damaged: object
    for damaged in ({}, [], 3, document | {"epoch": {}}, document | {"settings": None}):
        assert train(damaged) == 1
        assert "not a plan of an epoch" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(document, "run.epochs=1", "run.seed=3", "run.log_steps=7") == 0


def test_a_plan_that_cannot_be_read_is_named_with_the_cure(given, tmp_path, capsys):
    absent = str(tmp_path / "absent.json")
    assert main(["train", *given, "--plan", absent]) == 1
    error = capsys.readouterr().err
    assert "absent.json: not a plan of an epoch (FileNotFoundError" in error
    assert "plan this run: tonari plan CONFIG.toml --probe FILE --json > plan.json" in error
    assert main(["train", *given, "--plan", absent, "--dry-run"]) == 2
    assert "--plan is held against a run, and --dry-run starts none" in capsys.readouterr().err


def test_a_plan_takes_what_a_run_measured_and_shows_both(
    document, train, given, probe, tmp_path, capsys
):
    document["epoch"]["epoch_end_s"] = 0.0
    assert train(document) == 0
    capsys.readouterr()
    command = ["plan", *given, "--probe", probe, "--from", str(tmp_path / "run")]
    # Another job: of other steps and epochs
    command += ["shuffle.exchange=0.5", "run.epochs=7", "--hidden", "0.5"]
    assert main([*command, "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    epoch, learned = other["epoch"], other["learned"]
    (_, measured) = epochs(tmp_path)
    factor = measured["train_s"] / measured["planned_train_s"]
    assert learned["factors"]["train_s"]["median"] == pytest.approx(factor)
    assert "epoch_end_s" not in learned["factors"]
    assert learned["train_s"] == pytest.approx(factor * epoch["train_s"])
    assert learned["epoch_end_s"] == epoch["epoch_end_s"] > 0
    assert epoch["train_s"] < 0.8 * document["epoch"]["train_s"], "planned alone, of half the rows"
    parts = ("train_s", "exchange_s", "epoch_end_s", "refresh_s", "evaluation_s", "checkpoint_s")
    assert learned["epoch_s"] == pytest.approx(sum(learned[part] for part in parts))
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"with what {tmp_path / 'run'} measured" in shown
    assert f"{factor:.2f} in one epoch" in shown
    assert shown.count("7 epochs: ") == 2


def test_a_run_without_a_plan_and_wrong_arguments_are_refused(
    given, settings, probe, tmp_path, capsys
):
    assert main(["train", *given, "run.epochs=1"]) == 0
    command = ["plan", *settings, "--probe", probe, "--from"]
    assert main([*command, str(tmp_path / "run")]) == 1
    assert "has 1 epochs and none beside a plan; give the run.directory of a run that" in (
        capsys.readouterr().err
    )
    found = json.loads(Path(probe).read_text())
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(found | {"data": None, "evaluations": []}))
    run = tmp_path / "metrics.jsonl"
    write_metrics(run, [{"train_s": (1.0, 1.0)}] * 2)
    assert main(["plan", *settings, "--probe", str(alone), "--from", str(run)]) == 1
    assert "probe without --no-data" in capsys.readouterr().err
