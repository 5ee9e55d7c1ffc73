"""timm: what its `create_loader` makes, fed by Tonari; transforms and mixup stay timm's own."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

import dataio
from dataio.rows.samples import Batch, Sample


def _transform_picture(
    transform: Callable[[Image.Image], Any], sample: Sample, rng: np.random.Generator
) -> dict[str, Any]:
    # timm draws by global generators, which the loader seeds.
    picture = Image.open(io.BytesIO(cast(bytes, sample["image"]))).convert("RGB")
    return {"image": transform(picture), "label": sample["label"]}


def _collate_pairs(collate_fn: Callable[[Any], Any], samples: list[Any]) -> Batch:
    pairs = [(sample["image"], int(sample["label"])) for sample in samples]
    return dict(zip(("image", "label"), collate_fn(pairs), strict=True))


class Fed:
    """What timm sees of a `DataLoader`: pairs of pictures and labels, a length and a sampler.

    Args:
        batches: A `Loader` or an evaluation.
        collate_fn: timm's: its script turns mixup off there.
    """

    def __init__(self, batches: Any, collate_fn: Callable[..., Any]) -> None:
        self.batches, self.collate_fn = batches, collate_fn
        self.sampler = self

    def __len__(self) -> int:
        """Count the batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield pairs; the last of an evaluation has fewer rows, as far as some are left."""
        for step, batch in enumerate(self.batches, 1):
            pair = batch["image"], batch["label"]
            if step == len(self) and "valid" in batch and batch["valid"].any():
                pair = pair[0][batch["valid"]], pair[1][batch["valid"]]
            yield pair

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as timm's script asks a distributed sampler; see `Loader.set_epoch`."""
        self.batches.set_epoch(epoch)


def feed(
    loader: Any,
    source: Any,
    *,
    image: str = "image",
    label: str = "label",
    training: Any = None,
    **options: Any,
) -> Any:
    """Let what timm's ``create_loader`` returned take its samples from Tonari. Collective.

    Its transforms, ``collate_fn``, batch size, normalisation and random erasing stay as they are;
    ``num_aug_splits`` and ``num_aug_repeats`` do not fit.

    Args:
        loader: What ``create_loader`` returned.
        source: The dataset, as `Loader` takes it.
        image: The source's field of the picture.
        label: Of its class.
        training: None: it is for training. To evaluate: what ``feed`` returned for training.
        options: What else `Loader` takes, or `Loader.evaluation`.

    Returns:
        timm's prefetcher, whose ``loader`` is now a `Fed`; without a prefetcher that itself.
    """
    of_torch = getattr(loader, "loader", loader)
    made: dict[str, Any] = {
        "fields": {"image": dataio.Bytes(image), "label": dataio.Int(label)},
        "transform": partial(_transform_picture, of_torch.dataset.transform),
        "collate": partial(_collate_pairs, of_torch.collate_fn),
    }
    if training is None:
        batches: Any = dataio.Loader(
            source, batch_size=of_torch.batch_size, drop_last=True, **made, **options
        )
    else:
        trained = getattr(training, "loader", training).batches
        batches = trained.evaluation(source, **made, **options)
    fed = Fed(batches, of_torch.collate_fn)
    if of_torch is loader:
        return fed
    loader.loader = fed
    return loader
