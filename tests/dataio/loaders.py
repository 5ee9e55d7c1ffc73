"""Loaders as tests want them, and what is made of their batches."""

import hashlib
import io
from typing import Any

import numpy as np
import torch
from PIL import Image as PillowImage

import shuffle
from dataio import Image, Int, Loader, Reports, Workers
from dataio.rows.fields import row_schema
from dataio.rows.rows import make_rows
from importance import Kakurenbo, RandomPrune
from tests.memory_source import FIELDS, MemorySource

EPOCHS = 3


class ImageSource(MemorySource):
    """Small PNGs whose pixels follow from the sample's id."""

    def read(self, sample_ids, fields):
        schema = row_schema(fields)
        for i in np.asarray(sample_ids, np.int64).tolist():
            buffer = io.BytesIO()
            pixels = np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)
            PillowImage.fromarray(pixels).save(buffer, "PNG")
            data = np.frombuffer(buffer.getvalue(), np.uint8)
            label = np.array([[i % 4]], "<i8").view(np.uint8)
            yield make_rows(schema, np.array([i]), [label], np.array([[len(data)]]), [data])


IMAGES = {"image": Image("png"), "label": Int("cls")}


def jitter(sample, rng):
    """A transform that draws: its result tells which numbers it was given."""
    return sample | {"noise": rng.normal(size=3).astype(np.float32)}


def scramble(batch, rng):
    return batch | {"mix": torch.from_numpy(rng.integers(0, 100, 2))}


def make(world, root, *, importance=None, source=None, exchange=0.3, compress="none", **options):
    chosen: dict[str, Any] = {"batch_size": 5, "fields": FIELDS, "seed": 7}
    chosen |= {"workers": Workers(threads=1), "reports": Reports(progress=False)}
    return Loader(
        source or MemorySource(61),
        cache=root,
        world=world,
        shuffle=shuffle.Partial(exchange, compress=compress),
        importance=importance,
        **(chosen | options),
    )


def digest(batch):
    """A hash of everything a batch holds."""
    seen = hashlib.sha256()
    for name, value in sorted(batch.items()):
        seen.update(name.encode())
        data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else b"|".join(value)
        seen.update(data)
    return seen.hexdigest()


def loss_of(ids, epoch):
    """A loss that differs by sample and epoch, and an outcome that lets about half be hidden."""
    loss = torch.sin(ids.float() * 12.9898 + epoch) + 1.1
    return loss, ids % 2 == 0, torch.full((len(ids),), 0.9)


def train(loader, epochs=EPOCHS, *, save_at=None, path=None):
    """Run to the end, or save at a step and stop: a list of (epoch, kind, step, digest)."""
    seen = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            seen.append((epoch, "train", loader.step, digest(batch)))
            if save_at == (epoch, loader.step):
                loader.save(path)
                return seen
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
            seen.append((epoch, "refresh", 0, digest(batch)))
    return seen


POLICIES = {
    "off": None,
    "kakurenbo": Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0),
    "random": RandomPrune(0.25, delta=0.9),
}
