"""What `tonari simulate` says, and how it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataio.plan.layout import Layout
from tonari import cli
from tonari.simulate.command import measure_plan
from tonari.simulate.report import needed_rate, shown_epochs

SMALL = ["simulate", "--ranks", "9", "--samples", "9e3", "--classes", "30", "--epochs", "4"]


def test_json_holds_every_policy_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--exchange", "1", "0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_nodes"] == 3
    assert report["steps"] == 32
    names = [line["name"] for line in report["lines"]]
    assert names == ["Local", "Partial 0.1", "Partial 1", "Global"]
    for line in report["lines"]:
        assert {len(v) for v in line["curves"].values() if isinstance(v, list)} == {4}
        assert line["curves"]["epoch_correlation"][0] is None
    local, tenth, whole, everywhere = report["lines"]
    assert len(set(local["curves"]["distance"])) == 1
    assert tenth["curves"]["distance"][3] < local["curves"]["distance"][3]
    assert whole["curves"]["distance"][3] < tenth["curves"]["distance"][3]
    assert everywhere["curves"]["epochs_to_random"] == 0
    assert everywhere["cost"] is None
    assert tenth["cost"]["traffic"]["num_leaving"] == 100
    assert tenth["cost"]["traffic"]["rank_bytes"] == 100 * 100_000
    assert tenth["cost"]["plan_s"] > 0
    assert tenth["cost"]["plan_bytes"] > 800, "the leaving rows alone"


def test_tables_show_the_rate_that_a_step_time_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--step-s", "0.5"]) == 0
    shown = capsys.readouterr().out
    # 100 rows of 100 kB of each of 4 ranks, in 32 steps of half a second
    rate = next(line for line in shown.splitlines() if "MB/s a node" in line)
    assert rate.partition("MB/s a node")[2].split()[1] == "2.5"
    assert "nodes visited" in shown
    assert "Local" in shown
    assert "Global" in shown


def test_steps_say_how_large_batches_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--steps", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["batch_size"]) == (20, 50)


def test_labels_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "labels.npy", np.repeat(np.arange(4, dtype=np.int32), [10, 20, 30, 340]))
    args = ["simulate", "--ranks", "8", "--labels", str(tmp_path / "labels.npy"), "--epochs", "2"]
    assert cli.main([*args, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_samples"], report["num_classes"]) == (400, 4)
    # Node 0: 10, 20, 30 and 140 of its 200 rows; node 1 has only the last class
    assert report["lines"][0]["curves"]["distance"][0] == pytest.approx(0.15)


def test_a_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main([*SMALL, "--plot", str(tmp_path / "mix.png")]) == 0
    assert (tmp_path / "mix.png").read_bytes().startswith(b"\x89PNG")


def test_one_node_exchanges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--ranks", "2", "--samples", "100", "--epochs", "2"]) == 0
    assert "as random from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--ranks 0 --samples 5", "--ranks is 0, expected >= 1"),
        ("--ranks 4 --samples 1.5", "--samples is 1.5, expected a whole number"),
        ("--ranks 4 --samples nan", "--samples is nan, expected a whole number"),
        ("--ranks 4", "--samples is missing; give it, or the labels"),
        ("--ranks 4 --samples 9 --exchange 0.1 2", "expected fractions in [0, 1]"),
        ("--ranks 4 --samples 9 --sample-bytes many", "--sample-bytes: found 'many'"),
        ("--ranks 4 --samples 9 --step-s 0", "--step-s is 0.0, expected a time > 0"),
        ("--ranks 4 --samples 9 --steps 0", "--steps is 0, expected >= 1"),
        ("--ranks 4 --samples 9 --plot a.txt", "expected a name that ends in .png"),
        ("--ranks 4 --samples 9 --classes 99999999", "--classes is 99999999, expected at most"),
    ],
)
def test_wrong_arguments_exit_2_and_are_named(
    args: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *args.split()]) == 2
    shown = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert said in shown


@pytest.mark.parametrize(
    ("labels", "args", "said"),
    [
        (None, "--samples 3", "but there are 4 replicas and each needs at least one"),
        (None, "--samples 9 --labels none.npy", "expected a .npy file of one whole number"),
        (None, "--samples 9 --plot none/a.png", "expected one to write into; make it first"),
        (np.ones(5), "", "found float64[5], expected one whole number a sample"),
        (np.zeros((5, 2), int), "", "found int64[5, 2], expected one whole number a sample"),
        (np.array([-1, 3, 3, 3]), "", "found labels from -1 to 3, expected [0, 10000000); number"),
        (np.arange(8), "--samples 9", "found 8 labels for --samples 9; leave --samples out"),
        (None, "--ranks 8 --samples 1e6 --sample-bytes 100MB", "expected at most 4096; lower"),
    ],
)
def test_inputs_that_do_not_fit_exit_1_with_the_cure(
    labels: np.ndarray | None,
    args: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["simulate", "--ranks", "4", *args.split()]
    if labels is not None:
        np.save("labels.npy", labels)
        words += ["--labels", "labels.npy"]
    assert cli.main(words) == 1
    assert said in capsys.readouterr().err


def test_a_rank_among_65536_plans_an_epoch_in_little_time_and_memory() -> None:
    layout = Layout((4,) * 16_384, 10**9)
    cost = measure_plan(layout, exchange=0.1, batch_size=32, row_bytes=100_000, seed=0)
    assert cost.plan_s < 1
    assert cost.plan_bytes < 20_000_000
    assert cost.traffic.num_messages == 16
    assert needed_rate(cost, None) is None


def test_tables_show_the_first_and_the_last_epoch() -> None:
    assert shown_epochs(1) == [0]
    assert shown_epochs(30) == [0, 1, 2, 5, 10, 20, 29]
