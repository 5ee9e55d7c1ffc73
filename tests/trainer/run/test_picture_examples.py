"""The examples with pictures, as their first lines say to start them."""

import re
import shutil
from pathlib import Path

import pytest

from tests.multirank import ROOT, launch_command, python_command, run_job

EPOCHS = 2
LINE = re.compile(r"epoch (\d): loss (\d\.\d+), (?:accuracy|mean IoU) (\d\.\d+)")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The shards that both train on, and the cache beside them."""
    directory = tmp_path_factory.mktemp("examples") / "pictures"
    command = [*python_command(), str(ROOT / "examples" / "pictures.py"), str(directory)]
    status, output = run_job(command, env=None, timeout_s=60)
    assert status == 0, output
    return directory


def run(
    example: str, pictures: Path, saved: Path, begin: list[str]
) -> dict[int, tuple[float, float]]:
    """Loss and accuracy, or mean IoU, of each epoch that was trained."""
    status, output = run_job(
        [
            *begin, str(ROOT / "examples" / f"{example}.py"),
            str(pictures / "train-{000000..000001}.tar"), str(pictures / "val" / "val-000000.tar"),
            "--saved", str(saved), "--epochs", str(EPOCHS),
        ],
        env={"TONARI_CACHE": str(pictures.parent / "cache")},
        timeout_s=200,
    )  # fmt: skip
    assert status == 0, output
    return {int(epoch): (float(loss), float(score)) for epoch, loss, score in LINE.findall(output)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "example", [pytest.param("imagenet", marks=pytest.mark.nightly), "segmentation"]
)
def test_the_example_learns_and_goes_on_with_the_same_losses(tmp_path, pictures, example):
    saved, killed = tmp_path / "whole", tmp_path / "killed"
    whole = run(example, pictures, saved, python_command())
    assert list(whole) == list(range(EPOCHS))
    # A class drawn at random is right in a quarter of the pictures; all background has IoU < 0.2.
    assert whole[EPOCHS - 1][1] > 0.6
    # What a job leaves that is killed while it saves its second epoch.
    shutil.copytree(saved / "000", killed / "000")
    shutil.copytree(saved / "001" / "loader", killed / "001" / "loader")
    rest = run(example, pictures, killed, python_command())
    assert rest == {epoch: whole[epoch] for epoch in range(1, EPOCHS)}


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("example", "launcher"),
    [
        ("imagenet", "torchrun"),
        pytest.param("segmentation", "mpiexec", marks=pytest.mark.nightly),
        pytest.param("imagenet", "mpiexec", marks=pytest.mark.nightly),
        pytest.param("segmentation", "torchrun", marks=pytest.mark.nightly),
    ],
)
def test_the_example_learns_on_two_ranks(tmp_path, pictures, example, launcher):
    figures = run(example, pictures, tmp_path / "saved", launch_command(launcher, 2))
    assert list(figures) == list(range(EPOCHS))
    assert figures[EPOCHS - 1][1] > 0.6
