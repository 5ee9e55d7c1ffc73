"""Tiny float64 models of every kind, batches for them, and what one process makes of both."""

from collections.abc import Callable

import torch
from torch import Tensor

from tonari.trainer.models import GPT, Llama, ResNet, SmallCNN, StagedModel, ViT, seeded
from tonari.trainer.run.tasks import Classify, NextToken

NUM_ROWS = 8
SEQUENCE = 8
VOCABULARY = 12
NUM_CLASSES = 4

MAKERS: dict[str, Callable[[], StagedModel]] = {
    "cnn": lambda: SmallCNN(NUM_CLASSES, 3, 16),
    "resnet": lambda: ResNet(NUM_CLASSES, depth=8, image_size=16),
    "vit": lambda: ViT(NUM_CLASSES, image_size=16, width=16, depth=3, heads=4),
    "token vit": lambda: ViT(
        NUM_CLASSES, image_size=16, width=16, depth=3, heads=4, pooling="token", norm_eps=1e-6
    ),
    "gpt": lambda: GPT(VOCABULARY, SEQUENCE, width=16, depth=3, heads=4),
    "llama": lambda: Llama(
        VOCABULARY, SEQUENCE, width=16, depth=3, heads=4, kv_heads=2, inner_width=24
    ),
}
TEXT = ("gpt", "llama", "tied llama")
"""Those that read tokens."""


def tied() -> StagedModel:
    """Make a model of one stage: its output layer is its embedding."""
    return Llama(
        VOCABULARY, SEQUENCE, width=16, depth=2, heads=4, kv_heads=2, inner_width=24, tied=True
    )


def make(kind: str, *, build: Callable[..., StagedModel] = seeded) -> StagedModel:
    """Make the same model every time, large enough weights included: small ones hide errors."""

    def large() -> StagedModel:
        model = (tied if kind == "tied llama" else MAKERS[kind])().double()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).double()
        return model

    return build(large, seed=5)


def task_of(kind: str) -> NextToken | Classify:
    """Say what a kind of model learns, in one process."""
    return NextToken() if kind in TEXT else Classify()


def batch_of(kind: str) -> dict[str, Tensor]:
    """Make a whole step's batch, weights included."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.arange(NUM_ROWS) % 3 / 2 + 0.5
    if kind in TEXT:
        tokens = torch.randint(VOCABULARY, (NUM_ROWS, SEQUENCE + 1), generator=generator)
        return {"tokens": tokens, "weight": weight}
    images = torch.randint(256, (NUM_ROWS, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
    return {"image": images, "label": labels, "weight": weight}


def one_process(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train one step; returns the gradients, and ``loss``, ``correct``, ``confidence`` a row."""
    model, task, batch = make(kind), task_of(kind), batch_of(kind)
    logits, target = model(task.input(batch)), task.target(batch)
    loss = task.losses(logits, target)
    (loss * batch["weight"]).mean().backward()
    correct, confidence = task.outcome(logits, target)
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients, {"loss": loss.detach(), "correct": correct, "confidence": confidence}
