"""`tonari bench io`: alone, on two ranks, by hand, and what it cannot do."""

import json
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.multirank import job_environ, launch_command, python_command, run_job
from tonari import cli
from tonari.bench import io
from tonari.meet import interface_towards

SMALL = "--size 1MiB --sample 32KiB --repeats 1 --threads 2 --patterns random_record".split()


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """A directory to measure, and one beside it, as arguments."""
    for name in ("shared", "scratch"):
        (tmp_path / name).mkdir()
    return [str(tmp_path / "shared"), "--scratch", str(tmp_path / "scratch")]


def left(place: list[str]) -> list[Path]:
    return [*Path(place[0]).iterdir(), *Path(place[2]).iterdir()]


def test_one_process_prints_one_document(place, tmp_path, capsys):
    file = tmp_path / "out.json"
    status = cli.main(["bench", "io", *place, *SMALL, "--json", "--json-file", str(file)])
    told = capsys.readouterr()
    assert status == 0, told.err
    document = json.loads(told.out)
    assert document == json.loads(file.read_text())
    assert document["site"]["path"] == place[0]
    assert document["environment"]["launcher"] == "alone"
    assert len(document["phases"]) == 4
    assert "of 300 s left, 1 of 4: random_record (shared), cold, ranks 1, threads 2\n" in told.err
    assert not left(place)


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("nothere", "found nothing there, expected a directory to measure"),
        ("file", "is no directory, expected one to measure"),
        ("/proc/self", "making the benchmark's own directory failed"),
    ],
)
def test_a_directory_that_cannot_be_measured_ends_it_with_one_message(
    directory, message, place, tmp_path, capsys
):
    (tmp_path / "file").touch()
    assert cli.main(["bench", "io", str(tmp_path / directory), *place[1:], *SMALL]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tonari")]
    assert len(said) == 1
    assert message in said[0]
    assert not left(place)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--node 1", "go together"),
        ("--node 2 --nodes 2 --meet here:1", "must be in [0, 2)"),
        ("--sample 1000", "multiple of 4096"),
        ("--repeats 0", "repeats must be >= 1"),
        ("--dlio-summaries out", "of training, which nothing asks for"),
        ("--fields label=int:cls", "what of --dataset to train on"),
        ("--fields label:cls --step-ms 1 --dataset x.tar", "expected NAME=KIND:KEY"),
    ],
)
def test_a_wrong_flag_is_refused(flags, message, place, capsys):
    assert cli.main(["bench", "io", *place, *flags.split()]) == 2
    said = " ".join(word for word in capsys.readouterr().err.split() if word != "│")
    assert message in said


def test_it_trains_on_the_users_own_dataset(place, tmp_path, capsys):
    table = pa.table({"data": [bytes(5000)] * 96, "label": list(range(96))})
    for shard in range(2):
        pq.write_table(table.slice(48 * shard, 48), tmp_path / f"{shard}.parquet")
    dataset = ["--dataset", str(tmp_path / "*.parquet"), "--fields", "label=int:label"]
    train = "--step-ms 1 --batch-size 8 --workers 0 --epochs 2 --exchange 0.2".split()
    out = tmp_path / "out.json"
    status = cli.main(
        [
            "bench", "io", *place, *SMALL, *dataset, *train, "--json-file", str(out),
            "--dlio-summaries", str(tmp_path / "dlio"),
        ]
    )  # fmt: skip
    told = capsys.readouterr()
    assert status == 0, told.err
    assert told.out.startswith("Does staging pay? ")
    assert " of 300 s left, end to end: staged\n" in told.err
    document = json.loads(out.read_text())
    assert {phase["pattern"] for phase in document["phases"]} == {"random_record", "dataset"}
    found = document["end_to_end"]
    assert found["num_samples"] == 96
    assert [way["name"] for way in found["ways"]] == [
        "null", "dataloader", "staged", "exchange", "hiding",
    ]  # fmt: skip
    assert found["ways"][4]["samples_of_epoch"] == [96 - 28] * 2
    for way in found["ways"]:
        summary = json.loads((tmp_path / "dlio" / way["name"] / "summary.json").read_text())
        steps = -(-way["samples_of_epoch"][1] // 8)
        expected = 100 * steps * 0.001 / way["epoch_s"][1]
        assert summary["metric"]["train_au_percentage"][1] == pytest.approx(expected)
    assert not left(place)
    wrong = ["--dataset", str(tmp_path / "*.parquet"), "--fields", "label=int:nothere"]
    assert cli.main(["bench", "io", *place, *SMALL, *wrong, *train]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tonari")]
    assert len(said) == 1
    assert "nothere" in said[0]
    assert not left(place)


TRAIN = "--step-ms 1 --batch-size 8 --workers 0 --epochs 2 --dataloader-epochs 2".split()


def test_it_trains_on_what_a_loader_opens_and_refuses_others_before_measuring(
    place, tmp_path, capsys, monkeypatch
):
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")
    values = np.arange(48 * 16 * 8, dtype=np.float32).reshape(48, 16, 8)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("x", data=values)
    for number in range(24):
        path = tmp_path / "folder" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(path)
    out = tmp_path / "out.json"
    given = ["bench", "io", *place, *SMALL, *TRAIN, "--json-file", str(out), "--dataset"]
    # Of the arrays the fields are known.
    for words, count in (
        ([f"{tmp_path}/a.zarr"], 48),
        ([f"{tmp_path}/a.zarr", "--axis", "1"], 16),
        ([f"{tmp_path}/folder", "--fields", "image=image:image", "label=int:label"], 24),
    ):
        assert cli.main([*given, *words]) == 0, capsys.readouterr().err
        found = json.loads(out.read_text())["end_to_end"]
        assert (found["num_samples"], len(found["ways"])) == (count, 5)
        assert not left(place)
    monkeypatch.setattr(io, "measure", lambda *_: pytest.fail("measured"))
    for words, message in (
        ([f"{tmp_path}/a.zarr", "--fields", "x=array:float32:3:x"], "expected float32[3]"),
        ([f"{tmp_path}/absent.zarr"], "absent.zarr"),
    ):
        capsys.readouterr()
        assert cli.main([*given, *words]) == 1
        assert message in capsys.readouterr().err


def test_an_address_without_a_port_is_refused(place, capsys):
    status = cli.main(["bench", "io", *place, *"--node 0 --nodes 2 --meet here".split()])
    assert status == 1
    assert "expected HOST:PORT" in capsys.readouterr().err


def test_the_interface_towards_this_host_is_the_loopback():
    assert interface_towards("127.0.0.1", 9) == "lo"


def test_sigterm_removes_the_files_and_ends(place, tmp_path):
    command = [*python_command(), "-m", "tonari", "bench", "io", *place, "--size", "8MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=job_environ())
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "file_per_sample" in line:
                break
        assert left(place)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert not left(place)


@pytest.mark.multirank
def test_two_ranks_as_two_nodes_measure_and_agree_on_errors(place, tmp_path):
    file = tmp_path / "out.json"
    tonari = [*launch_command("mpiexec", 2), "-m", "tonari", "bench", "io"]
    env = {"TONARI_RANKS_PER_NODE": "1"}
    status, said = run_job(
        [*tonari, *place, *SMALL, "--json-file", str(file)], env=env, timeout_s=120
    )
    assert status == 0, said
    document = json.loads(file.read_text())
    assert document["environment"]["launcher"] == "mpiexec"
    assert len(document["links"]) == 1
    phases = [phase for phase in document["phases"] if phase["clients"] == 2]
    assert {len(phase["repeats"][0]["verdict_of_node"]) for phase in phases} == {2}
    if document["site"]["name"] in ("ext4", "xfs", "btrfs"):
        # Each rank reads what the other wrote, and is judged by its own process's counter.
        states = [(phase["wanted"], phase["repeats"][0]["verdict"]["state"]) for phase in phases]
        assert {wanted == state for wanted, state in states} == {True}, states
    status, said = run_job(
        [*tonari, str(tmp_path / "nothere"), *place[1:], *SMALL], env=env, timeout_s=60
    )
    assert status != 0
    assert said.count("found nothing there") == 1, said
    assert "Traceback" not in said
    assert not left(place)


@pytest.mark.multirank
def test_two_nodes_started_by_hand_meet_and_measure(place, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [*python_command(), "-m", "tonari", "bench", "io", *place, *SMALL, "--nodes", "2",
               "--meet", address, "--json-file", str(tmp_path / "out.json")]  # fmt: skip
    started = [
        subprocess.Popen(
            [*command, "--node", str(node)], env=job_environ(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in (1, 0)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["environment"]["launcher"] == "by hand"
    assert document["environment"]["nodes"] == 2
    assert not left(place)
