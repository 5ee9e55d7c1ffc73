"""What a caller's task, loss, optimizer and module give is right, or refused by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dataio
from tests.dataio.source.shards import write_tar
from tests.trainer.run.runs import lines
from tonari.trainer import (
    Adapted,
    CheckpointError,
    Columns,
    ConfigError,
    load_config,
    seeded,
    train,
)
from tonari.trainer.run.optimizers import find_lr_shares

ROWS, WIDTH, CLASSES = 16, 6, 3
SETTINGS = """
[data]
train = "{root}/t.tar"
batch_size = {rows}
workers.threads = 0
cache.path = "{root}/cache"
[shuffle]
exchange = 0.1
[optimizer]
lr = 0.05
weight_decay = 0.0
schedule = "steps"
[mesh]
dtype = "float64"
[run]
epochs = 3
log_steps = 1
device = "cpu"
directory = "{root}/run"
"""
FIELDS: dict[str, dataio.Field] = {
    "x": dataio.Array("bin", (WIDTH,), "float32"),
    "y": dataio.Int("cls"),
}
Losses = Callable[[Tensor, Tensor], Tensor]


def cross(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


class Numbers:
    """A task as the page on models describes one, with every method."""

    columns = Columns(("x",), ("y",))

    def __init__(self, losses: Losses = cross, **own: Any) -> None:
        self.losses = losses
        vars(self).update(own)

    def input(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].double()

    def target(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["y"].long()

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return logits.argmax(1) == target, logits.softmax(1).amax(1)


@pytest.fixture
def data(tmp_path: Path) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((ROWS, WIDTH)).astype("<f4"), rng.integers(0, CLASSES, ROWS)
    members = [
        member
        for n, (a, b) in enumerate(zip(x, y, strict=True))
        for member in ((f"{n:03d}.bin", a.tobytes()), (f"{n:03d}.cls", str(b).encode()))
    ]
    write_tar(tmp_path / "t.tar", members)
    return torch.from_numpy(x), torch.from_numpy(y)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def start(root: Path, *overrides: str, **given: Any) -> list[dict[str, Any]]:
    """Train; return the steps' lines."""
    (root / "run.toml").write_text(SETTINGS.format(root=root, rows=ROWS))
    own: dict[str, Any] = {"model": make, "task": Numbers(), "fields": FIELDS, "quiet": True}
    train(load_config(root / "run.toml", overrides), **(own | given))
    return [line for line in lines(root / "run") if line["kind"] == "step"]


LOSSES: dict[str, tuple[Losses, str]] = {
    "a column": (lambda out, t: F.mse_loss(out[:, :1], t[:, None].double(), reduction="none"),
                 r"loss of \d+ rows is \[\d+, 1\], expected \[\d+\]"),
    "a scalar": (lambda out, t: F.cross_entropy(out, t), r"is \[\], expected \[\d+\]"),
    "each class": (lambda out, t: out - out.detach(), r"is \[\d+, 3\], expected"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_is_not_one_a_row_is_refused_before_staging(
    tmp_path: Path, data: object, unstaged: None, kind: str
) -> None:
    losses, said = LOSSES[kind]
    for given in ({"task": Numbers(losses)}, {"loss": losses}):
        with pytest.raises(ConfigError, match=said):
            start(tmp_path, **given)


def test_a_loss_that_only_batches_show_is_refused_as_the_first_comes(
    tmp_path: Path, data: object
) -> None:
    def losses(out: Tensor, target: Tensor) -> Tensor:
        if out.is_meta or target.is_meta:
            raise RuntimeError("looks at values")
        return F.cross_entropy(out, target, reduction="none")[:, None]

    with pytest.raises(ConfigError, match=r"loss of 16 rows is \[16, 1\], expected \[16\]"):
        start(tmp_path, task=Numbers(losses))


def test_outcomes_that_are_not_one_a_row_are_refused(tmp_path: Path, data: object) -> None:
    def outcome(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (logits > 0), logits.amax(1)

    with pytest.raises(ConfigError, match=r"outcome of 16 rows has right of \[16, 3\], expected"):
        start(tmp_path, f"data.test={tmp_path}/t.tar", task=Numbers(outcome=outcome))


def contrast(out: Tensor, target: Tensor) -> Tensor:
    """A loss over the whole batch: of each row, with all others."""
    return (out @ out.T).logsumexp(1) + cross(out, target)


@pytest.mark.parametrize("cut", ["mesh.microbatches=2", "optimizer.accumulate=2"])
def test_a_loss_over_the_batch_is_refused_where_the_batch_is_cut(
    tmp_path: Path, data: object, unstaged: None, cut: str
) -> None:
    with pytest.raises(ConfigError, match=rf"depends on the other rows .* {cut[:12]}.*cuts into"):
        start(tmp_path, cut, task=Numbers(contrast))


def test_a_loss_over_the_whole_batch_trains_as_plain_torch_does(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    found = start(tmp_path, task=Numbers(contrast))
    module = seeded(make, seed=0).double()
    x, y = data
    assert found[0]["loss"] == pytest.approx(
        contrast(module(x.double()), y).mean().item(), rel=1e-9
    )


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        ("augment.label_smoothing=0.1", {"loss": cross}),
        ("augment.mixup=0.4", {"loss": cross}),
        ("augment.label_smoothing=0.1", {}),
        ("augment.erase=0.5", {}),
    ],
)
def test_settings_without_effect_beside_a_loss_or_task_are_refused(
    tmp_path: Path, data: object, unstaged: None, setting: str, given: dict[str, Any]
) -> None:
    name = setting.split("=")[0]
    extra = ("augment.crop=random", "augment.size=8", "data.drop_last=true")
    if given:
        given = given | {"task": None, "fields": None}
    with pytest.raises(ConfigError, match=rf"{name} is 0\.\d, but train was given a"):
        start(tmp_path, setting, *extra, **given)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (dataio.Float("y"), r"'label' is float32\[\], expected one whole number a row"),
        (dataio.Array("y", (4,), "float32"), r"'label' is float32\[4\], expected one whole"),
        (dataio.Array("y", (4,), "int64"), r"'label' is int64\[4\], expected one whole"),
    ],
)
def test_targets_that_are_no_class_need_a_task(
    tmp_path: Path, data: object, unstaged: None, label: dataio.Field, said: str
) -> None:
    image = dataio.Image("png", resize=dataio.Resize(8))
    with pytest.raises(ConfigError, match=said):
        start(
            tmp_path, task=None, fields={"image": image, "label": label},
            loss=lambda out, t: (out[:, 0] - t) ** 2,
            model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 1)),
        )  # fmt: skip


def test_a_column_that_no_field_gives_is_named(
    tmp_path: Path, data: object, unstaged: None
) -> None:
    with pytest.raises(ConfigError, match=r"the column 'x', but the fields .* are a, y; give"):
        start(tmp_path, fields={"a": FIELDS["x"], "y": FIELDS["y"]})


def test_each_group_keeps_its_share_of_the_learning_rate(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        return torch.optim.SGD(
            [{"params": own[:2], "lr": 0.01}, {"params": own[2:], "lr": 0.1}], momentum=0.9
        )

    settings = ("optimizer.milestones=[2]", "optimizer.decay=0.1")
    found = start(tmp_path, *settings, optimizer=groups)
    module, (x, y) = seeded(make, seed=0).double(), data
    optimizer = groups(module.parameters())
    wanted = []
    for epoch in range(3):
        for group, share in zip(optimizer.param_groups, (0.1, 1.0), strict=True):
            group["lr"] = 0.05 * share * (0.1 if epoch >= 2 else 1)
        loss = cross(module(x.double()), y).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert [line["loss"] for line in found] == pytest.approx(wanted, rel=1e-12)
    # Goes on with these shares, not with the rates that were saved.
    more = start(tmp_path, *settings, "run.epochs=4", optimizer=groups)
    assert more[-1]["loss"] < wanted[-1]


def test_shares_are_of_the_largest_rate(tmp_path: Path) -> None:
    with dataio.join(device="cpu"):
        one = torch.nn.Parameter(torch.zeros(1))
        assert find_lr_shares(torch.optim.SGD([one], lr=7.0)) == [1.0]
        assert find_lr_shares(torch.optim.SGD([one], lr=0.0)) == [1.0]


@pytest.mark.parametrize("every", [0, 1, 5])
@pytest.mark.parametrize("where", ["weights", "statistics"])
def test_numbers_that_are_lost_end_a_run_whether_or_not_it_saves(
    tmp_path: Path, data: object, every: int, where: str
) -> None:
    seen = [0]

    def given(batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].double()
        seen[0] += not x.is_meta and len(x) == ROWS
        if seen[0] == 3:
            x = torch.full_like(x, math.nan)
        return x

    def losses(out: Tensor, target: Tensor) -> Tensor:
        if where == "statistics" and seen[0] == 3:
            return (out * 0).nan_to_num(0).sum(1)
        return cross(out, target)

    with pytest.raises(CheckpointError, match=r"step \d: .* is not finite.*smaller optimizer\.lr"):
        start(
            tmp_path, f"run.checkpoint_epochs={every}", "run.epochs=6", "optimizer.momentum=0.0",
            task=Numbers(losses, input=given),
            model=lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)),
        )  # fmt: skip


class Named(nn.Module):
    """Takes pictures and bytes that are none, by name, and notes what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, CLASSES)
        self.seen: list[tuple[torch.dtype, float]] = []

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        if type(pixels) is Tensor and pixels.device.type == "cpu":
            self.seen.append((pixels.dtype, float(pixels.min())))
        assert mask.dtype == torch.uint8
        out: Tensor = self.head(pixels.flatten(1))
        return out


def test_pictures_given_by_name_are_normalised_and_other_bytes_are_not() -> None:
    from tonari.trainer.run.own import adapt

    image = dataio.Image("png", resize=dataio.Resize(8))
    fields: dict[str, dataio.Field] = {"image": image, "y": dataio.Int("cls")}
    task = Numbers(columns=Columns(("image",), ("y",)))
    module = Named()
    model = adapt(
        module, layers=None, task=task, fields=fields, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )
    assert isinstance(model, Adapted)
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    model({"pixels": pixels, "mask": torch.ones(2, 8, 8, dtype=torch.uint8)})
    assert module.seen == [(torch.float32, -1.0)]


def test_train_prints_what_the_command_prints(
    tmp_path: Path, data: object, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, quiet=False)
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out[:3]] == [f"epoch {n} of 3" for n in range(3)]
    assert out[3].startswith("trained 3 epochs, 3 steps on 1 replicas, loss ")
    start(tmp_path, "run.epochs=4", quiet=True)
    assert capsys.readouterr().out == ""


class Balanced(nn.Module):
    """Gives a balance loss beside its logits, as a mixture of experts does."""

    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.stem(x).tanh()
        share = self.router(hidden).softmax(1)
        balance = 2 * (share.mean(0) ** 2).sum()
        logits = self.head(hidden * share.repeat(1, 4))
        return (logits, balance) if self.kind == "tuple" else {"logits": logits, "aux": balance}


@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_the_model_gives_beside_its_logits_counts(
    tmp_path: Path, data: tuple[Tensor, Tensor], kind: str, microbatches: int
) -> None:
    found = start(
        tmp_path, f"mesh.microbatches={microbatches}", "optimizer.momentum=0.0",
        model=lambda: Balanced(kind),
    )  # fmt: skip
    module, (x, y) = seeded(lambda: Balanced("tuple"), seed=0).double(), data
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    logits, balance = module(x.double())
    if microbatches == 1:
        loss = (cross(logits, y) + balance).mean()
        loss.backward()
        optimizer.step()
        assert found[0]["loss"] == pytest.approx(loss.item(), rel=1e-12)
        again, more = module(x.double())
        assert found[1]["loss"] == pytest.approx((cross(again, y) + more).mean().item(), rel=1e-12)
    else:  # each microbatch has its own balance
        assert found[0]["loss"] > cross(logits, y).mean().item()


def test_output_leaves_a_loss_of_the_model_out(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    found = start(tmp_path, model=lambda: Adapted(Balanced(), output=lambda given: given[0]))
    module, (x, y) = seeded(Balanced, seed=0).double(), data
    wanted = cross(module(x.double())[0], y).mean().item()
    assert found[0]["loss"] == pytest.approx(wanted, rel=1e-12)
