"""Images as the settings want them: as fields of the loader, and normalised in the model."""

import dataio
from tonari.trainer.config.augment import AugmentConfig
from tonari.trainer.config.config import DataConfig
from tonari.trainer.models.staged import Images, StagedModel
from tonari.trainer.run.erasing import RandomErasing
from tonari.trainer.run.mixing import MixedClassify
from tonari.trainer.run.tasks import Classify


def image_fields(
    data: DataConfig, augment: AugmentConfig, *, training: bool
) -> dict[str, dataio.Field]:
    """Describe a sample: an image and its label.

    Args:
        data: Keys and channels; its ``image_size`` squeezes whole images.
        augment: What is cut out of them.
        training: Whether to crop and flip by chance.
    """
    resize: dataio.Resize | dataio.ResizeShort | None = None
    crop: dataio.RandomCrop | dataio.RandomResizedCrop | dataio.CenterCrop | None = None
    if data.image_size is not None:
        resize = dataio.Resize(data.image_size)
    if augment.size is not None:
        if training and augment.crop == "random":
            crop = dataio.RandomCrop(augment.size, padding=augment.padding)
        elif training and augment.crop == "resized":
            low, high = augment.scale
            crop = dataio.RandomResizedCrop(augment.size, scale=(low, high))
        else:
            crop = dataio.CenterCrop(augment.size)
            if augment.resize_short is not None:
                resize = dataio.ResizeShort(augment.resize_short)
    flip = augment.flip if training else 0.0
    image = dataio.Image(data.image, resize=resize, crop=crop, flip=flip, channels=data.channels)
    return {"image": image, "label": dataio.Int(data.label)}


def evaluation_fields(data: DataConfig, augment: AugmentConfig) -> dict[str, dataio.Field] | None:
    """Describe a sample of an evaluation; None: as one of training."""
    if data.kind == "text" or (augment.crop, augment.flip, augment.size) == ("none", 0, None):
        return None
    return image_fields(data, augment, training=False)


def image_task(augment: AugmentConfig, *, seed: int, replica: int) -> Classify:
    """Make the task of images.

    Args:
        augment: How they are erased and mixed, and their labels smoothed.
        seed: The run's.
        replica: The rank's.
    """
    if not (augment.draws or augment.label_smoothing):
        return Classify()
    erase = None
    if augment.erase:
        erase = RandomErasing(augment.erase, mean=augment.mean, seed=seed, replica=replica)
    return MixedClassify(
        mixup=augment.mixup, cutmix=augment.cutmix, size=augment.size or 0,
        smoothing=augment.label_smoothing, erase=erase, seed=seed, replica=replica,
    )  # fmt: skip


def normalise(model: StagedModel, augment: AugmentConfig) -> StagedModel:
    """Let a model's stem normalise images by the mean and deviation of each channel, if given."""
    if augment.mean and isinstance(model.stem, Images):
        model.stem.mean, model.stem.std = augment.mean, augment.std
    return model
