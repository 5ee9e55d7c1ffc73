"""`tonari search`, as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.multirank import ROOT
from tests.oracle.test_trace import GPT
from tonari.cli import main
from tonari.oracle.cluster.cluster import load_cluster
from tonari.plan.search import data_choices, format_s

H100 = ROOT / "examples" / "clusters" / "h100.toml"
MACHINE = ("--cluster", str(H100), "--world", "4")


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(GPT)
    return str(path)


def test_the_fastest_meshes_of_a_machine_are_listed(settings, tmp_path, capsys):
    command = ["search", settings, *MACHINE]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["global_batch_size"] == 4 * 8
    steps = [float(f"{each['step_s']:.8g}") for each in found["candidates"]]
    assert len(steps) == 10
    assert steps == sorted(steps)
    assert found["legal"] == found["priced"] + found["unfit"] + found["pruned"]
    picture = tmp_path / "fastest.svg"
    data = ["--data", "1000", "--try", "shuffle.exchange=0", "--try", "shuffle.exchange=1"]
    assert main([*command, "--global-batch", "16", "--picture", str(picture), *data]) == 0
    shown = capsys.readouterr().out
    assert "the first, in parts of its epoch: " in shown
    assert "the best of each choice:" in shown
    assert "data.workers.threads=1 shuffle.exchange=0" in shown
    drawn = picture.read_text()
    assert drawn.count("dp_replicate=") == 10
    assert drawn.count("shuffle.exchange=0") + drawn.count("shuffle.exchange=1") == 10
    assert "configurations are legal for 16 samples a step" in shown
    assert "mesh.pp=" in shown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (3.3e-6, "0.00330 ms"), (0.0222, "22.2 ms"), (1, "1.00 s"), (4321.6, "4,321.6 s")],
)
def test_a_time_is_shown_by_its_size(seconds, words):
    assert format_s(seconds) == words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("plan",), "run.toml`, then `tonari plan "),
        (("plan", "--probe", "a", "--data", "1"), "unrecognized arguments: --data"),
        (("plan", "--probe", "a", "--hidden", "1"), "--hidden: 1, expected a share in [0, 1)"),
        (("search",), "required: --cluster, --world"),
        (("search", "--cluster", str(H100)), "required: --world"),
        (("search", "--cluster", str(H100), "--world", "0"), "--world: 0, expected a number >= 1"),
        (("search", *MACHINE, "--explain"), "unrecognized arguments: --explain"),
        (("search", *MACHINE, "--from", "run"), "unrecognized arguments: --from"),
        (("search", *MACHINE, "--timeline", "a.json"), "unrecognized arguments: --timeline"),
        (("search", *MACHINE, "--data", "1", "--probe", "a"), "not allowed with argument --data"),
        (("search", *MACHINE, "--hidden", "x"), "--hidden: x, expected a share in [0, 1)"),
    ],
)
def test_each_command_names_what_it_needs_and_does_not_know(settings, capsys, given, words):
    command, *options = given
    assert main([command, settings, *options]) == 2
    assert words in capsys.readouterr().err


def test_choices_of_epochs_are_priced_for_the_files_of_the_config(settings, tmp_path, capsys):
    command = ["search", settings, *MACHINE, "--hidden", "0.3"]
    assert main(command) == 1
    assert "--data files: data.train: absent.txt cannot be read" in capsys.readouterr().err
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be. " * 500)
    command.append(f"data.train={str(text)!r}")
    assert main([*command, "--data", "files"]) == 0
    counted = capsys.readouterr().out
    assert "the first, in parts of its epoch: " in counted
    assert main(command) == 0
    assert capsys.readouterr().out == counted


def test_a_choice_names_what_it_hides(settings):
    def words(*hidden_fractions):
        return [each.words for each in data_choices(
            Path(settings), (), load_cluster(H100), world_size=4, words="1000", probe=None,
            tries=[()], hidden_fractions=hidden_fractions,
        )]  # fmt: skip

    assert words(0.0) == [()]
    assert words(0.3) == [("30% hidden",)]
    assert words(0.0, 0.3) == [("0% hidden",), ("30% hidden",)]


def test_what_computes_a_step_is_not_for_the_user_to_try(settings, capsys):
    assert main(["search", settings, *MACHINE, "--data", "100", "--try", "mesh.pp=2"]) == 1
    assert "a search chooses by itself what computes a step" in capsys.readouterr().err


def test_a_machine_whose_processors_are_not_described_is_refused(settings, capsys):
    cluster = ROOT / "examples" / "clusters" / "gigabit.toml"
    assert main(["search", settings, "--cluster", str(cluster), "--world", "4"]) == 1
    assert "[device]" in capsys.readouterr().err


def test_a_model_of_one_s_own_is_refused_with_what_to_do_instead(settings, capsys):
    assert main(["search", settings, *MACHINE, "model.kind=torch.nn:Identity"]) == 1
    assert "model.kind is torch.nn:Identity, a model of your own, whose" in capsys.readouterr().err
