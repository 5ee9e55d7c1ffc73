"""Every setting of a file reaches what it is a setting of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dataio import NodeCache, Staging, Workers
from dataio.job.launch import Job, join
from dataio.world import single_world
from tests.trainer.deliver.fake_loader import NUM_CLASSES
from tests.trainer.digits import write_config
from tests.trainer.run.alone import one_stage
from tonari.oracle.trace import NoReports, make_batch
from tonari.trainer.config.config import build_config, load_config
from tonari.trainer.config.optimizer import OptimizerConfig
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.place import place_of
from tonari.trainer.models import SmallCNN
from tonari.trainer.run.build import build_loader, build_parallel, lay_channels_last, make_model
from tonari.trainer.run.optimizers import build_optimizer, make_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.pace import build_schedule
from tonari.trainer.run.step import train_step
from tonari.trainer.run.tasks import Classify


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ((), 32),
        (("data.image_size=24",), 24),
        (("augment.crop=resized", "augment.size=64"), 64),
        (("augment.crop=random", "augment.size=16", "data.image_size=24"), 16),
        (("augment.crop=resized", "augment.size=64", "model.image_size=128"), 128),
    ],
)
def test_a_model_is_made_for_the_images_that_it_gets(
    tmp_path: Path, given: tuple[str, ...], size: int
) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text('[data]\ntrain = "none"\n[model]\nkind = "vit"\nnum_classes = 4\n')
    assert make_model(load_config(settings, given)).data_shape(5).shape == (5, 3, size, size)


def test_the_optimizer_takes_its_settings() -> None:
    with join(device="cpu"):
        pipeline = one_stage(SmallCNN(NUM_CLASSES, 3, 8), batch_size=4)
        sgd = OptimizerConfig(lr=0.3, momentum=0.7, weight_decay=0.2)
        adamw = OptimizerConfig(
            kind="adamw", lr=0.3, decay_norms=True, betas=(0.5, 0.6), weight_decay=0.2
        )
        made = [build_optimizer(config, pipeline.parameters()) for config in (sgd, adamw)]
    assert [type(optimizer) for optimizer in made] == [torch.optim.SGD, torch.optim.AdamW]
    (first,), (second,) = (optimizer.param_groups for optimizer in made)
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.3, 0.7, 0.2)
    assert (second["lr"], second["betas"], second["weight_decay"]) == (0.3, (0.5, 0.6), 0.2)
    assert first["params"] == second["params"] == list(pipeline.parameters())


def test_adamw_decays_no_norms_and_biases_unless_asked_and_sgd_does() -> None:
    with join(device="cpu"):
        parameters = list(one_stage(SmallCNN(NUM_CLASSES, 3, 8), batch_size=4).parameters())
    given: tuple[dict[str, Any], ...]
    given = ({"kind": "adamw"}, {"kind": "adamw", "decay_norms": True}, {}, {"decay_norms": False})
    for settings, spares in zip(given, (True, False, False, True), strict=True):
        config = OptimizerConfig(weight_decay=0.2, **settings)
        decays = {
            id(each): group["weight_decay"]
            for group in build_optimizer(config, parameters).param_groups
            for each in group["params"]
        }
        expected = [0 if spares and each.ndim == 1 else 0.2 for each in parameters]
        assert [decays[id(each)] for each in parameters] == expected
    # A stage may own biases alone.
    adamw = OptimizerConfig(kind="adamw")
    biases = [each for each in parameters if each.ndim == 1]
    assert [group["weight_decay"] for group in build_optimizer(adamw, biases).param_groups] == [0]


@pytest.mark.parametrize("kind", ["torch.optim.NAdam", "torch.optim:NAdam"])
def test_any_optimizer_of_torch_is_made_by_name_with_settings_of_its_own(kind: str) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))]
    config = OptimizerConfig(
        kind=kind, lr=0.3, weight_decay=0.2, decay_norms=False, args={"momentum_decay": 0.1}
    )
    optimizer = build_optimizer(config, weights)
    assert type(optimizer) is torch.optim.NAdam
    found = [(g["lr"], g["momentum_decay"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(0.3, 0.1, 0.2), (0.3, 0.1, 0)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "torch.optim.Adamm"}, r"Adamm.* cannot be imported .*; give a class that can"),
        ({"kind": "nowhere:Adam"}, "cannot be imported .*nowhere"),
        ({"kind": "torch.nn.Linear"}, "no torch.optim.Optimizer; give a class that is"),
        ({"kind": "torch.optim.LBFGS"}, "needs a closure.*; choose an optimizer"),
        ({"kind": "torch.optim.NAdam", "args": {"mu": 1}}, r"'mu'.*; it takes .*momentum_decay"),
        ({"kind": "adam"}, "expected sgd, adamw, or the name of a class"),
        ({"kind": "adamw", "args": {"eps": 1e-3}}, "settings of its own; leave it out"),
        ({"kind": "torch.optim.NAdam", "args": {"lr": 1}}, "args.lr .* give optimizer.lr"),
        ({"min_lr": 0.5, "lr": 0.1}, "min_lr is 0.5, expected at most .*0.1"),
        ({"warmup_steps": 5, "warmup_epochs": 1}, "expected one of them"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused(settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_optimizer(OptimizerConfig(**settings), [torch.nn.Parameter(torch.zeros(2))])


def test_the_schedule_takes_its_settings() -> None:
    steps = OptimizerConfig(lr=0.8, schedule="steps", milestones=(2, 3), decay=0.5, warmup_epochs=1)
    rate = build_schedule(steps, length=4)
    assert rate(0) < 0.8
    assert [rate(epoch) for epoch in (1, 2, 3)] == pytest.approx([0.8, 0.4, 0.2])
    cosine = OptimizerConfig(lr=0.8)
    by_length = [build_schedule(cosine, length=epochs)(2) for epochs in (4, 8)]
    assert by_length[0] == pytest.approx(0.4)
    assert by_length[1] > by_length[0]


class Opened(Exception):
    """Says what a loader was to be opened with."""


def test_the_loader_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "batch_size": 20,
        "drop_last": True,
        "exclude": "exclude.csv",
        "cache": NodeCache(str(tmp_path), quota="3GB"),
        "staging": Staging(when="overlap", readers=4, bandwidth=1.5),
        "workers": Workers(threads=3, processes=2, prefetch=5),
    }
    given = (
        "data.batch_size=20", "data.drop_last=true", f"data.cache={tmp_path}",
        "data.cache.quota=3GB", "data.staging.when=overlap", "data.staging.readers=4",
        "data.staging.bandwidth=1.5", "data.workers.threads=3", "data.workers.processes=2",
        "data.workers.prefetch=5", "data.exclude=exclude.csv",
    )  # fmt: skip
    config = load_config(write_config(tmp_path), (*given, "run.seed=7", "shuffle.exchange=0.25"))

    def opened(source: object, **settings: Any) -> None:
        raise Opened(settings)

    monkeypatch.setattr("tonari.trainer.run.build.dataio.Loader", opened)
    place = place_of(0, (1,) * 5, schedule="1f1b", virtual=1)
    with join(device="cpu") as job, pytest.raises(Opened) as raised:
        build_loader(config, job, place=place, task=Classify())
    (found,) = raised.value.args
    assert {name: found[name] for name in settings} == settings
    assert found["seed"] == 7
    assert found["shuffle"].exchange == 0.25
    assert sorted(found["fields"]) == ["image", "label"]


def test_the_model_takes_its_settings(tmp_path: Path) -> None:
    path = write_config(tmp_path)

    def weights(job: Job, *overrides: str) -> torch.Tensor:
        parallel = build_parallel(load_config(path, overrides), job)
        return next(parallel.pipeline.parameters()).detach()

    with join(device="cpu") as job:
        assert job.world.world_size == single_world().world_size
        plain, again, double, seeded = (
            weights(job, *overrides)
            for overrides in ((), (), ("mesh.dtype=float64",), ("run.seed=1",))
        )
    assert torch.equal(plain, again)
    assert torch.equal(plain.double(), double)
    assert double.dtype == torch.float64
    assert not torch.equal(plain, seeded)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "the optimizer is LBFGS, .* needs a closure.*; choose an optimizer"),
        (list, "the optimizer is list, expected a torch.optim.Optimizer; let the function"),
    ],
)
def test_a_caller_s_optimizer_that_cannot_be_stepped_is_refused(make: Any, words: str) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match=words):
        make_optimizer(OptimizerConfig(), weights, make)
    assert isinstance(make_optimizer(OptimizerConfig(), weights), torch.optim.SGD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolutions_lie_channels_last_and_learn_the_same(dtype: str) -> None:
    weights = []
    for channels_last in (False, True):
        config = build_config(
            {
                "data": {"train": "none", "batch_size": 4, "image_size": 8},
                "model": {"kind": "small_cnn", "num_classes": 4},
                "mesh": {"channels_last": channels_last, "dtype": dtype},
                "run": {"device": "cpu"},
            }
        )
        with join(device="cpu") as job:
            parallel = build_parallel(config, job)
            pipeline = parallel.pipeline
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            batch = make_batch(config, Own(), parallel.task, pipeline.place)
            for number in range(3):
                train_step(pipeline, optimizer, NoReports(), [batch], step=number)
            found = [each.detach().clone() for each in pipeline.parameters()]
        kernels = [each for each in pipeline.parameters() if each.dim() == 4 and each.shape[1] > 1]
        assert kernels
        for each in kernels:
            assert each.is_contiguous(memory_format=torch.channels_last) == channels_last
        weights.append(found)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one, other, atol=tolerance)


def test_weights_that_ranks_share_are_not_laid_channels_last() -> None:
    with pytest.raises(ConfigError, match="channels_last is true on 2 ranks, expected one"):
        lay_channels_last([torch.nn.Conv2d(2, 2, 1)], num_ranks=2)
