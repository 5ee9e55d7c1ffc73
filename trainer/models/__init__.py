"""Reference models: they take uint8 images from the loader and scale them themselves."""

from trainer.models.cnn import SmallCNN
from trainer.models.resnet import ResNet
from trainer.models.seeded import seeded

__all__ = ["ResNet", "SmallCNN", "seeded"]
