"""Every setting of a file reaches what it is a setting of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dataio import NodeCache, Staging, Workers
from dataio.world import single_world
from tests.trainer.deliver.fake_loader import NUM_CLASSES
from tests.trainer.digits import write_config
from tests.trainer.run.alone import one_stage
from trainer.config.config import OptimizerConfig, load_config
from trainer.mesh.place import place_of
from trainer.models import SmallCNN
from trainer.run.build import build_loader, build_optimizer, build_parallel, build_schedule
from trainer.run.tasks import Classify
from trainer.watch.launch import Job, join


def test_the_optimizer_takes_its_settings() -> None:
    with join(device="cpu"):
        pipeline = one_stage(SmallCNN(NUM_CLASSES, 3, 8), batch_size=4)
        sgd = OptimizerConfig(lr=0.3, momentum=0.7, weight_decay=0.2)
        adamw = OptimizerConfig(kind="adamw", lr=0.3, betas=(0.5, 0.6), weight_decay=0.2)
        made = [build_optimizer(config, pipeline) for config in (sgd, adamw)]
    assert [type(optimizer) for optimizer in made] == [torch.optim.SGD, torch.optim.AdamW]
    (first,), (second,) = (optimizer.param_groups for optimizer in made)
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.3, 0.7, 0.2)
    assert (second["lr"], second["betas"], second["weight_decay"]) == (0.3, (0.5, 0.6), 0.2)
    assert first["params"] == second["params"] == list(pipeline.parameters())


def test_the_schedule_takes_its_settings() -> None:
    steps = OptimizerConfig(lr=0.8, schedule="steps", milestones=(2, 3), decay=0.5, warmup_epochs=1)
    rate = build_schedule(steps, num_epochs=4)
    assert rate(0) < 0.8
    assert [rate(epoch) for epoch in (1, 2, 3)] == pytest.approx([0.8, 0.4, 0.2])
    cosine = OptimizerConfig(lr=0.8)
    by_length = [build_schedule(cosine, num_epochs=epochs)(2) for epochs in (4, 8)]
    assert by_length[0] == pytest.approx(0.4)
    assert by_length[1] > by_length[0]


class Opened(Exception):
    """Says what a loader was to be opened with."""


def test_the_loader_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "batch_size": 20,
        "drop_last": True,
        "cache": NodeCache(str(tmp_path), quota="3GB"),
        "staging": Staging(when="overlap", readers=4, bandwidth=1.5),
        "workers": Workers(threads=3, processes=2, prefetch=5),
    }
    given = (
        "data.batch_size=20", "data.drop_last=true", f"data.cache={tmp_path}",
        "data.cache.quota=3GB", "data.staging.when=overlap", "data.staging.readers=4",
        "data.staging.bandwidth=1.5", "data.workers.threads=3", "data.workers.processes=2",
        "data.workers.prefetch=5",
    )  # fmt: skip
    config = load_config(write_config(tmp_path), (*given, "run.seed=7", "shuffle.exchange=0.25"))

    def opened(source: object, **settings: Any) -> None:
        raise Opened(settings)

    monkeypatch.setattr("trainer.run.build.dataio.Loader", opened)
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
