"""Images as the settings want them: as fields of the loader, and normalised in the model."""

import json
from collections.abc import Sequence
from dataclasses import replace

import dataio
from dataio.base.errors import FieldError
from dataio.source import open_some
from dataio.source.names import IMAGE_KEYS, LABEL_KEYS, fields_there
from dataio.world import World
from dataio.world.agree import agree
from tonari.trainer.config.augment import AugmentConfig
from tonari.trainer.config.config import Config, DataConfig
from tonari.trainer.models.staged import Images, StagedModel
from tonari.trainer.run.erasing import RandomErasing
from tonari.trainer.run.mixing import MixedClassify
from tonari.trainer.run.own import Own
from tonari.trainer.run.tasks import Classify


def with_keys(config: Config, own: Own, world: World) -> Config:
    """Find the keys of pictures and classes that settings leave to the data. Collective.

    Raises:
        FieldError: On all ranks, if not just one key of the first sample may be meant.
        SourceError: On all ranks, if the data cannot be read.
    """
    data = config.data
    given = own.fields or own.sources or (data.image and data.label)
    if given or data.kind == "text":
        return config

    def look() -> bytes:
        if world.rank:
            return b""
        source = open_some(data.train, num_shards=1, joined=data.joined)
        image = data.image or _only(source, IMAGE_KEYS, dataio.Image, "image")
        label = data.label or _only(source, LABEL_KEYS, dataio.Int, "label")
        return json.dumps([image, label]).encode()

    image, label = json.loads(agree(world, look, doing="look for pictures and classes")[0])
    return replace(config, data=replace(data, image=image, label=label))


def _only(source: dataio.Source, keys: Sequence[str], kind: type[dataio.Field], name: str) -> str:
    """Find the first key where samples have it, else the only other one."""
    try:
        found = [field.key for field in fields_there(source, keys, (kind,), name)]
    except FieldError as error:
        raise FieldError(f"{error}, in the TOML file as [data] {name} = KEY") from error
    if len(found) > 1 and found[0] != keys[0]:
        raise FieldError(
            f"{source.name}: samples hold {' and '.join(found)}, expected one {name}; choose in "
            f'the TOML file: [data] {name} = "{found[0]}"'
        )
    return found[0]


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
    # What a loader opens has keys: see with_keys.
    key, label = data.image or IMAGE_KEYS[0], data.label or LABEL_KEYS[0]
    image = dataio.Image(
        key, resize=resize, crop=crop, flip=flip, channels=data.channels, decoded=data.decoded
    )
    return {"image": image, "label": dataio.Int(label)}


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
