"""What a TOML file says of how images are changed on their way to the model."""

from dataclasses import dataclass
from typing import Literal

from dataio.base.checked import Count, Fraction, NotNegative, Positive, Share, Whole
from tonari.trainer.config.settings import Section
from tonari.trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Section):
    """Crops, flips, erased parts and mixtures of images, and the smoothing of their labels.

    Attributes:
        crop: Takes ``size`` x ``size`` pixels for training: ``"random"`` after adding ``padding``
            (CIFAR), ``"resized"`` a random part of ``scale`` of the area, resized (ImageNet).
        size: Height and width of what the model gets.
        padding: Pixels added on each side before a random crop.
        scale: Least and largest share of the area that ``"resized"`` takes.
        flip: Probability that left and right change places; not in an evaluation.
        resize_short: An evaluation brings the shorter side to that length, and takes the middle
            ``size`` x ``size``.
        mean: Of bytes divided by 255, one for each channel: normalises the input of the model,
            which is in [-1, 1] without it.
        std: Beside ``mean``: what is divided by.
        erase: Probability that a box of a training image, of 2 to 33 % of its area, becomes the
            mean colour.
        mixup: Alpha of the Beta distribution of torchvision's transform of that name; 0: not.
        cutmix: The same of that one; with both, each batch gets one of them.
        label_smoothing: Changes what the weights descend, and no loss that is reported.
    """

    crop: Literal["none", "random", "resized"] = "none"
    size: Count | None = None
    padding: Whole = 0
    scale: tuple[Positive, ...] = (0.08, 1.0)
    flip: Fraction = 0.0
    resize_short: Count | None = None
    mean: tuple[Fraction, ...] = ()
    std: tuple[Positive, ...] = ()
    erase: Fraction = 0.0
    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    label_smoothing: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is None and (self.crop != "none" or self.resize_short or self.cutmix):
            raise ConfigError(
                "augment.size is missing, expected the size of the images where augment.crop, "
                "augment.resize_short or augment.cutmix is given; give for example augment.size=32"
            )
        if self.padding and self.crop != "random":
            raise ConfigError(
                f'augment.padding is {self.padding}, expected 0 where augment.crop is "{self.crop}"'
                "; leave it out, or give augment.crop=random"
            )
        if (
            self.resize_short is not None
            and self.size is not None
            and self.resize_short < self.size
        ):
            raise ConfigError(
                f"augment.resize_short is {self.resize_short}, expected at least augment.size = "
                f"{self.size}, which is cut out of it; give for example {self.size * 8 // 7}"
            )
        if len(self.scale) != 2 or not self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(
                f"augment.scale is {self.scale!r}, expected two ascending shares of the area; give "
                "for example [0.08, 1.0]"
            )
        if len(self.mean) != len(self.std):
            raise ConfigError(
                f"augment.mean has {len(self.mean)} numbers and augment.std {len(self.std)}, "
                "expected one of each for each channel; give both, or neither"
            )

    @property
    def mixes(self) -> bool:
        """Whether rows are mixed with others."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def draws(self) -> bool:
        """Whether anything is drawn for each training batch."""
        return self.mixes or self.erase > 0

    @property
    def given(self) -> bool:
        """Whether anything was set."""
        return self != AugmentConfig()


def check_augment(
    augment: AugmentConfig,
    *,
    is_text: bool,
    channels: int,
    image_size: int | None,
    decoded: bool | Literal["auto"],
    drop_last: bool,
) -> None:
    """Compare the settings with those of the data.

    Raises:
        ConfigError: If they do not fit.
    """
    if is_text and (augment.given or decoded):
        name = "[augment]" if augment.given else "data.decoded"
        raise ConfigError(f'{name} is for data.kind "images", which is "text"; remove it')
    if augment.resize_short and image_size:
        raise ConfigError(
            f"augment.resize_short is {augment.resize_short} and data.image_size is {image_size}, "
            "expected one of them; leave the other out"
        )
    if decoded is True and not image_size and (not augment.size or augment.crop != "none"):
        raise ConfigError(
            "data.decoded is true, but nothing brings all pictures to one size to be kept in; give "
            'data.image_size, or data.decoded="auto", which keeps those of few pixels as they are'
        )
    if augment.mean and len(augment.mean) != channels:
        raise ConfigError(
            f"augment.mean has {len(augment.mean)} numbers, expected one for each of "
            f"data.channels = {channels}; correct it, and augment.std"
        )
    if augment.mixes and not drop_last:
        raise ConfigError(
            "augment.mixup and augment.cutmix mix all rows of a batch, padding too; give "
            "data.drop_last=true"
        )


def check_rescoring(augment: AugmentConfig, *, rescores: bool) -> None:
    """Refuse an importance policy that gives hidden rows scores that others' cannot be held to.

    Raises:
        ConfigError: If it does, and images are mixed or erased.
    """
    if augment.draws and rescores:
        raise ConfigError(
            "augment.erase, augment.mixup or augment.cutmix is given, but this importance.kind "
            "gives hidden rows new scores without them, which are lower than those of changed "
            "rows; give importance.refresh_every=0, or leave them out"
        )
