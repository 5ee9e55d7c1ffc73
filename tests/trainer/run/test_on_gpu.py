"""Steps and runs on a GPU: they compute what a CPU does, and nobody waits for the device."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dataio.job.launch import join
from tests.gpu import no_synchronisation
from tests.trainer.deliver.fake_loader import FakeLoader
from tests.trainer.run.runs import KAKURENBO, lines, run, stop_after
from tonari.oracle.trace import make_batch, trace_step
from tonari.trainer.config.config import Config, build_config
from tonari.trainer.run.build import Parallel, build_parallel
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import evaluate, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # torch's own, as it compiles
]

ROWS, CLASSES = 16, 10
IMAGES: dict[str, Any] = {"train": "none", "image_size": 64, "batch_size": ROWS}
TEXT: dict[str, Any] = {
    "train": "none", "kind": "text", "sequence_length": 64, "batch_size": ROWS
}  # fmt: skip
TOKENS = {"width": 64, "depth": 2, "heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "resnet": {"kind": "resnet", "depth": 8, "norm": "batch", "num_classes": CLASSES},
    "resnet50": {"kind": "resnet50", "num_classes": CLASSES},
    "vit": {"kind": "vit", "patch": 8, "num_classes": CLASSES, **TOKENS},
    "gpt": {"kind": "gpt", **TOKENS},
    "llama": {"kind": "llama", **TOKENS},
}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "clipped": {"optimizer": {"clip": 1.0}},
    "in two batches": {"optimizer": {"accumulate": 2}},
    "in microbatches": {"mesh": {"microbatches": 2}},
    "bfloat16": {"mesh": {"dtype": "bfloat16"}},
    "recomputed": {"mesh": {"checkpointing": "full"}},
    "recomputed in part": {"mesh": {"checkpointing": "selective"}},
    "by AdamW": {"optimizer": {"kind": "adamw", "lr": 1e-3}},
    "swapped": {"mesh": {"swap_blocks": 1}},
    "compiled": {"mesh": {"compile": True}},
}


class Loader(FakeLoader):
    """Takes outcomes too, as under a policy that asks for them."""

    needs_outcome = True

    def __init__(self) -> None:
        super().__init__(replica=0, num_replicas=1, global_batch_size=ROWS, steps=1)

    def report(self, *_: object) -> None:
        """Take them."""


def make_config(model: str, device: str, **sections: dict[str, Any]) -> Config:
    is_text = model in ("gpt", "llama")
    given: dict[str, dict[str, Any]] = {
        "data": TEXT if is_text else IMAGES,
        "model": MODELS[model],
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "run": {"device": device},
    }
    for name, settings in sections.items():
        given[name] = given.get(name, {}) | settings
    return build_config(given)


def fill(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a batch contents that depend on nothing but its shapes."""
    generator = torch.Generator().manual_seed(0)
    for name, value in batch.items():
        if name == "label":
            value.random_(0, CLASSES, generator=generator)
        elif not value.is_floating_point() and name not in ("sample_id", "slot"):
            value.random_(0, 256, generator=generator)
    batch["sample_id"] = torch.arange(ROWS)
    return batch


def make_batches(
    config: Config, parallel: Parallel, device: torch.device
) -> list[dict[str, Tensor]]:
    made = []
    for _ in range(config.optimizer.accumulate):
        batch = fill(make_batch(config, Own(), parallel.task, parallel.pipeline.place))
        made.append({name: value.to(device) for name, value in batch.items()})
    return made


def steps(config: Config, *, num: int, quiet: bool = False) -> list[Tensor]:
    """Train some steps; the weights after them."""
    with join(device=config.run.device) as job:
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        batches = make_batches(config, parallel, job.device)
        for number in range(num):
            with no_synchronisation() if quiet and number >= 2 else nullcontext():
                train_step(
                    pipeline, optimizer, Loader(), batches, clip=config.optimizer.clip, step=number
                )
        return [plain(parameter) for parameter in pipeline.parameters()]


def plain(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return (value.to_local() if hasattr(value, "to_local") else value).cpu().clone()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_waits_for_no_device(model: str, way: str) -> None:
    steps(make_config(model, "cuda", **WAYS[way]), num=4, quiet=True)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way not in ("bfloat16", "swapped", "compiled")]
)
def test_steps_compute_what_those_on_a_cpu_do(model: str, way: str) -> None:
    # In double precision: a step of an untrained network makes much of what is rounded.
    given = WAYS[way] | {"mesh": {**WAYS[way].get("mesh", {}), "dtype": "float64"}}
    assert share_off(model, given) < 1e-6


@pytest.mark.parametrize("model", [model for model in MODELS if model != "resnet50"])
def test_compiled_steps_compute_what_those_on_a_cpu_do(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert share_off(model, WAYS["compiled"]) < 0.02


def share_off(model: str, given: dict[str, dict[str, Any]]) -> float:
    """Say how far apart steps on both devices end, as a share of how far they went."""
    found = steps(make_config(model, "cuda", **given), num=3)
    expected = steps(make_config(model, "cpu", **given), num=3)
    begun = steps(make_config(model, "cpu", **given), num=0)
    return distance(found, expected) / distance(expected, begun)


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    parts = [(a.double() - b.double()).square().sum() for a, b in zip(some, others, strict=True)]
    return float(torch.stack(parts).sum().sqrt())


LARGER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": (
        {**TEXT, "sequence_length": 512, "batch_size": 8},
        {"kind": "gpt", "width": 768, "depth": 6, "heads": 12},
    ),
    "vit": (
        {**IMAGES, "image_size": 224, "batch_size": 32},
        {"kind": "vit", "patch": 16, "width": 768, "depth": 6, "heads": 12, "num_classes": CLASSES},
    ),
    "resnet50": ({**IMAGES, "image_size": 224, "batch_size": 32}, MODELS["resnet50"]),
}  # fmt: skip


@pytest.mark.parametrize("model", LARGER)
@pytest.mark.parametrize("way", ["by AdamW", "bfloat16", "recomputed", "recomputed in part"])
def test_the_most_memory_is_within_5_percent_of_what_a_trace_finds(model: str, way: str) -> None:
    data, settings = LARGER[model]
    config = build_config({
        "data": data, "model": settings, "run": {"device": "cuda"},
        "optimizer": {"momentum": 0.9, "clip": 1.0}, **WAYS[way],
    })  # fmt: skip
    gc.collect()
    before = torch.cuda.memory_allocated()
    with join(device="cuda") as job:
        parallel = build_parallel(config, job)
        optimizer = build_optimizer(config.optimizer, parallel.pipeline.parameters())
        batches = make_batches(config, parallel, job.device)
        for number in range(3):
            torch.cuda.reset_peak_memory_stats()
            train_step(
                parallel.pipeline, optimizer, Loader(), batches, clip=config.optimizer.clip,
                step=number,
            )  # fmt: skip
        found = torch.cuda.max_memory_allocated() - before
    traced = trace_step(config, world_size=1, rank=0).peak_bytes
    if way == "bfloat16" and model != "resnet50" and traced == pytest.approx(found, rel=0.07):
        pytest.xfail(f"{traced / found - 1:.1%}; -5.9 % on an H200, and the cause is not known")
    assert traced == pytest.approx(found, rel=0.05)


VARIANTS = {
    "plain": (),
    "kakurenbo": KAKURENBO,
    "batch norm": ("model.kind=resnet", "model.depth=8", "model.norm=batch"),
    "bfloat16": ("mesh.dtype=bfloat16",),
    "asynchronous": ("run.checkpoint_async=true",),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_stopped_and_resumed_is_the_same_bit_by_bit(
    config: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    given = ("run.device=cuda", "run.deterministic=true", *VARIANTS[variant])
    run(config, "whole", *given)
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        assert not run(config, "cut", *given).finished
    assert run(config, "cut", *given).finished
    whole, cut = lines(config.parent / "whole"), lines(config.parent / "cut")
    assert cut == [line | {"loss": pytest.approx(line["loss"])} for line in whole]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_sees_the_rows_of_one_on_a_cpu_and_learns_alike(config: Path, variant: str) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        run(config, device, f"run.device={device}", *VARIANTS[variant])
        ends.append([line for line in lines(config.parent / device) if line["kind"] == "epoch"])
    for own, expected in zip(ends[1], ends[0], strict=True):
        assert own["loss"] == pytest.approx(expected["loss"], rel=0.05)
        assert own["hidden_fraction"] == pytest.approx(expected["hidden_fraction"], abs=0.05)
    assert ends[1][0]["order_hash"] == ends[0][0]["order_hash"]


def test_an_evaluation_on_a_gpu_counts_what_one_on_a_cpu_does() -> None:
    found = []
    for device in ("cpu", "cuda"):
        config = make_config("vit", device)
        with join(device=device) as job:
            parallel = build_parallel(config, job)
            batches = make_batches(config, parallel, job.device)
            for batch in batches:
                batch["valid"] = batch["sample_id"] % 3 > 0
            found.append(evaluate(parallel.pipeline, batches))
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-4)
    assert found[1].accuracy == found[0].accuracy
