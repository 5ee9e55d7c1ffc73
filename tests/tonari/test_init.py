"""`tonari init`: what it writes is read, runs, and is never written over something."""

import io
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tonari import cli
from tonari.errors import CommandError
from tonari.init import command
from tonari.pack.shards import write_shards
from tonari.trainer import load_config, train


def png(number):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (40, 36, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_the_batch_script_is_for_this_machine_and_its_scheduler(tmp_path, capsys, scheduler):
    given = ["--nodes", "7", "--ranks-per-node", "3", "--time", "09:08:07"]
    assert cli.main(["init", str(tmp_path / "new"), "--scheduler", scheduler, *given]) == 0
    name, submit, sizes = {
        "slurm": ("job.sbatch", "sbatch", ("#SBATCH --nodes=7", "#SBATCH --ntasks-per-node=3")),
        "pbs": ("job.pbs", "qsub", ("#PBS -l select=7:mpiprocs=3", "#PBS -l place=scatter")),
    }[scheduler]
    script = (tmp_path / "new" / name).read_text()
    limit = {"slurm": "#SBATCH --time=09:08:07", "pbs": "#PBS -l walltime=09:08:07"}[scheduler]
    for line in (*sizes, limit, "CONFIG=${CONFIG:-train.toml}"):
        assert line in script.splitlines()
    assert f"PYTHON=${{PYTHON:-{sys.executable}}}" in script
    assert "examples/" not in script
    subprocess.run(["bash", "-n", str(tmp_path / "new" / name)], check=True, timeout=20)
    out = capsys.readouterr().out.splitlines()
    assert f"  {submit} {name}" in out
    assert any(line.endswith("    # instead: a loop of your own") for line in out)
    if scheduler == "slurm":
        text = (tmp_path / "new/loop.sbatch").read_text()
        assert "#SBATCH --nodes=7" in text
        assert f"PYTHON=${{PYTHON:-{sys.executable}}}" in text
        assert "LOOP=${LOOP:-loop.py}" in text
        assert "examples/" not in text + (tmp_path / "new/loop.py").read_text()


@pytest.mark.parametrize(
    ("made", "program", "status", "ends"),
    [
        ("step-5", "", 0, "status 3, goes on from runs/train/checkpoints/step-5 in job 8"),
        ("0005", "loop.py", 0, "status 3, goes on from runs/train/checkpoints/0005 in job 8"),
        ("", "", 3, "status 3 and no checkpoint after the start: not submitted again"),
    ],
)
def test_a_pbs_job_submits_itself_only_after_a_new_checkpoint(
    tmp_path, made, program, status, ends
):
    assert cli.main(["init", str(tmp_path), "--scheduler", "pbs"]) == 0
    (tmp_path / "nodes").write_text("node0\nnode1\n")
    programs = {
        "qstat": "echo '    Resource_List.walltime = 02:00:00'",
        "qsub": 'printf "%s\\n" "$* $BEFORE_S" > asked; echo 8',
        "mpiexec": f'printf "%s\\n" "$*" > started; mkdir -p runs/train/checkpoints/{made}; exit 3',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", tmp_path / "job.pbs"], capture_output=True, text=True, timeout=20,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MPIEXEC": "mpiexec", "PBS_JOBID": "7",
             "PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodes"),
             "OVERRIDES": "run.epochs=90 run.seed=1", "PROGRAM": program},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr.strip()) == (status, ends)
    started = (tmp_path / "started").read_text()
    assert started.startswith(f"-n 2 -f {tmp_path}/nodes ")
    runs = program or "-m tonari train train.toml run.directory=runs/train"
    assert started.endswith(f" {runs} run.epochs=90 run.seed=1\n")
    assert (tmp_path / "asked").exists() == bool(made)
    if made:
        asked = (tmp_path / "asked").read_text()
        assert asked.startswith("-W depend=afterany:7 -l walltime=02:00:00 -v CONFIG,")
        assert asked.endswith(f" {tmp_path}/job.pbs 300\n"), "and what it was given"


def test_the_config_and_the_loop_train_on_the_data_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    samples = ({"__key__": f"{n}", "png": png(n), "y": b"%d" % (n % 2)} for n in range(70))
    write_shards(samples, tmp_path / "data", shard_samples=40)
    given = ["--data", "data/*.tar", "--image", "png", "--label", "y", "--scheduler", "none"]
    assert cli.main(["init", "new", *given]) == 0
    assert "found 2 classes in 'y', and pictures in 'png' that" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "new")  # as the command says
    assert "beside this file" not in Path("train.toml").read_text(), "there is no such script"
    data = load_config(Path("train.toml")).data
    assert (data.train, data.image, data.label) == (f"{tmp_path}/data/*.tar", "png", "y")

    def lines(epochs, saved):
        given = ["loop.py", f"--epochs={epochs}", f"--saved={saved}"]
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path("loop.py", run_name="__main__")
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]

    capsys.readouterr()
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would stay behind the test
    whole = lines(3, "whole")
    assert whole == lines(1, "saved") + lines(3, "saved"), "it goes on, model and optimizer too"
    assert whole[-1].startswith("epoch 2, step 6: loss ")
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == [
        "loop.py", "train.toml",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((300, 400, 3), ("resnet50", "resized", 224, 256)),
        ((90, 60, 3), ("small_cnn", "resized", 64, 73)),
        ((32, 32, 3), ("small_cnn", "random", 32, None)),
    ],
)
def test_the_settings_fit_the_pictures_of_a_folder(tmp_path, monkeypatch, shape, given):
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for place in (f"{split}/{name}" for split in ("train", "val") for name in "abc"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / place / "1.jpg")
    assert cli.main(["init", "new", "--data", "train", "--scheduler", "none"]) == 0
    text = Path("new/train.toml").read_text()
    config = load_config(Path("new/train.toml"))
    data, augment = config.data, config.augment
    assert (data.image, data.label, data.test) == ("image", "label", f"{tmp_path}/val")
    assert config.model.settings["num_classes"] == 3
    assert (config.model.kind, augment.crop, augment.size, augment.resize_short) == given
    body = text.partition("[data]")[2].splitlines()
    columns = {line.index("# ") for line in body if "# " in line and str(tmp_path) not in line}
    assert columns == {42}, "comments begin in one column"
    if config.model.kind == "small_cnn":
        config = load_config(Path("new/train.toml"), ["run.epochs=2", "data.batch_size=3"])
        train(config, quiet=True)


def test_data_that_cannot_be_looked_into_is_said_and_written_all_the_same(tmp_path, capsys):
    given = ["--data", str(tmp_path / "absent-*.tar"), "--scheduler", "none"]
    assert cli.main(["init", str(tmp_path / "new"), *given]) == 0
    assert "could not look into the data (" in capsys.readouterr().out
    assert load_config(tmp_path / "new/train.toml").data.image == "jpg"


def test_a_corpus_is_packed_and_trained_by_the_steps_that_init_prints(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("my corpus.jsonl").write_text(200 * '{"text": "the cat sat on the mat"}\n')
    given = ["--text", "--scheduler", "slurm"]
    assert cli.main(["init", "new", "--data", "my corpus.jsonl", *given]) == 0
    steps = [line.split("#")[0].split() for line in capsys.readouterr().out.splitlines()[2:]]
    pack = next(shlex.split(" ".join(step)) for step in steps if step[1] == "pack")
    assert pack[:4] == ["tonari", "pack", f"{tmp_path}/my corpus.jsonl", "data/train"]
    monkeypatch.chdir(tmp_path / "new")
    assert sorted(path.name for path in Path().iterdir()) == ["job.sbatch", "train.toml"]
    assert cli.main(pack[1:]) == 0
    small = ["run.max_steps=2", "model.width=16", "data.sequence_length=16", "run.device=cpu"]
    assert cli.main(["train", "train.toml", *small, "data.cache=cache"]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.main(["init", "packed", "--data", "new/data/train", *given]) == 0
    assert "tonari pack" not in capsys.readouterr().out
    assert load_config(Path("packed/train.toml")).data.train == f"{tmp_path}/new/data/train"
    assert cli.main(["init", "later", *given]) == 0
    assert "tonari pack CORPUS data/train" in capsys.readouterr().out


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "loop.py").write_text("mine")
    with pytest.raises(CommandError, match=r"found loop\.py, expected none of them; remove or"):
        command.main([str(tmp_path), "--scheduler", "slurm"])
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]
    with pytest.raises(CommandError, match="expected both >= 1; give"):
        command.main([str(tmp_path / "new"), "--nodes", "0"])


@pytest.mark.parametrize(
    ("installed", "found"),
    [({"sbatch"}, "slurm"), ({"qsub", "pbsnodes"}, "pbs"), ({"qsub"}, "none"), (set(), "none")],
)
def test_the_scheduler_is_the_one_whose_commands_are_there(monkeypatch, installed, found):
    monkeypatch.setattr(shutil, "which", lambda name: name in installed or None)
    assert command.find_scheduler() == found
