"""The demo, small: what it must show whatever the machine's speed."""

import json
import subprocess

import numpy as np
import pytest
import torch

from dataio import Int, open_source
from tests.multirank import job_environ, python_command
from tonari.demo.data import pack_digits
from tonari.demo.report import paired_difference, report_words, sentence, whole_s
from tonari.demo.run import CountedBatches

EPOCHS = 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    command = [
        *(*python_command(), "-m", "tonari", "demo", "--json", "--epochs", str(EPOCHS)),
        *("--ranks", "2", "--nodes", "2", "--pfs-bandwidth", "0", "--pfs-latency", "0"),
        *("--workers", "0", "--output", str(directory / "demo.png")),
    ]
    environment = {k: v for k, v in job_environ().items() if not k.startswith("TONARI_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), directory


@pytest.mark.multirank
@pytest.mark.timeout(300)
def test_the_shared_directory_is_read_once(demo):
    document, _ = demo
    assert document["world"] == {"ranks": 2, "nodes": 2}
    for kind in ("tonari", "tonari_hiding"):
        read = document["runs"][kind]["source_bytes"]
        assert document["data"]["tar_bytes"] * 0.9 < read[0] <= 1.05 * document["data"]["tar_bytes"]
        assert read[1:] == [0] * (EPOCHS - 1)
    baseline = document["runs"]["dataloader"]["source_bytes"]
    assert min(baseline) > 0.5 * document["data"]["tar_bytes"], "the baseline reads every epoch"
    # Training and test samples without the tars' ends: what Tonari read once, but for these.
    assert 0.7 * sum(document["runs"]["tonari"]["source_bytes"]) < baseline[0]


@pytest.mark.multirank
def test_every_run_reports_every_epoch(demo):
    document, directory = demo
    for run in document["runs"].values():
        for name in ("epoch_s", "wait_s", "test_accuracy", "source_bytes", "exchanged_rows",
                     "hidden_fraction"):  # fmt: skip
            assert len(run[name]) == EPOCHS
        assert all(wait <= whole for wait, whole in zip(run["wait_s"], run["epoch_s"], strict=True))
        assert run["test_accuracy"][-1] > 0.3, "it learns: guessing gives 0.1"
    assert document["runs"]["tonari"]["exchanged_rows"] == [0, 2 * (1438 // 2 // 10)]
    assert document["runs"]["tonari"]["staging_s"] > 0
    assert document["settings"]["wrong_labels"] == 0.4
    assert (directory / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_wrong_labels_is_made_among_training_rows_alone(tmp_path):
    packed = pack_digits(tmp_path / "a", wrong_labels=0.4)
    clean = pack_digits(tmp_path / "b", wrong_labels=0)

    def labels(shards):
        source = open_source(shards)
        rows = source.read(np.arange(source.num_samples), {"label": Int("cls")})
        return np.concatenate([each.fixed[0].view(np.int64)[:, 0] for each in rows])

    changed = np.flatnonzero(labels(packed.train_shards) != labels(clean.train_shards))
    assert changed.tolist() == sorted(packed.wrong)
    assert len(changed) == round(0.4 * packed.num_train)
    assert labels(packed.test_shards).tolist() == labels(clean.test_shards).tolist()


def test_of_the_hidden_rows_those_of_a_wrong_label_are_counted():
    ids = torch.tensor([0, 1, 2, 3, -1])  # 4 and 5 are hidden, the last row is padding
    rows = CountedBatches([{"sample_id": ids}], wrong=[0, 4])
    assert len([*rows]) == 1
    assert rows.hidden_wrong(6, total=list) == 0.5


def made_up(epoch_s, accuracy, staging_s=0.0):
    of_none = {"hidden_fraction": [0.0] * len(epoch_s), "fewer_epochs": 0.92}
    return {"epoch_s": epoch_s, "test_accuracy": accuracy, "staging_s": staging_s} | of_none


def test_what_workers_take_to_start_counts_when_the_fastest_is_chosen():
    slow_start, steady = made_up([50.0, 2.4], [0.5] * 2), made_up([2.5, 2.5], [0.5] * 2)
    assert whole_s(slow_start, 24) > whole_s(steady, 24)
    assert whole_s(slow_start, 1000) < whole_s(steady, 1000)


def test_the_sentence_says_when_nothing_was_gained():
    slow, fast = made_up([2.0] * 4, [0.9] * 4), made_up([1.0] * 4, [0.9] * 4, 1.5)
    gained = sentence({"dataloader": slow, "tonari": fast, "tonari_hiding": fast})
    assert "2.0 times shorter" in gained
    assert "staging had paid after 2 epochs" in gained
    nothing = sentence({"dataloader": fast, "tonari": slow, "tonari_hiding": slow})
    assert nothing.startswith("Nothing was gained by staging: later epochs take 2.00 times")


def test_the_sentence_says_what_hiding_brought_also_where_it_lost():
    all_rows = made_up([2.0] * 4, [0.9] * 4)
    better = made_up([1.0] * 4, [0.95] * 4) | {"hidden_fraction": [0.0, 0.4, 0.4, 0.4]}
    runs = {"dataloader": all_rows, "tonari": all_rows, "tonari_hiding": better}
    words = "hiding 40% of the rows makes them 2.00 times shorter (+5.0 points beside "
    words += "hiding none, +3.0 beside a third of the epochs)."
    assert sentence(runs).endswith(words)
    words = "hiding 0% of the rows saves no time here (-5.0 points beside "
    words += "hiding none, -2.0 beside a third of the epochs)."
    assert sentence(runs | {"tonari": better, "tonari_hiding": all_rows}).endswith(words)


def test_the_terminal_shows_the_figures_the_sweep_and_the_seeds():
    figures = {"wait_s": 1.0, "source_bytes": 1e6, "exchanged_rows": 5.0, "hidden_fraction": 0.1,
               "hidden_wrong_fraction": 0.9}  # fmt: skip
    slow, fast = (
        made_up([s] * 4, [0.9] * 4, staged) | {name: [v] * 4 for name, v in figures.items()}
        for s, staged in ((2.0, 0.0), (1.0, 1.5))
    )
    slow["num_workers"] = 2
    runs = {"dataloader": slow, "tonari": fast, "tonari_hiding": fast}
    shown = report_words([runs, runs], {1.0: runs, 0.0: runs}, "3.7 MB of shards").splitlines()
    assert shown[0] == "3.7 MB of shards"
    assert next(line.split() for line in shown if "labels wrong" in line)[-3:] == ["90%"] * 3
    assert [line.split()[-2:] for line in shown if "all epochs" in line] == [["4.00", "MB"]]
    assert [line.split() for line in shown if "staging, once" in line] == [
        ["staging,", "once", "-", "1.50", "s", "1.50", "s"]
    ]
    assert "  DataLoader with 2 workers, the best of those tried" in shown
    assert shown[shown.index("Where it pays") + 2].split()[-3:] == ["2.00", "2", "epochs"]
    assert shown[-1].startswith("Tonari, hiding: accuracy +0.00 points")
    alone = report_words([runs], {1.0: runs}, "3.7 MB")
    assert "Where it pays" not in alone
    assert "over 2 seeds" not in alone


def test_the_paired_difference_is_students():
    seeds = [
        {"dataloader": made_up([1.0], [0.90]), "tonari": made_up([1.0], [0.90 + gap / 100])}
        for gap in (1.0, 2.0, 3.0)
    ]
    found = paired_difference(seeds, "tonari")
    assert found.mean_points == pytest.approx(2.0)
    # t(0.975, 2) = 4.3027, standard error 1/sqrt(3)
    assert found.high_points == pytest.approx(2.0 + 4.3027 / 3**0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3", "--nodes", "2"], "3 ranks do not spread evenly over 2 nodes"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--wrong-labels", "1"], "--wrong-labels must be at least 0 and less than 1"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    from tonari.cli import main

    assert main(["demo", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
