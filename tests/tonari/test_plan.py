"""`tonari probe` and `tonari plan`, as a user runs them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.multirank import job_environ, launch_command
from tests.oracle.test_trace import GPT, OWN
from tests.trainer.tiles.tiled_run import SETTINGS as TILED
from tests.trainer.tiles.tiled_run import make_data
from tonari.cli import main
from tonari.oracle import stopwatch, trace_step, traffic
from tonari.oracle.probe import messages, probe
from tonari.oracle.probe.messages import KINDS
from tonari.oracle.probe.probe import load_probe, save_probe
from tonari.trainer.config.config import load_config

TIMEOUT_S = 200


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GPT)
    return path


def test_a_step_alone_is_planned_from_its_probe(settings, tmp_path, capsys):
    kept = tmp_path / "probe.json"
    assert main(["probe", str(settings), "--steps", "1", "--no-data", "--out", str(kept)]) == 0
    assert "a step computes" in capsys.readouterr().out
    drawn, picture = tmp_path / "timeline.json", tmp_path / "step.svg"
    command = ["plan", str(settings), "--probe", str(kept)]
    assert main([*command, "--timeline", str(drawn), "--picture", str(picture)]) == 0
    assert "computing" in picture.read_text()
    shown = capsys.readouterr().out
    assert shown.startswith("a step: ")
    assert "computing" in shown
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (step,) = json.loads(kept.read_text())["steps"]
    assert document["step_s"] == pytest.approx(sum(step["laps_s"][0]))
    assert document["low_s"] <= document["step_s"] <= document["high_s"]
    assert document["samples_per_s"] == pytest.approx(8 / document["step_s"])
    spans = [each for each in json.loads(drawn.read_text())["traceEvents"] if each["ph"] == "X"]
    assert [span["name"] for span in spans] == ["compute"] * 3
    assert sum(span["dur"] for span in spans) == pytest.approx(3e6 * document["step_s"])


def test_a_probe_of_other_settings_or_fewer_ranks_is_refused(settings, tmp_path, capsys):
    kept = tmp_path / "probe.json"
    given = ["probe", str(settings), "--steps", "1", "--no-data", "--out", str(kept)]
    assert main([*given, "--world", "2"]) == 0
    assert main(["plan", str(settings), "--probe", str(kept)]) == 1
    assert "of 1 ranks of a job of 2; give --cluster FILE" in capsys.readouterr().err
    assert main(["plan", str(settings), "--probe", str(kept), "model.width=64"]) == 1
    assert "of other settings: [model] differ" in capsys.readouterr().err
    kept.unlink()
    assert main(["plan", str(settings), "--probe", str(kept)]) == 1
    assert "make it with tonari probe" in capsys.readouterr().err


TWO_NODES = """
name = "two nodes"
[[level]]
name = "node"
units = 1
[[level]]
name = "switch"
units = 2
gbyte_s = 1e-5
"""


def test_tiles_are_planned_with_what_they_send_and_hold(tmp_path, capsys):
    np.savez(tmp_path / "data.npz", **make_data())
    settings = tmp_path / "run.toml"
    settings.write_text(
        TILED.format(
            data=tmp_path / "data.npz", cache=tmp_path / "cache", directory=tmp_path / "run",
            batch_size=8, model="unet", tiles=[1, 2],
        )
    )  # fmt: skip
    kept, cluster = str(tmp_path / "probe.json"), tmp_path / "cluster.toml"
    cluster.write_text(TWO_NODES)
    assert main(["probe", str(settings), "--world", "2", "--steps", "1", "--out", kept]) == 0
    capsys.readouterr()
    command = ["plan", str(settings), "--probe", kept, "--cluster", str(cluster), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["epoch"]["steps"] == 6, "of 48 samples, whose tiles two ranks have"
    assert len(document["peak_bytes"]) == 2
    for rank, tile in enumerate(document["tiles"]):
        trace = trace_step(load_config(settings), world_size=2, rank=rank)
        (sent,) = [each for each in traffic(trace, (1, 1, 1, 2, 1)) if each.kind == "send"]
        assert (tile["messages"], tile["sent_bytes"]) == (sent.messages, sent.num_bytes)
        assert tile["sending_s"] == pytest.approx(sent.num_bytes / 1e4)
        # Half of 3 x 13 x 10 numbers, with what files and manifests have beside them
        assert 780 <= tile["kept_row_bytes"] < 900
        assert tile["read_row_bytes"] > 780, "an npz is read row by row"


def test_epochs_on_two_nodes_are_planned_from_one(settings, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(97, 122)) * 400 + b"a")
    given = [
        str(settings), f"data.train={text}", "data.test_fraction=0.2", "shuffle.exchange=0.5",
        f"data.cache={tmp_path / 'cache'}", f"run.directory={tmp_path / 'run'}",
    ]  # fmt: skip
    kept, cluster = tmp_path / "probe.json", tmp_path / "cluster.toml"
    assert main(["probe", *given, "--world", "2", "--steps", "2", "--out", str(kept)]) == 0
    # Of 625 rows of 16 bytes and the one after them a fifth is left for the evaluation
    assert "500 rows of" in capsys.readouterr().out
    assert list((tmp_path / "cache").iterdir()) == []
    cluster.write_text(TWO_NODES)
    command = ["plan", *given, "--probe", str(kept), "--cluster", str(cluster)]
    assert main([*command, "--json", "--explain"]) == 0
    document = json.loads(capsys.readouterr().out)
    *terms, total = document["explanation"]
    by_equation_s = [term["by_equation_s"] for term in terms if term["term"] != "data"]
    assert sum(by_equation_s) == pytest.approx(total["by_equation_s"])
    assert total["simulated_s"] == document["step_s"]
    epoch = document["epoch"]
    # 250 rows of each replica, 8 a batch; half of them leave
    assert (epoch["steps"], epoch["num_nodes"]) == (32, 2)
    times = json.loads(kept.read_text())["data"]
    row_bytes, read_bytes = times["row_bytes"], times["source_row_bytes"]
    assert 17 <= row_bytes < 80  # with some 36 of the manifest
    assert epoch["link_bytes"] == pytest.approx(125 * row_bytes)
    assert epoch["evaluation_s"] > 0
    parts = ("train_s", "exchange_s", "epoch_end_s", "refresh_s", "evaluation_s", "checkpoint_s")
    assert epoch["epoch_s"] == pytest.approx(sum(epoch[part] for part in parts))
    # The gradients of a step alone take longer than that over 10 kB/s
    assert document["parts_s"]["all_reduce"] > 1.0
    # A byte a second from the source: staged once, or a batch of 8 rows at each step
    cluster.write_text(f"{TWO_NODES}[storage]\nnode_read_gbyte_s = 1e-9\n")
    assert main([*command, "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["epoch"]
    assert slow["staging_s"] == pytest.approx(250 * read_bytes)
    assert slow["unstaged_s"] == pytest.approx(32 * 8 * read_bytes, rel=0.1)
    after, staged_s = slow["pays_after"], slow["epoch_s"] - slow["evaluation_s"]
    assert slow["staging_s"] + after * staged_s <= after * slow["unstaged_s"]
    assert slow["staging_s"] + (after - 1) * staged_s > (after - 1) * slow["unstaged_s"]
    tries = [*command, "--try", "shuffle.exchange=1", "--try", "shuffle.exchange=0"]
    page = tmp_path / "plan.html"
    assert main([*tries, "--json", "--report", str(page)]) == 0
    still, moving = json.loads(capsys.readouterr().out)
    assert [still["overrides"], moving["overrides"]] == [
        ["shuffle.exchange=0"], ["shuffle.exchange=1"]
    ]  # fmt: skip
    assert moving["epoch"]["link_bytes"] == pytest.approx(250 * row_bytes)
    assert f"An epoch takes {still['epoch']['epoch_s']:.1f} s" in page.read_text()
    assert "<code>shuffle.exchange=1</code>" in page.read_text()
    # On the link of the gradients, 10 kB/s, which is free only while a step computes
    longer_s = moving["epoch"]["epoch_s"] - still["epoch"]["epoch_s"]
    link_s = moving["epoch"]["link_bytes"] / 1e4
    free_s = 32 * (still["step_s"] - still["parts_s"]["all_reduce"])
    assert link_s - free_s - 0.01 <= longer_s <= link_s + 0.01
    assert main(tries) == 0
    shown = capsys.readouterr().out
    over = moving["epoch"]["epoch_s"] / still["epoch"]["epoch_s"] - 1
    assert f"{over:+.1%}" in shown.splitlines()[2]
    assert "2. It takes" in shown
    picture = tmp_path / "epoch.svg"
    assert main([*command, "--hidden", "0.5", "--explain", "--picture", str(picture)]) == 0
    drawn = picture.read_text()
    assert "<title>steps, waiting: all-reduce " in drawn
    assert "<title>evaluation " in drawn
    shown = capsys.readouterr().out
    (gradients,) = (line for line in shown.splitlines() if "dp_replicate: all-reduce" in line)
    equation_s, simulated_s = map(float, gradients.split()[-2:])
    assert equation_s == pytest.approx(simulated_s, rel=0.1)
    assert "1e-05 GB/s), n = 2" in gradients
    assert "pipeline bubble" not in shown
    assert "16 steps, 50% hidden" in shown
    assert "of exchange" in shown
    assert "node hours" in shown
    assert "without it an epoch would take" in shown
    assert "it has paid after" in shown
    assert main([*command, "--hidden", "1"]) == 2
    assert "argument --hidden: 1, expected a share in [0, 1)" in capsys.readouterr().err
    cluster.write_text(TWO_NODES.replace("units = 2", "units = 1"))
    assert main(command) == 1
    assert "has 1 ranks, fewer than the 2 of the job" in capsys.readouterr().err


def test_wrong_arguments_are_refused_before_anything_is_timed(settings, tmp_path, capsys):
    away = tmp_path / "absent" / "probe.json"
    assert main(["probe", str(settings), "--out", str(away)]) == 1
    assert "found no directory" in capsys.readouterr().err
    assert main(["probe", str(settings), "mesh.pp=3", "--world", "2"]) == 1
    assert "mesh: pp 3" in capsys.readouterr().err
    assert main(["probe", str(settings), "--steps", "0"]) == 2
    assert "expected at least 1" in capsys.readouterr().err


BY_VALUE = """
from torch import nn

class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images):
        if images.float().mean().item() == 1.0:  # as every number is of a tensor without data
            raise RuntimeError("not without data")
        return self.layer(images.flatten(1))
"""


def test_a_model_that_cannot_be_traced_has_a_time_and_no_memory(tmp_path, monkeypatch, capsys):
    (tmp_path / "decides_by_value.py").write_text(BY_VALUE)
    monkeypatch.syspath_prepend(tmp_path)
    path, kept = tmp_path / "run.toml", tmp_path / "probe.json"
    path.write_text(OWN + '[model]\nkind = "decides_by_value:Decides"\n')
    assert main(["probe", str(path), "--steps", "1", "--no-data", "--out", str(kept)]) == 0
    assert main(["plan", str(path), "--probe", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "a step: " in shown
    assert "by coordinate of pp: not known: a step of decides_by_value:Decides as rank 0" in shown


def test_a_job_on_gpus_is_refused_where_there_is_none(settings, tmp_path, capsys):
    kept = tmp_path / "probe.json"
    assert main(["probe", str(settings), "run.device=cuda", "--out", str(kept)]) == 1
    assert "sees no GPU here" in capsys.readouterr().err


BY_RANK = """
from torch import distributed, nn

class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images):
        if distributed.get_rank() == 1:
            raise RuntimeError("one rank fails")
        return self.layer(images.flatten(1))
"""


@pytest.mark.multirank
@pytest.mark.nightly
def test_a_rank_that_fails_ends_the_probe_with_its_words(tmp_path, run_timed):
    (tmp_path / "fails_by_rank.py").write_text(BY_RANK)
    path = tmp_path / "run.toml"
    path.write_text(OWN + '[model]\nkind = "fails_by_rank:Fails"\n')
    ended = run_timed(
        2, "probe", path, "--steps", "1", "--no-data", "--out", tmp_path / "probe.json"
    )
    assert ended.returncode
    assert "one rank fails" in ended.stderr
    assert not (tmp_path / "probe.json").exists()


@pytest.mark.multirank
@pytest.mark.nightly
def test_three_ranks_are_probed_and_planned(settings, tmp_path, run_timed, capsys):
    kept = tmp_path / "probe.json"
    ended = run_timed(3, "probe", settings, "--steps", "1", "--no-data", "--out", kept)
    assert ended.returncode == 0, ended.stderr
    found = load_probe(kept)
    assert {each.ranks for each in found.messages} == {1, 2, 3}
    assert {each.kind for each in found.messages if each.ranks == 3} == {*KINDS}
    assert all(min(each.seconds) > 0 for each in found.messages)
    assert [count for count, _ in found.slowdowns] == [1, 2, 3]
    assert main(["plan", str(settings), "--probe", str(kept)]) == 0
    assert "waiting: all-reduce" in capsys.readouterr().out


@pytest.fixture
def run_timed(tmp_path: Path):
    def run(num_ranks, *arguments):
        command = [*launch_command("mpiexec", num_ranks), "-m", "tonari"]
        path = {"PYTHONPATH": f"{job_environ()['PYTHONPATH']}:{tmp_path}"}
        return subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT_S,
            env=job_environ(path), check=False,
        )  # fmt: skip

    return run


@pytest.mark.multirank
def test_ranks_of_a_pipeline_are_probed_and_planned(settings, tmp_path, run_timed, capsys):
    kept = tmp_path / "probe.json"
    mesh = ["mesh.pp=2", "mesh.microbatches=2"]
    ended = run_timed(2, "probe", settings, *mesh, "--steps", "1", "--no-data", "--out", kept)
    assert ended.returncode == 0, ended.stderr
    found = load_probe(kept)
    assert {each.kind for each in found.messages if each.ranks == 2} == {*KINDS}
    assert [count for count, _ in found.slowdowns] == [1, 2]
    assert main(["plan", str(settings), "--probe", str(kept), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"compute", "send", "receive"} <= {*document["parts_s"]}
    assert sum(document["parts_s"].values()) == pytest.approx(document["step_s"], rel=0.3)
    assert len(document["peak_bytes"]) == 2
    assert main(["plan", str(settings), "--probe", str(kept), "mesh.pp=1"]) == 1
    assert "the probe is of other settings" in capsys.readouterr().err


def test_settings_that_were_tried_are_compared_the_fastest_first(settings, tmp_path, capsys):
    tried = tmp_path / "probes"
    ways = ["model.depth=8", "model.depth=1 data.batch_size=16"]
    given = ["probe", str(settings), "model.width=16", "--steps", "1", "--no-data"]
    given += [word for way in ways for word in ("--try", way)]
    assert main([*given, "--rounds", "2", "--out", str(tried)]) == 0
    shown = capsys.readouterr().out
    assert (shown.count("a step computes"), shown.count("round 1 of 2")) == (2, 2)
    assert [load_probe(path).overrides for path in sorted(tried.iterdir())] == [
        ("model.width=16", "model.depth=1", "data.batch_size=16"),
        ("model.width=16", "model.depth=8"),
    ]  # fmt: skip
    for path in tried.iterdir():
        (steps,) = load_probe(path).steps
        assert len(steps.laps_s) == len(steps.step_s) == 2
    command = ["plan", str(settings), "--probe", str(tried)]
    assert main([*command, "--json"]) == 0
    fast, slow = json.loads(capsys.readouterr().out)
    assert fast["overrides"] == ["model.depth=1", "data.batch_size=16"]
    assert fast["samples_per_s"] == pytest.approx(16 / fast["step_s"])
    assert slow["overrides"] == ["model.depth=8"]
    assert fast["samples_per_s"] > slow["samples_per_s"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"the first:\n\na step: {fast['step_s']:.3f} s" in shown
    head, _, second, *_, words, own = shown.partition("\n\nthe first:")[0].splitlines()
    assert "over the first" in head
    longer_s = 16 * (1 / slow["samples_per_s"] - 1 / fast["samples_per_s"])
    assert f"{longer_s / fast['step_s']:+.1%}" in second
    assert words.startswith("2. It takes ")
    assert "above all for computation" in words
    assert own == "  model.depth=8"


def test_no_step_is_timed_after_a_message(settings, tmp_path, monkeypatch):
    """What messages leave in the allocator makes steps faster than those of a run."""
    timed: list[str] = []

    def time_step(*given, **named):
        timed.append("step")
        return plain_step(*given, **named)

    def time_messages(*, sizes, **named):
        timed.append("messages")
        return plain_messages(sizes=sizes[:1], **named)

    plain_step, plain_messages = stopwatch.time_step, messages.time_messages
    monkeypatch.setattr(probe, "time_step", time_step)
    monkeypatch.setattr(probe, "time_messages", time_messages)
    monkeypatch.setattr(probe, "keep_freed_memory", lambda: timed.append("memory kept"))
    given = ["probe", str(settings), "--no-data", "--steps", "1", "--rounds", "2"]
    given += ["--try", "model.depth=1", "--try", "model.depth=2"]
    assert main([*given, "--out", str(tmp_path / "probes")]) == 0
    assert timed == ["memory kept", "step"] * 4 + ["messages"]
    for path in (tmp_path / "probes").iterdir():
        assert load_probe(path).messages
    timed.clear()
    assert probe.probe(load_config(settings), world_size=1, steps=1).messages
    assert timed == ["memory kept", "step", "messages"]


def test_settings_that_do_not_fit_are_refused_before_any_is_timed(settings, tmp_path, capsys):
    tried = tmp_path / "probes"
    given = ["probe", str(settings), "--no-data", "--try", "model.depth=1", "--try", "mesh.pp=3"]
    assert main([*given, "--out", str(tried)]) == 1
    assert "mesh: pp 3" in capsys.readouterr().err
    assert list(tried.iterdir()) == []
    twice = ["probe", str(settings), "--try", "model.depth=1", "--try", "model.depth=1"]
    assert main([*twice, "--out", str(tried)]) == 2
    assert "--try was given the same settings twice" in capsys.readouterr().err
    assert main(["plan", str(settings), "--probe", str(tried)]) == 1
    assert "found no *.json there" in capsys.readouterr().err


def test_rounds_that_were_timed_before_a_stop_are_kept_under_a_name_without_paths(
    settings, tmp_path, monkeypatch
):
    saved: list[Path] = []

    def stop_at_third(found, path):
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(path)
        save_probe(found, path)

    monkeypatch.setattr(probe, "save_probe", stop_at_third)
    tried = tmp_path / "probes"
    given = ["probe", str(settings), "--no-data", "--steps", "1", "--rounds", "2"]
    ways = ["model.depth=1 run.directory=/of/one", "model.depth=2"]
    given += [word for way in ways for word in ("--try", way)]
    assert main([*given, "--out", str(tried)]) == 130
    assert sorted(path.name for path in tried.iterdir()) == [
        "model.depth=1_run.directory=-of-one.json", "model.depth=2.json"
    ]  # fmt: skip
    for path in tried.iterdir():
        (steps,) = load_probe(path).steps
        assert len(steps.laps_s) == 1
