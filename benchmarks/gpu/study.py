"""Row 4: is leaving samples out worth its time on a GPU, at the usual size?

Two studies of the examples, by `tonari ablate`, with a ResNet-18 on all of CIFAR-10, one seed
first: 40 % of the labels wrong, where `KeepAgreed` is claimed to beat the honest controls; and
right labels, where `Kakurenbo` at its published setting is claimed to take 22 % less time at 0.4
points less. Both controls are in both. A study takes longer than a row may: cells that are there
stay, and the next call goes on with the others.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.row import UNFINISHED, Case, Goal, Setting, Ways
from examples.damaged import main as write_damaged
from tonari.ablate.call import TERMINATED
from tonari.ablate.command import main as ablate
from tonari.bench.errors import BenchError
from tonari.names import EXAMPLES

QUESTION = "Leaving samples out of CIFAR-10 with a ResNet-18: accuracy against time"

TRAIN, TEST = "cifar10-train.parquet", "cifar10-test.parquet"
LEAST_S = 60.0
"""Less than this is not worth the start of a study."""
GRACE_S = 20.0
"""In which a study that is stopped writes a checkpoint."""


@dataclass(frozen=True)
class Asked:
    """A study, and which of its arms are trained.

    Attributes:
        study: The file's name.
        full: Whether its tables for a GPU apply.
        noise: Share of wrong labels.
        arms: In the order of the report; the first is the baseline.
        settings: Above the file's.
        goals: Of the claims.
    """

    study: str
    full: bool
    noise: float
    arms: tuple[str, ...]
    settings: tuple[str, ...]
    goals: tuple[Goal, ...]


MODEL = ('model.kind="benchmarks.gpu.study:ResNet18"', "mesh.dtype=bfloat16")
ASKED = {
    "40 % wrong labels": Asked(
        "selection_study.toml", True, 0.4,
        ("full", "full, 20 epochs", "random 0.5, 20 epochs", "keep agreed, half", "kakurenbo 0.3"),
        ("data.batch_size=128", "optimizer.accumulate=1"),
        (Goal("keep agreed, half", "above_controls_points", least=0.0),),
    ),
    "right labels": Asked(
        "importance_study.toml", False, 0.0,
        ("full", "kakurenbo 0.3", "full, 24 epochs", "random 0.3"), (),
        (
            Goal("kakurenbo 0.3", "time_ratio", most=0.78),
            Goal("kakurenbo 0.3", "to_full_points", least=-0.4),
        ),
    ),
}  # fmt: skip


def cases(setting: Setting) -> Sequence[Case]:
    """List the studies."""
    there = all((setting.data / name).exists() for name in (TRAIN, TEST))
    lacks = "" if there else f"{setting.data} has no {TRAIN} and {TEST}"
    return [
        Case(name, partial(run, setting, asked), asked.goals, lacks)
        for name, asked in ASKED.items()
    ]


def run(setting: Setting, asked: Asked) -> Ways:
    """Train the cells that are missing while there is time, and report what is there."""
    if setting.seconds_left < LEAST_S:
        raise BenchError(f"{setting.seconds_left:.0f} s are left, expected {LEAST_S:.0f}")
    size = 8 if setting.tiny else 32
    names = f"noise{asked.noise}-{size}.parquet", f"test-{size}.parquet"
    paths = [setting.work / name for name in names]
    for path, name, noise in zip(paths, (TRAIN, TEST), (asked.noise, 0.0), strict=True):
        if not path.exists():
            few = ["--samples", "64"] if setting.tiny else []
            given = [str(setting.data / name), str(path.with_suffix(".partial")), *few]
            write_damaged([*given, "--noise", str(noise), "--size", str(size)])
            path.with_suffix(".partial").replace(path)
    out = setting.work / asked.study.removesuffix(".toml")
    settings = [
        *MODEL, *asked.settings, "study.seeds=1", f'data.train="{paths[0]}"',
        f'data.test="{paths[1]}"', "data.image=png", f"data.image_size={size}",
        f"run.device={setting.device}", "run.checkpoint_epochs=0",
    ]  # fmt: skip
    if setting.tiny:
        settings += ["model.args.width=2", "data.batch_size=32", "mesh.dtype=float32"]
        settings += [f"augment.size={size}"] if asked.noise == 0 else []
    arms = asked.arms[:2] if setting.tiny else asked.arms
    command = [
        str(EXAMPLES / asked.study), *settings, "--out", str(out),
        *(part for arm in arms for part in ("--only", arm)), *(["--full"] if asked.full else []),
    ]  # fmt: skip
    with stopped_after(setting.seconds_left - GRACE_S):
        status = ablate(command)
    if status == TERMINATED:
        ablate([*command, "--report-only"])
    return read_report(out / "report" / "study.json", arms)


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Send this process a SIGTERM after some seconds: a study that it interrupts goes on later."""

    def refuse(*_: object) -> None:
        raise BenchError("the time was over outside of the study; the next call goes on")

    before = signal.signal(signal.SIGTERM, refuse)
    timer = threading.Timer(max(seconds, 1.0), os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def read_report(path: Path, arms: Sequence[str]) -> Ways:
    """Take accuracy and time of the arms that are there, of all seeds.

    Raises:
        BenchError: If none is.
    """
    lines = {
        line["arm"]: line for line in json.loads(path.read_text())["arms"]
        if line["accuracy"] and line["arm"] in arms
    }  # fmt: skip
    if not lines:
        raise BenchError("no arm was trained in time, expected one; the next call goes on")
    whole, ways = lines.get(arms[0]), Ways()
    for arm, line in lines.items():
        points, train_s = line["accuracy"]["mean"], line["costs"]["train_s"]["mean"]
        ways[arm] = {"accuracy_points": points, "train_s": train_s}
        if whole is not None:
            ways[arm]["time_ratio"] = train_s / whole["costs"]["train_s"]["mean"]
            ways[arm]["to_full_points"] = points - whole["accuracy"]["mean"]
        if above := [each["difference"] for each in line["controls"] if each["difference"]]:
            ways[arm]["above_controls_points"] = min(each["mean"] for each in above)
    if missing := len(arms) - len(lines):
        next(iter(ways.values()))[UNFINISHED] = missing
    return ways


class ResNet18(nn.Sequential):
    """The ResNet-18 for 32 x 32 images: a stem of 3 x 3, four widths.

    Source: He et al., Deep residual learning for image recognition, CVPR 2016, as papers on CIFAR
    have it.
    """

    def __init__(self, num_classes: int = 10, width: int = 64) -> None:
        widths = [width * times for times in (1, 1, 2, 2, 4, 4, 8, 8)]
        super().__init__(
            _conv(3, width), nn.BatchNorm2d(width), nn.ReLU(),
            *(_Block(a, b) for a, b in zip([width, *widths], widths, strict=False)),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, num_classes),
        )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        stride = 1 if given == width else 2
        self.path = nn.Sequential(
            _conv(given, width, stride), nn.BatchNorm2d(width), nn.ReLU(),
            _conv(width, width), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.path(features) + self.shortcut(features))


def _conv(given: int, width: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(given, width, 3, stride, padding=1, bias=False)
